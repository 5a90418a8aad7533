"""The backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.schedule import FIRST, HEAD, LAST, NUMBER, SEQUENCE, ZERO, Schedule
from pallas_kernels.flash_attention.tiles import (
    LOG2E,
    NEVER,
    TILES,
    capped,
    joins_batches,
    kernel,
    ranges_of_queries,
    seen,
    swizzled,
    to_eights,
)


@joins_batches
@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "ordered", "interpret"))
def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    d_out_BTNH: jax.Array,
    lower_BT: jax.Array,
    upper_BT: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    ordered: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> (d_q, d_k, d_v) like q, k and v.

    out, lse: of `forward`, or of attention to more keys, of which these are some.
    ordered: d_q is added up in one order, from the last keys to the first: the same bits in every run.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_keys, kv_heads = k_BSKH.shape[1:3]
    if length % 8 or num_keys % 8:
        q, k, v, out, d_out = map(to_eights, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, d_out_BTNH))
        lse = to_eights(lse_BNT, axis=2, constant_values=-NEVER)
        bounds = (to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        options = dict(scale=scale, soft_cap=soft_cap, ordered=ordered, interpret=interpret)
        d_q, d_k, d_v = backward(q, k, v, out, lse, d_out, *bounds, **options)
        return d_q[:, :length], d_k[:, :num_keys], d_v[:, :num_keys]
    group, dtype, tiles = num_heads // kv_heads, q_BTNH.dtype, TILES[head_dim]
    block_q, block_k, half = tiles.backward_queries, tiles.backward_keys, head_dim // 2
    stages, d_out_stages, piece = tiles.stages, tiles.d_out_stages, min(half, 64)
    shared = block_k == 64  # both warpgroups have the same keys
    width = half if shared else head_dim  # of their d_k and d_v
    ranges = ranges_of_queries(lower_BT, upper_BT, block_q, block_k, num_keys)
    num_tiles = ranges.shape[1]
    bytes_of_head = group * length * head_dim * (4 + 2 * dtype.itemsize)
    # In order, who adds first is taken first: nobody waits for a tile that nobody has taken.
    schedule = Schedule(batch, kv_heads, num_tiles, bytes_of_head, last_first=ordered, interpret=interpret)
    beyond = (0, -length % block_q)
    # Queries beyond the end see what the last one does, with p = exp2(0 - 1e30) = 0.
    bounds = jnp.pad(jnp.stack([lower_BT, upper_BT], 1), [(0, 0), (0, 0), beyond], mode="edge")
    delta_BNT = jnp.sum(out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32), -1).transpose(0, 2, 1)
    lse_BNT = jnp.pad(lse_BNT * LOG2E, [(0, 0), (0, 0), beyond], constant_values=-NEVER)
    delta_BNT = jnp.pad(delta_BNT, [(0, 0), (0, 0), beyond])
    q_tiles = bounds.shape[2] // block_q
    by_column, shape = plgpu.Layout.WGMMA.reduce(0), (64, block_q)
    wide = lambda a: lax.broadcast_in_dim(a, shape, [1])
    accumulator = lambda width: plgpu.ACC((64, width), jnp.float32)

    def body(
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, bounds_ref, ranges_ref, d_q_gmem_ref, d_k_gmem_ref,
        d_v_gmem_ref, tile, q_smem, d_out_smem, k_smem, v_smem, d_s_smem, results_smem, lse_smem, delta_smem,
        bounds_smem, kv_there, q_there, d_out_there, kv_free, q_free, d_out_free, both_there, my_turn,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        d_q_smem, d_kv_smem = results_smem
        tile_smem, _, _, tile_free = tile
        if ordered:
            added = pl.get_global(plgpu.SemaphoreType.REGULAR((batch, num_heads, q_tiles + 1)))

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(24, action="decrease")

            def ranges(b, number):
                return [ranges_ref[b, number, i] for i in range(4)]

            def load(slot, passed, now):
                b, kv_head, number, first, last = (now[i] for i in (SEQUENCE, HEAD, NUMBER, FIRST, LAST))
                keys, places, passed = pl.ds(number * block_k, block_k), (last - first) * group, passed * group

                def head_and_step(place):
                    return kv_head * group + lax.div(place, last - first), first + lax.rem(place, last - first)

                def copy(place, _):
                    head, step = head_and_step(place)
                    here, place = place, passed + place
                    stage, d_out_stage = lax.rem(place, stages), lax.rem(place, d_out_stages)
                    rows = pl.ds(step * block_q, block_q)
                    pl.when(place >= stages)(lambda: plgpu.barrier_wait(q_free.at[stage]))
                    plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[stage], q_there.at[stage])
                    plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[stage], q_there.at[stage])
                    plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[stage], q_there.at[stage])
                    plgpu.copy_gmem_to_smem(bounds_ref.at[b, :, rows], bounds_smem.at[stage], q_there.at[stage])
                    pl.when(place >= d_out_stages)(lambda: plgpu.barrier_wait(d_out_free.at[d_out_stage]))
                    there = d_out_there.at[d_out_stage]
                    plgpu.copy_gmem_to_smem(d_out_ref.at[b, rows, head], d_out_smem.at[d_out_stage], there)
                    if ordered:
                        pl.when(here > 0)(lambda: wait_for_others(here - 1))

                def wait_for_others(place):
                    head, step = head_and_step(place)
                    before = (bounds_ref[b, 1, step * block_q + block_q - 1] - 1) // block_k - number  # tiles of keys
                    plgpu.semaphore_wait(added.at[b, head, step], 2 * before, decrement=False, memory_scope="gpu")
                    plgpu.barrier_arrive(my_turn.at[lax.rem(passed + place, stages + 1)])

                soon = jnp.minimum(min(stages, d_out_stages), places)  # more may wait for what follows
                lax.fori_loop(0, soon, copy, None)
                plgpu.barrier_wait(kv_free)
                plgpu.copy_gmem_to_smem(k_ref.at[b, keys, kv_head], k_smem, kv_there)
                plgpu.copy_gmem_to_smem(v_ref.at[b, keys, kv_head], v_smem, kv_there)
                lax.fori_loop(soon, places, copy, None)
                if ordered:
                    pl.when(places > 0)(lambda: wait_for_others(places - 1))

            schedule.load(tile, ranges, load)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            first_row = 0 if shared else wg * 64
            mine, columns = pl.ds(first_row, 64), pl.ds(wg * half if shared else 0, width)
            # Zero, read anew for each tile: else ptxas has all addresses of operands in registers, and spills them.
            zero = lambda: tile_smem[0, ZERO]
            my_rows = lambda: pl.ds((zero() if shared else wg + zero()) * 64, 64)

            def stored(slot, here):
                """The d_q before this place has left shared memory; in order: is added, and the next block may know.
                here: the place in this tile of keys."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=not ordered)
                if ordered:
                    # Before the first place nobody is told; with a branch ptxas takes one product after the other.
                    first, last, b, kv_head = (tile_smem[slot, i] for i in (FIRST, LAST, SEQUENCE, HEAD))
                    before, length = jnp.maximum(here - 1, 0), jnp.maximum(last - first, 1)
                    head = kv_head * group + lax.div(before, length)
                    step = jnp.where(here > 0, first + lax.rem(before, length), q_tiles)
                    plgpu.semaphore_signal(added.at[b, head, step], memory_scope="gpu")

            def products(s_ref, place):
                plgpu.wgmma(s_ref, k_smem.at[my_rows()], q_smem.at[lax.rem(place, stages)].transpose((1, 0)))

            def one_tile(step, carry, slot, in_group, masked):
                """Keys are the rows and queries the columns of every tile, so that p and d_s are left operands. The
                products of the next queries with the keys are computed beside the end of this tile."""
                place, end, d_k, d_v, s = carry
                stage, d_out_stage = lax.rem(place, stages), lax.rem(place, d_out_stages)
                side = wg if shared else lax.rem(place, 2)
                rows = pl.ds(step * block_q, block_q)

                def part_of_d_q(d_q_ref, part_number):
                    part = pl.ds((wg + zero()) * half + part_number * piece, piece)
                    plgpu.wgmma(d_q_ref, d_s_smem.at[side].transpose((1, 0)), k_smem.at[:, part])

                def add(part_number):
                    plgpu.commit_smem()
                    b, head = tile_smem[slot, SEQUENCE], tile_smem[slot, HEAD] * group + in_group
                    part = d_q_gmem_ref.at[b, rows, head, pl.ds(wg * half + part_number * piece, piece)]
                    plgpu.copy_smem_to_gmem(d_q_smem.at[wg], part, reduction_op="add")

                def gradients(d_p_ref):
                    plgpu.barrier_wait(d_out_there.at[d_out_stage])
                    plgpu.wgmma(d_p_ref, v_smem.at[my_rows()], d_out_smem.at[d_out_stage].transpose((1, 0)))
                    lse = plgpu.load(lse_smem.at[stage], (), layout=by_column)
                    capped_s, factor, slope = capped(s, scale, soft_cap)
                    p = jnp.exp2(capped_s * factor - wide(lse))
                    if masked:
                        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                        key += tile_smem[slot, NUMBER] * block_k + first_row
                        lower, upper = (plgpu.load(bounds_smem.at[stage, i], (), layout=by_column) for i in range(2))
                        p = jnp.where(seen(key, lower, upper, wide), p, 0.0)

                    def beside_d_v(d_v_ref):
                        d_v_ref[...] = d_v
                        plgpu.wgmma(d_v_ref, p.astype(dtype), d_out_smem.at[d_out_stage, :, columns])
                        delta = plgpu.load(delta_smem.at[stage], (), layout=by_column)
                        d_s = p * (plgpu.wgmma_accumulator_load(d_p_ref, wait_n=1) - wide(delta))
                        d_s = (d_s if slope is None else d_s * slope).astype(dtype)
                        d_s_smem[side, mine] = d_s
                        plgpu.commit_smem()
                        if not shared:
                            plgpu.barrier_arrive(both_there)

                        def the_others(d_k_ref, d_q_ref):
                            d_k_ref[...] = d_k
                            plgpu.wgmma(d_k_ref, d_s, q_smem.at[stage, :, columns])
                            if not shared:
                                plgpu.barrier_wait(both_there)
                            part_of_d_q(d_q_ref, 0)
                            new_d_v = plgpu.wgmma_accumulator_load(d_v_ref, wait_n=2)
                            plgpu.barrier_arrive(d_out_free.at[d_out_stage])
                            new_d_k = plgpu.wgmma_accumulator_load(d_k_ref, wait_n=1)
                            plgpu.barrier_arrive(q_free.at[stage])
                            next_there = q_there.at[lax.rem(place + 1, stages)]
                            pl.when(place + 1 < end)(lambda: plgpu.barrier_wait(next_there))
                            return new_d_k, new_d_v, plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)

                        return pl.run_scoped(the_others, accumulator(width), accumulator(piece))

                    return pl.run_scoped(beside_d_v, accumulator(width))

                d_k, d_v, d_q = pl.run_scoped(gradients, accumulator(block_q))

                def next_products(s_ref):
                    products(s_ref, place + 1)  # after the last place: of what lies there, for nobody
                    length = tile_smem[slot, LAST] - tile_smem[slot, FIRST]
                    stored(slot, place - end + length * group)
                    d_q_smem[wg] = d_q
                    if ordered:
                        plgpu.barrier_wait(my_turn.at[lax.rem(place, stages + 1)])
                    add(0)
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

                s = pl.run_scoped(next_products, accumulator(block_q))
                for part_number in range(1, half // piece):

                    def another(d_q_ref, part_number=part_number):
                        part_of_d_q(d_q_ref, part_number)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        d_q_smem[wg] = plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)

                    pl.run_scoped(another, accumulator(piece))
                    add(part_number)
                return place + 1, end, d_k, d_v, s

            def one_tile_of_keys(slot, place):
                plgpu.barrier_wait(kv_there)

                def one_head(in_group, carry):
                    for part, masked in enumerate((True, False, True)):
                        a_tile = functools.partial(one_tile, slot=slot, in_group=in_group, masked=masked)
                        carry = lax.fori_loop(tile_smem[slot, part], tile_smem[slot, part + 1], a_tile, carry)
                    return carry

                zeros = plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA)
                places = (tile_smem[slot, LAST] - tile_smem[slot, FIRST]) * group
                end = place + places

                def first_products(s_ref):
                    pl.when(place < end)(lambda: plgpu.barrier_wait(q_there.at[lax.rem(place, stages)]))
                    products(s_ref, place)
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

                s = pl.run_scoped(first_products, accumulator(block_q))
                place, _, d_k, d_v, _ = lax.fori_loop(0, group, one_head, (place, end, zeros, zeros, s))
                plgpu.barrier_arrive(kv_free)
                if ordered:
                    stored(slot, places)
                b, kv_head = tile_smem[slot, SEQUENCE], tile_smem[slot, HEAD]
                keys = pl.ds(tile_smem[slot, NUMBER] * block_k + first_row, 64)
                plgpu.barrier_arrive(tile_free.at[slot])
                for ref, result in ((d_k_gmem_ref, d_k * scale), (d_v_gmem_ref, d_v)):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    d_kv_smem[wg] = result.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(d_kv_smem.at[wg], ref.at[b, keys, kv_head, columns])
                return place

            plgpu.barrier_arrive(kv_free)
            schedule.compute(tile, one_tile_of_keys, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzle = min(128, half * dtype.itemsize)  # half of the keys' columns is one tile
    scratch = [
        schedule.scratch,
        swizzled((stages, block_q, head_dim), dtype, swizzle),
        swizzled((d_out_stages, block_q, head_dim), dtype),
        swizzled((block_k, head_dim), dtype, swizzle),
        swizzled((block_k, head_dim), dtype),
        swizzled((2, block_k, block_q), dtype, swizzle),  # two, as one warpgroup may be a step ahead
        # d_q's piece, and when it has left, d_k and d_v of the same size.
        plgpu.RefUnion(swizzled((2, block_q, piece), jnp.float32), swizzled((2, 64, width), dtype)),
        *[plgpu.SMEM((stages, block_q), jnp.float32)] * 2,
        plgpu.SMEM((stages, 2, block_q), jnp.int32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        plgpu.Barrier(num_barriers=d_out_stages),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=d_out_stages),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=stages + 1),  # the turn of the last place may come while two are still to be taken
    ]
    out_type = [jax.ShapeDtypeStruct(k_BSKH.shape, dtype)] * 2
    run = kernel(body, out_type, scratch, schedule.blocks, interpret)

    def add_up(refs):
        d_q_ref, d_k_ref, d_v_ref = refs
        # .fun: without vmap, whose wrapper refuses an array that is changed in place (jax 0.10)
        given = q_BTNH, k_BSKH, v_BSKH, d_out_BTNH, lse_BNT, delta_BNT, bounds, ranges
        d_k_ref[...], d_v_ref[...] = run.fun(*given, d_q_ref)

    # A zero that waits for d_out: else XLA makes the zeros of all layers at once, before the first needs them.
    zero, _ = lax.optimization_barrier((jnp.float32(0), delta_BNT))
    d_q, d_k, d_v = pl.run_state(add_up)((jnp.full(q_BTNH.shape, zero), jnp.zeros_like(k_BSKH), jnp.zeros_like(v_BSKH)))
    return (d_q * scale).astype(dtype), d_k, d_v
