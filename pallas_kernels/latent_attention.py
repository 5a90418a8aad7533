"""Attention of new tokens to latents in pages, for Hopper (Pallas, Mosaic GPU): what an engine computes for multi-head
latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), where all heads share one key, of which the first part
is the value too.

For the query q of a head of a token: s_j = scale * q c_j, j over the slots lower <= j < upper of the token;
out = sum_j exp(s_j) (c_j)_V / sum_j exp(s_j), where ( )_V are the first V entries. Slots are split into parts, see
parts.py.

Dimensions: B rows, T new tokens, N heads, C width of a key (576: a latent of 512 and a rotary key of 64), V width of a
value (512), Z pages, S slots in a page, P pages of a row, p parts; R queries of a row, T times N rounded up
(`fitting`); `BLOCK` queries per block, and slots per step.
q and pages [Z, 1, 1, S, C] bfloat16. Scores, sums and partial results are float32; probabilities are multiplied in
bfloat16.

A block of two warpgroups computes one part for 64 queries, whose sums fill half of the registers of a multiprocessor:
each warpgroup has half of the columns. The first one multiplies queries and keys, and gives the probabilities to the
second one through shared memory; so while it multiplies the next keys, the second one multiplies values, and loads.
Fewer queries cost as much as 64. Decoding with up to 64 heads is limited by memory bandwidth; with 128 the second block
finds the keys in the L2 cache, and tensor cores and memory take about as long.
Contents of slots that no query of a block may see have no effect, including NaN, if they are before the first or behind
the last one that it sees. Refused: see `problem`.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.parts import LOG2E, MASKED_SCORE, MOST_PARTS, dtype_of_sums, joined, num_parts, room_of
from pallas_kernels.registers import load_as
from pallas_kernels.shared_memory import swizzled

BLOCK = 64
STAGES = 2  # steps in flight: all that fit into shared memory
DIMS = 576, 512  # of keys and values, of all models with latent attention so far but small ones
SLOTS = 132  # concurrent blocks: one per multiprocessor
BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def problem(key_dim: int, value_dim: int, page_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used, or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if cache_dtype != jnp.bfloat16:
        return f"cache of {cache_dtype}"
    if (key_dim, value_dim) != DIMS:
        return f"latents of {value_dim} and rotary keys of {key_dim - value_dim}"
    if page_size % 8 or BLOCK % page_size:
        return f"pages of {page_size} tokens"
    return ""


def fitting(num_heads: int) -> int:
    """Heads of which whole tokens fill a block, or whole blocks a token."""
    if num_heads > BLOCK:
        return -(-num_heads // BLOCK) * BLOCK
    return max(8, 1 << (num_heads - 1).bit_length())


def _per_query(bounds_BT: jax.Array, heads: int, blocks: int) -> jax.Array:
    """[B, T] -> [B, blocks * BLOCK]."""
    bounds_BR = jnp.repeat(bounds_BT, heads, 1)
    return jnp.pad(bounds_BR, ((0, 0), (0, blocks * BLOCK - bounds_BR.shape[1])), mode="edge")


@functools.partial(jax.jit, static_argnames=("value_dim", "scale", "parts", "interpret"))  # traced once for all layers
def attend(
    q_BTNC: jax.Array, pages_ZCKSH: jax.Array, table_BP: jax.Array, lower_BT: jax.Array, upper_BT: jax.Array, *,
    value_dim: int, scale: float, parts: int | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-> (out [B, T, N, V] in q's dtype, natural log-sum-exp of the scores [B, N, T] float32; 0 and -inf of no slots).

    table: int32, page of the slots 0..S-1, S..2S-1, ... of a row; any value for pages that are not read. lower, upper:
    int32, 0 <= lower, upper <= P S; neither decreases along T. parts: None: as many as fill the GPU. interpret:
    plgpu.InterpretGPUParams, to run on CPU.
    """
    batch, length, num_heads, key_dim = q_BTNC.shape
    num_pages, _, _, page_size, _ = pages_ZCKSH.shape
    heads = fitting(num_heads)
    num_queries = length * heads
    blocks = -(-num_queries // BLOCK)
    if parts is None:
        parts = min(max(SLOTS // (batch * blocks), 1), MOST_PARTS)  # it is not known how many slots tokens see
        if length == 1:
            parts = num_parts(batch * blocks, table_BP.shape[1] * page_size, SLOTS)
    per_bound = 1 if length > 1 and heads < BLOCK else heads
    if per_bound == 1:
        lower_BT, upper_BT = (_per_query(bounds_BT, heads, blocks) for bounds_BT in (lower_BT, upper_BT))
    plan = _Plan(page_size, key_dim, value_dim, scale, parts, per_bound)
    dtype = q_BTNC.dtype
    result_dtype = dtype_of_sums(parts, dtype)
    shared = _Shared(
        queries=swizzled((BLOCK, key_dim), dtype),
        memory=plgpu.RefUnion(
            tuple(swizzled((STAGES, BLOCK, width), dtype) for width in plan.widths),
            swizzled((2, BLOCK, plan.half), result_dtype),
        ),
        probs=swizzled((BLOCK, BLOCK), dtype),
        factor=plgpu.SMEM((BLOCK,), jnp.float32),
        queries_ready=plgpu.Barrier(),
        keys_ready=plgpu.Barrier(num_arrivals=BLOCK // page_size, num_barriers=2 * STAGES),
        first_done=plgpu.Barrier(),
        probs_ready=plgpu.Barrier(),
        probs_free=plgpu.Barrier(),
    )

    q_BTMC = jnp.pad(q_BTNC, ((0, 0), (0, 0), (0, heads - num_heads), (0, 0)))
    results, stats = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=[
            jax.ShapeDtypeStruct((batch, parts, num_queries, value_dim), result_dtype),
            jax.ShapeDtypeStruct((batch, room_of(parts), 2, blocks * BLOCK), jnp.float32),
        ],
        scratch_types=[*shared],
        grid=(batch, parts, blocks),  # blocks that read the same keys run at the same time
        grid_names=("row", "part", "block"),
        num_threads=2,
        thread_name="wg",
        # Where one thread reads what another one wrote there is a commit_smem or a barrier between them. Sums over
        # slots stay in a warp, and need no shared memory.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(
        q_BTMC.reshape(batch, num_queries, key_dim), pages_ZCKSH.reshape(num_pages, page_size, key_dim), table_BP,
        lower_BT, upper_BT,
    )  # fmt: skip
    out_BRV, lse_BR = joined(results[:, None], stats[:, None], num_queries, dtype, interpret=interpret)
    out_BTMV = out_BRV.reshape(batch, length, heads, value_dim)
    lse_BTM = lse_BR.reshape(batch, length, heads)
    return out_BTMV[:, :, :num_heads], lse_BTM[:, :, :num_heads].swapaxes(1, 2)


# Arrays that the kernel reads, and results and statistics, which it writes.
_Global = collections.namedtuple("_Global", "q pages table lower upper results stats")
# Shared memory and barriers of a block: types in `attend`, refs in the kernel.
_Shared = collections.namedtuple(
    "_Shared", "queries memory probs factor queries_ready keys_ready first_done probs_ready probs_free"
)


@dataclasses.dataclass(frozen=True)
class _Plan:
    page_size: int
    key_dim: int
    value_dim: int
    scale: float
    parts: int
    per_bound: int
    """Queries that have the same bounds: those of a token, or 1 if a block has several tokens."""

    @property
    def half(self) -> int:
        """Columns of a warpgroup."""
        return self.value_dim // 2

    @property
    def widths(self) -> tuple[int, int]:
        """Of the parts of a key: the values of the first warpgroup, and the rest."""
        return self.half, self.key_dim - self.half


def _body(plan: _Plan, *refs):
    part = _Part(plan, _Global(*refs[: len(_Global._fields)]), _Shared(*refs[len(_Global._fields) :]))
    wg = lax.axis_index("wg")
    pl.when(wg == 0)(part.first_warpgroup)
    pl.when(wg == 1)(part.second_warpgroup)


class _Part:
    """What a block computes: a part of the slots of a row, for 64 queries."""

    def __init__(self, plan: _Plan, gmem: _Global, smem: _Shared):
        self.plan = plan
        self.smem = smem
        self.keys, self.results = smem.memory
        self.gmem = gmem
        self.row, self.part, block = (lax.axis_index(name) for name in ("row", "part", "block"))
        # With a causal mask the last blocks have the most work, so they come first.
        first_query = (lax.axis_size("block") - 1 - block) * BLOCK
        self.queries = pl.ds(first_query, BLOCK)
        last_bound = gmem.upper.shape[1] - 1
        self.start = gmem.lower[self.row, lax.div(first_query, plan.per_bound)]
        self.end = gmem.upper[self.row, jnp.minimum(lax.div(first_query + BLOCK - 1, plan.per_bound), last_bound)]
        begin = lax.div(self.start, BLOCK)
        steps = jnp.maximum(lax.div(self.end + BLOCK - 1, BLOCK) - begin, 0)
        self.first, self.last = (begin + lax.div((self.part + i) * steps, plan.parts) for i in range(2))
        self.pages = range(BLOCK // plan.page_size)
        self.columns = pl.ds(0, plan.widths[0]), pl.ds(*plan.widths)

    def first_warpgroup(self) -> None:
        """Scores and probabilities, and the first half of the columns."""
        smem = self.smem
        bounds = self.bounds()
        plgpu.barrier_wait(smem.queries_ready)
        most = plgpu.layout_cast(jnp.full((BLOCK,), MASKED_SCORE, jnp.float32), BY_ROW)
        total = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), BY_ROW)

        def step(number, carry):
            sums, most, total = carry
            slot = lax.rem(number - self.first, STAGES)
            scores = self.masked_scores(number, slot, bounds)
            new_most = jnp.maximum(most, jnp.max(scores, 1))
            probs = jnp.exp2(scores - _wide(new_most, scores.shape))
            shrink = jnp.exp2(most - new_most)
            total = total * shrink + jnp.sum(probs, 1)
            probs = probs.astype(self.gmem.q.dtype)
            plgpu.barrier_wait(smem.probs_free)
            smem.probs[...] = probs
            smem.factor[...] = shrink
            self.clear_unseen(number, slot, 0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.probs_ready)
            sums = self.added(sums, shrink, probs, slot, 0)
            plgpu.barrier_arrive(smem.first_done)
            return sums, new_most, total

        sums, most, total = lax.fori_loop(self.first, self.last, step, (self.no_sums(), most, total))
        plgpu.barrier_wait(smem.probs_free)  # and so the keys, whose memory results have
        if self.plan.parts == 1:
            factor = jnp.where(total > 0, 1 / total, 0.0)
            smem.factor[...] = factor
            sums *= _wide(factor, sums.shape)
        plgpu.barrier_arrive(smem.probs_ready)
        self.store(sums, 0)
        self.gmem.stats[self.row, self.part, 0, self.queries] = most
        self.gmem.stats[self.row, self.part, 1, self.queries] = total
        plgpu.wait_smem_to_gmem(0)

    def second_warpgroup(self) -> None:
        """Loading, and the second half of the columns."""
        smem = self.smem
        plgpu.copy_gmem_to_smem(self.gmem.q.at[self.row, self.queries], smem.queries, smem.queries_ready)
        for i in range(STAGES):
            self.copy(self.first + i, self.pages_of(self.first + i), (1, 0))
        plgpu.barrier_arrive(smem.probs_free)

        def step(number, sums):
            slot = lax.rem(number - self.first, STAGES)
            next_pages = self.pages_of(number + STAGES)
            plgpu.barrier_wait(self.ready(slot, 1))
            self.clear_unseen(number, slot, 1)
            plgpu.commit_smem()
            plgpu.barrier_wait(smem.probs_ready)
            shrink = load_as(smem.factor, BY_ROW)
            sums = self.added(sums, shrink, smem.probs, slot, 1)
            self.copy(number + STAGES, next_pages, (1,))
            plgpu.barrier_wait(smem.first_done)
            plgpu.barrier_arrive(smem.probs_free)  # not before: the first warpgroup could be done once more
            self.copy(number + STAGES, next_pages, (0,))
            return sums

        sums = lax.fori_loop(self.first, self.last, step, self.no_sums())
        plgpu.barrier_wait(smem.probs_ready)
        if self.plan.parts == 1:
            sums *= _wide(load_as(smem.factor, BY_ROW), sums.shape)
        self.store(sums, 1)
        plgpu.wait_smem_to_gmem(0)

    def pages_of(self, step):
        """Pages without visible tokens are not read: a visible page is used in their place."""
        size = self.plan.page_size

        def number(page):
            place = step * len(self.pages) + page
            return jnp.clip(place, lax.div(self.start, size), lax.div(self.end - 1, size))

        return tuple(self.gmem.table[self.row, number(page)] for page in self.pages)

    def copy(self, step, numbers, halves) -> None:
        """Starts the copies of these halves of the keys of a step, if it exists, to its slot."""
        slot = lax.rem(step - self.first, STAGES)

        @pl.when(step < self.last)
        def _copy():
            for half in halves:
                for page, number in zip(self.pages, numbers, strict=True):
                    tokens = pl.ds(page * self.plan.page_size, self.plan.page_size)
                    source = self.gmem.pages.at[number, :, self.columns[half]]
                    target = self.keys[half].at[slot, tokens]
                    plgpu.copy_gmem_to_smem(source, target, self.ready(slot, half))

    def ready(self, slot, half: int):
        return self.smem.keys_ready.at[2 * slot + half]

    def bounds(self):
        """Of the slots that each query sees."""
        if self.plan.per_bound > 1:
            return self.start, self.end

        def of_queries(ref):
            bounds = load_as(ref.at[self.row, self.queries], BY_ROW, optimized=False)
            return _wide(bounds, (BLOCK, BLOCK))

        return of_queries(self.gmem.lower), of_queries(self.gmem.upper)

    def masked_scores(self, step, slot, bounds):
        """Times log2 e [queries, slots]; minus infinity for slots that a query does not see."""

        def products(ref):
            for half in (1, 0):
                plgpu.barrier_wait(self.ready(slot, half))
                queries = self.smem.queries.at[:, self.columns[half]]
                plgpu.wgmma(ref, queries, self.keys[half].at[slot].transpose((1, 0)))
            return ref[...]

        scores = pl.run_scoped(products, plgpu.ACC((BLOCK, BLOCK), jnp.float32))
        place = self.places(step, scores.shape, 1)
        lower, upper = bounds
        is_seen = (place >= lower) & (place < upper)
        return jnp.where(is_seen, scores * (self.plan.scale * LOG2E), -jnp.inf)

    def places(self, step, shape, dim: int):
        """Of the slots of a step."""
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) + step * BLOCK

    def clear_unseen(self, step, slot, half: int) -> None:
        """Half of the values that no query sees: 0 * NaN is NaN."""
        values = self.values(slot, half)

        @pl.when((step * BLOCK < self.start) | ((step + 1) * BLOCK > self.end))
        def _clear():
            loaded = load_as(values, plgpu.Layout.WGMMA)
            place = self.places(step, (BLOCK, self.plan.half), 0)
            is_seen = (place >= self.start) & (place < self.end)
            values[...] = jnp.where(is_seen, loaded, jnp.zeros_like(loaded))

    def values(self, slot, half: int):
        return self.keys[half].at[slot, :, pl.ds(0, self.plan.half)]

    def added(self, sums, shrink, probs, slot, half: int):
        """shrink * sums + the product of probabilities and half of the values [queries, columns]."""

        def products(ref):
            ref[...] = sums * _wide(shrink, sums.shape)
            plgpu.wgmma(ref, probs, self.values(slot, half))
            return ref[...]

        return pl.run_scoped(products, plgpu.ACC((BLOCK, self.plan.half), jnp.float32))

    def no_sums(self):
        return plgpu.layout_cast(jnp.zeros((BLOCK, self.plan.half), jnp.float32), plgpu.Layout.WGMMA)

    def store(self, sums, half: int) -> None:
        own = self.results.at[half]
        own[...] = sums.astype(self.gmem.results.dtype)
        plgpu.commit_smem()
        columns = pl.ds(half * self.plan.half, self.plan.half)
        plgpu.copy_smem_to_gmem(own, self.gmem.results.at[self.row, self.part, self.queries, columns])


def _wide(a, shape):
    """One number per query, in all columns."""
    return lax.broadcast_in_dim(a, shape, [0])
