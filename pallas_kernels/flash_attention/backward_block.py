"""A block of the backward pass: `Plan` has its sizes and shared memory, `Load` and `Compute` are the programs of its
warpgroups.

gmem: refs of arrays in global memory. smem: refs in shared memory, including barriers. An iteration is one tile of
queries of one head of the group, counted over all tiles of keys; a slot holds the indices of a tile of keys
(schedule.py).
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.schedule import FIRST, HEAD, LAST, NUMBER, SEQUENCE, ZERO, Schedule
from pallas_kernels.flash_attention.tiles import Heads, Tiles, capped, seen
from pallas_kernels.registers import load_as
from pallas_kernels.shared_memory import swizzled

# Inputs (lse: log2(e) times the log-sum-exp); d_q, to which the kernel adds; d_k and d_v, which it writes.
Global = collections.namedtuple("Global", "q k v d_out lse delta bounds ranges d_q d_k d_v")
# Shared memory and barriers of a block: types in `Plan.shared_memory`, refs in the kernel.
Shared = collections.namedtuple(
    "Shared",
    "tile q d_out k v d_s results lse delta bounds "
    "kv_ready q_ready d_out_ready kv_free q_free d_out_free both_ready my_turn",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of the kernel."""

    schedule: Schedule
    tiles: Tiles
    heads: Heads
    head_dim: int
    q_tiles: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    ordered: bool

    @property
    def group(self) -> int:
        return self.heads.group

    @property
    def block_q(self) -> int:
        return self.tiles.backward_queries

    @property
    def block_k(self) -> int:
        return self.tiles.backward_keys

    @property
    def same_keys(self) -> bool:
        """Whether both warpgroups have the same keys, and half of the columns of d_k and d_v each."""
        return self.block_k == 64

    @property
    def half(self) -> int:
        """Columns of d_q that a warpgroup computes, in tiles of 16: of 80 columns the first or the last 48."""
        return -(-self.head_dim // 32) * 16

    @property
    def overlap(self) -> int:
        """Columns of d_q that both compute."""
        return 2 * self.half - self.head_dim

    @property
    def width(self) -> int:
        """Columns of a warpgroup's d_k and d_v."""
        return self.half if self.same_keys else self.head_dim

    @property
    def piece(self) -> int:
        """Columns of d_q that a warpgroup adds at once."""
        return min(self.half, 64)

    def shared_memory(self) -> Shared:
        stages = self.tiles.stages
        d_out_stages = self.tiles.d_out_stages
        dtype = self.dtype
        d_q = swizzled((2, self.block_q, self.piece), jnp.float32)
        d_kv = swizzled((2, 64, self.width), dtype)
        return Shared(
            tile=self.schedule.scratch,
            q=swizzled((stages, self.block_q, self.head_dim), dtype, self.half),
            d_out=swizzled((d_out_stages, self.block_q, self.head_dim), dtype),
            k=swizzled((self.block_k, self.head_dim), dtype, self.half),
            v=swizzled((self.block_k, self.head_dim), dtype),
            # two, as one warpgroup may be a step ahead; tiles like those of k, by which it is multiplied
            d_s=swizzled((2, self.block_k, self.block_q), dtype, self.half),
            # A warpgroup stores d_k and d_v where its piece of d_q was, once that has been copied out. If they were of
            # another size, they would reach into the piece of the other warpgroup.
            results=plgpu.RefUnion(d_q, d_kv) if num_bytes(d_q) == num_bytes(d_kv) else (d_q, d_kv),
            lse=plgpu.SMEM((stages, self.block_q), jnp.float32),
            delta=plgpu.SMEM((stages, self.block_q), jnp.float32),
            bounds=plgpu.SMEM((stages, 2, self.block_q), jnp.int32),
            kv_ready=plgpu.Barrier(num_arrivals=2),
            q_ready=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            d_out_ready=plgpu.Barrier(num_barriers=d_out_stages),
            kv_free=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            d_out_free=plgpu.Barrier(num_arrivals=2, num_barriers=d_out_stages),
            both_ready=plgpu.Barrier(num_arrivals=2),
            # the turn of the last iteration may come while two turns have not been taken yet
            my_turn=plgpu.Barrier(num_barriers=stages + 1),
        )


def run_block(plan: Plan, gmem: Global, smem: Shared):
    wg = lax.axis_index("wg")
    added = None
    if plan.ordered:
        shape = (plan.schedule.batch, plan.heads.queries, plan.q_tiles + 1)
        added = pl.get_global(plgpu.SemaphoreType.REGULAR(shape))

    @pl.when(wg == 2)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        Load(plan, gmem, smem, added).run()

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        Compute(plan, gmem, smem, added, wg).run()


@dataclasses.dataclass(frozen=True)
class Load:
    """The load warpgroup. added: if ordered, how many additions each tile of d_q has received."""

    plan: Plan
    gmem: Global
    smem: Shared
    added: Any

    def run(self):
        self.plan.schedule.load(self.smem.tile, self.ranges, self.tile_of_keys)

    def ranges(self, b, number):
        return [self.gmem.ranges[b, number, i] for i in range(4)]

    def tile_of_keys(self, slot, passed, now):
        """Loads keys and values, then queries."""
        gmem = self.gmem
        smem = self.smem
        tiles = self.plan.tiles
        heads = self.plan.heads
        group = heads.group
        block_q = self.plan.block_q
        block_k = self.plan.block_k
        stages = tiles.stages
        d_out_stages = tiles.d_out_stages
        b, kv_head, number, first, last = (now[i] for i in (SEQUENCE, HEAD, NUMBER, FIRST, LAST))
        keys = pl.ds(number * block_k, block_k)
        num_iterations = (last - first) * group
        passed = passed * group

        def head_and_step(iteration):
            return kv_head * group + lax.div(iteration, last - first), first + lax.rem(iteration, last - first)

        def copy(iteration, _):
            head, step = head_and_step(iteration)
            here = iteration
            iteration = passed + iteration
            stage = lax.rem(iteration, stages)
            d_out_stage = lax.rem(iteration, d_out_stages)
            rows = pl.ds(step * block_q, block_q)
            pl.when(iteration >= stages)(lambda: plgpu.barrier_wait(smem.q_free.at[stage]))
            ready = smem.q_ready.at[stage]
            plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, heads.q(head)], smem.q.at[stage], ready)
            plgpu.copy_gmem_to_smem(gmem.lse.at[b, head, rows], smem.lse.at[stage], ready)
            plgpu.copy_gmem_to_smem(gmem.delta.at[b, head, rows], smem.delta.at[stage], ready)
            plgpu.copy_gmem_to_smem(gmem.bounds.at[b, :, rows], smem.bounds.at[stage], ready)
            pl.when(iteration >= d_out_stages)(lambda: plgpu.barrier_wait(smem.d_out_free.at[d_out_stage]))
            ready = smem.d_out_ready.at[d_out_stage]
            plgpu.copy_gmem_to_smem(gmem.d_out.at[b, rows, head], smem.d_out.at[d_out_stage], ready)
            if self.plan.ordered:
                pl.when(here > 0)(lambda: wait_for_others(here - 1))

        def wait_for_others(iteration):
            head, step = head_and_step(iteration)
            before = (gmem.bounds[b, 1, step * block_q + block_q - 1] - 1) // block_k - number  # tiles of keys
            plgpu.semaphore_wait(self.added.at[b, head, step], 2 * before, decrement=False, memory_scope="gpu")
            plgpu.barrier_arrive(smem.my_turn.at[lax.rem(passed + iteration, stages + 1)])

        early = jnp.minimum(min(stages, d_out_stages), num_iterations)  # further copies may depend on what follows
        lax.fori_loop(0, early, copy, None)
        plgpu.barrier_wait(smem.kv_free)
        plgpu.copy_gmem_to_smem(gmem.k.at[b, keys, heads.k(kv_head)], smem.k, smem.kv_ready)
        plgpu.copy_gmem_to_smem(gmem.v.at[b, keys, heads.v(kv_head)], smem.v, smem.kv_ready)
        lax.fori_loop(early, num_iterations, copy, None)
        if self.plan.ordered:
            pl.when(num_iterations > 0)(lambda: wait_for_others(num_iterations - 1))


class Compute:
    """Compute warpgroup number wg. Keys are the rows and queries the columns of every tile, so that p and d_s are left
    operands."""

    def __init__(self, plan: Plan, gmem: Global, smem: Shared, added: Any, wg: jax.Array):
        self.plan = plan
        self.gmem = gmem
        self.smem = smem
        self.added = added
        self.wg = wg
        self.tile, _, _, self.tile_free = smem.tile
        self.d_q_smem, self.d_kv_smem = smem.results
        self.first_row = 0 if plan.same_keys else wg * 64
        self.own_rows = pl.ds(self.first_row, 64)
        self.columns = pl.ds(wg * plan.half if plan.same_keys else 0, plan.width)

    def run(self):
        plgpu.barrier_arrive(self.smem.kv_free)
        self.plan.schedule.compute(self.smem.tile, self.tile_of_keys, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def tile_of_keys(self, slot, iteration):
        """iteration: the first one of this tile -> the first one of the next tile."""
        plan = self.plan
        smem = self.smem
        tile = self.tile
        plgpu.barrier_wait(smem.kv_ready)

        def one_head(in_group, carry):
            for part, masked in enumerate((True, False, True)):
                step = functools.partial(self.tile_of_queries, slot=slot, in_group=in_group, masked=masked)
                carry = lax.fori_loop(tile[slot, part], tile[slot, part + 1], step, carry)
            return carry

        zeros = plgpu.layout_cast(jnp.zeros((64, plan.width), jnp.float32), plgpu.Layout.WGMMA)
        num_iterations = (tile[slot, LAST] - tile[slot, FIRST]) * plan.group
        end = iteration + num_iterations

        def first_products(s_ref):
            pl.when(iteration < end)(lambda: plgpu.barrier_wait(smem.q_ready.at[lax.rem(iteration, plan.tiles.stages)]))
            self.products(s_ref, iteration)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(first_products, accumulator(plan.block_q))
        iteration, _, d_k, d_v, _ = lax.fori_loop(0, plan.group, one_head, (iteration, end, zeros, zeros, s))
        plgpu.barrier_arrive(smem.kv_free)
        if plan.ordered:
            self.stored(slot, num_iterations)
        b = tile[slot, SEQUENCE]
        kv_head = tile[slot, HEAD]
        keys = pl.ds(tile[slot, NUMBER] * plan.block_k + self.first_row, 64)
        plgpu.barrier_arrive(self.tile_free.at[slot])
        for ref, head, result in (
            (self.gmem.d_k, plan.heads.k(kv_head), d_k * plan.scale),
            (self.gmem.d_v, plan.heads.v(kv_head), d_v),
        ):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.d_kv_smem[self.wg] = result.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.d_kv_smem.at[self.wg], ref.at[b, keys, head, self.columns])
        return iteration

    def tile_of_queries(self, step, carry, *, slot, in_group, masked):
        """Overlaps the end of this tile with the products of the next queries and the keys."""
        iteration, end, d_k, d_v, s = carry
        plan = self.plan
        smem = self.smem
        stages = plan.tiles.stages
        block_q = plan.block_q
        stage = lax.rem(iteration, stages)
        d_out_stage = lax.rem(iteration, plan.tiles.d_out_stages)
        side = self.wg if plan.same_keys else lax.rem(iteration, 2)
        rows = pl.ds(step * block_q, block_q)

        def gradients(d_p_ref):
            plgpu.barrier_wait(smem.d_out_ready.at[d_out_stage])
            plgpu.wgmma(d_p_ref, smem.v.at[self.my_rows()], smem.d_out.at[d_out_stage].transpose((1, 0)))
            p, slope = self.probabilities(s, stage, slot, masked)

            def beside_d_v(d_v_ref):
                d_v_ref[...] = d_v
                plgpu.wgmma(d_v_ref, p.astype(plan.dtype), smem.d_out.at[d_out_stage, :, self.columns])
                delta = of_queries(smem.delta.at[stage])
                d_s = p * (plgpu.wgmma_accumulator_load(d_p_ref, wait_n=1) - self.wide(delta))
                d_s = (d_s if slope is None else d_s * slope).astype(plan.dtype)
                smem.d_s[side, self.own_rows] = d_s
                plgpu.commit_smem()
                if not plan.same_keys:
                    plgpu.barrier_arrive(smem.both_ready)

                def the_others(d_k_ref, d_q_ref):
                    d_k_ref[...] = d_k
                    plgpu.wgmma(d_k_ref, d_s, smem.q.at[stage, :, self.columns])
                    if not plan.same_keys:
                        plgpu.barrier_wait(smem.both_ready)
                    self.part_of_d_q(d_q_ref, side, 0)
                    new_d_v = plgpu.wgmma_accumulator_load(d_v_ref, wait_n=2)
                    plgpu.barrier_arrive(smem.d_out_free.at[d_out_stage])
                    new_d_k = plgpu.wgmma_accumulator_load(d_k_ref, wait_n=1)
                    plgpu.barrier_arrive(smem.q_free.at[stage])
                    next_ready = smem.q_ready.at[lax.rem(iteration + 1, stages)]
                    pl.when(iteration + 1 < end)(lambda: plgpu.barrier_wait(next_ready))
                    return new_d_k, new_d_v, plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)

                return pl.run_scoped(the_others, accumulator(plan.width), accumulator(plan.piece))

            return pl.run_scoped(beside_d_v, accumulator(plan.width))

        d_k, d_v, d_q = pl.run_scoped(gradients, accumulator(block_q))

        def next_products(s_ref):
            self.products(s_ref, iteration + 1)  # after the last iteration: of stale contents, unused
            length = self.tile[slot, LAST] - self.tile[slot, FIRST]
            self.stored(slot, iteration - end + length * plan.group)
            self.d_q_smem[self.wg] = self.counted_once(d_q)
            if plan.ordered:
                plgpu.barrier_wait(smem.my_turn.at[lax.rem(iteration, stages + 1)])
            self.add(slot, in_group, rows, 0)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(next_products, accumulator(block_q))
        for number in range(1, plan.half // plan.piece):

            def another(d_q_ref, number=number):
                self.part_of_d_q(d_q_ref, side, number)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.d_q_smem[self.wg] = plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)

            pl.run_scoped(another, accumulator(plan.piece))
            self.add(slot, in_group, rows, number)
        return iteration + 1, end, d_k, d_v, s

    def products(self, s_ref, iteration):
        k = self.smem.k.at[self.my_rows()]
        q = self.smem.q.at[lax.rem(iteration, self.plan.tiles.stages)]
        plgpu.wgmma(s_ref, k, q.transpose((1, 0)))

    def probabilities(self, s, stage, slot, masked):
        """-> (p, derivative of the cap or None)."""
        plan = self.plan
        smem = self.smem
        lse = of_queries(smem.lse.at[stage])
        capped_s, factor, slope = capped(s, plan.scale, plan.soft_cap)
        p = jnp.exp2(capped_s * factor - self.wide(lse))
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, (64, plan.block_q), 0, layout=plgpu.Layout.WGMMA)
            key += self.tile[slot, NUMBER] * plan.block_k + self.first_row
            lower, upper = (of_queries(smem.bounds.at[stage, i]) for i in range(2))
            p = jnp.where(seen(key, lower, upper, self.wide), p, 0.0)
        return p, slope

    def part_of_d_q(self, d_q_ref, side, number):
        plan = self.plan
        smem = self.smem
        columns = pl.ds((self.wg + self.zero()) * (plan.half - plan.overlap) + number * plan.piece, plan.piece)
        plgpu.wgmma(d_q_ref, smem.d_s.at[side].transpose((1, 0)), smem.k.at[:, columns])

    def counted_once(self, d_q):
        """Zeros in the columns that the first warpgroup adds."""
        plan = self.plan
        if not plan.overlap:
            return d_q
        column = plgpu.broadcasted_iota(jnp.int32, (plan.block_q, plan.piece), 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(column >= self.wg * plan.overlap, d_q, 0.0)

    def add(self, slot, in_group, rows, number):
        """Adds d_q_smem to part `number` of the warpgroup's columns of d_q."""
        plan = self.plan
        tile = self.tile
        plgpu.commit_smem()
        b = tile[slot, SEQUENCE]
        head = tile[slot, HEAD] * plan.group + in_group
        columns = pl.ds(self.wg * (plan.half - plan.overlap) + number * plan.piece, plan.piece)
        part = self.gmem.d_q.at[b, rows, head, columns]
        plgpu.copy_smem_to_gmem(self.d_q_smem.at[self.wg], part, reduction_op="add")

    def stored(self, slot, here):
        """Waits until the d_q of the previous iteration has been copied out of shared memory; if ordered, until it has
        been added, and signals the next block. here: the iteration within this tile of keys."""
        plan = self.plan
        tile = self.tile
        plgpu.wait_smem_to_gmem(0, wait_read_only=not plan.ordered)
        if plan.ordered:
            # Before the first iteration an unused semaphore is signalled; a branch would make ptxas serialize products.
            first, last, b, kv_head = (tile[slot, i] for i in (FIRST, LAST, SEQUENCE, HEAD))
            before = jnp.maximum(here - 1, 0)
            length = jnp.maximum(last - first, 1)
            head = kv_head * plan.group + lax.div(before, length)
            step = jnp.where(here > 0, first + lax.rem(before, length), plan.q_tiles)
            plgpu.semaphore_signal(self.added.at[b, head, step], memory_scope="gpu")

    def zero(self):
        """Read again for each tile: otherwise ptxas keeps all operand addresses in registers, and spills them."""
        return self.tile[0, ZERO]

    def my_rows(self):
        return pl.ds((self.zero() if self.plan.same_keys else self.wg + self.zero()) * 64, 64)

    def wide(self, a):
        return lax.broadcast_in_dim(a, (64, self.plan.block_q), [1])


def of_queries(ref):
    """Loads one number per query, as the columns of a tile."""
    return load_as(ref, plgpu.Layout.WGMMA.reduce(0))


def num_bytes(memory):
    return math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize


def accumulator(columns):
    return plgpu.ACC((64, columns), jnp.float32)
