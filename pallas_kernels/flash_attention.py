"""Attention without its matrix of scores, forward and backward, for Hopper (Pallas, Mosaic GPU).

FlashAttention-2 (Dao 2023, arXiv 2307.08691) with the warp specialisation of FlashAttention-3 (Shah et al. 2024, arXiv
2407.08608). With s_ij = scale q_i k_j, or cap tanh(scale q_i k_j / cap):

    forward     lse_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - lse_i),  o_i = sum_j p_ij v_j
    backward    delta_i = d_o_i o_i,  d_s_ij = p_ij (d_o_i v_j - delta_i),
                d_v_j = sum_i p_ij d_o_i,  d_q_i = scale sum_j d_s_ij k_j,  d_k_j = scale sum_i d_s_ij q_i

Every mask is an interval: query i sees the keys lower_i <= j < upper_i, both bounds never decreasing along the
sequence. Causal: [0, i + 1). A window of w: [i + 1 - w, i + 1). Packed documents: from the first token of the own one.
Not causal: [0, S). Tiles that no query sees are not computed, and only those on an edge are masked.

Dimensions: B batch, T query time, S key time, N heads, K key-value heads, G = N / K, H head dim.
bfloat16 or float16, sums and softmax float32. T and S need not be multiples of a tile: what TMA reads beyond the end is
zero, what it writes there is dropped; only where 8 does not divide them are the arrays copied first. A block has one
warpgroup that loads and two that compute, each 64 rows:

    forward     a block for 128 queries of a head; keys and values pass by in tiles of 128, two in flight;
                one warpgroup multiplies while the other does its softmax. Shared memory: 160 KB for H = 128.
    backward    a block for 128 keys of a key-value head; the queries of its G heads pass by, 64 at a time. d_k and d_v
                stay in registers; d_q is added up in float32 by TMA, whose order is not fixed, so the last bits of d_q
                may differ from run to run, unless `ordered` asks for one order. Shared memory: 194 KB for H = 128.
                Heads of 256: d_k and d_v of 64 keys are all registers of both warpgroups, so a block has 64 keys, each
                warpgroup computes all p and d_s, and half of the columns of d_q, d_k and d_v: 1.4 times the products.

Refused: see `problem`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NEVER = -1e30  # log-sum-exp of a query that sees no key; its result is 0
LOG2E = math.log2(math.e)
BLOCK = 128  # queries of a block forward


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Measured on an H100, see README.md."""

    forward_keys: int
    """Of a tile that passes by; a block has 128 queries."""
    backward_keys: int = 128
    """Of a block: 128, 64 for each of the two warpgroups; or 64 for both, and half of the columns for each."""
    backward_queries: int = 64
    """Of a tile that passes by."""
    stages: int = 2
    """Tiles of q on their way, backward."""
    d_out_stages: int = 2


TILES = {
    64: Tiles(128, stages=3, d_out_stages=3),
    128: Tiles(128),
    256: Tiles(64, backward_keys=64, d_out_stages=1),
}


def problem(head_dim: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used, or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    return "" if head_dim in TILES else f"head dim {head_dim}"


# Traced and compiled once for all layers of a model.
_once = functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))
_once_backward = functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "ordered", "interpret"))


@_once
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
        q, k, v = map(_to_eights, (q_BTNH, k_BSKH, v_BSKH))
        bounds = (_to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        out_BTNH, lse_BNT = forward(q, k, v, *bounds, scale=scale, soft_cap=soft_cap, interpret=interpret)
        return out_BTNH[:, :length], lse_BNT[:, :, :length]
    group, dtype, block_k = num_heads // k_BSKH.shape[2], q_BTNH.dtype, TILES[head_dim].forward_keys
    ranges, bounds = _ranges_of_keys(lower_BT, upper_BT, block_k), _padded_bounds(lower_BT, upper_BT, BLOCK)
    tiles, stages = ranges.shape[1], 2
    by_row, shape = plgpu.Layout.WGMMA.reduce(1), (64, block_k)
    wide = lambda a, shape: lax.broadcast_in_dim(a, shape, [0])

    def body(
        q_ref, k_ref, v_ref, bounds_ref, ranges_ref, out_ref, lse_ref,
        q_smem, k_smem, v_smem, bounds_smem, lse_smem, q_there, k_there, v_there, k_free, v_free, turn,
    ):  # fmt: skip
        wg, head, b = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("batch")
        number = tiles - 1 - lax.axis_index("tile")  # the last have most to do in a causal mask: first
        first, full_first, full_last, last = _four(ranges_ref.at[b, number])

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            def copy(step, _):
                slot, keys = lax.rem(step - first, stages), pl.ds(step * block_k, block_k)
                for ref, smem, there, free in ((k_ref, k_smem, k_there, k_free), (v_ref, v_smem, v_there, v_free)):
                    pl.when(step - first >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[b, keys, lax.div(head, group)], smem.at[slot], there.at[slot])

            lax.fori_loop(first, last, copy, None)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            rows, q = pl.ds(number * BLOCK + wg * 64, 64), q_smem.at[wg]
            plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q, q_there.at[wg])
            plgpu.copy_gmem_to_smem(bounds_ref.at[b, :, rows], bounds_smem.at[wg], q_there.at[wg])
            plgpu.barrier_wait(q_there.at[wg])

            def take_turn():  # one multiplies, the other does what is no product
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def one_tile(step, carry, masked):
                out, most, total = carry  # most and s are log2(e) times what they would be
                slot = lax.rem(step - first, stages)
                plgpu.barrier_wait(k_there.at[slot])

                def scores(s_ref):
                    plgpu.wgmma(s_ref, q, k_smem.at[slot].transpose((1, 0)))
                    take_turn()
                    return s_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                s, factor, _ = _capped(s, scale, soft_cap)
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + step * block_k
                    lower, upper = (plgpu.load(bounds_smem.at[wg, i], (), layout=by_row) for i in range(2))
                    s = jnp.where((key >= wide(lower, shape)) & (key < wide(upper, shape)), s, -jnp.inf)
                new_most = jnp.maximum(most, jnp.max(s, 1) * factor)
                shrink = jnp.exp2(most - new_most)
                p = jnp.exp2(s * factor - wide(new_most, shape))
                total = total * shrink + jnp.sum(p, 1)
                out *= wide(shrink, out.shape)
                # What follows waits for the other warpgroup: all of the above is to be done before.
                out, new_most, total, p = lax.optimization_barrier((out, new_most, total, p.astype(dtype)))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_there.at[slot])
                plgpu.barrier_wait(turn)

                def sums(out_ref):
                    out_ref[...] = out
                    plgpu.wgmma(out_ref, p, v_smem.at[slot])
                    return out_ref[...]

                out = pl.run_scoped(sums, plgpu.ACC(out.shape, jnp.float32))
                plgpu.barrier_arrive(v_free.at[slot])
                return out, new_most, total

            carry = (
                plgpu.layout_cast(jnp.zeros((64, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((64,), NEVER, jnp.float32), by_row),
                plgpu.layout_cast(jnp.zeros((64,), jnp.float32), by_row),
            )
            pl.when(wg == 1)(take_turn)
            carry = lax.fori_loop(first, full_first, lambda i, c: one_tile(i, c, True), carry)
            carry = lax.fori_loop(full_first, full_last, lambda i, c: one_tile(i, c, False), carry)
            out, most, total = lax.fori_loop(full_last, last, lambda i, c: one_tile(i, c, True), carry)
            pl.when(wg == 0)(take_turn)
            sees = total > 0
            q[...] = (out * wide(jnp.where(sees, 1 / total, 0.0), out.shape)).astype(dtype)
            lse_smem[wg] = jnp.where(sees, (most + jnp.log2(total)) / LOG2E, NEVER)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q, out_ref.at[b, rows, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[b, head, rows])
            plgpu.wait_smem_to_gmem(0)

    out_type = [
        jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
        jax.ShapeDtypeStruct((batch, num_heads, tiles * BLOCK), jnp.float32),
    ]
    scratch = [
        _swizzled((2, 64, head_dim), dtype),
        *[_swizzled((stages, block_k, head_dim), dtype)] * 2,
        plgpu.SMEM((2, 2, 64), jnp.int32),
        plgpu.SMEM((2, 64), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
        *[plgpu.Barrier(num_barriers=stages)] * 2,
        *[plgpu.Barrier(num_arrivals=2, num_barriers=stages)] * 2,
        plgpu.Barrier(num_arrivals=2),
    ]
    run = _kernel(body, out_type, scratch, (num_heads, tiles, batch), interpret)
    out_BTNH, lse_BNT = run(q_BTNH, k_BSKH, v_BSKH, bounds, ranges)
    return out_BTNH, lse_BNT[:, :, :length]


@_once_backward
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
        q, k, v, out, d_out = map(_to_eights, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, d_out_BTNH))
        lse = _to_eights(lse_BNT, axis=2, constant_values=-NEVER)
        bounds = (_to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        options = dict(scale=scale, soft_cap=soft_cap, ordered=ordered, interpret=interpret)
        d_q, d_k, d_v = backward(q, k, v, out, lse, d_out, *bounds, **options)
        return d_q[:, :length], d_k[:, :num_keys], d_v[:, :num_keys]
    group, dtype, tiles = num_heads // kv_heads, q_BTNH.dtype, TILES[head_dim]
    block_q, block_k, half = tiles.backward_queries, tiles.backward_keys, head_dim // 2
    stages, d_out_stages, piece = tiles.stages, tiles.d_out_stages, min(half, 64)
    shared = block_k == 64  # both warpgroups have the same keys
    width = half if shared else head_dim  # of their d_k and d_v
    ranges = _ranges_of_queries(lower_BT, upper_BT, block_q, block_k, num_keys)
    bounds = _padded_bounds(lower_BT, upper_BT, block_q, mode="edge")
    delta_BNT = jnp.sum(out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32), -1).transpose(0, 2, 1)
    pad = [(0, 0), (0, 0), (0, -length % block_q)]
    # A query beyond the end has p = exp2(0 - 1e30) = 0.
    lse_BNT, delta_BNT = jnp.pad(lse_BNT * LOG2E, pad, constant_values=-NEVER), jnp.pad(delta_BNT, pad)
    num_tiles, q_tiles = ranges.shape[1], bounds.shape[2] // block_q
    by_column, shape = plgpu.Layout.WGMMA.reduce(0), (64, block_q)
    wide = lambda a: lax.broadcast_in_dim(a, shape, [1])
    accumulator = lambda width: plgpu.ACC((64, width), jnp.float32)

    def body(
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, bounds_ref, ranges_ref, d_q_gmem_ref, d_k_gmem_ref,
        d_v_gmem_ref, q_smem, d_out_smem, k_smem, v_smem, d_s_smem, d_q_smem, lse_smem, delta_smem, bounds_smem,
        kv_there, q_there, d_out_there, q_free, d_out_free, both_there, my_turn,
    ):  # fmt: skip
        wg, kv_head, b = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("batch")
        number = lax.axis_index("tile")
        if ordered:  # who adds first starts first: nobody waits for a block that is not there
            number = num_tiles - 1 - number
            added = pl.get_global(plgpu.SemaphoreType.REGULAR((batch, num_heads, q_tiles)))
        first, full_first, full_last, last = _four(ranges_ref.at[b, number])
        places = (last - first) * group

        def head_and_step(place):
            return kv_head * group + lax.div(place, last - first), first + lax.rem(place, last - first)

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(24, action="decrease")
            keys = (b, pl.ds(number * block_k, block_k), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem, kv_there)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem, kv_there)

            def copy(place, _):
                slot, d_out_slot = lax.rem(place, stages), lax.rem(place, d_out_stages)
                head, step = head_and_step(place)
                rows = pl.ds(step * block_q, block_q)
                pl.when(place >= stages)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[slot], q_there.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_smem.at[slot], q_there.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[slot], q_there.at[slot])
                plgpu.copy_gmem_to_smem(bounds_ref.at[b, :, rows], bounds_smem.at[slot], q_there.at[slot])
                pl.when(place >= d_out_stages)(lambda: plgpu.barrier_wait(d_out_free.at[d_out_slot]))
                there = d_out_there.at[d_out_slot]
                plgpu.copy_gmem_to_smem(d_out_ref.at[b, rows, head], d_out_smem.at[d_out_slot], there)
                if ordered:
                    pl.when(place > 0)(lambda: wait_for_others(place - 1))

            def wait_for_others(place):
                head, step = head_and_step(place)
                before = (bounds_ref[b, 1, step * block_q + block_q - 1] - 1) // block_k - number  # tiles of keys
                plgpu.semaphore_wait(added.at[b, head, step], 2 * before, decrement=False, memory_scope="gpu")
                plgpu.barrier_arrive(my_turn.at[lax.rem(place, stages + 1)])

            lax.fori_loop(0, places, copy, None)
            if ordered:
                pl.when(places > 0)(lambda: wait_for_others(places - 1))

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            first_row = 0 if shared else wg * 64
            mine, columns = pl.ds(first_row, 64), pl.ds(wg * half if shared else 0, width)
            plgpu.barrier_wait(kv_there)

            def together():
                plgpu.barrier_arrive(both_there)
                plgpu.barrier_wait(both_there)

            def stored(place):
                """The d_q before this place has left shared memory; in order: is added, and the next block may know."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=not ordered)
                if ordered:
                    tell = lambda: plgpu.semaphore_signal(added.at[b, *head_and_step(place - 1)], memory_scope="gpu")
                    pl.when(place > 0)(tell)

            def one_tile(step, carry, in_group, masked):
                """Keys are the rows and queries the columns of every tile, so that p and d_s are left operands."""
                d_k, d_v = carry
                place = in_group * (last - first) + step - first
                slot, d_out_slot = lax.rem(place, stages), lax.rem(place, d_out_stages)
                side = wg if shared else lax.rem(place, 2)
                rows, head = pl.ds(step * block_q, block_q), kv_head * group + in_group
                plgpu.barrier_wait(q_there.at[slot])

                def scores(s_ref, d_p_ref):
                    plgpu.wgmma(s_ref, k_smem.at[mine], q_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(d_out_there.at[d_out_slot])
                    plgpu.wgmma(d_p_ref, v_smem.at[mine], d_out_smem.at[d_out_slot].transpose((1, 0)))
                    lse = plgpu.load(lse_smem.at[slot], (), layout=by_column)
                    s, factor, slope = _capped(plgpu.wgmma_accumulator_load(s_ref, wait_n=1), scale, soft_cap)
                    p = jnp.exp2(s * factor - wide(lse))
                    if masked:
                        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                        key += number * block_k + first_row
                        lower, upper = (plgpu.load(bounds_smem.at[slot, i], (), layout=by_column) for i in range(2))
                        p = jnp.where((key >= wide(lower)) & (key < wide(upper)), p, 0.0)
                    delta = plgpu.load(delta_smem.at[slot], (), layout=by_column)
                    d_s = p * (plgpu.wgmma_accumulator_load(d_p_ref, wait_n=0) - wide(delta))
                    return p.astype(dtype), (d_s if slope is None else d_s * slope).astype(dtype)

                p, d_s = pl.run_scoped(scores, accumulator(block_q), accumulator(block_q))

                def part_of_d_q(d_q_ref, part_number):
                    part = pl.ds(wg * half + part_number * piece, piece)
                    plgpu.wgmma(d_q_ref, d_s_smem.at[side].transpose((1, 0)), k_smem.at[:, part])

                def add(part_number):
                    plgpu.commit_smem()
                    part = d_q_gmem_ref.at[b, rows, head, pl.ds(wg * half + part_number * piece, piece)]
                    plgpu.copy_smem_to_gmem(d_q_smem.at[wg], part, reduction_op="add")

                def gradients(d_k_ref, d_v_ref, d_q_ref):
                    d_k_ref[...], d_v_ref[...] = d_k, d_v
                    plgpu.wgmma(d_v_ref, p, d_out_smem.at[d_out_slot, :, columns])
                    d_s_smem[side, mine] = d_s
                    plgpu.commit_smem()
                    if not shared:
                        plgpu.barrier_arrive(both_there)
                    plgpu.wgmma(d_k_ref, d_s, q_smem.at[slot, :, columns])
                    if not shared:
                        plgpu.barrier_wait(both_there)
                    part_of_d_q(d_q_ref, 0)
                    new_d_v = plgpu.wgmma_accumulator_load(d_v_ref, wait_n=2)
                    plgpu.barrier_arrive(d_out_free.at[d_out_slot])
                    new_d_k = plgpu.wgmma_accumulator_load(d_k_ref, wait_n=1)
                    plgpu.barrier_arrive(q_free.at[slot])
                    stored(place)
                    d_q_smem[wg] = plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)
                    return new_d_k, new_d_v

                d_k, d_v = pl.run_scoped(gradients, accumulator(width), accumulator(width), accumulator(piece))
                if ordered:
                    plgpu.barrier_wait(my_turn.at[lax.rem(place, stages + 1)])
                add(0)
                for part_number in range(1, half // piece):

                    def another(d_q_ref, part_number=part_number):
                        part_of_d_q(d_q_ref, part_number)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        d_q_smem[wg] = plgpu.wgmma_accumulator_load(d_q_ref, wait_n=0)

                    pl.run_scoped(another, accumulator(piece))
                    add(part_number)
                return d_k, d_v

            def one_head(in_group, carry):
                carry = lax.fori_loop(first, full_first, lambda i, c: one_tile(i, c, in_group, True), carry)
                carry = lax.fori_loop(full_first, full_last, lambda i, c: one_tile(i, c, in_group, False), carry)
                return lax.fori_loop(full_last, last, lambda i, c: one_tile(i, c, in_group, True), carry)

            zeros = plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA)
            d_k, d_v = lax.fori_loop(0, group, one_head, (zeros, zeros))
            if ordered:
                stored(places)
            together()  # the other one reads all keys for its part of d_q
            k_smem[mine, columns] = (d_k * scale).astype(dtype)
            v_smem[mine, columns] = d_v.astype(dtype)
            plgpu.commit_smem()
            together()
            keys = (b, pl.ds(number * block_k, block_k), kv_head)
            pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(k_smem, d_k_gmem_ref.at[keys]))
            pl.when(wg == 1)(lambda: plgpu.copy_smem_to_gmem(v_smem, d_v_gmem_ref.at[keys]))
            plgpu.wait_smem_to_gmem(0)

    swizzle = min(128, half * dtype.itemsize)  # half of the keys' columns is one tile
    scratch = [
        _swizzled((stages, block_q, head_dim), dtype, swizzle),
        _swizzled((d_out_stages, block_q, head_dim), dtype),
        _swizzled((block_k, head_dim), dtype, swizzle),
        _swizzled((block_k, head_dim), dtype),
        _swizzled((2, block_k, block_q), dtype, swizzle),  # two, as one warpgroup may be a step ahead
        _swizzled((2, block_q, piece), jnp.float32),
        *[plgpu.SMEM((stages, block_q), jnp.float32)] * 2,
        plgpu.SMEM((stages, 2, block_q), jnp.int32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        plgpu.Barrier(num_barriers=d_out_stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=d_out_stages),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=stages + 1),  # the turn of the last place may come while two are still to be taken
    ]
    d_q = jax.new_ref(jnp.zeros(q_BTNH.shape, jnp.float32), memory_space=plgpu.GMEM)
    out_type = [jax.ShapeDtypeStruct(k_BSKH.shape, dtype)] * 2
    run = _kernel(body, out_type, scratch, (kv_heads, num_tiles, batch), interpret)
    # .fun: without vmap, whose wrapper refuses an array that is changed in place (jax 0.10)
    d_k, d_v = run.fun(q_BTNH, k_BSKH, v_BSKH, d_out_BTNH, lse_BNT, delta_BNT, bounds, ranges, d_q)
    return (d_q[...] * scale).astype(dtype), d_k, d_v


def _capped(products, scale, soft_cap):
    """-> (s, what turns it into a power of two, its derivative after the scale or None)."""
    if soft_cap is None:
        return products, scale * LOG2E, None
    tanh = jnp.tanh(products * (scale / soft_cap))
    return soft_cap * tanh, LOG2E, 1 - tanh * tanh


def _extremes(bounds_BT, block):
    """Least and greatest of each tile of queries, [B, tiles]."""
    batch, length = bounds_BT.shape
    tiles = jnp.pad(bounds_BT, ((0, 0), (0, -length % block)), mode="edge").reshape(batch, -1, block)
    return tiles[:, :, 0], tiles[:, :, -1]


def _ranges_of_keys(lower_BT, upper_BT, block_k):
    """int32 [B, tiles of queries, 4]: (first tile of keys, first and last that all see wholly, last), ends excluded."""
    (low, high_low), (low_high, high) = _extremes(lower_BT, BLOCK), _extremes(upper_BT, BLOCK)
    first = low // block_k
    last = jnp.maximum(-(-high // block_k), first)
    full_first = jnp.clip(-(-high_low // block_k), first, last)
    full_last = jnp.clip(low_high // block_k, full_first, last)
    return jnp.stack([first, full_first, full_last, last], -1)


def _ranges_of_queries(lower_BT, upper_BT, block_q, block_k, num_keys):
    """The same for each tile of keys: int32 [B, tiles of keys, 4], tiles of queries."""
    (low, high_low), (low_high, high) = _extremes(lower_BT, block_q), _extremes(upper_BT, block_q)
    start = jnp.arange(-(-num_keys // block_k)) * block_k
    count = lambda holds: jnp.sum(holds, 1, dtype=jnp.int32)  # of tiles, which are in order
    first = count(high[:, :, None] <= start)
    last = jnp.maximum(count(low[:, :, None] < start + block_k), first)
    full_first = jnp.clip(count(low_high[:, :, None] < start + block_k), first, last)
    full_last = jnp.clip(count(high_low[:, :, None] <= start), full_first, last)
    return jnp.stack([first, full_first, full_last, last], -1)


def _four(ref):
    """The sum drops the marks of jax.shard_map, which a loop does not keep in its carry."""
    return (ref[i] + 0 for i in range(4))


def _to_eights(a, axis=1, **options):
    """As TMA has it: rows of shared memory are swizzled by eights."""
    return jnp.pad(a, [(0, -size % 8 if number == axis else 0) for number, size in enumerate(a.shape)], **options)


def _padded_bounds(lower_BT, upper_BT, block, mode="constant"):
    """int32 [B, 2, T rounded up]; queries beyond the end see nothing, or with "edge" what the last one does."""
    return jnp.pad(jnp.stack([lower_BT, upper_BT], 1), ((0, 0), (0, 0), (0, -lower_BT.shape[1] % block)), mode=mode)


def _swizzled(shape, dtype, swizzle=128):
    """Shared memory as TMA writes it and wgmma reads it."""
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))


def _kernel(body, out_type, scratch, grid, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "tile", "batch"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
