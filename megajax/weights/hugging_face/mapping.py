"""Converts options and parameters in both directions with the tables of families.py.

Dimensions: N query heads, K key-value heads, H head dim.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.layout import stack_of
from megajax.fields.ranges import check_fields
from megajax.models.interface import ModelConfig
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.weights.hugging_face import encoder_decoders, encoders, families, hybrids, mixtures
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.known_keys import check_keys
from megajax.weights.hugging_face.weights import Layout, Row

# In order of preference when exporting a model without a named architecture.
FAMILIES = tuple(
    family for kind in (families, mixtures, hybrids, encoders, encoder_decoders) for family in kind.FAMILIES
)

# ----------------------------------------------------------------------------- options


def family_of(theirs: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for an architecture without a table."""
    names = theirs.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"architectures={names} must be a list of names")
    for family in FAMILIES:
        if family.architecture in names or (not names and theirs.get("model_type") == family.model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(
        f"architectures={names}, model_type={theirs.get('model_type')} is not supported; supported are {known}"
    )


def read_options(family: Family, theirs: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Raises ValueError with the key for what is not supported, and for a key that may change what the model computes.
    """
    check_keys(family, theirs)
    fields = dict(family.always)
    for option in family.options:
        fields |= option.read(theirs)
    config = replaced(family.form.default, fields)
    check_fields(config, "model.")
    return family.form.with_sizes(config)


def write_options(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes.

    Raises ValueError, naming the fields of the config that the family does not support.
    """
    theirs, lacking = _written(family, config)
    if lacking:
        raise ValueError(f"{family.architecture} does not have {', '.join(lacking)}")
    return theirs


def family_for(config: ModelConfig, architecture: str | None = None) -> Family:
    """The family to write a model as: the named one, or the first that has all of its options.

    Raises ValueError, naming the missing options, for the closest family if none was named.
    """
    ours = [family for family in FAMILIES if config.kind == family.form.default.kind]
    if not ours:
        raise ValueError(f"model.kind={config.kind} has no Hugging Face folder")
    known = [family for family in ours if architecture in (None, family.architecture)]
    if not known:
        names = ", ".join(family.architecture for family in ours)
        raise ValueError(f"architecture={architecture} is not supported; supported are {names}")
    lacking = {family: _written(family, config)[1] for family in known}
    nearest = min(known, key=lambda family: len(lacking[family]))
    if lacking[nearest]:
        found = "" if architecture else "no supported architecture has all options of this model; "
        raise ValueError(f"{found}{nearest.architecture} does not have {', '.join(lacking[nearest])}")
    return nearest


def _written(family: Family, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """-> (keys of config.json, config fields that they cannot express)."""
    form = family.form
    config = form.with_sizes(config)
    theirs = {"architectures": [family.architecture], "model_type": family.model_type}
    wanted = _fields(form.canonical(config))
    always = {
        name: value for name, value in family.always.items() if name != "bias"
    }  # it follows from the other biases
    lacking = {name: f"model.{name}={wanted[name]}" for name, value in always.items() if wanted[name] != value}
    for option in family.options:
        try:
            theirs |= option.write(_fields(config))
        except ValueError as error:
            lacking[str(error)] = str(error)
    if not lacking:
        try:
            restored = _fields(form.canonical(read_options(family, theirs)))
        except ValueError as error:
            return theirs, [str(error)]
        lacking = {
            name: f"model.{name}={value}" for name, value in wanted.items() if not _is_same(restored[name], value)
        }
    return theirs, list(lacking.values())


def _is_same(found: Any, wanted: Any) -> bool:
    """Numbers may differ by the rounding of a power: 1 / sqrt(8) is not 8 ** -0.5."""
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-14)
    return found == wanted


def replaced(config: Any, fields: Mapping[str, Any], prefix: str = "") -> Any:
    """The config with other values of some fields, which are named as in _fields."""
    changes = {}
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if dataclasses.is_dataclass(getattr(config, field.name)):
            changes[field.name] = replaced(getattr(config, field.name), fields, f"{name}.")
        elif name in fields:
            changes[field.name] = fields[name]
    return dataclasses.replace(config, **changes)


def _fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields by name; those of sections as rope.base and moe.router.top_k."""
    fields = {}
    for field in dataclasses.fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        fields |= _fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return fields


# ----------------------------------------------------------------------------- parameters


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters within a Hugging Face tensor: the whole, or that of a single layer or expert."""

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
    def num_outputs(self) -> int:
        """Of a matrix, or entries of a bias."""
        return math.prod(self.shape[self.num_stacked + self.num_inputs :])


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, with the parts of our parameters that it consists of."""

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
        outputs = sum(part.num_outputs for part in self.parts)
        is_ours = self.layout == "conv1d"
        return (*first.stack, *first.inputs, outputs) if is_ours else (*first.stack, outputs, *first.inputs)

    def of_outputs(self) -> "Tensor":
        """One number per output of each part, such as a bias or the scales of a matrix."""
        parts = [dataclasses.replace(part, shape=part.shape[part.num_inputs :], num_inputs=0) for part in self.parts]
        return dataclasses.replace(self, parts=tuple(parts))

    def split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tensor -> its parts, views of it where that is possible."""
        return tuple(view.reshape(part.shape) for view, part in zip(self.views(array), self.parts, strict=True))

    def views(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """As split, of which what is written to a part changes the tensor; the heads of a part may be on two axes."""
        if self.layout == "same":
            return (array,)
        if self.layout == "taps":
            ends = np.cumsum([part.num_outputs // part.shape[0] for part in self.parts])
            cut = np.split(array[:, 0].T, ends[:-1], axis=-1)
            return tuple(view.reshape(part.shape) for view, part in zip(cut, self.parts, strict=True))
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
    """Maps the tensors of a folder to the parameters of a model."""

    def __init__(self, family: Family, config: ModelConfig, table: Sequence[Row] | None = None):
        """table: one of those of the family; default: the one that is written.

        Raises ValueError if the table has no tensor for a parameter of the model.
        """
        model = Model(family.form.without_training(config))
        self.config = config
        self._sizes = family.form.sizes(config)
        rows = family.form.rows(config, table or family.weights)
        self.layer_rows = model.layer_rows
        leaves = jax.tree_util.tree_leaves_with_path(model.abstract_weights)
        self.shapes = {name_of(path): leaf.shape for path, leaf in leaves}
        """Shapes of our parameters by name, with the layers in order."""
        self._records = {name_of(path): record for path, record in jax.tree_util.tree_leaves_with_path(model.records)}
        self.rows = [
            self._row(row, names)
            for row in rows
            if all(getattr(config, field) == value for field, value in row.where.items())
            for names in self._names(row)
        ]
        """The tensors of each row of the table and kind of layer: one, or one per layer, or per layer and expert."""
        self.source = {}
        """(parameter, at) -> (tensor, index of the part in it)."""
        for tensor in self.tensors:
            for number, part in enumerate(tensor.parts):
                self.source[part.name, part.at] = (tensor, number)
        missing = set(self._records) - {name for name, _ in self.source}
        if missing:
            raise ValueError(f"{family.architecture} has no tensor for {', '.join(sorted(missing))}")

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for row in self.rows for tensor in row]

    def layers_of(self, name: str) -> np.ndarray | None:
        """Numbers of the layers over which one of our parameters is stacked; None: it is not."""
        stack = stack_of(name, self.layer_rows)
        return None if stack is None else self.layer_rows[stack]

    def _names(self, row: Row) -> list[list[str]]:
        """Our names in a row, for each kind of layer that has all of them."""
        kinds = [stack.rpartition(".")[2] for stack in self.layer_rows]
        candidates = [[name.replace("*", kind) for name in row.ours] for kind in kinds]
        distinct = dict.fromkeys(map(tuple, candidates))
        return [list(names) for names in distinct if all(name in self._records for name in names)]

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
        record = self._records[name]
        axes = record.axes[len(at) :]
        sizes = zip(axes, self.shapes[name][len(at) :], strict=True)
        shape = tuple(self._sizes.get(axis, size) for axis, size in sizes)
        is_matrix = record.role not in ("vector", "variable")
        return Part(name, at, shape, axes.count("experts"), record.num_inputs if is_matrix else 0)
