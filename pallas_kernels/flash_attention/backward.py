"""The backward pass: its arrays; backward_block.py is the program of a block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.backward_block import Global, Plan, Shared, run_block
from pallas_kernels.flash_attention.schedule import Schedule
from pallas_kernels.flash_attention.tiles import (
    LOG2E,
    MASKED_SCORE,
    TILES,
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
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_keys, kv_heads = k_BSKH.shape[1:3]
    if length % 8 or num_keys % 8:
        q, k, v, out, d_out = map(to_eights, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, d_out_BTNH))
        lse = to_eights(lse_BNT, axis=2, constant_values=-MASKED_SCORE)
        bounds = (to_eights(a, mode="edge") for a in (lower_BT, upper_BT))
        options = dict(scale=scale, soft_cap=soft_cap, ordered=ordered, interpret=interpret)
        d_q, d_k, d_v = backward(q, k, v, out, lse, d_out, *bounds, **options)
        return d_q[:, :length], d_k[:, :num_keys], d_v[:, :num_keys]
    dtype = q_BTNH.dtype
    tiles = TILES[head_dim]
    block_q = tiles.backward_queries
    ranges = ranges_of_queries(lower_BT, upper_BT, block_q, tiles.backward_keys, num_keys)
    bytes_of_head = num_heads // kv_heads * length * head_dim * (4 + 2 * dtype.itemsize)
    # If ordered, tiles that add first are claimed first: no tile waits for one that has not been claimed.
    schedule = Schedule(batch, kv_heads, ranges.shape[1], bytes_of_head, last_first=ordered, interpret=interpret)
    beyond = (0, -length % block_q)
    # Queries beyond the end have the mask of the last one, with p = exp2(0 - 1e30) = 0.
    bounds = jnp.pad(jnp.stack([lower_BT, upper_BT], 1), [(0, 0), (0, 0), beyond], mode="edge")
    delta_BNT = jnp.sum(out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32), -1).transpose(0, 2, 1)
    lse_BNT = jnp.pad(lse_BNT * LOG2E, [(0, 0), (0, 0), beyond], constant_values=-MASKED_SCORE)
    delta_BNT = jnp.pad(delta_BNT, [(0, 0), (0, 0), beyond])
    q_tiles = bounds.shape[2] // block_q
    plan = Plan(schedule, tiles, num_heads, head_dim, q_tiles, dtype, scale, soft_cap, ordered)
    out_type = [jax.ShapeDtypeStruct(k_BSKH.shape, dtype)] * 2

    def body(*refs):
        run_block(plan, Global(*refs[: len(Global._fields)]), Shared(*refs[len(Global._fields) :]))

    run = kernel(body, out_type, [*plan.shared_memory()], schedule.blocks, interpret)

    def accumulate(refs):
        d_q_ref, d_k_ref, d_v_ref = refs
        # .fun: without vmap, whose wrapper refuses an array that is modified in place (jax 0.10)
        inputs = q_BTNH, k_BSKH, v_BSKH, d_out_BTNH, lse_BNT, delta_BNT, bounds, ranges
        d_k_ref[...], d_v_ref[...] = run.fun(*inputs, d_q_ref)

    # A zero that depends on d_out: otherwise XLA allocates the zeros of all layers at once, before the first use.
    zero, _ = lax.optimization_barrier((jnp.float32(0), delta_BNT))
    d_q, d_k, d_v = pl.run_state(accumulate)(
        (jnp.full(q_BTNH.shape, zero), jnp.zeros_like(k_BSKH), jnp.zeros_like(v_BSKH))
    )
    return (d_q * scale).astype(dtype), d_k, d_v
