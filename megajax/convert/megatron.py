"""Decoder parameters as Megatron Core names and lays them out, and back.

Dimensions: D model width, F feed-forward width, N query heads, K key-value heads, H head dim, V vocabulary.
Megatron's linear weights are [out, in]. The rows of `linear_qkv` go by key-value head: its N / K queries, its key, its
value; a gated `linear_fc1` is the gate above the up projection. Megatron numbers the layers, ours are stacked.
The vocabulary is padded to a multiple that depends on the tensor parallel size in Megatron, and on
`model.vocab_multiple` here.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.activation import GATED

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
LAYER = "decoder.layers.{}."  # prefix of the names of one layer

# Transformer Engine layers hold the norm in front of them; the names on the right are those of Megatron's own layers.
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the table: one Megatron array is one or several of ours."""

    ours: tuple[str, ...]
    theirs: str
    shape: tuple[int, ...]
    """Megatron's; the number of rows of a vocabulary table is a minimum."""
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda theirs: (theirs,)
    join: Callable[..., np.ndarray] = lambda ours: ours
    """Inverse of split, of all of ours."""

    @property
    def in_layer(self) -> bool:
        return self.theirs.startswith(LAYER)


def to_megajax(named: Mapping[str, np.ndarray], config: DecoderConfig) -> dict:
    """Megatron's parameters, whole (not split over tensor parallel ranks) -> nested dict like Model.abstract_weights.

    dtypes are kept. Norms may have the names of Megatron's own or of Transformer Engine's layers. A vocabulary with
    fewer rows than ours is padded with zeros, one with more is cut; both only touch rows that are no token.
    Raises ValueError for a parameter that is missing, unexpected or of the wrong shape.
    """
    _check_table(config)
    named = {_own_name(name): array for name, array in named.items()}
    _check({name: array.shape for name, array in named.items()}, _their_shapes(config), _fits)
    flat = {}
    for entry in _table(config):
        if entry.in_layer:
            layers = [entry.split(named[entry.theirs.format(number)]) for number in range(config.num_layers)]
            arrays = tuple(np.stack(parts) for parts in zip(*layers, strict=True))
        else:
            arrays = entry.split(named[entry.theirs])
        flat |= zip(entry.ours, arrays, strict=True)
    return _nested(flat)


def from_megajax(params: dict, config: DecoderConfig) -> dict[str, np.ndarray]:
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
    for entry in _table(config):
        arrays = [np.asarray(flat[path]) for path in entry.ours]
        if entry.in_layer:
            for number in range(config.num_layers):
                named[entry.theirs.format(number)] = entry.join(*(array[number] for array in arrays))
        else:
            named[entry.theirs] = entry.join(*arrays)
    return named


# ----------------------------------------------------------------------------- the table


def _table(config: DecoderConfig) -> list[Entry]:
    D = config.embed_dim
    V = config.vocab_size

    def rows(w_VD):
        return (_with_rows(w_VD, config.padded_vocab_size),)

    table = [Entry(("embedding",), VOCABULARY[0], (V, D), rows)]
    if config.position == "learned":
        shape = (config.max_positions, D)
        table.append(Entry(("position_embedding",), "embedding.position_embeddings.weight", shape))
    table += _norm(config, "layers/dense/attention_norm", LAYER + "input_layernorm", D)
    table += _attention(config)
    table += _norm(config, "layers/dense/mlp_norm", LAYER + "pre_mlp_layernorm", D)
    table += _mlp(config)
    table += _norm(config, "final_norm", "decoder.final_layernorm", D)
    if not config.tied_embeddings:

        def head(w_VD):
            return (rows(w_VD)[0].T,)

        table.append(Entry(("head",), VOCABULARY[1], (V, D), head, np.transpose))
    return table


def _norm(config: DecoderConfig, ours: str, theirs: str, dim: int) -> list[Entry]:
    table = [Entry((f"{ours}/scale",), f"{theirs}.weight", (dim,))]
    if config.norm == "layernorm" and config.norm_bias:
        table.append(Entry((f"{ours}/bias",), f"{theirs}.bias", (dim,)))
    return table


def _attention(config: DecoderConfig) -> list[Entry]:
    D = config.embed_dim
    N = config.num_heads
    K = config.kv_heads
    H = config.width_of_head
    ours = "layers/dense/attention/"
    theirs = LAYER + "self_attention."

    # Both serve the weight and the bias: the transpose of a vector is itself, and the last dims are the same.
    def split_qkv(rows):
        grouped = rows.T.reshape(*rows.shape[1:], K, N // K + 2, H)
        queries = grouped[..., :-2, :]
        return queries.reshape(*queries.shape[:-3], N, H), grouped[..., -2, :], grouped[..., -1, :]

    def join_qkv(query, key, value):
        queries = query.reshape(*query.shape[:-2], K, N // K, H)
        grouped = np.concatenate([queries, key[..., None, :], value[..., None, :]], -2)
        return grouped.reshape(*grouped.shape[:-3], -1).T

    def split_out(w_DX):
        return (w_DX.T.reshape(N, H, D),)

    def join_out(out_NHD):
        return out_NHD.reshape(N * H, D).T

    projections = ("query", "key", "value")
    num_rows = (N + 2 * K) * H
    weights = tuple(ours + name for name in projections)
    biases = tuple(f"{ours}{name}_bias" for name in projections)
    table = [
        Entry(weights, theirs + "linear_qkv.weight", (num_rows, D), split_qkv, join_qkv),
        Entry((ours + "out",), theirs + "linear_proj.weight", (D, N * H), split_out, join_out),
    ]
    if config.has_qkv_bias:
        table.append(Entry(biases, theirs + "linear_qkv.bias", (num_rows,), split_qkv, join_qkv))
    if config.has_attention_out_bias:
        table.append(Entry((ours + "out_bias",), theirs + "linear_proj.bias", (D,)))
    if config.attention_sinks:
        table.append(Entry((ours + "sinks",), theirs + "core_attention.softmax_offset", (N,)))
    if config.qk_norm and config.qk_norm_scope == "head":
        table += _norm(config, ours + "query_norm", theirs + "q_layernorm", H)
        table += _norm(config, ours + "key_norm", theirs + "k_layernorm", H)
    return table


def _mlp(config: DecoderConfig) -> list[Entry]:
    D = config.embed_dim
    F = config.width_of_mlp
    ours = "layers/dense/mlp/"
    theirs = LAYER + "mlp."
    wide = ("gate", "up") if config.activation in GATED else ("up",)
    weights = tuple(ours + name for name in wide)
    biases = tuple(f"{ours}{name}_bias" for name in wide)

    def split_wide(rows):
        return tuple(np.split(rows.T, len(wide), -1))

    def join_wide(*parts):
        return np.concatenate(parts, -1).T

    def transposed(w):
        return (w.T,)

    table = [
        Entry(weights, theirs + "linear_fc1.weight", (len(wide) * F, D), split_wide, join_wide),
        Entry((ours + "down",), theirs + "linear_fc2.weight", (D, F), transposed, np.transpose),
    ]
    if config.has_mlp_bias:
        table.append(Entry(biases, theirs + "linear_fc1.bias", (len(wide) * F,), split_wide, join_wide))
        table.append(Entry((ours + "down_bias",), theirs + "linear_fc2.bias", (D,)))
    return table


def _with_rows(w_VD: np.ndarray, num_rows: int) -> np.ndarray:
    return np.pad(w_VD[:num_rows], ((0, max(num_rows - len(w_VD), 0)), (0, 0)))


# ----------------------------------------------------------------------------- names, trees and checks


def _own_name(name: str) -> str:
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


def _fits(name: str, found: tuple, wanted: tuple) -> bool:
    """A vocabulary may be padded to any size."""
    if name in VOCABULARY:
        return found[1:] == wanted[1:] and found[0] >= wanted[0]
    return found == wanted


def _check_table(config: DecoderConfig) -> None:
    """Raises ValueError for what Megatron has no parameter for (the table names ours that it would leave out)."""
    ours = [path for entry in _table(config) for path in entry.ours]
    expected = _flat(Model(config).abstract_weights)
    for path in {**dict.fromkeys(ours), **expected}:
        if path not in expected or path not in ours:
            raise ValueError(f"parameter {path} has no counterpart in Megatron; choose a model config without it")


def _their_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    numbers = range(config.num_layers)
    return {
        name: entry.shape
        for entry in _table(config)
        for name in ([entry.theirs.format(n) for n in numbers] if entry.in_layer else [entry.theirs])
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
