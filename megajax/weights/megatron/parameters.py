"""Parameters as Megatron Core names and lays them out -> ours, and back, by the tables of the families.

Megatron numbers the layers and experts, ours are stacked. The vocabulary is padded to a multiple that depends on the
tensor parallel size in Megatron, and on `model.vocab_multiple` here.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from megajax.checkpoint.piecewise import PiecewiseArray
from megajax.models.interface import ModelConfig
from megajax.models.model import Model
from megajax.weights.megatron.entries import VOCABULARY
from megajax.weights.megatron.families import table_of

# Transformer Engine layers hold the norm in front of them; the names on the right are those of Megatron's own layers.
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mixer.in_proj.layer_norm_": ".norm.",
}


def to_megajax(named: Mapping[str, np.ndarray], config: ModelConfig) -> dict:
    """Megatron's parameters, whole (not split over tensor parallel ranks) -> nested dict like Model.abstract_weights.

    dtypes are kept, and arrays are read one after the other (numpy.asarray). Norms may have the names of Megatron's own
    or of Transformer Engine's layers. A vocabulary with fewer rows than ours is padded with zeros, one with more is
    cut; both only touch rows that are no token.

    Raises ValueError for a parameter that is missing, unexpected or of the wrong shape.
    """

    def whole(array: PiecewiseArray) -> np.ndarray:
        return array.read((slice(None),) * len(array.shape))

    return jax.tree.map(whole, piecewise_arrays(named, config))


def piecewise_arrays(named: Mapping[str, np.ndarray], config: ModelConfig, dtype: np.dtype | None = None) -> dict:
    """As to_megajax, with arrays that are read where they are wanted; a piece needs Megatron's whole arrays of the
    layers and experts in it, of which one is in memory at a time. dtype: of matrices; None: as they are."""
    check_parameters(named, config)
    named = {_own_name(name): array for name, array in named.items()}
    model = Model(config)
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract_weights)
    shapes = {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    records = _flat(model.records)
    table = table_of(config)

    @functools.lru_cache(maxsize=1)  # pieces of an array follow each other
    def parts(row: int, *place: int) -> tuple[np.ndarray, ...]:
        """Of Megatron's array of an entry. place: (), (layer,) or (layer, expert)."""
        return table[row].split(np.asarray(named[table[row].theirs.format(*place)]))

    def array_of(row: int, number: int) -> PiecewiseArray:
        entry = table[row]
        path = entry.ours[number]
        is_cast = dtype is not None and records[path].is_cast
        names = [name for n in entry.layers for name in entry.names(n)] or [entry.theirs]
        found = np.dtype(dtype) if is_cast else np.result_type(*{named[name].dtype for name in names})
        lead = [entry.layers] if entry.layers else []
        lead += [range(entry.num_experts)] if entry.num_experts else []

        def read(index: tuple[slice, ...]) -> np.ndarray:
            places = [numbers[part] for numbers, part in zip(lead, index, strict=False)]
            rest = index[len(lead) :]
            pieces = [parts(row, *place)[number][rest].astype(found) for place in itertools.product(*places)]
            return np.stack(pieces).reshape(*map(len, places), *pieces[0].shape)

        return PiecewiseArray(shapes[path], found, read)

    flat = {path: array_of(row, number) for row, entry in enumerate(table) for number, path in enumerate(entry.ours)}
    return _nested(flat)


def check_parameters(named: Mapping[str, np.ndarray], config: ModelConfig) -> None:
    """Raises ValueError for what to_megajax refuses, and reads no array."""
    _check_table(config)
    _check({_own_name(name): array.shape for name, array in named.items()}, _their_shapes(config), _fits)


def from_megajax(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Inverse of to_megajax: Megatron's own layer names -> whole arrays, with our padded vocabulary.

    For tensor parallel size n Megatron expects `model.vocab_multiple` = its --make-vocab-size-divisible-by times n.
    Raises ValueError for a parameter that is missing, unexpected or of the wrong shape.
    """
    _check_table(config)
    flat = _flat(params)
    expected = _flat(Model(config).abstract_weights)

    def shapes(arrays):
        return {path: array.shape for path, array in arrays.items()}

    _check(shapes(flat), shapes(expected), lambda _, found, wanted: found == wanted)
    named = {}
    for entry in table_of(config):
        arrays = [np.asarray(flat[path]) for path in entry.ours]
        if entry.layers:
            for row, number in enumerate(entry.layers):
                joined = entry.join(*(array[row] for array in arrays))
                named |= zip(entry.names(number), joined if entry.num_experts else [joined], strict=True)
        else:
            named[entry.theirs] = entry.join(*arrays)
    return named


# ----------------------------------------------------------------------------- names, trees and checks


def _own_name(name: str) -> str:
    # With grouped GEMM the arrays are numbered, not the experts.
    name = re.sub(r"(\.mlp\.experts)\.(linear_fc[12]\.weight)(\d+)$", r"\1.local_experts.\3.\2", name)
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # newer versions, in checkpoints of ranks
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


def _fits(name: str, found: tuple, wanted: tuple) -> bool:
    """A vocabulary may be padded to any size."""
    if name in VOCABULARY:
        return found[1:] == wanted[1:] and found[0] >= wanted[0]
    return found == wanted


def _check_table(config: ModelConfig) -> None:
    """Raises ValueError for a parameter that the table leaves out, or that the model config does."""
    config.check_exports()
    ours = [path for entry in table_of(config) for path in entry.ours]
    expected = _flat(Model(config).abstract_weights)
    for path in {**dict.fromkeys(ours), **expected}:
        if path not in expected or path not in ours:
            raise ValueError(
                f"parameter {path} is not in both Megatron's model and that of the model config; choose another config"
            )


def _their_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        name: entry.shape
        for entry in table_of(config)
        for name in ([name for n in entry.layers for name in entry.names(n)] if entry.layers else [entry.theirs])
    }


def _check(found: dict[str, tuple], expected: dict[str, tuple], fits: Callable[[str, tuple, tuple], bool]) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"parameter {name} {shape} is missing; the model config asks for it: is it the right one?")
        if not fits(name, found[name], shape):
            raise ValueError(f"parameter {name} has shape {found[name]}, but the model config makes it {shape}")
    for name in found:
        if name not in expected:
            raise ValueError(f"parameter {name} {found[name]} is unexpected; the model config has no such parameter")


def _nested(flat: dict) -> dict:
    tree: dict = {}
    for path, array in flat.items():
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return tree


def _flat(tree: dict) -> dict:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}
