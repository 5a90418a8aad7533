"""The forward pass."""

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
    NEVER,
    TILES,
    capped,
    joins_batches,
    kernel,
    range_of_keys,
    seen,
    swizzled,
    to_eights,
)


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
    if length % 8 or k_BSKH.shape[1] % 8:
        q, k, v = map(to_eights, (q_BTNH, k_BSKH, v_BSKH))
        bounds = (to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        out_BTNH, lse_BNT = forward(q, k, v, *bounds, scale=scale, soft_cap=soft_cap, interpret=interpret)
        return out_BTNH[:, :length], lse_BNT[:, :, :length]
    group, dtype, block_k = num_heads // k_BSKH.shape[2], q_BTNH.dtype, TILES[head_dim].forward_keys
    tiles, stages, slots = -(-length // BLOCK), 2, TILES[head_dim].forward_slots
    # The last have most to do in a causal mask: first.
    bytes_of_head = 2 * k_BSKH.shape[1] * head_dim * dtype.itemsize // group
    schedule = Schedule(batch, num_heads, tiles, bytes_of_head, slots, last_first=True, interpret=interpret)
    by_row, shape = plgpu.Layout.WGMMA.reduce(1), (64, block_k)
    wide = lambda a, shape: lax.broadcast_in_dim(a, shape, [0])

    def body(
        q_ref, k_ref, v_ref, lower_ref, upper_ref, out_ref, lse_ref, tile, q_smem, k_smem, v_smem, bounds_smem,
        lse_smem, q_there, k_there, v_there, k_free, v_free, turn,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        tile_smem, _, _, tile_free = tile

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def ranges(b, number):
                rows = number * BLOCK, jnp.minimum(number * BLOCK + BLOCK, length) - 1
                return range_of_keys(*(ref[b, row] for ref in (lower_ref, upper_ref) for row in rows), block_k)

            def load(slot, passed, now):
                b, number, head, first, last = (now[i] for i in (SEQUENCE, NUMBER, HEAD, FIRST, LAST))
                for i, ref in enumerate((lower_ref, upper_ref)):  # beyond the end: 0, sees nothing
                    rows = pl.ds(number * BLOCK, BLOCK)
                    plgpu.copy_gmem_to_smem(ref.at[b, rows], bounds_smem.at[slot, i], q_there.at[slot])
                for part in range(2):
                    rows = pl.ds(number * BLOCK + part * 64, 64)
                    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[slot, part], q_there.at[slot])

                def copy(step, _):
                    place, keys = passed + step - first, pl.ds(step * block_k, block_k)
                    stage = lax.rem(place, stages)
                    for ref, smem, there, free in ((k_ref, k_smem, k_there, k_free), (v_ref, v_smem, v_there, v_free)):
                        pl.when(place >= stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
                        here = ref.at[b, keys, lax.div(head, group)]
                        plgpu.copy_gmem_to_smem(here, smem.at[stage], there.at[stage])

                lax.fori_loop(first, last, copy, None)

            schedule.load(tile, ranges, load)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * 64, 64)

            def take_turn():  # one multiplies, the other does what is no product
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def one_tile(step, carry, slot, masked):
                place, out, most, total = carry  # most and s are log2(e) times what they would be
                stage = lax.rem(place, stages)
                plgpu.barrier_wait(k_there.at[stage])

                def scores(s_ref):
                    plgpu.wgmma(s_ref, q_smem.at[slot, wg], k_smem.at[stage].transpose((1, 0)))
                    take_turn()
                    return s_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                s, factor, _ = capped(s, scale, soft_cap)
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + step * block_k
                    lower, upper = (plgpu.load(bounds_smem.at[slot, i, mine], (), layout=by_row) for i in range(2))
                    s = jnp.where(seen(key, lower, upper, lambda a: wide(a, shape)), s, -jnp.inf)
                new_most = jnp.maximum(most, jnp.max(s, 1) * factor)
                shrink = jnp.exp2(most - new_most)
                p = jnp.exp2(s * factor - wide(new_most, shape))
                total = total * shrink + jnp.sum(p, 1)
                out *= wide(shrink, out.shape)
                # What follows waits for the other warpgroup: all of the above is to be done before.
                out, new_most, total, p = lax.optimization_barrier((out, new_most, total, p.astype(dtype)))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_there.at[stage])
                plgpu.barrier_wait(turn)

                def sums(out_ref):
                    out_ref[...] = out
                    plgpu.wgmma(out_ref, p, v_smem.at[stage])
                    return out_ref[...]

                out = pl.run_scoped(sums, plgpu.ACC(out.shape, jnp.float32))
                plgpu.barrier_arrive(v_free.at[stage])
                return place + 1, out, new_most, total

            def one_tile_of_queries(slot, place):
                plgpu.barrier_wait(q_there.at[slot])
                carry = (
                    place,
                    plgpu.layout_cast(jnp.zeros((64, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((64,), NEVER, jnp.float32), by_row),
                    plgpu.layout_cast(jnp.zeros((64,), jnp.float32), by_row),
                )
                for part, masked in enumerate((True, False, True)):
                    a_tile = functools.partial(one_tile, slot=slot, masked=masked)
                    carry = lax.fori_loop(tile_smem[slot, part], tile_smem[slot, part + 1], a_tile, carry)
                place, out, most, total = carry
                b, number, head = (tile_smem[slot, i] for i in (SEQUENCE, NUMBER, HEAD))
                rows, out_smem = pl.ds(number * BLOCK + wg * 64, 64), q_smem.at[slot, wg]
                plgpu.barrier_arrive(turn)  # the end is no product
                sees = total > 0
                out_smem[...] = (out * wide(jnp.where(sees, 1 / total, 0.0), out.shape)).astype(dtype)
                lse_smem[wg] = jnp.where(sees, (most + jnp.log2(total)) / LOG2E, NEVER)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[b, rows, head])
                plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[b, head, rows])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(tile_free.at[slot])
                plgpu.barrier_wait(turn)
                return place

            pl.when(wg == 1)(take_turn)
            schedule.compute(tile, one_tile_of_queries, jnp.int32(0))
            pl.when(wg == 0)(take_turn)
            plgpu.wait_smem_to_gmem(0)

    out_type = [
        jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
        jax.ShapeDtypeStruct((batch, num_heads, tiles * BLOCK), jnp.float32),
    ]
    scratch = [
        schedule.scratch,
        swizzled((slots, 2, 64, head_dim), dtype),  # the queries, then their results
        *[swizzled((stages, block_k, head_dim), dtype)] * 2,
        plgpu.SMEM((slots, 2, BLOCK), jnp.int32),
        plgpu.SMEM((2, 64), jnp.float32),
        plgpu.Barrier(num_arrivals=4, num_barriers=slots),
        *[plgpu.Barrier(num_barriers=stages)] * 2,
        *[plgpu.Barrier(num_arrivals=2, num_barriers=stages)] * 2,
        plgpu.Barrier(num_arrivals=2),
    ]
    run = kernel(body, out_type, scratch, schedule.blocks, interpret)
    out_BTNH, lse_BNT = run(q_BTNH, k_BSKH, v_BSKH, lower_BT, upper_BT)
    return out_BTNH, lse_BNT[:, :, :length]
