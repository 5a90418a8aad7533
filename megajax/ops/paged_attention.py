"""Attention of one new token per sequence to keys and values stored in pages (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180): chooses the kernel for Hopper or the plain reference, and defines its sharding.

Dimensions: B sequences, N heads, K key-value heads, G = N / K, H head dim, Z pages, S slots in a page, P pages of a
sequence, T = P S slots of a sequence.
`tensor` splits the heads; sequences and pages are whole on every device. There is no derivative: decoding needs none.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax import compat
from megajax.current_mesh import manual
from megajax.ops.attention import MASKED_SCORE
from megajax.ops.matmul import dot_precision
from megajax.sharding import activation_spec
from pallas_kernels import paged_attention as kernel

logger = logging.getLogger("megajax")


def paged_attention(
    q_BNH: jax.Array, keys_ZKSH: jax.Array, values_ZKSH: jax.Array, table_BP: jax.Array, lengths_B: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None, *, scale: float, window: int | None = None,
    soft_cap: float | None = None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """softmax(scale * q k^T) v over the tokens of each sequence -> (out [B, N, H] in q's dtype, log-sum-exp [B, N]).

    q is the query of the last token, whose key and value are already in the pages.
    table: int32, entry p is the page with positions S p to S p + S - 1 of the sequence. lengths: int32; length 0 gives
    0 and -inf. Entries beyond the length may have any value, and slots without a token any contents, including NaN.
    scales: of int8 keys and values, float32 [Z, K, S] each, see `quantise`.
    window: attend only to the last `window` tokens. soft_cap: as in ops/attention.py.
    """
    heads = activation_spec(keys_ZKSH.shape, (None, "kv_heads", None, None))[1]
    backend = _backend(q_BNH, keys_ZKSH)
    run = reference_paged_attention if backend == "reference" else kernel.decode

    def body(*arrays):
        results = run(*arrays, scale=scale, window=window, soft_cap=soft_cap)
        return compat.vary(results, compat.varying_axes(arrays[0]))

    pages = P(None, heads, None, None)
    specs = (P(None, heads, None), pages, pages, P(), P(), None if scales is None else (P(None, heads, None),) * 2)
    out_specs = (P(None, heads, None), P(None, heads))
    return manual(body, specs, out_specs)(q_BNH, keys_ZKSH, values_ZKSH, table_BP, lengths_B, scales)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys or values [..., H] -> (int8 [..., H], float32 [...]), whose product is x; the maximum of a row is 127."""
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), -1) / 127
    rounded = jnp.round(x.astype(jnp.float32) / jnp.where(scale > 0, scale, 1)[..., None])
    return rounded.astype(jnp.int8), scale


def reference_paged_attention(
    q_BNH, keys_ZKSH, values_ZKSH, table_BP, lengths_B, scales=None, *, scale, window=None, soft_cap=None
):
    """The formula, in float32, with all keys and values of the sequences gathered."""
    batch, num_heads, head_dim = q_BNH.shape
    num_places = table_BP.shape[1] * keys_ZKSH.shape[2]
    place_T = jnp.arange(num_places)
    length_B1 = lengths_B[:, None]
    seen_BT = place_T < length_B1
    if window is not None:
        seen_BT &= place_T >= length_B1 - window

    def gather(pages_ZKSH, scales_ZKS):
        gathered_BPKSH = pages_ZKSH[table_BP].astype(jnp.float32)
        if scales_ZKS is not None:
            gathered_BPKSH *= scales_ZKS[table_BP][..., None]
        gathered_BKTH = gathered_BPKSH.swapaxes(1, 2).reshape(batch, -1, num_places, head_dim)
        return jnp.where(seen_BT[:, None, :, None], gathered_BKTH, 0)  # 0 * NaN is NaN

    key_scales, value_scales = scales or (None, None)
    keys_BKTH = gather(keys_ZKSH, key_scales)
    values_BKTH = gather(values_ZKSH, value_scales)
    q_BKGH = q_BNH.reshape(batch, keys_BKTH.shape[1], -1, head_dim).astype(jnp.float32)
    dot = functools.partial(jnp.einsum, precision=dot_precision(jnp.float32))
    scores_BKGT = dot("bkgh,bkth->bkgt", q_BKGH, keys_BKTH) * scale
    if soft_cap is not None:
        scores_BKGT = soft_cap * jnp.tanh(scores_BKGT / soft_cap)
    seen_B11T = seen_BT[:, None, None]
    lse_BKG = jax.nn.logsumexp(scores_BKGT, -1, where=seen_B11T)
    probs_BKGT = jnp.where(seen_B11T, jax.nn.softmax(jnp.where(seen_B11T, scores_BKGT, MASKED_SCORE), -1), 0)
    out_BKGH = dot("bkgt,bkth->bkgh", probs_BKGT, values_BKTH)
    return out_BKGH.reshape(q_BNH.shape).astype(q_BNH.dtype), lse_BKG.reshape(batch, num_heads)


def _backend(q_BNH, keys_ZKSH) -> str:
    num_heads = q_BNH.shape[1]
    kv_heads, page_size = keys_ZKSH.shape[1:3]
    reason = compat.mosaic_problem() or kernel.problem(
        num_heads, kv_heads, q_BNH.shape[-1], page_size, q_BNH.dtype, keys_ZKSH.dtype
    )
    _log_choice(reason)
    return "reference" if reason else "kernel"


@functools.cache
def _log_choice(reason: str) -> None:
    chosen = f"reference ({reason})" if reason else "split over the sequence (pallas_kernels/paged_attention.py)"
    logger.info("paged attention: %s", chosen)
