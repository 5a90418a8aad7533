"""Entries of the tables that pair Megatron Core's parameters with ours, for the parts that its models share.

Dimensions: D model width, F feed-forward width, N query heads, K key-value heads, H head dim, V vocabulary.
Megatron's linear weights are [out, in]. The rows of `linear_qkv` go by key-value head: its N / K queries, its key, its
value; those of `linear_kv` (cross-attention) and `linear_kv_up_proj` (latent attention) by head: its key, its value. A
gated `linear_fc1` is the gate above the up projection.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.norm import NormConfig
from megajax.ops.activation import GATED

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
SEQUENCE_TO_SEQUENCE_OUTPUT = "lm_head.output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"
SEQUENCE_TO_SEQUENCE_BIAS = "lm_head.output_layer.bias"
# Arrays with a row for each token.
VOCABULARY = (EMBEDDING, OUTPUT, OUTPUT_BIAS, SEQUENCE_TO_SEQUENCE_OUTPUT, SEQUENCE_TO_SEQUENCE_BIAS)
LAYER = "decoder.layers.{}."  # prefix of the names of one layer


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

    def of_layers(self, stack: str, layers: Sequence[int]) -> "Entry":
        """Of a layer -> of the layers with these numbers. stack: path of ours."""
        ours = tuple(f"{stack}/{path}" for path in self.ours)
        return dataclasses.replace(self, ours=ours, layers=tuple(layers))


Table = list[Entry]


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool


def vocabulary(ours: str, theirs: str, vocab_size: int, padded_size: int, *inputs: int) -> Entry:
    """A row for each token. ours has [padded_size, *inputs]."""
    return Entry((ours,), theirs, (vocab_size, *inputs), lambda rows: (with_rows(rows, padded_size),))


def output_layer(ours: str, theirs: str, vocab_size: int, padded_size: int, embed_dim: int) -> Entry:
    """ours is the transposed one, [D, V]."""
    return Entry((ours,), theirs, (vocab_size, embed_dim), lambda w_VD: (with_rows(w_VD, padded_size).T,), np.transpose)


def positions(num_rows: int, padded_rows: int, embed_dim: int) -> Entry:
    theirs = "embedding.position_embeddings.weight"
    shape = (num_rows, embed_dim)
    return Entry(
        ("position_embedding",), theirs, shape, lambda rows: (with_rows(rows, padded_rows),), lambda a: a[:num_rows]
    )


def norm(config: NormConfig, ours: str, theirs: str, dim: int) -> Table:
    table = [Entry((f"{ours}/scale",), f"{theirs}.weight", (dim,))]
    if config.kind == "layernorm" and config.bias:
        table.append(Entry((f"{ours}/bias",), f"{theirs}.bias", (dim,)))
    return table


def linear(ours: str, theirs: str, inputs: Sequence[int], outputs: Sequence[int], *, has_bias: bool) -> Table:
    """One matrix, ours [*inputs, *outputs]."""
    shape = (math.prod(outputs), math.prod(inputs))

    def split(w):
        return (w.T.reshape(*inputs, *outputs),)

    table = [Entry((ours,), f"{theirs}.weight", shape, split, lambda w: w.reshape(shape[::-1]).T)]
    if has_bias:
        bias = Entry((f"{ours}_bias",), f"{theirs}.bias", shape[:1], lambda b: (b.reshape(outputs),), np.ravel)
        table.append(bias)
    return table


def projections(ours: dict[str, int], theirs: str, num_groups: int, sizes: Heads) -> Table:
    """One matrix whose rows go by group of heads; in each group ours[name] heads of each of ours, in this order."""
    D = sizes.embed_dim
    H = sizes.head_dim
    ends = np.cumsum(list(ours.values()))
    num_rows = num_groups * ends[-1] * H

    # Both serve the weight and the bias: the transpose of a vector is itself, and the last dims are the same.
    def split(rows):
        grouped = rows.T.reshape(*rows.shape[1:], num_groups, ends[-1], H)
        parts = np.split(grouped, ends[:-1], -2)
        return tuple(part.reshape(*part.shape[:-3], -1, H) for part in parts)

    def join(*parts):
        grouped = [part.reshape(*part.shape[:-2], num_groups, -1, H) for part in parts]
        whole = np.concatenate(grouped, -2)
        return whole.reshape(*whole.shape[:-3], -1).T

    table = [Entry(tuple(ours), f"{theirs}.weight", (num_rows, D), split, join)]
    if sizes.qkv_bias:
        biases = tuple(f"{name}_bias" for name in ours)
        table.append(Entry(biases, f"{theirs}.bias", (num_rows,), split, join))
    return table


def self_attention(ours: str, theirs: str, sizes: Heads) -> Table:
    """ours, theirs: prefixes."""
    N = sizes.num_heads
    K = sizes.num_kv_heads
    parts = {f"{ours}query": N // K, f"{ours}key": 1, f"{ours}value": 1}
    return projections(parts, f"{theirs}linear_qkv", K, sizes) + out_projection(ours, theirs, sizes)


def cross_attention(ours: str, theirs: str, sizes: Heads) -> Table:
    """ours, theirs: prefixes."""
    N = sizes.num_heads
    table = projections({f"{ours}query": 1}, f"{theirs}linear_q", N, sizes)
    table += projections({f"{ours}key": 1, f"{ours}value": 1}, f"{theirs}linear_kv", N, sizes)
    return table + out_projection(ours, theirs, sizes)


def out_projection(ours: str, theirs: str, sizes: Heads) -> Table:
    inputs = (sizes.num_heads, sizes.head_dim)
    return linear(f"{ours}out", f"{theirs}linear_proj", inputs, (sizes.embed_dim,), has_bias=sizes.out_bias)


def experts(moe: MoeConfig, ours: str, theirs: str, embed_dim: int, mlp_dim: int, activation: str) -> Table:
    """ours, theirs: prefixes, theirs with the place of the number of a layer."""
    D = embed_dim
    E = moe.num_experts
    table = [Entry((f"{ours}router",), f"{theirs}router.weight", (E, D), transposed, np.transpose)]
    if moe.router.bias_update_rate is not None:
        table.append(Entry((f"{ours}router_expert_bias",), f"{theirs}router.expert_bias", (E,)))
    of_experts = feed_forward(ours, theirs + "experts.local_experts.{}.", D, moe.expert_dim or mlp_dim, activation)
    table += [dataclasses.replace(entry, num_experts=E) for entry in of_experts]
    if moe.shared_dim is not None:
        table += feed_forward(f"{ours}shared/", f"{theirs}shared_experts.", D, moe.shared_dim, activation)
    if moe.shared_gate:
        name = f"{theirs}shared_experts.gate_weight"
        table.append(Entry((f"{ours}shared_gate",), name, (1, D), transposed, np.transpose))
    return table


def feed_forward(
    ours: str, theirs: str, embed_dim: int, width: int, activation: str, *, has_bias: bool = False
) -> Table:
    """ours, theirs: prefixes."""
    D = embed_dim
    wide = ("gate", "up") if activation in GATED else ("up",)
    weights = tuple(ours + name for name in wide)
    biases = tuple(f"{ours}{name}_bias" for name in wide)

    def split_wide(rows):
        return tuple(np.split(*transposed(rows), len(wide), -1))

    def join_wide(*parts):
        return transposed(np.concatenate(parts, -1))[0]

    def join_down(w):
        return transposed(w)[0]

    rows = len(wide) * width
    table = [
        Entry(weights, f"{theirs}linear_fc1.weight", (rows, D), split_wide, join_wide),
        Entry((f"{ours}down",), f"{theirs}linear_fc2.weight", (D, width), transposed, join_down),
    ]
    if has_bias:
        table.append(Entry(biases, f"{theirs}linear_fc1.bias", (rows,), split_wide, join_wide))
        table.append(Entry((f"{ours}down_bias",), f"{theirs}linear_fc2.bias", (D,)))
    return table


def transposed(array: np.ndarray) -> tuple[np.ndarray]:
    """Matrices; a vector is its own transpose."""
    return (array if array.ndim == 1 else array.swapaxes(-1, -2),)


def with_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Padded with zeros, or cut."""
    missing = num_rows - len(rows)
    padding = [(0, max(missing, 0))] + [(0, 0)] * (rows.ndim - 1)
    return np.pad(rows[:num_rows], padding)
