"""Parameters as Megatron Core names and lays them out -> ours, and back, by the tables of the families.

Megatron numbers the layers and experts, ours are stacked. The vocabulary is padded to a multiple that depends on the
tensor parallel size in Megatron, and on `model.vocab_multiple` here.
"""

import functools
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from megajax.models.bert import BertConfig
from megajax.models.interface import ModelConfig
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.weights.megatron.arguments import Shapes
from megajax.weights.megatron.families import table_of
from megajax.weights.megatron.ranks import StoredArray
from megajax.weights.megatron.rows import VOCABULARY
from megajax.weights.parameter_reader import ParameterReader
from megajax.weights.tensor_map import Tensor, WeightMap

Named = Mapping[str, np.ndarray | StoredArray]
# Transformer Engine layers hold the norm in front of them; the names on the right are those of Megatron's own layers.
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mixer.in_proj.layer_norm_": ".norm.",
}


def to_megajax(named: Named, config: ModelConfig) -> dict:
    """Megatron's parameters, whole (not split over tensor parallel ranks) -> nested dict like Model.abstract_weights.

    dtypes are kept, and arrays are read one after the other (numpy.asarray). Norms may have the names of Megatron's own
    or of Transformer Engine's layers. A vocabulary with fewer rows than ours is padded with zeros, one with more is
    cut; both only touch rows that are no token.

    Raises ValueError for a parameter that is missing, unexpected, of the wrong shape or not finite.
    """
    return jax.tree.map(lambda array: array.read((slice(None),) * len(array.shape)), piecewise_arrays(named, config))


def piecewise_arrays(named: Named, config: ModelConfig, dtype: np.dtype | None = None) -> dict:
    """As to_megajax, with arrays that are read where they are wanted; a piece needs Megatron's whole arrays of the
    layers and experts in it, of which one is in memory at a time. dtype: of matrices; None: as they are."""
    weights = check_parameters(named, config)
    own = {_own_name(name): array for name, array in named.items()}

    @functools.lru_cache(maxsize=1)  # pieces of an array follow each other
    def array_of(tensor: Tensor) -> np.ndarray:
        array = np.asarray(own[tensor.name])
        return array if tensor.name not in VOCABULARY else _with_rows(array, tensor.shape[0])

    reader = ParameterReader(weights, array_of, lambda tensor: own[tensor.name].dtype, lambda tensor: tensor.name)
    dtypes = {
        name: found if dtype is None or not weights.records[name].is_cast else np.dtype(dtype)
        for name, found in reader.dtypes.items()
    }
    return reader.piecewise(Model(config), dtypes)


def check_parameters(named: Named, config: ModelConfig) -> WeightMap:
    """Raises ValueError for what to_megajax refuses by names and shapes, and reads no array."""
    weights = _map(config)

    def fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """A vocabulary may be padded to any size."""
        if name in VOCABULARY:
            return found[1:] == wanted[1:] and found[0] >= config.vocab_size
        return found == wanted

    found = {_own_name(name): array.shape for name, array in named.items()}
    _check(found, {tensor.name: tensor.shape for tensor in weights.tensors}, fits)
    return weights


def from_megajax(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Inverse of to_megajax: Megatron's own layer names -> whole arrays, with our padded vocabulary.

    For tensor parallel size n Megatron expects `model.vocab_multiple` = its --make-vocab-size-divisible-by times n.
    Raises ValueError for a parameter that is missing, unexpected or of the wrong shape.
    """
    weights = _map(config)
    arrays = {name_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes = {name: array.shape for name, array in arrays.items()}
    _check(shapes, weights.shapes, lambda _, found, wanted: found == wanted)
    named = {}
    for tensor in weights.tensors:
        named[tensor.name] = np.empty(tensor.shape, np.result_type(*(arrays[part.name] for part in tensor.parts)))
        for part, view in zip(tensor.parts, tensor.views(named[tensor.name]), strict=True):
            whole = arrays[part.name][weights.row_of(part)]
            view[...] = whole[tuple(map(slice, part.shape))].reshape(view.shape)
    return named


def _map(config: ModelConfig) -> WeightMap:
    """Raises ValueError for a model that Megatron does not have."""
    config.check_exports()
    sizes = {"positions": config.position_rows} if isinstance(config, BertConfig) else {}
    return WeightMap(config, table_of(config), sizes, "Megatron")


def _check(found: Shapes, expected: Shapes, fits: Callable[[str, tuple[int, ...], tuple[int, ...]], bool]) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"parameter {name} {shape} is missing; the model config asks for it: is it the right one?")
        if not fits(name, found[name], shape):
            raise ValueError(f"parameter {name} has shape {found[name]}, but the model config makes it {shape}")
    for name in found:
        if name not in expected:
            raise ValueError(f"parameter {name} {found[name]} is unexpected; the model config has no such parameter")


def _own_name(name: str) -> str:
    # With grouped GEMM the arrays are numbered, not the experts.
    name = re.sub(r"(\.mlp\.experts)\.(linear_fc[12]\.weight)(\d+)$", r"\1.local_experts.\3.\2", name)
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # newer versions, in checkpoints of ranks
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


def _with_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Padded with zeros, or cut."""
    padding = [(0, max(num_rows - len(rows), 0))] + [(0, 0)] * (rows.ndim - 1)
    return np.pad(rows[:num_rows], padding)
