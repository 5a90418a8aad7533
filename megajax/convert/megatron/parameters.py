"""Decoder parameters as Megatron Core names and lays them out, and back.

Dimensions: D model width, F feed-forward width, N query heads, K key-value heads, H head dim, V vocabulary.
Megatron's linear weights are [out, in]. The rows of `linear_qkv` go by key-value head: its N / K queries, its key, its
value; those of `linear_kv_up_proj` (latent attention) by head: its key, its value; a gated `linear_fc1` is the gate
above the up projection. Megatron numbers the layers, ours are stacked.
The vocabulary is padded to a multiple that depends on the tensor parallel size in Megatron, and on
`model.vocab_multiple` here.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from megajax.checkpoint.piecewise import PiecewiseArray
from megajax.models.decoder import DecoderConfig, mtp_name
from megajax.models.model import Model
from megajax.ops.activation import GATED

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
LAYER = "decoder.layers.{}."  # prefix of the names of one layer
MTP = "mtp.layers.{}."  # of one layer of multi-token prediction, around the transformer layer in it
EXPERT = "mlp.experts.local_experts.{}."  # and, in a layer, of those of one expert

# Transformer Engine layers hold the norm in front of them; the names on the right are those of Megatron's own layers.
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
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
    layers: tuple[int, ...] = ()
    """Numbers of the layers that have it."""
    num_experts: int = 0
    """Experts that each have such an array in Megatron; ours hold all of them, as the first dim. 0: not of experts."""

    def names(self, layer: int) -> list[str]:
        """Of Megatron's arrays in this layer."""
        return [self.theirs.format(layer, *expert) for expert in self._experts]

    @property
    def _experts(self) -> list[tuple[int, ...]]:
        return [(number,) for number in range(self.num_experts)] or [()]

    def of_layers(self, stack: str, layers: tuple[int, ...]) -> "Entry":
        """Of a layer -> of the layers with these numbers. stack: path of ours."""
        ours = tuple(f"{stack}/{path}" for path in self.ours)
        return dataclasses.replace(self, ours=ours, layers=layers)


def to_megajax(named: Mapping[str, np.ndarray], config: DecoderConfig) -> dict:
    """Megatron's parameters, whole (not split over tensor parallel ranks) -> nested dict like Model.abstract_weights.

    dtypes are kept, and arrays are read one after the other (numpy.asarray). Norms may have the names of Megatron's own
    or of Transformer Engine's layers. A vocabulary with fewer rows than ours is padded with zeros, one with more is
    cut; both only touch rows that are no token.

    Raises ValueError for a parameter that is missing, unexpected or of the wrong shape.
    """

    def whole(array: PiecewiseArray) -> np.ndarray:
        return array.read((slice(None),) * len(array.shape))

    return jax.tree.map(whole, piecewise_arrays(named, config))


def piecewise_arrays(named: Mapping[str, np.ndarray], config: DecoderConfig, dtype: np.dtype | None = None) -> dict:
    """As to_megajax, with arrays that are read where they are wanted; a piece needs Megatron's whole arrays of the
    layers and experts in it, of which one is in memory at a time. dtype: of matrices; None: as they are."""
    check_parameters(named, config)
    named = {_own_name(name): array for name, array in named.items()}
    model = Model(config)
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract_weights)
    shapes = {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    records = _flat(model.records)
    table = _table(config)

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


def check_parameters(named: Mapping[str, np.ndarray], config: DecoderConfig) -> None:
    """Raises ValueError for what to_megajax refuses, and reads no array."""
    _check_table(config)
    _check({_own_name(name): array.shape for name, array in named.items()}, _their_shapes(config), _fits)


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
        if entry.layers:
            for row, number in enumerate(entry.layers):
                joined = entry.join(*(array[row] for array in arrays))
                named |= zip(entry.names(number), joined if entry.num_experts else [joined], strict=True)
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
    for kind in ("dense", "moe"):
        layers = tuple(n for n in range(config.num_layers) if _kind(config, n) == kind)
        if layers:
            table += [entry.of_layers(f"layers/{kind}", layers) for entry in _layer(config, kind)]
    table += _multi_token(config)
    table += _norm(config, "final_norm", "decoder.final_layernorm", D)
    if not config.tied_embeddings:

        def head(w_VD):
            return (rows(w_VD)[0].T,)

        table.append(Entry(("head",), VOCABULARY[1], (V, D), head, np.transpose))
    return table


def _kind(config: DecoderConfig, number: int) -> str:
    """Of the layer with this number."""
    return "moe" if config.moe.has_experts(number) else "dense"


def _layer(config: DecoderConfig, kind: str) -> list[Entry]:
    D = config.embed_dim
    attention = _attention if config.latent.kv_rank is None else _latent_attention
    feed_forward = {"dense": _mlp, "moe": _experts}[kind]
    table = _norm(config, "attention_norm", LAYER + "input_layernorm", D) + attention(config)
    return table + _norm(config, "mlp_norm", LAYER + "pre_mlp_layernorm", D) + feed_forward(config)


def _multi_token(config: DecoderConfig) -> list[Entry]:
    """The layers of multi-token prediction, which are like the last layer."""
    D = config.embed_dim
    kind = _kind(config, config.num_layers - 1)
    table = [Entry(("projection",), MTP + "eh_proj.weight", (D, 2 * D), _transposed, np.transpose)]
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "final_layernorm"}
    for ours, theirs in names.items():
        table += _norm(config, ours, MTP + theirs, D)
    for entry in _layer(config, kind):
        ours = tuple(f"layer/{path}" for path in entry.ours)
        theirs = entry.theirs.replace(LAYER, MTP + "transformer_layer.")
        table.append(dataclasses.replace(entry, ours=ours, theirs=theirs))
    stacks = [f"{mtp_name(depth)}/{kind}" for depth in range(1, config.mtp_layers + 1)]
    return [entry.of_layers(stack, (number,)) for number, stack in enumerate(stacks) for entry in table]


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
    ours = "attention/"
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
    if config.qk_norm is True:
        table += _norm(config, ours + "query_norm", theirs + "q_layernorm", H)
        table += _norm(config, ours + "key_norm", theirs + "k_layernorm", H)
    return table


def _latent_attention(config: DecoderConfig) -> list[Entry]:
    D = config.embed_dim
    N = config.num_heads
    H = config.width_of_head
    latent = config.latent
    rank = latent.kv_rank
    value_dim = latent.value_dim or H
    theirs = LAYER + "self_attention."

    def split_heads(w_NX):
        return (w_NX.T.reshape(w_NX.shape[1], N, -1),)

    def join_heads(w_XNH):
        return w_XNH.reshape(w_XNH.shape[0], -1).T

    def split_up(w_NX):
        return tuple(np.split(*split_heads(w_NX), (H,), -1))

    def join_up(key, value):
        return join_heads(np.concatenate([key, value], -1))

    def split_out(w_DX):
        return (w_DX.T.reshape(N, value_dim, D),)

    def join_out(out_NHD):
        return out_NHD.reshape(-1, D).T

    def down(ours: str, name: str, width: int) -> Entry:
        return Entry((f"attention/{ours}",), theirs + f"{name}.weight", (width, D), _transposed, np.transpose)

    query_rows = N * (H + latent.rope_dim)
    if latent.q_rank is None:
        shape = (query_rows, D)
        table = [Entry(("attention/query",), theirs + "linear_q_proj.weight", shape, split_heads, join_heads)]
    else:
        shape = (query_rows, latent.q_rank)
        table = [
            down("query_down", "linear_q_down_proj", latent.q_rank),
            Entry(("attention/query_up",), theirs + "linear_q_up_proj.weight", shape, split_heads, join_heads),
        ]
        table += _norm(config, "attention/query_norm", theirs + "q_layernorm", latent.q_rank)
    up = ("attention/key_up", "attention/value_up")
    table += [
        down("key_value_down", "linear_kv_down_proj", rank + latent.rope_dim),
        Entry(up, theirs + "linear_kv_up_proj.weight", (N * (H + value_dim), rank), split_up, join_up),
        Entry(("attention/out",), theirs + "linear_proj.weight", (D, N * value_dim), split_out, join_out),
    ]
    table += _norm(config, "attention/key_value_norm", theirs + "kv_layernorm", rank)
    if config.attention_sinks:
        table.append(Entry(("attention/sinks",), theirs + "core_attention.softmax_offset", (N,)))
    return table


def _mlp(config: DecoderConfig) -> list[Entry]:
    return _feed_forward(config, "mlp/", "mlp.", config.width_of_mlp, has_bias=config.has_mlp_bias)


def _experts(config: DecoderConfig) -> list[Entry]:
    D = config.embed_dim
    moe = config.moe
    E = moe.num_experts
    table = [Entry(("mlp/router",), LAYER + "mlp.router.weight", (E, D), _transposed, np.transpose)]
    if moe.router.bias_update_rate is not None:
        table.append(Entry(("mlp/router_expert_bias",), LAYER + "mlp.router.expert_bias", (E,)))
    of_experts = _feed_forward(config, "mlp/", EXPERT, moe.expert_dim or config.width_of_mlp)
    table += [dataclasses.replace(entry, num_experts=E) for entry in of_experts]
    if moe.shared_dim is not None:
        table += _feed_forward(config, "mlp/shared/", "mlp.shared_experts.", moe.shared_dim)
    if moe.shared_gate:
        theirs = LAYER + "mlp.shared_experts.gate_weight"
        table.append(Entry(("mlp/shared_gate",), theirs, (1, D), _transposed, np.transpose))
    return table


def _feed_forward(config: DecoderConfig, ours: str, theirs: str, width: int, *, has_bias: bool = False) -> list[Entry]:
    D = config.embed_dim
    theirs = LAYER + theirs
    wide = ("gate", "up") if config.activation in GATED else ("up",)
    weights = tuple(ours + name for name in wide)
    biases = tuple(f"{ours}{name}_bias" for name in wide)

    def split_wide(rows):
        return tuple(np.split(*_transposed(rows), len(wide), -1))

    def join_wide(*parts):
        return _transposed(np.concatenate(parts, -1))[0]

    def join_down(w):
        return _transposed(w)[0]

    rows = len(wide) * width
    table = [
        Entry(weights, theirs + "linear_fc1.weight", (rows, D), split_wide, join_wide),
        Entry((ours + "down",), theirs + "linear_fc2.weight", (D, width), _transposed, join_down),
    ]
    if has_bias:
        table.append(Entry(biases, theirs + "linear_fc1.bias", (rows,), split_wide, join_wide))
        table.append(Entry((ours + "down_bias",), theirs + "linear_fc2.bias", (D,)))
    return table


def _transposed(array: np.ndarray) -> tuple[np.ndarray]:
    """Matrices; a vector is its own transpose."""
    return (array if array.ndim == 1 else array.swapaxes(-1, -2),)


def _with_rows(w_VD: np.ndarray, num_rows: int) -> np.ndarray:
    missing = num_rows - len(w_VD)
    return np.pad(w_VD, ((0, missing), (0, 0))) if missing > 0 else w_VD[:num_rows]


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


def _check_table(config: DecoderConfig) -> None:
    """Raises ValueError for a parameter that the table leaves out, or that the model config does."""
    ours = [path for entry in _table(config) for path in entry.ours]
    expected = _flat(Model(config).abstract_weights)
    for path in {**dict.fromkeys(ours), **expected}:
        if path not in expected or path not in ours:
            raise ValueError(
                f"parameter {path} is not in both Megatron's model and that of the model config; choose another config"
            )


def _their_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    return {
        name: entry.shape
        for entry in _table(config)
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
