"""Keys and values of the tokens seen so far: in pages that sequences share, or contiguous for each row.

Dimensions: B rows, T new tokens, N heads, K key-value heads, H head dim; contiguous: S slots of a row; paged: Z pages,
S slots of a page, P pages of a row; C is 2, keys and values, or 1 if the keys are the values too (latent attention).
An attention layer calls `attend(q, k, v, ...) -> (out, cache)`, whatever the kind of cache; only latent attention asks
first whether it `is_empty`, because it then computes in another form.

PagedCache is that of the inference engine (Kwon et al. 2023, https://arxiv.org/abs/2309.06180). Which page holds which
token is decided outside, and comes as Places. The contiguous cache is for programs without an engine
(weights/stablehlo.py): they start with one EmptyCache per layer; the prefill turns it into a LayerCache, and each
decoding step writes to it. Slot s of a row holds token s of that row, so the causal mask alone hides the slots beyond a
row's length: the padding of a short prompt, then zeros.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import axis_size, manual
from megajax.mesh.sharding import activation_spec, constrain
from megajax.ops.paged_attention import attend_to_pages, quantise, write_pages
from megajax.parallel.context import AXIS, attention
from megajax.quantization.formats import to_levels

PAGE_AXES = (None, None, "kv_heads", None, None)
_AXES = ("batch", None, "kv_heads", None)  # not split over `context`: a new token may attend to any slot


class PoolSizes(NamedTuple):
    """What a layer needs to know to allocate its part of the pool."""

    num_pages: int
    page_size: int
    """Tokens in a page."""
    num_rows: int
    """Sequences that run at the same time, for layers with a state per sequence; the arrays of a state have the rows
    first."""
    dtype: jnp.dtype
    """Of keys and values in pages; int8 has a float32 scale per token and head."""
    num_guesses: int = 0
    """Further tokens that layers of the model guess in each step (stacks of the role guess)."""


class Places(NamedTuple):
    """Where the new tokens of a step are stored and what they attend to; the same for all layers.

    Either every row is one new token of a sequence of its own (T is 1, lower is None), or there is one row (B is 1)
    that holds tokens of several sequences one after the other. Padding has slot Z S, row num_rows and upper 0, or
    lower = upper: it is not stored and attends to nothing.
    """

    slots_BT: jax.Array
    """int32: page * S + offset, where a token is stored; distinct, except for padding."""
    positions_BT: jax.Array
    """int32: position in the sequence."""
    rows_BT: jax.Array
    """int32: index of the sequence, for layers with a state per sequence."""
    table_BP: jax.Array
    """int32: pages of the row, of several sequences one after the other; any valid page in entries beyond them."""
    lower_BT: jax.Array | None
    """int32: a token attends to the slots lower <= s < upper of its row of pages: its sequence, up to itself.
    The bounds of a row never decrease."""
    upper_BT: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=("pages", "scales", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class PagedCache:
    pages: jax.Array
    """[Z, C, K, S, H], keys after the rotary embedding. One array, so that a step writes keys and values at once."""
    scales: jax.Array | None
    """Of int8 pages, float32 [Z, C, K, S]."""
    places: Places | None = None
    """Set by `at`."""

    is_empty = False

    @staticmethod
    def zeros(sizes: PoolSizes, num_kv_heads: int, head_dim: int, *, has_values: bool = True) -> "PagedCache":
        shape = (sizes.num_pages, 2 if has_values else 1, num_kv_heads, sizes.page_size, head_dim)
        pages = constrain(jnp.zeros(shape, sizes.dtype), *PAGE_AXES)
        if sizes.dtype != jnp.int8:
            return PagedCache(pages, None)
        return PagedCache(pages, constrain(jnp.zeros(shape[:-1], jnp.float32), *PAGE_AXES[:-1]))

    def at(self, places: Places) -> "PagedCache":
        """The same cache, ready for these tokens."""
        return dataclasses.replace(self, places=places)

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array | None, *, method, deterministic,
        **options
    ) -> tuple[jax.Array, "PagedCache"]:  # fmt: skip
        """-> (attention of the new tokens to all tokens of their sequence [B, T, N, H], the updated cache).

        v: None if the keys are the values too. options: mask, scale, soft_cap, slopes, sinks and backend as in
        ops/attention.py. method, deterministic: for training.
        """
        slots, _, _, table, lower, upper = self.places
        new_BTCKH = k_BTKH[:, :, None] if v_BTKH is None else jnp.stack((k_BTKH, v_BTKH), 2)
        scales = None
        if self.scales is not None:
            new_BTCKH, scales_BTCK = quantise(new_BTCKH)
            scales = write_pages(self.scales, scales_BTCK, slots)
        elif self.pages.dtype == jnp.float8_e4m3fn:  # beyond its largest value a cast gives NaN
            new_BTCKH = to_levels(new_BTCKH, self.pages.dtype)
        pages = write_pages(self.pages, new_BTCKH.astype(self.pages.dtype), slots)
        out = attend_to_pages(q_BTNH, pages, table, lower, upper, scales, **options)
        return out, PagedCache(pages, scales)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class LayerCache:
    keys: jax.Array
    """[B, S, K, H] in the compute dtype, after the rotary embedding."""
    values: jax.Array | None
    """[B, S, K, H] in the compute dtype; None: the keys are the values too (latent attention)."""
    places: jax.Array | None = None
    """int32 [B, T]: slots of the next T tokens, distinct within a row; S and above: not stored. Set by `at`."""

    is_empty = False

    def at(self, places_BT: jax.Array) -> "LayerCache":
        """The same cache, with the slots of the next tokens set."""
        return dataclasses.replace(self, places=places_BT)

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array | None, **options
    ) -> tuple[jax.Array, "LayerCache"]:
        """-> (attention of the new tokens to all tokens of their row [B, T, N, H], the updated cache).

        v: None if the keys are the values too. options: keyword arguments of parallel/context.py's `attention`.
        """
        keys = _write(self.keys, k_BTKH, self.places)
        values = None if v_BTKH is None else _write(self.values, v_BTKH, self.places)
        places_BS = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2])
        indices = (self.places, places_BS)
        out_BTNH = attention(q_BTNH, keys, keys if values is None else values, indices=indices, **options)
        return out_BTNH, LayerCache(keys, values)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyCache:
    """A cache of S = `length` slots before the first token."""

    length: int

    is_empty = True

    def at(self, places_BT: jax.Array) -> "EmptyCache":
        """The prompt and its padding take the first slots; nothing attends to the padding."""
        return self

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, stored: tuple | None = None, **options
    ) -> tuple[jax.Array, "LayerCache"]:
        """Stores the whole prompt, T <= S. Attention runs over the prompt alone, as in training. Only where `context`
        splits the prompt does it need indices, because the prompt is not in the token order of training.

        stored: the (keys, values or None) to store if they are not k and v: those that later tokens attend to.
        """
        pad_width = ((0, 0), (0, self.length - k_BTKH.shape[1]), (0, 0), (0, 0))
        new = (k_BTKH, v_BTKH) if stored is None else stored
        keys, values = jax.tree.map(lambda a: constrain(jnp.pad(a, pad_width), *_AXES), new)
        places_BT = jnp.broadcast_to(jnp.arange(k_BTKH.shape[1], dtype=jnp.int32), k_BTKH.shape[:2])
        indices = (places_BT, places_BT) if axis_size(AXIS) > 1 else None
        return attention(q_BTNH, k_BTKH, v_BTKH, indices=indices, **options), LayerCache(keys, values)


def _write(cache_BSKH: jax.Array, new_BTKH: jax.Array, places_BT: jax.Array) -> jax.Array:
    """Updates in place if the cache is donated; every device writes its own rows and heads."""
    spec = activation_spec(cache_BSKH.shape, _AXES)

    @jax.vmap
    def write(row_SKH, new_TKH, places_T):
        return row_SKH.at[places_T].set(new_TKH, mode="drop", unique_indices=True)

    return manual(write, (spec, spec, P(spec[0], None)), spec)(cache_BSKH, new_BTKH, places_BT)
