"""The backward pass: its arrays; backward_block.py is the program of a block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.flash_attention.backward_block import Global, Plan, Shared, run_block
from pallas_kernels.flash_attention.schedule import Schedule
from pallas_kernels.flash_attention.tiles import (
    LOG2E,
    MASKED_SCORE,
    TILES,
    Heads,
    in_heads,
    joins_batches,
    kernel,
    ranges_of_queries,
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

    out, lse: of `forward`, or of attention to a larger set of keys that includes these.
    ordered: accumulate d_q in a fixed order, from the last keys to the first: bitwise reproducible.
    """
    heads = Heads(q_BTNH.shape[2], k_BSKH.shape[2])
    how = scale, soft_cap, ordered, interpret
    arrays = q_BTNH, k_BSKH, v_BSKH
    d_q, (d_k, d_v) = _backward(arrays, (out_BTNH, d_out_BTNH), lse_BNT, (lower_BT, upper_BT), heads, *how)
    return d_q, d_k, d_v


@joins_batches
@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "ordered", "interpret"))
def joined_backward(
    joined_BTKGH: jax.Array,
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
) -> tuple[jax.Array]:
    """As backward, of queries, keys and values in one array [B, T, K, G + 2, H] -> (its gradient,)."""
    heads, joined_BTMH = in_heads(joined_BTKGH)
    how = scale, soft_cap, ordered, interpret
    bounds = lower_BT, upper_BT
    d_q_BTNH, (d_joined,) = _backward((joined_BTMH,), (out_BTNH, d_out_BTNH), lse_BNT, bounds, heads, *how)
    batch, length, kv_heads, _, head_dim = joined_BTKGH.shape
    d_q = d_q_BTNH.reshape(batch, length, kv_heads, heads.group, head_dim)
    # The kernel wrote the others' places, and XLA writes these into the same memory; without the barrier it would do
    # so after a transposition.
    d_joined = lax.dynamic_update_slice(d_joined.reshape(joined_BTKGH.shape), d_q, (0,) * 5)
    return (with_layout_constraint(d_joined, Layout(tuple(range(5)))),)


def _backward(arrays, outs, lse_BNT, bounds, heads: Heads, scale, soft_cap, ordered, interpret):
    """arrays: q, k and v, or the one that has all heads. outs: out and d_out. -> (d_q, (d_k and d_v, or the array that
    has them, without d_q))."""
    batch, length, _, head_dim = arrays[0].shape
    num_keys = arrays[-1].shape[1]
    if length % 8 or num_keys % 8:
        lse = to_eights(lse_BNT, axis=2, constant_values=-MASKED_SCORE)
        given = tuple(map(to_eights, arrays)), tuple(map(to_eights, outs)), lse
        wide_bounds = tuple(to_eights(a, mode="edge") for a in bounds)
        d_q, d_kv = _backward(*given, wide_bounds, heads, scale, soft_cap, ordered, interpret)
        return d_q[:, :length], tuple(d[:, :num_keys] for d in d_kv)
    dtype = arrays[0].dtype
    tiles = TILES[head_dim]
    block_q = tiles.backward_queries
    lower_BT, upper_BT = bounds
    ranges = ranges_of_queries(lower_BT, upper_BT, block_q, tiles.backward_keys, num_keys)
    bytes_of_head = heads.group * length * head_dim * (4 + 2 * dtype.itemsize)
    # If ordered, tiles that add first are claimed first: no tile waits for one that has not been claimed.
    schedule = Schedule(batch, heads.keys, ranges.shape[1], bytes_of_head, last_first=ordered, interpret=interpret)
    beyond = (0, -length % block_q)
    # Queries beyond the end have the mask of the last one, with p = exp2(0 - 1e30) = 0.
    bounds = jnp.pad(jnp.stack([lower_BT, upper_BT], 1), [(0, 0), (0, 0), beyond], mode="edge")
    out_BTNH, d_out_BTNH = outs
    delta_BNT = jnp.sum(out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32), -1).transpose(0, 2, 1)
    lse_BNT = jnp.pad(lse_BNT * LOG2E, [(0, 0), (0, 0), beyond], constant_values=-MASKED_SCORE)
    delta_BNT = jnp.pad(delta_BNT, [(0, 0), (0, 0), beyond])
    q_tiles = bounds.shape[2] // block_q
    plan = Plan(schedule, tiles, heads, head_dim, q_tiles, dtype, scale, soft_cap, ordered)
    written = arrays[-2:]  # has the shapes of what the kernel writes
    out_type = [jax.ShapeDtypeStruct(a.shape, dtype) for a in written]

    def body(*refs):
        q, k, v = refs[:1] * 3 if heads.joined else refs[:3]
        d_out, lse, delta, bounds, ranges, d_q, *rest = refs[len(arrays) :]
        d_k, d_v = rest[:1] * 2 if heads.joined else rest[:2]
        gmem = Global(q, k, v, d_out, lse, delta, bounds, ranges, d_q, d_k, d_v)
        run_block(plan, gmem, Shared(*rest[len(written) :]))

    run = kernel(body, out_type, [*plan.shared_memory()], schedule.blocks, interpret)

    def accumulate(refs):
        d_q_ref, *d_kv_refs = refs
        # .fun: without vmap, whose wrapper refuses an array that is modified in place (jax 0.10)
        results = run.fun(*arrays, d_out_BTNH, lse_BNT, delta_BNT, bounds, ranges, d_q_ref)
        for ref, result in zip(d_kv_refs, results, strict=True):
            ref[...] = result

    # A zero that depends on d_out: otherwise XLA allocates the zeros of all layers at once, before the first use.
    zero, _ = lax.optimization_barrier((jnp.float32(0), delta_BNT))
    d_q, *d_kv = pl.run_state(accumulate)((jnp.full(out_BTNH.shape, zero), *map(jnp.zeros_like, written)))
    return (d_q * scale).astype(dtype), tuple(d_kv)
