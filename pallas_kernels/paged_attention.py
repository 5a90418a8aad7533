"""Attention of one new token per sequence to keys and values in pages, for Hopper (Pallas, Mosaic GPU).

For the query q of a head: s_j = scale * q k_j (soft_cap * tanh(s_j / soft_cap) with a soft cap), j over the last
`window` of the sequence's `length` tokens; out = sum_j exp(s_j) v_j / sum_j exp(s_j). The sequence is split as in
Flash-Decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): a block of 128 threads processes one part of
one sequence for one kv head, with a running maximum (Dao et al. 2022, https://arxiv.org/abs/2205.14135), and writes an
unnormalised sum, which parts.py combines, or the result if there is one part. Pages as in Kwon et al. 2023
(https://arxiv.org/abs/2309.06180).

Dimensions: B sequences, N heads, K kv heads, G = N / K, H head dim, Z pages, S slots in a page, P pages per sequence;
C is 2, keys and values, or 1 if the keys are the values too; `block` tokens per step; R rows, G rounded up to 8.
q bfloat16; pages [Z, C, K, S, H], so that a page of a kv head is contiguous: bfloat16, or int8 with a float32 scale per
token and kv head. Scores, sums and partial results are float32; probabilities are multiplied in bfloat16.

The limit is memory bandwidth: keys and values are read once for all G heads, 4 H bytes per token and kv head (int8: 2 H
+ 8). A ring buffer of `stages` steps is in flight, copied page by page (TMA): about 68 KB per block (bfloat16, H 128),
so that at least two blocks run on a multiprocessor (int8: about 55 KB, four). The tokens of a step are the rows of
the tensor-core products (keys times queries, transposed values times probabilities) and the R heads the columns, so
nothing is computed for heads that do not exist. int8 is converted in registers: keys are multiplied from there, values
go through shared memory, from which a product reads them transposed.
Pages without any of the last `window` tokens are not read, and other contents of a page, including NaN, have no effect.
Refused: see `problem`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers
from pallas_kernels.parts import LOG2E, MASKED_SCORE, dtype_of_sums, joined, num_parts, room_of
from pallas_kernels.shared_memory import swizzled

MAX_HEADS = 64  # per kv head
SLOTS = 132 * 2  # target number of concurrent blocks on an H100: two per multiprocessor saturate its memory
INT8_SLOTS = 132 * 4  # the same for int8, which also has to be converted


def problem(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> str:
    """Why this kernel cannot be used, or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if cache_dtype not in (jnp.bfloat16, jnp.int8):
        return f"cache of {cache_dtype}"
    if head_dim not in (64, 128):
        return f"head dim {head_dim}"
    if num_heads // num_kv_heads > MAX_HEADS:
        return f"{num_heads // num_kv_heads} heads per kv head"
    smallest = 32 if cache_dtype == jnp.int8 else 8  # a copy of 32 scales has the 128 bytes that TMA aligns to
    if page_size % smallest or 64 % page_size:
        return f"{cache_dtype} pages of {page_size} tokens"
    return ""


def decode(
    q_BNH: jax.Array, pages_ZCKSH: jax.Array, table_BP: jax.Array, lengths_B: jax.Array,
    scales_ZCKS: jax.Array | None = None, *, scale: float, window: int | None = None, soft_cap: float | None = None,
    parts: int | None = None, block: int = 64, stages: int = 2, **options
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-> (out [B, N, H] in q's dtype, natural log-sum-exp of the scores [B, N] float32; 0 and -inf for length 0).

    table: int32, page of tokens 0..S-1, S..2S-1, ...; any value for pages that are not read. lengths: int32, up to P S.
    scales: of int8 pages, float32. parts: None: from `num_parts`. block: tokens of a step. stages: steps in flight.
    options: of plgpu.kernel.
    """
    batch, num_heads, head_dim = q_BNH.shape
    num_pages, _, kv_heads, page_size = pages_ZCKSH.shape[:4]
    group = num_heads // kv_heads
    is_int8 = scales_ZCKS is not None
    rows = -(-group // 8) * 8
    most_tokens = table_BP.shape[1] * page_size
    slots = INT8_SLOTS if is_int8 else SLOTS
    parts = parts or num_parts(batch * kv_heads, min(most_tokens, window or most_tokens), slots, block)
    result_dtype = dtype_of_sums(parts, q_BNH.dtype)
    ring = swizzled((stages, block, head_dim), pages_ZCKSH.dtype)
    # The sums reuse the memory of the keys.
    memory = [plgpu.RefUnion(ring, plgpu.SMEM((rows, head_dim), result_dtype)), ring]
    if is_int8:
        memory += [plgpu.SMEM((stages, 2, block), jnp.float32), swizzled((block, head_dim), q_BNH.dtype)]
    own = [swizzled((rows, head_dim), q_BNH.dtype), swizzled((rows, block), q_BNH.dtype)]
    # Where blocks wait for others to end, the longest sequences come first, so that none of them ends alone.
    is_ordered = batch * kv_heads * parts > slots
    order = (_longest_first(lengths_B),) if is_ordered else ()
    q_BKRH = jnp.pad(q_BNH.reshape(batch, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    plan = _Plan(page_size, scale, window, soft_cap, parts, block, stages, is_int8, is_ordered)
    copies = (4 if is_int8 else 2) * (block // page_size)
    scales = (scales_ZCKS.reshape(num_pages, -1, page_size),) if is_int8 else ()
    sums, stats = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=[
            jax.ShapeDtypeStruct((batch, kv_heads, parts, group, head_dim), result_dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, room_of(parts), 2, rows), jnp.float32),
        ],
        scratch_types=[plgpu.Barrier(), plgpu.Barrier(num_arrivals=copies, num_barriers=stages), *own, *memory],
        grid=(batch, parts, kv_heads),
        grid_names=("place", "part", "head"),
        # tanh.approx has an error of 2^-11. Barriers: commit_smem follows each write to shared memory that other
        # threads read.
        compiler_params=plgpu.CompilerParams(approx_math=soft_cap is None, unsafe_no_auto_barriers=True),
        **options,
    )(q_BKRH, pages_ZCKSH.reshape(num_pages, -1, page_size, head_dim), table_BP, lengths_B, *order, *scales)
    return joined(sums, stats, group, q_BNH.dtype, **options)


def _longest_first(lengths_B: jax.Array) -> jax.Array:
    """Indices of the sequences, int32, from comparisons: a CUDA graph cannot hold every sort of XLA."""
    number_B = jnp.arange(len(lengths_B), dtype=jnp.int32)
    is_longer_BB = lengths_B > lengths_B[:, None]
    is_as_long_BB = lengths_B == lengths_B[:, None]
    rank_B = jnp.sum(is_longer_BB | (is_as_long_BB & (number_B < number_B[:, None])), 1)
    return jnp.sum(jnp.where(rank_B == number_B[:, None], number_B, 0), 1)


@dataclasses.dataclass(frozen=True)
class _Plan:
    page_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    parts: int
    block: int
    stages: int
    is_int8: bool
    is_ordered: bool


class _Part:
    """What a block computes: a part of a sequence, for one kv head."""

    def __init__(self, plan: _Plan, q_ref, pages_ref, table_ref, lengths_ref, *refs):
        self.plan = plan
        order_ref, *refs = refs if plan.is_ordered else (None, *refs)
        self.scales_ref, *refs = refs if plan.is_int8 else (None, *refs)
        self.sums_ref, self.stats_ref, self.q_ready, self.full, self.q, self.probs, shared, self.values, *more = refs
        self.keys, self.sums = shared
        self.scales, self.converted = more if plan.is_int8 else (None, None)
        self.q_ref = q_ref
        self.pages_ref = pages_ref
        self.table_ref = table_ref
        kv_heads, self.rows, self.head_dim = q_ref.shape[1:]
        place, self.head, self.part = (lax.axis_index(name) for name in ("place", "head", "part"))
        self.sequence = place if order_ref is None else order_ref[place]
        # Of its keys, and of its values, among those of a page.
        self.heads = self.head, pages_ref.shape[1] - kv_heads + self.head
        self.length = lengths_ref[self.sequence]
        self.start = jnp.maximum(self.length - plan.window, 0) if plan.window else 0
        begin = lax.div(self.start, plan.block)
        end = lax.div(self.length + plan.block - 1, plan.block)
        self.first, self.last = (begin + lax.div((self.part + i) * (end - begin), plan.parts) for i in range(2))
        self.pages = range(plan.block // plan.page_size)

    def run(self) -> None:
        stages = self.plan.stages
        numbers = [self.pages_of(self.first + i) for i in range(stages + 1)]
        plgpu.copy_gmem_to_smem(self.q_ref.at[self.sequence, self.head], self.q, self.q_ready)
        for i in range(stages):
            pl.when(self.first + i < self.last)(lambda i=i: self.copy(self.first + i, numbers[i]))
        plgpu.barrier_wait(self.q_ready)

        def zeros(height):
            return plgpu.layout_cast(jnp.zeros((height, self.rows), jnp.float32), plgpu.Layout.WGMMA)

        by_query = plgpu.Layout.WGMMA.reduce(0)
        most = plgpu.layout_cast(jnp.full((self.rows,), MASKED_SCORE, jnp.float32), by_query)
        carry = zeros(self.head_dim), most, zeros(self.plan.block), numbers[stages]
        sums, most, total, _ = lax.fori_loop(self.first, self.last, self.one_step, carry)
        total = jnp.sum(total, 0)
        if self.plan.parts == 1:
            sums *= _wide(jnp.where(total > 0, 1 / total, 0.0), 1, sums.shape)
        registers.store_transposed(self.sums, sums.astype(self.sums.dtype))
        plgpu.commit_smem()
        target = self.sums_ref.at[self.sequence, self.head, self.part]
        plgpu.copy_smem_to_gmem(self.sums.at[pl.ds(0, target.shape[0])], target)
        for i, stat in enumerate((most, total)):
            registers.store_narrow(self.stats_ref.at[self.sequence, self.head, self.part, i], stat)
        plgpu.wait_smem_to_gmem(0)

    def one_step(self, step, carry):
        sums, most, total, next_numbers = carry
        slot = lax.rem(step - self.first, self.plan.stages)
        plgpu.barrier_wait(self.full.at[slot])
        keys, values, key_scales, value_scales = self.loaded(step, slot)
        scores, seen = self.masked_scores(step, keys, key_scales)
        new_most = jnp.maximum(most, jnp.max(scores, 0))
        probs = jnp.exp2(scores - _wide(new_most, 1, scores.shape))
        alpha = jnp.exp2(most - new_most)
        total = total * _wide(alpha, 1, scores.shape) + probs
        if value_scales is not None:
            probs = jnp.where(seen, probs * _wide(value_scales, 0, scores.shape), 0.0)
        _store_transposed(self.probs, probs.astype(self.q_ref.dtype))
        plgpu.commit_smem()
        before = sums * _wide(alpha, 1, sums.shape)
        sums = _product(values, self.probs, before, transposed=True)
        plgpu.commit_smem()  # all threads have read this slot
        stages = self.plan.stages
        pl.when(step + stages < self.last)(lambda: self.copy(step + stages, next_numbers))
        return sums, new_most, total, self.pages_of(step + 1 + stages)

    def pages_of(self, step):
        """Pages without visible tokens are not read: a visible page is used in their place."""
        size = self.plan.page_size

        def number(page):
            place = step * len(self.pages) + page
            return jnp.clip(place, lax.div(self.start, size), lax.div(self.length - 1, size))

        return tuple(self.table_ref[self.sequence, number(page)] for page in self.pages)

    def copy(self, step, numbers):
        """Starts the copies of a step to its slot."""
        slot = lax.rem(step - self.first, self.plan.stages)
        for page, number in zip(self.pages, numbers, strict=True):
            tokens = pl.ds(page * self.plan.page_size, self.plan.page_size)
            for i, target in enumerate((self.keys, self.values)):
                source = self.pages_ref.at[number, self.heads[i]]
                plgpu.copy_gmem_to_smem(source, target.at[slot, tokens], self.full.at[slot])
                if self.scales_ref is not None and self.scales is not None:
                    scales = self.scales.at[slot, i, tokens]
                    plgpu.copy_gmem_to_smem(self.scales_ref.at[number, self.heads[i]], scales, self.full.at[slot])

    def loaded(self, step, slot):
        """-> (keys, values in shared memory, scales of both, or None)."""
        keys = self.keys.at[slot]
        values = self.values.at[slot]
        if self.scales is None or self.converted is None:
            block = self.plan.block

            # 0 * NaN is NaN, so masked values must be zeroed.
            @pl.when((step * block < self.start) | ((step + 1) * block > self.length))
            def _clear():
                loaded = registers.load_as(values, plgpu.Layout.WGMMA)
                values[...] = jnp.where(self.is_seen(step, (block, self.head_dim)), loaded, jnp.zeros_like(loaded))

            return keys, values, None, None

        def convert(ref):
            return registers.load_as(ref, plgpu.Layout.WGMMA_UPCAST_2X).astype(self.q_ref.dtype)

        by_token = plgpu.Layout.WGMMA.reduce(1)
        scales = [registers.load_as(self.scales.at[slot, i], by_token) for i in range(2)]
        self.converted[...] = convert(values)
        return plgpu.layout_cast(convert(keys), plgpu.Layout.WGMMA), self.converted, *scales

    def masked_scores(self, step, keys, key_scales):
        """-> (scores times log2 e, minus infinity for tokens that are not seen; whether these are seen)."""
        scale, soft_cap = self.plan.scale, self.plan.soft_cap
        scores = _product(keys, self.q)
        if key_scales is not None:
            scores *= _wide(key_scales, 0, scores.shape)
        factor = LOG2E if soft_cap else scale * LOG2E
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores * (scale / soft_cap))
        seen = self.is_seen(step, scores.shape)
        return jnp.where(seen, scores * factor, -jnp.inf), seen

    def is_seen(self, step, shape):
        index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)
        position = index + step * self.plan.block
        return (position >= self.start) & (position < self.length)


def _body(plan: _Plan, *refs):
    _Part(plan, *refs).run()


def _wide(a, dim: int, shape):
    return lax.broadcast_in_dim(a, shape, [dim])


def _product(a, b_ref, before=None, transposed=False):
    """before + a b^T -> float32 [m, rows]. a: [m, n] in registers or shared memory, or a reference [n, m] if
    transposed. b: [rows, n] in shared memory."""
    a = a.transpose((1, 0)) if transposed else a
    b_ref = b_ref.transpose((1, 0))

    def run(sum_ref):
        if before is not None:
            sum_ref[...] = before
        plgpu.wgmma(sum_ref, a, b_ref)
        return sum_ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b_ref.shape[1]), jnp.float32))


def _store_transposed(ref, value):
    ref.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
