"""Converts options and parameters in both directions with the tables of families.py.

Dimensions: N query heads, K key-value heads, H head dim.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.hugging_face.families import FAMILIES, Family, Layout, Row
from megajax.hugging_face.options import SCALINGS
from megajax.layers.rope import RopeConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import Parameter, name_of

# ----------------------------------------------------------------------------- options


def family_of(theirs: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for an architecture without a table."""
    names = theirs.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in names or (not names and theirs.get("model_type") == family.model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(
        f"architectures={names}, model_type={theirs.get('model_type')} is not supported; supported are {known}"
    )


def read_options(family: Family, theirs: Mapping[str, Any]) -> DecoderConfig:
    """The model that a config.json describes. Raises ValueError with the key for what is not supported."""
    if theirs.get("quantization_config"):
        raise ValueError("quantization_config: quantized weights are not supported; use the folder in bfloat16")
    fields = dict(family.always)
    for option in family.options:
        fields |= option.read(theirs)
    return _with_sizes(_config(fields))


def write_options(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes.

    Raises ValueError, naming the fields of the config that the family does not support.
    """
    theirs, lacking = _written(family, config)
    if lacking:
        raise ValueError(f"{family.architecture} does not have {', '.join(lacking)}")
    return theirs


def family_for(config: DecoderConfig, architecture: str | None = None) -> Family:
    """The family to write a model as: the named one, or the first that has all of its options.

    Raises ValueError, naming the missing options, for the closest family if none was named.
    """
    known = [family for family in FAMILIES if architecture in (None, family.architecture)]
    if not known:
        names = ", ".join(family.architecture for family in FAMILIES)
        raise ValueError(f"architecture={architecture} is not supported; supported are {names}")
    lacking = {family: _written(family, config)[1] for family in known}
    nearest = min(known, key=lambda family: len(lacking[family]))
    if lacking[nearest]:
        found = "" if architecture else "no supported architecture has all options of this model; "
        raise ValueError(f"{found}{nearest.architecture} does not have {', '.join(lacking[nearest])}")
    return nearest


def _written(family: Family, config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    """-> (keys of config.json, config fields that they cannot express)."""
    config = _with_sizes(config)
    theirs = {"architectures": [family.architecture], "model_type": family.model_type}
    wanted = _fields(_canonical(config))
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
        restored = _fields(_canonical(read_options(family, theirs)))
        lacking = {name: f"model.{name}={value}" for name, value in wanted.items() if restored[name] != value}
    return theirs, list(lacking.values())


def _config(fields: Mapping[str, Any]) -> DecoderConfig:
    rope = {name.removeprefix("rope."): value for name, value in fields.items() if name.startswith("rope.")}
    rest = {name: value for name, value in fields.items() if not name.startswith("rope.")}
    return DecoderConfig(**rest, rope=RopeConfig(**rope))


def _fields(config: DecoderConfig) -> dict[str, Any]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    rope = fields.pop("rope")
    return fields | {f"rope.{field.name}": getattr(rope, field.name) for field in dataclasses.fields(rope)}


def _with_sizes(config: DecoderConfig) -> DecoderConfig:
    """The same model with default sizes and biases resolved."""
    biases = ("qkv_bias", "attention_out_bias", "mlp_bias")
    given = {name: getattr(config, name) for name in biases}
    return dataclasses.replace(
        config,
        num_kv_heads=config.kv_heads,
        head_dim=config.width_of_head,
        mlp_dim=config.width_of_mlp,
        bias=all(config.bias if value is None else value for value in given.values()),
        **{name: config.bias if value is None else value for name, value in given.items()},
    )


def _canonical(config: DecoderConfig) -> DecoderConfig:
    """Equal for all configs of models that compute the same: unused fields have their defaults."""
    default = DecoderConfig()
    is_rope = config.position == "rope"
    return dataclasses.replace(
        _with_sizes(config),
        vocab_multiple=default.vocab_multiple,
        dropout=0.0,
        attention_dropout=0.0,
        init_std=default.init_std,
        max_positions=config.max_positions if config.position == "learned" else default.max_positions,
        rope=_canonical_rope(config.rope) if is_rope else default.rope,
        no_rope_every=config.no_rope_every if is_rope else None,
        full_attention_every=config.full_attention_every if config.window else None,
        qk_norm_scope=config.qk_norm_scope if config.qk_norm else default.qk_norm_scope,
        norm_bias=config.norm_bias if config.norm == "layernorm" else default.norm_bias,
    )


def _canonical_rope(rope: RopeConfig) -> RopeConfig:
    read = ("base", "fraction", "interleaved", "local_base", "scaling", *SCALINGS.get(rope.scaling, {}).values())
    return RopeConfig(**{name: getattr(rope, name) for name in read})


# ----------------------------------------------------------------------------- parameters


@dataclasses.dataclass(frozen=True)
class Part:
    """One of our parameters, for a single layer if it belongs to one, within a Hugging Face tensor."""

    name: str
    """Name of the parameter in a checkpoint, where it may be stacked over layers."""
    layer: int | None
    shape: tuple[int, ...]
    """Without the layer dim and without padding of the vocabulary."""
    num_inputs: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, with the parts of our parameters that it consists of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layout: Layout

    def split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tensor -> its parts, views of it where that is possible."""
        return tuple(view.reshape(part.shape) for view, part in zip(self.views(array), self.parts, strict=True))

    def views(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """As split, of which what is written to a part changes the tensor; the heads of a part may be on two axes."""
        if self.layout == "same":
            return (array,)
        rows = array if self.layout == "conv1d" else array.T  # outputs last; the transpose of a bias is itself
        if self.layout == "by_head":
            return _split_heads(rows, self.parts)
        ends = np.cumsum([part_width(part) for part in self.parts])
        cut = np.split(rows, ends[:-1], axis=-1)
        return tuple(view.reshape(part.shape) for view, part in zip(cut, self.parts, strict=True))


def part_width(part: Part) -> int:
    """Number of outputs of a matrix, or entries of a bias."""
    return math.prod(part.shape[part.num_inputs :])


def _inputs(part: Part) -> tuple[int, ...]:
    return (math.prod(part.shape[: part.num_inputs]),) if part.num_inputs else ()


def _split_heads(rows: np.ndarray, parts: Sequence[Part]) -> tuple[np.ndarray, ...]:
    """[..., K (N / K + 2) H] -> query [..., K, N / K, H], key and value [..., K, H]."""
    _, key, _ = parts
    K, H = key.shape[-2:]
    grouped = rows.reshape(*rows.shape[:-1], K, -1, H)
    return grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]


class WeightMap:
    """Maps the tensors of a folder to the parameters of a model."""

    def __init__(self, family: Family, config: DecoderConfig):
        """Raises ValueError if the tables have no tensor for a parameter of the model."""
        model = Model(config)
        self.config = config
        leaves = jax.tree_util.tree_leaves_with_path(model.abstract_weights)
        self.shapes = {name_of(path): leaf.shape for path, leaf in leaves}
        """Shapes of our parameters by name, with the layers in order."""
        records = {name_of(path): record for path, record in jax.tree_util.tree_leaves_with_path(model.records)}
        self.num_layers = config.num_layers
        self.rows = [
            self._row(row, records)
            for row in family.weights
            if all(name in records for name in row.ours)
            and all(getattr(config, field) == value for field, value in row.where.items())
        ]
        """The tensors of each row of the table: one, or one per layer."""
        self.source = {}
        """(parameter, layer or None) -> (tensor, index of the part in it)."""
        for tensor in self.tensors:
            for number, part in enumerate(tensor.parts):
                self.source[part.name, part.layer] = (tensor, number)
        missing = set(records) - {name for name, _ in self.source}
        if missing:
            raise ValueError(f"{family.architecture} has no tensor for {', '.join(sorted(missing))}")

    def is_stacked(self, name: str) -> bool:
        """Whether one of our parameters is stacked over layers."""
        return (name, None) not in self.source

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for row in self.rows for tensor in row]

    def _row(self, row: Row, records: Mapping[str, Parameter]) -> list[Tensor]:
        in_layer = records[row.ours[0]].axes[0] == "layers"
        numbers = range(self.num_layers) if in_layer else [None]
        return [self._tensor(row, number, records) for number in numbers]

    def _tensor(self, row: Row, layer: int | None, records: Mapping[str, Parameter]) -> Tensor:
        parts = []
        for name in row.ours:
            record = records[name]
            lead = 0 if layer is None else 1
            sizes = zip(record.axes[lead:], self.shapes[name][lead:], strict=True)
            shape = tuple(self.config.vocab_size if axis == "vocab" else size for axis, size in sizes)
            parts.append(Part(name, layer, shape, 0 if record.role == "vector" else record.num_inputs))
        shape = parts[0].shape
        if row.layout != "same":
            outputs = sum(part_width(part) for part in parts)
            inputs = _inputs(parts[0])
            shape = (*inputs, outputs) if row.layout == "conv1d" else (outputs, *inputs)
        return Tensor(row.theirs.format(layer), shape, tuple(parts), row.layout)
