"""Quantised Hugging Face folders: what `quantization_config` says, their tensors as if they were not quantised, and
what is written of a matrix.

In 8 bits, two formats that vLLM and transformers read: compressed-tensors
(https://github.com/vllm-project/compressed-tensors) in int8 and float8 with a scale per tensor, output (channel), group
or block, and fp8 with a scale per tensor or block, as DeepSeek-V3 and Qwen3 publish it. A matrix X.weight [out, in] has
X.weight_scale or X.weight_scale_inv, which is multiplied too in spite of its name, and for static inputs X.input_scale.
Matrices in 4 bits are in four_bits.py.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from megajax.checkpoint.piecewise import pieces
from megajax.quantization.formats import largest
from megajax.quantization.weights import DTYPES, Inputs, QuantizedWeight, WeightFormat
from megajax.weights.hugging_face.four_bits import Layout, Packing, packed_matrices
from megajax.weights.hugging_face.options import read_object
from megajax.weights.hugging_face.tensor_files import TensorFiles, TensorForm
from megajax.weights.parameter_reader import check_finite

logger = logging.getLogger("megajax")

NAMES: dict[np.dtype, Literal["int8", "float8"]] = {
    np.dtype(np.int8): "int8", np.dtype(ml_dtypes.float8_e4m3fn): "float8",
}  # fmt: skip
SCALES = ("_scale", "_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")
PAGE_SCALES = (".k_scale", ".v_scale", ".q_scale")  # of keys and values, which have a format of their own here
STORED = ("naive-quantized", "int-quantized", "float-quantized")
"""The formats of compressed-tensors with one number of a dtype per weight."""
PACKED: Layout = "pack-quantized"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the matrices of a folder are quantised."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: all of a tensor or of an output do."""
    inputs: Inputs | None
    """What products do with their inputs; None: something that the engine does not."""
    packing: Packing | None = None
    """Of matrices in 4 bits."""


def read_scheme(options: Mapping[str, Any]) -> Scheme | None:
    """What a config.json says about quantisation; None: nothing. Raises ValueError for what is not supported."""
    found = read_object(options, "quantization_config")
    if not found:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        block = found.get("weight_block_size")
        if block:
            return Scheme(tuple(block), None)
        known: dict[Any, Inputs] = {"dynamic": "dynamic", "static": "static"}
        return Scheme(None, known.get(found.get("activation_scheme")))
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "awq":
        _require(found, "version", _format_of(found, "gemm"), "gemm")
        _require(found, "zero_point", found.get("zero_point", True), True)
        return _four_bits(found, "awq")
    if method == "gptq":
        layout = _require(found, "checkpoint_format", _format_of(found, "gptq"), "gptq", "gptq_v2")
        return _four_bits(found, layout)
    raise ValueError(
        f"quantization_config.quant_method={method} is not supported, only awq, compressed-tensors, fp8 and gptq; use "
        "the folder in bfloat16"
    )


def _require(found: Mapping[str, Any], name: str, value: Any, *allowed: Any) -> Any:
    if value not in allowed:
        known = " and ".join(map(str, allowed))
        raise ValueError(
            f"quantization_config.{name}={value} is not supported with quant_method={found['quant_method']}, only "
            f"{known}; use the folder in bfloat16"
        )
    return value


def _format_of(found: Mapping[str, Any], default: str) -> str:
    """Of AWQ and GPTQ; the programs that write them have had several names for it."""
    if found.get("is_marlin_format"):
        return "marlin"
    given = (found.get(name) for name in ("version", "checkpoint_format", "format"))
    return str(next(filter(None, given), default)).lower()


def _four_bits(found: Mapping[str, Any], layout: Layout) -> Scheme:
    _require(found, "bits", found.get("bits"), 4)
    return Scheme(None, "unchanged", Packing(layout, _group_size(found), needs_zeros=True))


def _group_size(found: Mapping[str, Any]) -> int | None:
    size = found.get("group_size")
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"quantization_config: group_size={size} must be a positive number, or -1 for no groups")
    return size


def _compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    groups = list(read_object(found, "config_groups").values())
    formats = {group.get("format") or found.get("format") for group in groups} if groups else {found.get("format")}
    if other := sorted(map(str, formats - {*STORED, PACKED})):
        raise ValueError(
            f"quantization_config.format={other[0]} is not supported, only {', '.join((*STORED, PACKED))}; use the "
            "folder in bfloat16"
        )
    for name in ("sparsity_config", "transform_config"):
        if found.get(name):
            raise ValueError(f"quantization_config.{name} is not supported; use the folder in bfloat16")
    if PACKED in formats:
        return _packed_scheme(groups, formats)
    schemes = {_group_scheme(group) for group in groups}
    blocks = {scheme.block for scheme in schemes if scheme.block is not None}
    if len(blocks) > 1:
        raise ValueError(f"quantization_config.config_groups: groups with blocks of {sorted(blocks)} are not supported")
    inputs = {scheme.inputs for scheme in schemes}
    return Scheme(blocks.pop() if blocks else None, inputs.pop() if len(inputs) == 1 and not blocks else None)


def _packed_scheme(groups: Sequence[Mapping[str, Any]], formats: set) -> Scheme:
    sections = [group.get("weights") or {} for group in groups]
    kinds = {(w.get("num_bits"), w.get("type", "int"), _group_size(w), w.get("symmetric", True)) for w in sections}
    if len(kinds) != 1 or len(formats) > 1 or any(group.get("input_activations") for group in groups):
        raise ValueError(
            f"quantization_config.config_groups: format={PACKED} is supported for one kind of weights, with inputs "
            "that are not quantised; use the folder in bfloat16"
        )
    bits, kind, size, is_symmetric = kinds.pop()
    if (bits, kind) != (4, "int"):
        raise ValueError(
            f"quantization_config.config_groups: num_bits={bits}, type={kind} are not supported with format={PACKED}, "
            "only 4 and int; use the folder in bfloat16"
        )
    return Scheme(None, "unchanged", Packing(PACKED, size, needs_zeros=not is_symmetric))


def _group_scheme(group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights") or {}
    if not weights.get("symmetric", True):
        raise ValueError("quantization_config: weights with a zero point (symmetric=false) are not supported")
    block = None
    if weights.get("strategy") == "block":
        block = tuple(weights["block_structure"])
    elif weights.get("strategy") == "group":
        block = (1, weights["group_size"])
    given = group.get("input_activations")
    if given is None:
        return Scheme(block, "unchanged")
    kind = (given.get("dynamic", False), given.get("strategy"), given.get("symmetric", True))
    known: dict[Any, Inputs] = {(True, "token", True): "dynamic", (False, "tensor", True): "static"}
    is_same = all(given.get(name) == weights.get(name) for name in ("type", "num_bits"))
    return Scheme(block, known.get(kind) if is_same else None)


class DequantizedFiles:
    """The tensors of a folder by name; quantised matrices in bfloat16, and without their scales."""

    def __init__(self, folder: Path, scheme: Scheme | None):
        """Raises ValueError, naming a tensor, for scales that are missing or do not fit."""
        self._files = TensorFiles(folder)
        self._scheme = scheme or Scheme(None, None)
        self._latest: tuple[str, np.ndarray] | None = None
        forms = self._files.forms
        packing = self._scheme.packing
        self._packed = packed_matrices(self._files, packing) if packing else {}
        if scheme is None and (found := [name for name, form in forms.items() if form.dtype in NAMES]):
            raise ValueError(f"{folder}: {found[0]} is {forms[found[0]].dtype}, but config.json has no "
                             "quantization_config")  # fmt: skip
        self._scales = {name: self._scale_of(folder, name) for name, form in forms.items() if form.dtype in NAMES}
        """Name of a matrix -> that of its scale."""
        owners = [name.removesuffix("weight") for name in self._scales]
        scales = {*self._scales.values(), *(owner + name for owner in owners for name in INPUT_SCALES)}
        pages = [name for name in forms if name.endswith(PAGE_SCALES)]
        if pages:
            logger.warning("%s: scales of keys and values are not used; see page_dtype", folder)
        bfloat16 = np.dtype(ml_dtypes.bfloat16)
        hidden = scales.union(pages, *(matrix.tensors for matrix in self._packed.values()))
        self.forms = {
            name: TensorForm(form.shape, bfloat16) if name in self._scales else form
            for name, form in forms.items()
            if name not in hidden
        }
        self.forms |= {name: TensorForm(matrix.shape, bfloat16) for name, matrix in self._packed.items()}
        if words := [name for name, form in self.forms.items() if form.dtype.kind == "i"]:
            raise ValueError(f"{folder}: {words[0]} is {forms[words[0]].dtype}, which only matrices in 4 bits have, as "
                             "quantization_config describes them; use the folder in bfloat16")  # fmt: skip

    def _scale_of(self, folder: Path, name: str) -> str:
        forms = self._files.forms
        found = next((name + scale for scale in SCALES if name + scale in forms), None)
        if found is None:
            raise ValueError(f"{folder}: {name} is {forms[name].dtype}, and there is no {name}_scale")
        if name + "_zero_point" in forms:
            raise ValueError(f"{folder}: {name} has a zero point, which is not supported; use the folder in bfloat16")
        if self._shared_by(forms[name].shape, forms[found].shape) is None:
            shapes = f"{list(forms[found].shape)} and {name} {list(forms[name].shape)}"
            raise ValueError(f"{folder}: {found} is {shapes}, which is no scale per tensor, output or block of "
                             f"{self._scheme.block}")  # fmt: skip
        return found

    def _shared_by(self, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | None:
        """How many outputs and inputs share a scale, of matrices [..., out, in]; None: the shapes do not fit."""
        *lead, num_outputs, num_inputs = shape
        if math.prod(scale) == 1:
            return num_outputs, num_inputs
        if scale in ((*lead, num_outputs, 1), (*lead, num_outputs)):
            return 1, num_inputs
        block = self._scheme.block
        if block and scale == (*lead, -(-num_outputs // block[0]), -(-num_inputs // block[1])):
            return block
        return None

    @property
    def num_quantized(self) -> int:
        return len(self._scales) + len(self._packed)

    @functools.cached_property
    def format(self) -> WeightFormat | None:
        """What the engine can compute with as it is; None: it has other scales or inputs."""
        if self._packed:
            return self._packed_format()
        dtypes = {NAMES[self._files.forms[name].dtype] for name in self._scales}
        inputs = self._scheme.inputs
        if len(dtypes) != 1 or inputs is None or self._scheme.block is not None:
            return None
        return WeightFormat(dtypes.pop(), inputs)

    def _packed_format(self) -> WeightFormat | None:
        unordered = [name for name, matrix in self._packed.items() if not matrix.is_in_order]
        if unordered:
            logger.warning("the inputs of a group do not follow one another (desc_act, actorder) in %d matrices, such "
                           "as %s: all matrices are dequantised", len(unordered), unordered[0])  # fmt: skip
        return None if unordered else WeightFormat("int4", "unchanged")

    @property
    def largest_dim(self) -> int:
        """Of all tensors with several matrices, such as those of experts."""
        return max((form.shape[0] for form in self.forms.values() if len(form.shape) > 2), default=0)

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of the mapped file; of a quantised matrix float32 in memory, until the next one is read."""
        if name not in self._scales and name not in self._packed:
            return self._files[name]
        latest = self._latest  # several threads may read
        if latest is None or latest[0] != name:
            self._latest = None
            latest = (name, self._dequantized(name))
            self._latest = latest
        return latest[1]

    def _dequantized(self, name: str) -> np.ndarray:
        if name in self._packed:
            return self._packed[name].dequantized()
        levels = self._files[name]
        scale = np.asarray(self._files[self._scales[name]], np.float32)
        outputs, inputs = self._shared_by(levels.shape, scale.shape) or (1, 1)
        scale = scale.reshape(*levels.shape[:-2], -(-levels.shape[-2] // outputs), -(-levels.shape[-1] // inputs))
        out = np.empty(levels.shape, np.float32)
        for piece in pieces(levels.shape, out.dtype):
            rows = np.arange(levels.shape[-2])[piece[-2]] // outputs
            columns = np.arange(levels.shape[-1])[piece[-1]] // inputs
            with np.errstate(all="ignore"):  # who reads this refuses what is not finite, by name
                out[piece] = levels[piece].astype(np.float32) * scale[piece[:-2]][..., rows, :][..., columns]
        return out

    def weight(self, name: str) -> QuantizedWeight | None:
        """A matrix [out, in] in `format`, with arrays of NumPy; None: this one is not quantised, or none is in it."""
        if self.format is None:
            return None
        if name in self._packed:
            return self._packed[name].weight()
        if name not in self._scales:
            return None
        levels = self._files[name]
        scale = np.asarray(self._files[self._scales[name]], np.float32)
        check_finite(name, levels)
        check_finite(self._scales[name], scale)
        owner = name.removesuffix("weight")
        input_scale = None
        if self._scheme.inputs == "static":
            found = next((owner + kind for kind in INPUT_SCALES if owner + kind in self._files.forms), None)
            if found is None:
                raise ValueError(f"{name} has static inputs and no {owner}input_scale")
            input_scale = np.asarray(self._files[found], np.float32).reshape(())
        scale = np.broadcast_to(scale.reshape(1, -1), (1, len(levels)))
        return QuantizedWeight(levels, scale, input_scale, self.format.inputs)

    def is_empty_bias(self, name: str) -> bool:
        """Whether it is the zeros that AutoGPTQ wrote beside matrices in 4 bits of models without biases."""
        is_beside = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in self._packed
        return is_beside and not np.any(self._files[name])


# ----------------------------------------------------------------------------- writing


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How matrices of layers are written, and what calibration found (megajax/quantization)."""

    format: WeightFormat
    input_ranges: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Name of a parameter -> float32 [layers]: the largest absolute input that is not clipped, for static inputs."""
    factors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Name of a parameter -> float32 [layers, ...]: what it is multiplied by, which together changes no result."""

    def input_scale(self, name: str, row: int) -> float:
        return float(self.input_ranges[name][row]) / largest(DTYPES[self.format.dtype])


def written_config(format: WeightFormat, ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config`. ignored: names of modules, or patterns that begin with re:."""
    kind = {"int8": "int", "float8": "float"}[format.dtype]
    shared = dict(num_bits=8, type=kind, symmetric=True)
    inputs = {
        "dynamic": shared | dict(strategy="token", dynamic=True),
        "static": shared | dict(strategy="tensor", dynamic=False),
    }
    weights = shared | dict(strategy="channel", dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs[format.inputs])
    return dict(
        quant_method="compressed-tensors",
        format=f"{kind}-quantized",
        quantization_status="compressed",
        config_groups={"group_0": group},
        ignore=list(ignored),
    )


def written_forms(name: str, form: TensorForm, format: WeightFormat) -> dict[str, TensorForm]:
    """The tensors of a quantised matrix [out, in]."""
    float32 = np.dtype(np.float32)
    forms = {name: TensorForm(form.shape, DTYPES[format.dtype])}
    forms[name + "_scale"] = TensorForm((form.shape[0], 1), float32)
    if format.inputs == "static":
        forms[name.removesuffix("weight") + "input_scale"] = TensorForm((1,), float32)
    return forms


def quantized_rows(matrix: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """float32 [out, in] -> (levels [out, in], scales float32 [out, 1]), as QuantizedWeight.of."""
    scale = np.abs(matrix).max(1, keepdims=True) / np.float32(largest(dtype))
    scale = np.where(scale > 0, scale, np.float32(1))
    scaled = matrix / scale
    return (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype), scale
