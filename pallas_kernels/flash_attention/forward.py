"""The forward pass: `forward` has the arrays, `Plan` the sizes and the shared memory of a block, `Load` and `Compute`
are the programs of its warpgroups.

gmem: refs of arrays in global memory. smem: refs in shared memory, including barriers. An iteration is one tile of
keys, counted over all tiles of queries; a slot holds a tile of queries and its indices (schedule.py).
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
    Heads,
    capped,
    in_heads,
    joins_batches,
    kernel,
    range_of_keys,
    seen,
    to_eights,
)
from pallas_kernels.registers import load_as
from pallas_kernels.shared_memory import swizzled

STAGES = 2  # tiles of keys and of values in flight
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

    lower, upper: int32, 0 <= lower, upper <= S; neither decreases along T. interpret: plgpu.InterpretGPUParams, to run
    on CPU.
    """
    heads = Heads(q_BTNH.shape[2], k_BSKH.shape[2])
    return _forward((q_BTNH, k_BSKH, v_BSKH), (lower_BT, upper_BT), heads, scale, soft_cap, interpret)


@joins_batches
@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))
def joined_forward(
    joined_BTKGH: jax.Array,
    lower_BT: jax.Array,
    upper_BT: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As forward, of queries, keys and values in one array [B, T, K, G + 2, H]."""
    heads, joined_BTMH = in_heads(joined_BTKGH)
    return _forward((joined_BTMH,), (lower_BT, upper_BT), heads, scale, soft_cap, interpret)


def _forward(arrays, bounds, heads: Heads, scale, soft_cap, interpret):
    """arrays: q, k and v, or the one that has all heads."""
    batch, length, _, head_dim = arrays[0].shape
    num_keys = arrays[-1].shape[1]
    if length % 8 or num_keys % 8:
        arrays = tuple(map(to_eights, arrays))
        bounds = tuple(to_eights(a, mode="edge") for a in bounds)
        out_BTNH, lse_BNT = _forward(arrays, bounds, heads, scale, soft_cap, interpret)
        return out_BTNH[:, :length], lse_BNT[:, :, :length]
    dtype = arrays[0].dtype
    sizes = TILES[head_dim]
    tiles = -(-length // BLOCK)
    # With a causal mask the last tiles have the most work, so they come first.
    bytes_of_head = 2 * num_keys * head_dim * dtype.itemsize // heads.group
    schedule = Schedule(
        batch, heads.queries, tiles, bytes_of_head, sizes.forward_slots, last_first=True, interpret=interpret
    )
    plan = Plan(schedule, length, heads, head_dim, sizes.forward_keys, dtype, scale, soft_cap)
    out_type = [
        jax.ShapeDtypeStruct((batch, length, heads.queries, head_dim), dtype),
        jax.ShapeDtypeStruct((batch, heads.queries, tiles * BLOCK), jnp.float32),
    ]

    def body(*refs):
        q, k, v = refs[:1] * 3 if heads.joined else refs[:3]
        others = refs[len(arrays) :]
        num_others = len(Global._fields) - 3
        run_block(plan, Global(q, k, v, *others[:num_others]), Shared(*others[num_others:]))

    run = kernel(body, out_type, [*plan.shared_memory()], schedule.blocks, interpret)
    out_BTNH, lse_BNT = run(*arrays, *bounds)
    return out_BTNH, lse_BNT[:, :, :length]


# Arrays that the kernel reads, and out and lse, which it writes.
Global = collections.namedtuple("Global", "q k v lower upper out lse")
# Shared memory and barriers of a block: types in `Plan.shared_memory`, refs in the kernel.
Shared = collections.namedtuple("Shared", "tile q k v bounds lse q_ready k_ready v_ready k_free v_free turn")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of the kernel."""

    schedule: Schedule
    length: int
    heads: Heads
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
            q_ready=plgpu.Barrier(num_arrivals=4, num_barriers=slots),
            k_ready=plgpu.Barrier(num_barriers=STAGES),
            v_ready=plgpu.Barrier(num_barriers=STAGES),
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
        low, high_low, low_high, high = (ref[b, row] for ref in (gmem.lower, gmem.upper) for row in rows)
        return range_of_keys(low, high_low, low_high, high, plan.block_k)

    def tile_of_queries(self, slot, passed, now):
        """Loads queries and their bounds, then keys and values."""
        gmem = self.gmem
        smem = self.smem
        plan = self.plan
        b, number, head, first, last = (now[i] for i in (SEQUENCE, NUMBER, HEAD, FIRST, LAST))
        for i, ref in enumerate((gmem.lower, gmem.upper)):  # beyond the end: 0, sees nothing
            rows = pl.ds(number * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(ref.at[b, rows], smem.bounds.at[slot, i], smem.q_ready.at[slot])
        for part in range(2):
            rows = pl.ds(number * BLOCK + part * 64, 64)
            queries = gmem.q.at[b, rows, plan.heads.q(head)]
            plgpu.copy_gmem_to_smem(queries, smem.q.at[slot, part], smem.q_ready.at[slot])

        kv_head = lax.div(head, plan.heads.group)

        def copy(step, _):
            iteration = passed + step - first
            keys = pl.ds(step * plan.block_k, plan.block_k)
            stage = lax.rem(iteration, STAGES)
            for here, target, ready, free in (
                (gmem.k.at[b, keys, plan.heads.k(kv_head)], smem.k, smem.k_ready, smem.k_free),
                (gmem.v.at[b, keys, plan.heads.v(kv_head)], smem.v, smem.v_ready, smem.v_free),
            ):
                pl.when(iteration >= STAGES)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
                plgpu.copy_gmem_to_smem(here, target.at[stage], ready.at[stage])

        lax.fori_loop(first, last, copy, None)


class Compute:
    """A warpgroup that computes, number wg: 64 queries of each tile are the rows, keys the columns."""

    def __init__(self, plan: Plan, gmem: Global, smem: Shared, wg: jax.Array):
        self.plan = plan
        self.gmem = gmem
        self.smem = smem
        self.wg = wg
        self.tile, _, _, self.tile_free = smem.tile
        self.own_rows = pl.ds(wg * 64, 64)

    def run(self):
        pl.when(self.wg == 1)(self.take_turn)
        self.plan.schedule.compute(self.smem.tile, self.tile_of_queries, jnp.int32(0))
        pl.when(self.wg == 0)(self.take_turn)
        plgpu.wait_smem_to_gmem(0)

    def take_turn(self):
        """Alternates the warpgroups: one multiplies while the other does everything else."""
        plgpu.barrier_arrive(self.smem.turn)
        plgpu.barrier_wait(self.smem.turn)

    def tile_of_queries(self, slot, iteration):
        """iteration: the first one of this tile -> the first one of the next tile."""
        plan = self.plan
        gmem = self.gmem
        smem = self.smem
        tile = self.tile
        wg = self.wg
        plgpu.barrier_wait(smem.q_ready.at[slot])
        carry = (
            iteration,
            plgpu.layout_cast(jnp.zeros((64, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((64,), MASKED_SCORE, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((64,), jnp.float32), BY_ROW),
        )
        for part, masked in enumerate((True, False, True)):
            step = functools.partial(self.tile_of_keys, slot=slot, masked=masked)
            carry = lax.fori_loop(tile[slot, part], tile[slot, part + 1], step, carry)
        iteration, out, most, total = carry
        b, number, head = (tile[slot, i] for i in (SEQUENCE, NUMBER, HEAD))
        rows = pl.ds(number * BLOCK + wg * 64, 64)
        out_smem = smem.q.at[slot, wg]
        plgpu.barrier_arrive(smem.turn)  # no product follows in this tile
        has_keys = total > 0
        out_smem[...] = (out * wide(jnp.where(has_keys, 1 / total, 0.0), out.shape)).astype(plan.dtype)
        smem.lse[wg] = jnp.where(has_keys, (most + jnp.log2(total)) / LOG2E, MASKED_SCORE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, gmem.out.at[b, rows, head])
        plgpu.copy_smem_to_gmem(smem.lse.at[wg], gmem.lse.at[b, head, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.tile_free.at[slot])
        plgpu.barrier_wait(smem.turn)
        return iteration

    def tile_of_keys(self, step, carry, *, slot, masked):
        iteration, out, most, total = carry  # most and s are scaled by log2(e)
        plan = self.plan
        smem = self.smem
        shape = (64, self.plan.block_k)
        stage = lax.rem(iteration, STAGES)
        plgpu.barrier_wait(smem.k_ready.at[stage])

        def scores(s_ref):
            plgpu.wgmma(s_ref, smem.q.at[slot, self.wg], smem.k.at[stage].transpose((1, 0)))
            self.take_turn()
            return s_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(smem.k_free.at[stage])
        s, factor, _ = capped(s, plan.scale, plan.soft_cap)
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + step * plan.block_k
            lower, upper = (load_as(smem.bounds.at[slot, i, self.own_rows], BY_ROW) for i in range(2))
            s = jnp.where(seen(key, lower, upper, lambda a: wide(a, shape)), s, -jnp.inf)
        new_most = jnp.maximum(most, jnp.max(s, 1) * factor)
        shrink = jnp.exp2(most - new_most)
        p = jnp.exp2(s * factor - wide(new_most, shape))
        total = total * shrink + jnp.sum(p, 1)
        out *= wide(shrink, out.shape)
        # The next steps wait for the other warpgroup: everything above must be done before.
        out, new_most, total, p = lax.optimization_barrier((out, new_most, total, p.astype(plan.dtype)))
        plgpu.barrier_arrive(smem.turn)
        plgpu.barrier_wait(smem.v_ready.at[stage])
        plgpu.barrier_wait(smem.turn)

        def sums(out_ref):
            out_ref[...] = out
            plgpu.wgmma(out_ref, p, smem.v.at[stage])
            return out_ref[...]

        out = pl.run_scoped(sums, plgpu.ACC(out.shape, jnp.float32))
        plgpu.barrier_arrive(smem.v_free.at[stage])
        return iteration + 1, out, new_most, total


def wide(a, shape):
    """Broadcasts one number per query over the columns."""
    return lax.broadcast_in_dim(a, shape, [0])
