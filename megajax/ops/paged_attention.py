"""Attention of new tokens to keys and values stored in pages (Kwon et al. 2023, https://arxiv.org/abs/2309.06180):
chooses the kernels for Hopper or the plain reference, and defines its sharding.

Dimensions: B sequences, T new tokens, N heads, K key-value heads, G = N / K, H head dim, Z pages, S slots in a page, P
pages of a sequence, J = P S slots of a sequence; C is 2, keys and values, or 1 if the keys are the values too.
`tensor` splits the heads; sequences and pages are whole on every device. There is no derivative: decoding needs none.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import manual
from megajax.mesh.sharding import activation_spec
from megajax.ops.attention import MASKED_SCORE, of_distance, plain_attention, with_sinks
from megajax.ops.attention_backends import BackendName, Inputs, Options, Pairs, choose
from megajax.ops.attention_mask import CAUSAL, Mask
from megajax.quantization.formats import scale_of, to_levels


def attend_to_pages(
    q_BTNH: jax.Array, pages_ZCKSH: jax.Array, table_BP: jax.Array, lower_BT: jax.Array | None, upper_BT: jax.Array,
    scales_ZCKS: jax.Array | None = None, *, scale: float, mask: Mask = CAUSAL,
    soft_cap: float | None = None, slopes: jax.Array | None = None, sinks: jax.Array | None = None,
    ahead_BT: jax.Array | None = None, value_dim: int | None = None, backend: BackendName = "auto"
) -> jax.Array:  # fmt: skip
    """softmax(scale * q k^T) v over lower <= slot < upper of the pages of each row -> [B, T, N, H] in q's dtype.

    The key of a token itself is in slot upper - 1. The bounds of a row never decrease. A token with lower = upper
    attends to nothing: 0. lower: None: 0, one token per row (T is 1).
    ahead: int32, further slots after upper that a token attends to; those of a window count from itself.
    mask: of which the window is read: the bounds are the rest. value_dim: if keys are the values too (C is 1), of which
    entries; the results have as many. soft_cap, slopes, sinks, backend: as in ops/attention.py.
    """
    if lower_BT is None and slopes is None and value_dim is None:
        given = dict(scale=scale, mask=mask, soft_cap=soft_cap, backend=backend)
        out_BNH, lse_BN = paged_attention(q_BTNH[:, 0], pages_ZCKSH, table_BP, upper_BT[:, 0], scales_ZCKS, **given)
        return with_sinks(out_BNH[:, None], lse_BN[:, :, None], sinks)[0]
    lower_BT = jnp.zeros_like(upper_BT) if lower_BT is None else lower_BT
    if mask.reach is not None:
        lower_BT = jnp.maximum(lower_BT, upper_BT - mask.reach)
    if ahead_BT is not None:
        assert slopes is None, "slopes are of causal attention"
        upper_BT += ahead_BT
    options = Options(mask, scale, soft_cap)
    page = None if value_dim is None else (pages_ZCKSH.shape[3], pages_ZCKSH.dtype)
    given = dict(value_dim=value_dim, page=page, has_slopes=slopes is not None)
    chosen = choose(_inputs(options, q_BTNH.shape[1], q_BTNH, pages_ZCKSH, **given), backend)

    def body(q, pages, table, lower, upper, scales, slopes, sinks):
        if value_dim is None:
            k, v = (_contiguous(pages, scales, which, table, q.dtype) for which in (0, -1))
            results = chosen.forward(q, k, v, _Intervals(options, lower, upper, slopes))
        else:
            latents = PagedLatents(pages, table, lower, upper, scales, slopes, options, value_dim)
            results = chosen.attend_to_latents(q, latents)
        return with_sinks(*results, sinks)[0]

    heads, query_heads = _head_specs(q_BTNH, pages_ZCKSH)
    tokens = P(None, None, query_heads, None)
    pages = P(None, None, heads)  # and scales
    specs = (tokens, pages, P(), P(), P(), pages, P(query_heads), P(query_heads))
    arrays = (q_BTNH, pages_ZCKSH, table_BP, lower_BT, upper_BT, scales_ZCKS, slopes, sinks)
    return manual(body, specs, tokens)(*arrays)


def _inputs(
    options: Options, length: int, q: jax.Array, pages_ZCKSH: jax.Array, value_dim: int | None = None, **others
) -> Inputs:  # fmt: skip
    heads, head_dim = q.shape[-2:]
    shape = (length, heads, pages_ZCKSH.shape[2], head_dim, value_dim or head_dim)
    return Inputs(options, *shape, q.dtype, keys="pages" if value_dim is None else "latents", **others)


@dataclasses.dataclass(frozen=True)
class _Intervals(Pairs):
    """The Pairs of queries whose bounds are given."""

    lower_BT: jax.Array
    upper_BT: jax.Array
    slopes_N: jax.Array | None

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        return self.lower_BT, self.upper_BT

    def reference(self, q, k, v) -> tuple[jax.Array, jax.Array]:
        how = (self.options.scale, self.options.soft_cap, self.slopes_N)
        return reference_bounded_attention(q, k, v, self.lower_BT, self.upper_BT, *how)


@dataclasses.dataclass(frozen=True)
class PagedLatents:
    """Keys of one device that are the values too; arrays as in `attend_to_pages`."""

    pages: jax.Array
    table_BP: jax.Array
    lower_BT: jax.Array
    upper_BT: jax.Array
    scales: jax.Array | None
    slopes: jax.Array | None
    options: Options
    value_dim: int

    def reference(self, q_BTNH: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = _contiguous(self.pages, self.scales, 0, self.table_BP, q_BTNH.dtype)
        how = (self.options.scale, self.options.soft_cap, self.slopes)
        return reference_bounded_attention(q_BTNH, k, k[..., : self.value_dim], self.lower_BT, self.upper_BT, *how)


def _head_specs(q: jax.Array, pages_ZCKSH: jax.Array):
    """Mesh axes of the heads of pages, and of those of queries [..., N, H]; all queries may share one key head, which
    every device then has."""
    heads = activation_spec(pages_ZCKSH.shape, (None, None, "kv_heads", None, None))[2]
    if pages_ZCKSH.shape[2] > 1:
        return heads, heads
    return heads, activation_spec(q.shape[-2:], ("heads", None))[0]


def write_pages(pages: jax.Array, new: jax.Array, slots_BT: jax.Array) -> jax.Array:
    """Stores new [B, T, C, K, ...] in slots of pages [Z, C, K, S, ...], in place if the pages are donated.

    slots: int32, page * S + offset, distinct; Z S and above: not stored.
    """
    axes = (None, None, "kv_heads", *(None,) * (pages.ndim - 3))
    heads = activation_spec(pages.shape, axes)[2]

    def body(pages, new, slots):
        num_pages, num_kinds, num_heads, page_size, *rest = pages.shape
        # Of integers that are not negative, which XLA would compute with a fifth of the operations.
        page_BT11 = lax.div(slots, page_size)[..., None, None]
        head_CK = jnp.arange(num_kinds * num_heads, dtype=slots.dtype).reshape(num_kinds, num_heads)
        # One row per head of a token: a scatter along the first dim of a flat array is done in place, without a
        # transposed copy of the pool.
        index_BTCK = (page_BT11 * head_CK.size + head_CK) * page_size + lax.rem(slots, page_size)[..., None, None]
        flat = pages.reshape(-1, *rest)
        # Unique: else XLA writes each 16-bit element with a loop of atomic operations.
        set_rows = flat.at[index_BTCK].set
        return set_rows(new, mode="drop", unique_indices=True, wrap_negative_indices=False).reshape(pages.shape)

    pages_spec = P(None, None, heads)
    return manual(body, (pages_spec, P(None, None, None, heads), P()), pages_spec)(pages, new, slots_BT)


def _contiguous(pages_ZCKSH, scales_ZCKS, which, table_BP, dtype):
    """Keys (which = 0) or values (-1) in the pages of each row, one after the other: [B, P S, K, H]."""
    gathered_BPKSH = pages_ZCKSH[table_BP, which]
    if scales_ZCKS is not None:
        gathered_BPKSH = gathered_BPKSH.astype(jnp.float32) * scales_ZCKS[table_BP, which][..., None]
    batch, _, kv_heads, _, head_dim = gathered_BPKSH.shape
    return gathered_BPKSH.astype(dtype).swapaxes(2, 3).reshape(batch, -1, kv_heads, head_dim)


def reference_bounded_attention(q_BTNH, k_BJKH, v_BJKH, lower_BT, upper_BT, scale, soft_cap=None, slopes_N=None):
    """`plain_attention` to a range of keys per query; an empty range gives 0, and -inf as its log-sum-exp."""
    slot_J = jnp.arange(k_BJKH.shape[1])
    seen_BTJ = (slot_J >= lower_BT[..., None]) & (slot_J < upper_BT[..., None])
    # What nobody attends to may be NaN, and 0 * NaN is NaN.
    is_read_BJ11 = jnp.any(seen_BTJ, 1)[..., None, None]
    k_BJKH = jnp.where(is_read_BJ11, k_BJKH, 0)
    v_BJKH = jnp.where(is_read_BJ11, v_BJKH, 0)

    def masked(scores_BKGTJ):
        if slopes_N is not None:
            scores_BKGTJ -= of_distance(slopes_N, upper_BT[..., None] - 1 - slot_J, k_BJKH.shape[2])
        return jnp.where(seen_BTJ[:, None, None], scores_BKGTJ, MASKED_SCORE)

    out_BTNH, lse_BNT = plain_attention(q_BTNH, k_BJKH, v_BJKH, masked, scale, soft_cap)
    is_empty_BT = ~jnp.any(seen_BTJ, 2)
    return jnp.where(is_empty_BT[..., None, None], 0, out_BTNH), jnp.where(is_empty_BT[:, None], -jnp.inf, lse_BNT)


def paged_attention(
    q_BNH: jax.Array, pages_ZCKSH: jax.Array, table_BP: jax.Array, lengths_B: jax.Array,
    scales_ZCKS: jax.Array | None = None, *, scale: float, mask: Mask = CAUSAL,
    soft_cap: float | None = None, backend: BackendName = "auto"
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """softmax(scale * q k^T) v over the tokens of each sequence -> (out [B, N, H] in q's dtype, log-sum-exp [B, N]).

    q is the query of the last token, whose key and value are already in the pages.
    table: int32, entry p is the page with positions S p to S p + S - 1 of the sequence. lengths: int32; length 0 gives
    0 and -inf. Entries beyond the length may have any value, and slots without a token any contents, including NaN.
    scales: of int8 pages, float32, see `quantise`.
    mask: causal, perhaps with a window. soft_cap, backend: as in ops/attention.py.
    """
    heads, query_heads = _head_specs(q_BNH, pages_ZCKSH)
    options = Options(mask, scale, soft_cap)
    page = (pages_ZCKSH.shape[3], pages_ZCKSH.dtype)
    chosen = choose(_inputs(options, 1, q_BNH, pages_ZCKSH, page=page), backend)

    def body(q, *arrays):
        return chosen.decode(q, PagedKeys(arrays, options))

    pages = P(None, None, heads)  # and scales
    queries = P(None, query_heads)
    specs = (queries, pages, P(), P(), pages)
    return manual(body, specs, (queries, queries))(q_BNH, pages_ZCKSH, table_BP, lengths_B, scales_ZCKS)


@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """Keys and values of one device, of which each query reads a sequence."""

    arrays: tuple
    """Of `paged_attention`: pages, table, lengths and scales."""
    options: Options

    def reference(self, q_BNH: jax.Array) -> tuple[jax.Array, jax.Array]:
        how = dict(scale=self.options.scale, window=self.options.mask.reach, soft_cap=self.options.soft_cap)
        return reference_paged_attention(q_BNH, *self.arrays, **how)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys or values [..., H] -> (int8 [..., H], float32 [...]), whose product is x; the largest of a row is 127."""
    scale = scale_of(x, jnp.int8, [-1])
    return to_levels(x.astype(jnp.float32) / scale, jnp.int8), scale[..., 0]


def reference_paged_attention(
    q_BNH, pages_ZCKSH, table_BP, lengths_B, scales_ZCKS=None, *, scale, window=None, soft_cap=None
):
    """The formula, in float32, with all keys and values of the sequences gathered."""
    keys, values = (_contiguous(pages_ZCKSH, scales_ZCKS, which, table_BP, jnp.float32) for which in (0, -1))
    upper_B1 = lengths_B[:, None]
    lower_B1 = jnp.zeros_like(upper_B1) if window is None else upper_B1 - window
    q_B1NH = q_BNH[:, None].astype(jnp.float32)
    out_B1NH, lse_BN1 = reference_bounded_attention(q_B1NH, keys, values, lower_B1, upper_B1, scale, soft_cap)
    return out_B1NH[:, 0].astype(q_BNH.dtype), lse_BN1[:, :, 0]
