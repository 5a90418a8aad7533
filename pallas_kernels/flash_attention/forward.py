"""The forward pass: `forward` has the arrays, `Plan` the sizes and the shared memory of a block, `Load` and `Compute`
what its warpgroups do.

gmem: refs of arrays in global memory. smem: refs in shared memory, barriers among them. A place counts tiles of keys as
they pass by; a slot holds a tile of queries and its numbers (schedule.py).
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

from pallas_kernels.flash_attention.schedule import FIRST, HEAD, LAST, NUMBER, SEQUENCE, Schedule
from pallas_kernels.flash_attention.tiles import (
    BLOCK,
    LOG2E,
    MASKED_SCORE,
    TILES,
    capped,
    joins_batches,
    kernel,
    range_of_keys,
    seen,
    swizzled,
    to_eights,
)

STAGES = 2  # tiles of keys and of values on their way
BY_ROW = plgpu.Layout.WGMMA.reduce(1)


@joins_batches
@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))  # traced once for all layers
def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    lower_BT: jax.Array,
    upper_BT: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """-> (out [B, T, N, H] in q's dtype, log-sum-exp [B, N, T] float32).

    lower, upper: int32, 0 <= lower, upper <= S. interpret: plgpu.InterpretGPUParams, to run on CPU.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_keys, kv_heads = k_BSKH.shape[1:3]
    if length % 8 or num_keys % 8:
        q, k, v = map(to_eights, (q_BTNH, k_BSKH, v_BSKH))
        bounds = (to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        out_BTNH, lse_BNT = forward(q, k, v, *bounds, scale=scale, soft_cap=soft_cap, interpret=interpret)
        return out_BTNH[:, :length], lse_BNT[:, :, :length]
    group = num_heads // kv_heads
    dtype = q_BTNH.dtype
    sizes = TILES[head_dim]
    tiles = -(-length // BLOCK)
    # The last have most to do in a causal mask: first.
    bytes_of_head = 2 * num_keys * head_dim * dtype.itemsize // group
    schedule = Schedule(
        batch, num_heads, tiles, bytes_of_head, sizes.forward_slots, last_first=True, interpret=interpret
    )
    plan = Plan(schedule, length, group, head_dim, sizes.forward_keys, dtype, scale, soft_cap)
    out_type = [
        jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
        jax.ShapeDtypeStruct((batch, num_heads, tiles * BLOCK), jnp.float32),
    ]

    def body(*refs):
        run_block(plan, Global(*refs[: len(Global._fields)]), Shared(*refs[len(Global._fields) :]))

    run = kernel(body, out_type, [*plan.shared_memory()], schedule.blocks, interpret)
    out_BTNH, lse_BNT = run(q_BTNH, k_BSKH, v_BSKH, lower_BT, upper_BT)
    return out_BTNH, lse_BNT[:, :, :length]


# What the kernel reads, and out and lse, which it writes.
Global = collections.namedtuple("Global", "q k v lower upper out lse")
# Shared memory and barriers of a block: types in `Plan.shared_memory`, refs in the kernel.
Shared = collections.namedtuple("Shared", "tile q k v bounds lse q_there k_there v_there k_free v_free turn")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known before the kernel runs."""

    schedule: Schedule
    length: int
    group: int
    head_dim: int
    block_k: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None

    def shared_memory(self) -> Shared:
        slots = self.schedule.slots
        keys = swizzled((STAGES, self.block_k, self.head_dim), self.dtype)
        return Shared(
            tile=self.schedule.scratch,
            q=swizzled((slots, 2, 64, self.head_dim), self.dtype),  # the queries, then their results
            k=keys,
            v=keys,
            bounds=plgpu.SMEM((slots, 2, BLOCK), jnp.int32),
            lse=plgpu.SMEM((2, 64), jnp.float32),
            q_there=plgpu.Barrier(num_arrivals=4, num_barriers=slots),
            k_there=plgpu.Barrier(num_barriers=STAGES),
            v_there=plgpu.Barrier(num_barriers=STAGES),
            k_free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            v_free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            turn=plgpu.Barrier(num_arrivals=2),
        )


def run_block(plan: Plan, gmem: Global, smem: Shared):
    wg = lax.axis_index("wg")

    @pl.when(wg == 2)
    def _load():
        plgpu.set_max_registers(40, action="decrease")
        Load(plan, gmem, smem).run()

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        Compute(plan, gmem, smem, wg).run()


@dataclasses.dataclass(frozen=True)
class Load:
    """The warpgroup that loads."""

    plan: Plan
    gmem: Global
    smem: Shared

    def run(self):
        self.plan.schedule.load(self.smem.tile, self.ranges, self.tile_of_queries)

    def ranges(self, b, number):
        gmem = self.gmem
        plan = self.plan
        rows = number * BLOCK, jnp.minimum(number * BLOCK + BLOCK, plan.length) - 1
        return range_of_keys(*(ref[b, row] for ref in (gmem.lower, gmem.upper) for row in rows), plan.block_k)

    def tile_of_queries(self, slot, passed, now):
        """Queries and their bounds, and the keys and values that pass by."""
        gmem = self.gmem
        smem = self.smem
        plan = self.plan
        b, number, head, first, last = (now[i] for i in (SEQUENCE, NUMBER, HEAD, FIRST, LAST))
        for i, ref in enumerate((gmem.lower, gmem.upper)):  # beyond the end: 0, sees nothing
            rows = pl.ds(number * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(ref.at[b, rows], smem.bounds.at[slot, i], smem.q_there.at[slot])
        for part in range(2):
            rows = pl.ds(number * BLOCK + part * 64, 64)
            plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, head], smem.q.at[slot, part], smem.q_there.at[slot])

        def copy(step, _):
            place = passed + step - first
            keys = pl.ds(step * plan.block_k, plan.block_k)
            stage = lax.rem(place, STAGES)
            for ref, target, there, free in (
                (gmem.k, smem.k, smem.k_there, smem.k_free),
                (gmem.v, smem.v, smem.v_there, smem.v_free),
            ):
                pl.when(place >= STAGES)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
                here = ref.at[b, keys, lax.div(head, plan.group)]
                plgpu.copy_gmem_to_smem(here, target.at[stage], there.at[stage])

        lax.fori_loop(first, last, copy, None)


class Compute:
    """A warpgroup that computes, number wg: 64 queries of each tile are the rows, keys the columns."""

    def __init__(self, plan: Plan, gmem: Global, smem: Shared, wg: jax.Array):
        self.plan = plan
        self.gmem = gmem
        self.smem = smem
        self.wg = wg
        self.tile, _, _, self.tile_free = smem.tile
        self.mine = pl.ds(wg * 64, 64)

    def run(self):
        pl.when(self.wg == 1)(self.take_turn)
        self.plan.schedule.compute(self.smem.tile, self.tile_of_queries, jnp.int32(0))
        pl.when(self.wg == 0)(self.take_turn)
        plgpu.wait_smem_to_gmem(0)

    def take_turn(self):
        """One multiplies, the other does what is no product."""
        plgpu.barrier_arrive(self.smem.turn)
        plgpu.barrier_wait(self.smem.turn)

    def tile_of_queries(self, slot, place):
        """place: the first one of this tile; -> that of the next tile."""
        plan = self.plan
        gmem = self.gmem
        smem = self.smem
        tile = self.tile
        wg = self.wg
        plgpu.barrier_wait(smem.q_there.at[slot])
        carry = (
            place,
            plgpu.layout_cast(jnp.zeros((64, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((64,), MASKED_SCORE, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((64,), jnp.float32), BY_ROW),
        )
        for part, masked in enumerate((True, False, True)):
            step = functools.partial(self.tile_of_keys, slot=slot, masked=masked)
            carry = lax.fori_loop(tile[slot, part], tile[slot, part + 1], step, carry)
        place, out, most, total = carry
        b, number, head = (tile[slot, i] for i in (SEQUENCE, NUMBER, HEAD))
        rows = pl.ds(number * BLOCK + wg * 64, 64)
        out_smem = smem.q.at[slot, wg]
        plgpu.barrier_arrive(smem.turn)  # the end is no product
        sees = total > 0
        out_smem[...] = (out * wide(jnp.where(sees, 1 / total, 0.0), out.shape)).astype(plan.dtype)
        smem.lse[wg] = jnp.where(sees, (most + jnp.log2(total)) / LOG2E, MASKED_SCORE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[b, rows, head])
        plgpu.copy_smem_to_gmem(smem.lse.at[wg], gmem.lse.at[b, head, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.tile_free.at[slot])
        plgpu.barrier_wait(smem.turn)
        return place

    def tile_of_keys(self, step, carry, *, slot, masked):
        place, out, most, total = carry  # most and s are log2(e) times what they would be
        plan = self.plan
        smem = self.smem
        shape = (64, self.plan.block_k)
        stage = lax.rem(place, STAGES)
        plgpu.barrier_wait(smem.k_there.at[stage])

        def scores(s_ref):
            plgpu.wgmma(s_ref, smem.q.at[slot, self.wg], smem.k.at[stage].transpose((1, 0)))
            self.take_turn()
            return s_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(smem.k_free.at[stage])
        s, factor, _ = capped(s, plan.scale, plan.soft_cap)
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + step * plan.block_k
            lower, upper = (plgpu.load(smem.bounds.at[slot, i, self.mine], (), layout=BY_ROW) for i in range(2))
            s = jnp.where(seen(key, lower, upper, lambda a: wide(a, shape)), s, -jnp.inf)
        new_most = jnp.maximum(most, jnp.max(s, 1) * factor)
        shrink = jnp.exp2(most - new_most)
        p = jnp.exp2(s * factor - wide(new_most, shape))
        total = total * shrink + jnp.sum(p, 1)
        out *= wide(shrink, out.shape)
        # What follows waits for the other warpgroup: all of the above is to be done before.
        out, new_most, total, p = lax.optimization_barrier((out, new_most, total, p.astype(plan.dtype)))
        plgpu.barrier_arrive(smem.turn)
        plgpu.barrier_wait(smem.v_there.at[stage])
        plgpu.barrier_wait(smem.turn)

        def sums(out_ref):
            out_ref[...] = out
            plgpu.wgmma(out_ref, p, smem.v.at[stage])
            return out_ref[...]

        out = pl.run_scoped(sums, plgpu.ACC(out.shape, jnp.float32))
        plgpu.barrier_arrive(smem.v_free.at[stage])
        return place + 1, out, new_most, total


def wide(a, shape):
    """A number a query, for each column."""
    return lax.broadcast_in_dim(a, shape, [0])
