"""Keys and values of the tokens seen so far, in pages that sequences share (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Which page holds which token is decided outside, and comes as Places.

Dimensions: B rows, T new tokens, N heads, K key-value heads, H head dim, Z pages, S slots of a page, P pages of a row;
C is 2, keys and values, or 1 if the keys are the values too (latent attention).
An attention layer calls `attend(q, k, v, ...) -> (out, cache)`, whatever the kind of cache.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.mesh.sharding import constrain
from megajax.ops.paged_attention import attend_to_pages, quantise, write_pages
from megajax.quantization.formats import to_levels

PAGE_AXES = (None, None, "kv_heads", None, None)


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

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


class Singles(NamedTuple):
    """The last tokens of a row of several sequences, each the newest one of a sequence with a table of its own."""

    table_BP: jax.Array
    upper_B: jax.Array


class Places(NamedTuple):
    """Where the new tokens of a step are stored and what they attend to; the same for all layers.

    Either every row is one new token of a sequence of its own (T is 1, lower is None), or there is one row (B is 1)
    that holds tokens of several sequences one after the other. Padding has a slot from Z S on, row num_rows and upper
    0, or lower = upper: it is not stored and attends to nothing. So do, by these bounds, singles.
    """

    slots_BT: jax.Array
    """int32: page * S + offset, where a token is stored; distinct."""
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
    ahead_BT: jax.Array | None = None
    """int32: how many tokens after itself a token attends to, those of its image (Gemma 3); None: to none."""
    singles: Singles | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    pages: jax.Array
    """[Z, C, K, S, H], keys after the rotary embedding. One array, so that a step writes keys and values at once."""
    scales: jax.Array | None
    """Of int8 pages, float32 [Z, C, K, S]."""

    @staticmethod
    def zeros(sizes: PoolSizes, num_kv_heads: int, head_dim: int, *, has_values: bool = True) -> "PagedCache":
        shape = (sizes.num_pages, 2 if has_values else 1, num_kv_heads, sizes.page_size, head_dim)
        pages = constrain(jnp.zeros(shape, sizes.dtype), *PAGE_AXES)
        if sizes.dtype != jnp.int8:
            return PagedCache(pages, None)
        return PagedCache(pages, constrain(jnp.zeros(shape[:-1], jnp.float32), *PAGE_AXES[:-1]))

    def at(self, places: Places) -> "PlacedPages":
        return PlacedPages(self.pages, self.scales, places)


class PlacedPages(NamedTuple):
    """A PagedCache, ready for the tokens at these places."""

    pages: jax.Array
    scales: jax.Array | None
    places: Places

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array | None, *, method, deterministic,
        **options
    ) -> tuple[jax.Array, PagedCache]:  # fmt: skip
        """-> (attention of the new tokens to all tokens of their sequence [B, T, N, H], the updated cache).

        v: None if the keys are the values too, of which value_dim says how many entries; the results have as many.
        options: that, and mask, scale, soft_cap, slopes, sinks and backend as in ops/attention.py. method,
        deterministic: for training.
        """
        slots, _, _, table, lower, upper, ahead, singles = self.places
        new_BTCKH = k_BTKH[:, :, None] if v_BTKH is None else jnp.stack((k_BTKH, v_BTKH), 2)
        scales = None
        if self.scales is not None:
            new_BTCKH, scales_BTCK = quantise(new_BTCKH)
            scales = write_pages(self.scales, scales_BTCK, slots)
        elif self.pages.dtype == jnp.float8_e4m3fn:  # beyond its largest value a cast gives NaN
            new_BTCKH = to_levels(new_BTCKH, self.pages.dtype)
        pages = write_pages(self.pages, new_BTCKH.astype(self.pages.dtype), slots)
        out = attend_to_pages(q_BTNH, pages, table, lower, upper, scales, ahead_BT=ahead, **options)
        if singles is not None:
            queries = q_BTNH[0, -len(singles.upper_B) :, None]
            of_singles = attend_to_pages(
                queries, pages, singles.table_BP, None, singles.upper_B[:, None], scales, **options
            )
            out = out.at[0, -len(queries) :].set(of_singles[:, 0])
        return out, PagedCache(pages, scales)
