"""Tables that pair the tensors of another framework with our parameters, and the maps that follow for a model.

In the name of a tensor the first `{}` is the number of the layer, a second one that of the expert; `layers.*.` in the
name of a parameter is any kind of layer (dense, moe). Dimensions: N query heads, K key-value heads, H head dim.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megajax.checkpoint.layout import stack_of
from megajax.models.interface import ModelConfig
from megajax.models.model import Model
from megajax.parameters import named

Layout = Literal["same", "linear", "conv1d", "by_head", "within_heads", "taps", "patches", "batched"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Maps one tensor (theirs) to one or several of our parameters, of each kind of layer that has them.

    A tensor of each expert is a matrix of ours; a tensor without the number of an expert holds all, [experts, ...].
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = "same"
    """linear: theirs is [out, in], ours [in, out], several of ours concatenated along out. conv1d: theirs is [in, out].
    by_head: as linear, with rows grouped by key-value head: queries, key, value. within_heads: as linear, with several
    of ours concatenated within each head. taps: a convolution, theirs [channels, 1, taps], ours [taps, *channels],
    several of ours concatenated along the channels. patches: a convolution of images, frames or sound, theirs [out,
    colours, *places], ours [*places, colours, out]; theirs lacks the first of three places if its size is 1. batched:
    theirs has three dims, the first ones of size 1, and ours lacks these. same: no change."""
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of our config for which the row applies."""
    first_layer: int = 0
    """Number in theirs of the layer that is number 0 in ours."""


def linear(theirs: str, *ours: str, layout: Layout = "linear") -> tuple[Row, Row]:
    biases = tuple(f"{name}_bias" for name in ours)
    return Row(f"{theirs}.weight", ours, layout), Row(f"{theirs}.bias", biases, layout)


def norm(theirs: str, ours: str, **where: Any) -> tuple[Row, Row]:
    scale = Row(f"{theirs}.weight", (f"{ours}.scale",), where=where)
    return scale, Row(f"{theirs}.bias", (f"{ours}.bias",), where=where)


def of_multi_token(rows: Iterable[Row], first_layer: int, depth: int) -> list[Row]:
    """The rows of the layers of a model -> those of a layer of multi-token prediction, which holds such a layer; rows
    that are its own stay, others are left out. first_layer: its number in their names."""
    stack = f"mtp_{depth}."
    found = []
    for row in rows:
        if row.ours[0].startswith("layers."):
            kinds = [name.split(".", 2)[1:] for name in row.ours]
            row = dataclasses.replace(row, ours=tuple(f"{stack}{kind}.layer.{rest}" for kind, rest in kinds))
        if row.ours[0].startswith(stack):
            found.append(dataclasses.replace(row, first_layer=first_layer))
    return found


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters within such a tensor: the whole, or that of a single layer or expert."""

    name: str
    """Name of the parameter in a checkpoint, where it may be stacked over layers."""
    at: tuple[int, ...]
    """(), (layer,) or (layer, expert)."""
    shape: tuple[int, ...]
    """Without the dims of `at` and without padding."""
    num_stacked: int
    """Leading dims of the shape that number experts."""
    num_inputs: int
    """Following dims that a matmul contracts; 0 for vectors."""

    @property
    def stack(self) -> tuple[int, ...]:
        return self.shape[: self.num_stacked]

    @property
    def inputs(self) -> tuple[int, ...]:
        """() or the number of inputs."""
        ends = (self.num_stacked, self.num_stacked + self.num_inputs)
        return (math.prod(self.shape[slice(*ends)]),) if self.num_inputs else ()

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.shape[self.num_stacked + self.num_inputs :]

    @property
    def num_outputs(self) -> int:
        """Of a matrix, or entries of a bias."""
        return math.prod(self.outputs)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of another framework, with the parts of our parameters that it consists of."""

    name: str
    parts: tuple[Part, ...]
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        if self.layout == "same":
            return first.shape
        if self.layout == "taps":
            return (sum(part.num_outputs for part in self.parts) // first.shape[0], 1, first.shape[0])
        if self.layout == "patches":
            *places, colours, width = first.shape
            return (width, colours, *places[len(places) == 3 and places[0] == 1 :])
        if self.layout == "batched":
            return (*[1] * (3 - len(first.shape)), *first.shape)
        outputs = sum(part.num_outputs for part in self.parts)
        is_ours = self.layout == "conv1d"
        return (*first.stack, *first.inputs, outputs) if is_ours else (*first.stack, outputs, *first.inputs)

    def with_inputs(self, number: int) -> "Tensor":
        """The matrix with as many inputs, such as the scales of its groups of inputs."""
        parts = [
            dataclasses.replace(part, shape=(*part.stack, number, *part.outputs), num_inputs=1) for part in self.parts
        ]
        return dataclasses.replace(self, parts=tuple(parts))

    def split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tensor -> its parts, views of it where that is possible."""
        return tuple(view.reshape(part.shape) for view, part in zip(self.views(array), self.parts, strict=True))

    def views(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """As split, of which what is written to a part changes the tensor; the heads of a part may be on two axes."""
        if self.layout in ("same", "batched"):
            return (array.reshape(self.parts[0].shape),)
        if self.layout == "taps":
            ends = np.cumsum([part.num_outputs // part.shape[0] for part in self.parts])
            cut = np.split(array[:, 0].T, ends[:-1], axis=-1)
            return tuple(view.reshape(part.shape) for view, part in zip(cut, self.parts, strict=True))
        if self.layout == "patches":
            *places, colours, width = self.parts[0].shape
            return (np.moveaxis(array.reshape(width, colours, *places), (1, 0), (-2, -1)),)
        is_transposed = self.layout != "conv1d" and self.parts[0].num_inputs > 0
        rows = array.swapaxes(-1, -2) if is_transposed else array  # outputs last
        if self.layout == "by_head":
            return _split_heads(rows, self.parts)
        if self.layout == "within_heads":
            ends = np.cumsum([part.shape[-1] for part in self.parts])
            return tuple(np.split(rows.reshape(*self.parts[0].shape[:-1], -1), ends[:-1], axis=-1))
        ends = np.cumsum([part.num_outputs for part in self.parts])
        cut = np.split(rows, ends[:-1], axis=-1)
        return tuple(view.reshape(part.shape) for view, part in zip(cut, self.parts, strict=True))


def _split_heads(rows: np.ndarray, parts: Sequence[Part]) -> tuple[np.ndarray, ...]:
    """[..., K (N / K + 2) H] -> query [..., K, N / K, H], key and value [..., K, H]."""
    _, key, _ = parts
    K, H = key.shape[-2:]
    grouped = rows.reshape(*rows.shape[:-1], K, -1, H)
    return grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]


class WeightMap:
    """Maps the tensors of another framework to the parameters of a model."""

    def __init__(
        self, config: ModelConfig, rows: Iterable[Row], sizes: Mapping[str, int], framework: str, *, whole: bool = True
    ):
        """sizes: {logical axis that we pad: its size in their tensors}. framework: its name in messages.

        Raises ValueError if the table has no tensor for a parameter of the model; not whole: of a part of it.
        """
        model = Model(config)
        self._sizes = sizes
        self.layer_rows = model.layer_rows
        self.shapes = {name: leaf.shape for name, leaf in named(model.abstract_weights).items()}
        """Shapes of our parameters by name, with the layers in order."""
        self.records = named(model.records)
        self.rows = [
            self._row(row, names)
            for row in rows
            if all(getattr(config, field) == value for field, value in row.where.items())
            for names in self._names(row)
        ]
        """The tensors of each row of the table and kind of layer: one, or one per layer, or per layer and expert."""
        self.source: dict[tuple[str, tuple[int, ...]], tuple[Tensor, int]] = {}
        """(parameter, at) -> (tensor, index of the part in it)."""
        for tensor in self.tensors:
            for number, part in enumerate(tensor.parts):
                self.source[part.name, part.at] = (tensor, number)
        missing = set(self.records) - {name for name, _ in self.source}
        if missing and whole:
            raise ValueError(f"{framework} has no tensor for {', '.join(sorted(missing))}")

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for row in self.rows for tensor in row]

    def layers_of(self, name: str) -> np.ndarray | None:
        """Numbers of the layers over which one of our parameters is stacked; None: it is not."""
        stack = stack_of(name, self.layer_rows)
        return None if stack is None else self.layer_rows[stack]

    def row_of(self, part: Part) -> tuple[int, ...]:
        """Where the layer and the expert of a part are in our arrays, with the layers in order."""
        layers = self.layers_of(part.name)
        return part.at if layers is None else (layers.tolist().index(part.at[0]), *part.at[1:])

    def _names(self, row: Row) -> list[list[str]]:
        """Our names in a row, for each kind of layer that has all of them."""
        kinds = [stack.rpartition(".")[2] for stack in self.layer_rows]
        candidates = [[name.replace("*", kind) for name in row.ours] for kind in kinds]
        distinct = dict.fromkeys(map(tuple, candidates))
        return [list(names) for names in distinct if all(name in self.records for name in names)]

    def _row(self, row: Row, names: Sequence[str]) -> list[Tensor]:
        layers = self.layers_of(names[0])
        if layers is None:
            return [self._tensor(row, names, ())]
        if row.theirs.count("{}") == 1:
            return [self._tensor(row, names, (layer,)) for layer in layers.tolist()]
        experts = range(self.shapes[names[0]][1])
        return [self._tensor(row, names, at) for at in itertools.product(layers.tolist(), experts)]

    def _tensor(self, row: Row, names: Sequence[str], at: tuple[int, ...]) -> Tensor:
        numbers = (at[0] + row.first_layer, *at[1:]) if at else ()
        return Tensor(row.theirs.format(*numbers), tuple(self._part(name, at) for name in names), row.layout)

    def _part(self, name: str, at: tuple[int, ...]) -> Part:
        record = self.records[name]
        axes = record.axes[len(at) :]
        sizes = zip(axes, self.shapes[name][len(at) :], strict=True)
        shape = tuple(self._sizes.get(axis, size) for axis, size in sizes)
        is_matrix = record.role not in ("vector", "variable")
        return Part(name, at, shape, axes.count("experts"), record.num_inputs if is_matrix else 0)
