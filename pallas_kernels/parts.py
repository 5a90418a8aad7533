"""Decoding splits a sequence into parts, each a block of the attention kernels, and combines their results, as in
Flash-Decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/). XLA combines a few parts, a kernel for
Hopper (Pallas, Mosaic GPU) many.

Dimensions: B sequences, K kv heads, N heads, R rows of a kv head, H head dim, p parts.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registers import load_as, store_narrow

MASKED_SCORE = -1e30  # below every score; not -inf, so that a part without tokens gives 0 and no NaN
LOG2E = math.log2(math.e)
MAX_PART_TOKENS = 4096  # so that the GPU does not wait long for one long sequence among short ones
MANY_WAVES = 3  # of blocks: then it has others to do meanwhile, for twice as long
WRITTEN_OUT = 8  # parts whose combination is a sum of as many terms, which XLA fuses
MOST_PARTS = 64  # which our kernel combines
WIDTH = 128  # columns that a block of it combines


def num_parts(num_blocks: int, most_tokens: int, slots: int, block: int = 64) -> int:
    """Number of parts for sequences of up to most_tokens, of which num_blocks would run at once without parts, and
    `slots` can: fills the GPU; each part adds 1 % overhead. block: tokens per step, of which a part has two."""
    has_many = num_blocks >= MANY_WAVES * slots
    least = -(-most_tokens // (MAX_PART_TOKENS * (2 if has_many else 1)))
    most = max(least, min(most_tokens // (2 * block), MOST_PARTS))

    def cost(parts: int) -> float:
        waves = -(-num_blocks * parts // slots)
        return waves * (1 / parts + 0.01)

    return min(range(max(least, 1), max(most, 1) + 1), key=cost)


def room_of(parts: int) -> int:
    """Parts for which the array of statistics has room."""
    return MOST_PARTS if WRITTEN_OUT < parts <= MOST_PARTS else parts


def dtype_of_sums(parts: int, dtype: jnp.dtype) -> jnp.dtype:
    """Of `joined`: the only part of a sequence writes its result, in dtype."""
    return dtype if parts == 1 else jnp.float32


def joined(
    sums_BKpRH: jax.Array, stats_BKq2R: jax.Array, group: int, dtype: jnp.dtype, **options
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-> (out [B, N, H] in dtype, natural log-sum-exp of the scores [B, N] float32; 0 and -inf of no tokens).

    sums: in `dtype_of_sums`, of the values weighted by exp2(score - most), or, of a single part, divided by the sum of
    the weights too, and 0 of no tokens; stats: float32, most and the sum of the weights; scores are times log2 e; q:
    room_of(p). Of the R rows of a kv head, of which stats may have more than sums, the first `group` exist. options: of
    plgpu.kernel.
    """
    batch, kv_heads, parts = sums_BKpRH.shape[:3]
    if WRITTEN_OUT < parts <= MOST_PARTS:
        out, lse = _join_many(sums_BKpRH, stats_BKq2R, group, dtype, **options)
    else:
        stats_BKp2R = stats_BKq2R[..., : sums_BKpRH.shape[3]]
        out, lse = _join(sums_BKpRH, stats_BKp2R) if parts > 1 else _only(sums_BKpRH, stats_BKp2R)

    def merge(a):
        return a[:, :, :group].reshape(batch, kv_heads * group, *a.shape[3:])

    return merge(out).astype(dtype), merge(lse)


def _only(results_BK1RH, stats_BK12R):
    """-> out [B, K, R, H], log-sum-exp [B, K, R]."""
    most_BKR, total_BKR = (stats_BK12R[:, :, 0, i] for i in range(2))
    return results_BK1RH[:, :, 0], (most_BKR + jnp.log2(total_BKR)) / LOG2E


def _join(sums_BKpRH, stats_BKp2R):
    """-> out [B, K, R, H], log-sum-exp [B, K, R]."""
    most_BKpR = stats_BKp2R[:, :, :, 0]
    total_BKpR = stats_BKp2R[:, :, :, 1]
    most_BKR = _reduced(jnp.max, jnp.maximum, most_BKpR)
    weight_BKpR = jnp.exp2(most_BKpR - most_BKR[:, :, None])
    total_BKR = _reduced(jnp.sum, jnp.add, weight_BKpR * total_BKpR)
    out_BKRH = _reduced(jnp.sum, jnp.add, weight_BKpR[..., None] * sums_BKpRH)
    out_BKRH = jnp.where(total_BKR[..., None] > 0, out_BKRH / total_BKR[..., None], 0)
    return out_BKRH, (most_BKR + jnp.log2(total_BKR)) / LOG2E


def _reduced(reduction: Callable, operation: Callable, parts_BKpR: jax.Array) -> jax.Array:
    """Over the parts. XLA makes a kernel of each reduction, and fuses what is written out, but compiling many parts in
    each layer takes long."""
    if parts_BKpR.shape[2] > WRITTEN_OUT:
        return reduction(parts_BKpR, 2)
    return functools.reduce(operation, [parts_BKpR[:, :, p] for p in range(parts_BKpR.shape[2])])


def _join_many(sums_BKpRH, stats_BKq2R, group: int, dtype: jnp.dtype, **options):
    """The same in one kernel: XLA makes three. q: MOST_PARTS. -> out [B, N, H], log-sum-exp [B, N]."""
    batch, kv_heads, parts, rows, head_dim = sums_BKpRH.shape
    # A block has a few rows or a part of one: a column per thread.
    num_rows = max(WIDTH // head_dim, 1)
    blocks = -(-group * head_dim // WIDTH)
    by_column = plgpu.Layout.WG_STRIDED((WIDTH,), 1)
    by_part = plgpu.Layout.WGMMA.reduce(1)
    narrow = MOST_PARTS, 8

    def body(sums_ref, stats_ref, out_ref, lse_ref, weights_ref):
        block, head, sequence = (lax.axis_index(name) for name in ("block", "head", "sequence"))
        first_row = lax.div(block * WIDTH, head_dim)

        def loaded(ref, layout):
            return load_as(ref, layout, optimized=False)

        def weigh(number):
            """Stores the weights of a row, whose sum is one."""
            row = first_row + number
            most, total = (loaded(stats_ref.at[sequence, head, :, i, row], by_part) for i in range(2))
            exists = plgpu.broadcasted_iota(jnp.int32, narrow, 0, layout=plgpu.Layout.WGMMA) < parts
            most = jnp.where(exists, _wide(most, 0, narrow), MASKED_SCORE)
            peak = jnp.max(most, 0)
            weights = jnp.where(exists, jnp.exp2(most - _wide(peak, 1, narrow)), 0.0)
            total = jnp.sum(jnp.where(exists, weights * _wide(total, 0, narrow), 0.0), 0)
            factor = jnp.where(total > 0, 1 / total, 0.0)
            weights_ref[number] = jnp.max(weights * _wide(factor, 1, narrow), 1)
            store_narrow(lse_ref.at[sequence, head, row], (peak + jnp.log2(total)) / LOG2E)

        # First, to wait for all at once.
        sums = [loaded(sums_ref.at[sequence, head, part, block], by_column) for part in range(parts)]
        for number in range(num_rows):
            weigh(number)
        plgpu.commit_smem()
        row = lax.div(plgpu.broadcasted_iota(jnp.int32, (WIDTH,), 0, layout=by_column), head_dim)

        def weighted(part):
            weight = weights_ref[0, part]
            for number in range(1, num_rows):
                weight = jnp.where(row == number, weights_ref[number, part], weight)
            return weight * sums[part]

        out = functools.reduce(jnp.add, [weighted(part) for part in range(parts)])
        out_ref[sequence, head, block] = out.astype(dtype)

    out, lse_BKR8 = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch, kv_heads, blocks, WIDTH), dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, rows, narrow[1]), jnp.float32),
        ],
        scratch_types=[plgpu.SMEM((num_rows, MOST_PARTS), jnp.float32)],
        grid=(blocks, kv_heads, batch),
        grid_names=("block", "head", "sequence"),
        # By lanes: with as many sums, inferring layouts takes 20 times as long as lowering.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **options,
    )(sums_BKpRH.reshape(batch, kv_heads, parts, -1, WIDTH), stats_BKq2R)
    return out.reshape(batch, kv_heads, -1, head_dim), lse_BKR8[..., 0]


def _wide(a, dim: int, shape):
    return lax.broadcast_in_dim(a, shape, [dim])
