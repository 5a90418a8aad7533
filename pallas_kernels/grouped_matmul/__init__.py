"""Grouped matmul on Hopper: rows sorted by group, times one matrix per group.

Dimensions: R rows, E groups, W matrices per group (one or two) whose results are side by side, K and N the axes of a
matrix.

    forward          out[r, w] = rows[r] @ matrices[w][g(r)]            [R, K] -> [R, W, N]
    input_gradient   d_rows[r] = sum_w d_out[r, w] @ matrices[w][g(r)].T   [R, W, N] -> [R, K]
    weight_gradient  d_matrices[w][g] = rows of g .T @ d_out[rows of g, w]   -> W arrays [E, K, N]

Products accumulate in float32. Rows after the last group give zeros, and a group without rows a zero weight gradient.

One persistent block per multiprocessor computes tiles of 128 x 256 with 64 contracted elements a step: one warpgroup
loads (TMA), two compute 64 rows of the tile each (wgmma). A group begins at any row, but TMA loads at multiples of
eight: the first tile of a group begins up to seven rows before it, and rows of other groups are masked, by the store
or, where rows are contracted, in shared memory. Consecutive tiles share rows and matrices, so that both come from L2.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.products import Products, row_tiles
from pallas_kernels.grouped_matmul.steps import ALIGNED, run
from pallas_kernels.grouped_matmul.weight_gradients import WeightGradients


def problem(contracted: int, width: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used for matrices of [contracted, width], or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    return "" if contracted % 64 == 0 and width % 64 == 0 else f"widths {contracted} and {width}"


@functools.partial(jax.jit, static_argnames="interpret")
def forward(rows_RK, matrices: Sequence[jax.Array], sizes_E, *, interpret: Any = None) -> jax.Array:
    """sizes_E: int32, rows of each group, together at most R. interpret: plgpu.InterpretGPUParams, to run on CPU."""
    num_rows, contracted = rows_RK.shape
    if num_rows % ALIGNED:
        return forward(_to_eights(rows_RK), matrices, sizes_E, interpret=interpret)[:num_rows]
    width = matrices[0].shape[2]
    plan = Products(len(matrices), contracted, width, False, rows_RK.dtype, bool(interpret))
    out_type = jax.ShapeDtypeStruct((num_rows, len(matrices), width), rows_RK.dtype)
    return run(plan, out_type, interpret)(row_tiles(sizes_E, num_rows), rows_RK, *matrices)


@functools.partial(jax.jit, static_argnames="interpret")
def input_gradient(d_out_RWN, matrices: Sequence[jax.Array], sizes_E, *, interpret: Any = None) -> jax.Array:
    num_rows, num_matrices, width = d_out_RWN.shape
    if num_rows % ALIGNED:
        return input_gradient(_to_eights(d_out_RWN), matrices, sizes_E, interpret=interpret)[:num_rows]
    plan = Products(num_matrices, width, matrices[0].shape[1], True, d_out_RWN.dtype, bool(interpret))
    out_type = jax.ShapeDtypeStruct((num_rows, 1, plan.width), d_out_RWN.dtype)
    call = run(plan, out_type, interpret)
    d_out = d_out_RWN.reshape(num_rows, num_matrices * width)
    return call(row_tiles(sizes_E, num_rows), d_out, *matrices)[:, 0]


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def weight_gradient(rows_RK, d_out_RWN, sizes_E, *, dtype: jnp.dtype, interpret: Any = None) -> tuple[jax.Array, ...]:
    num_rows, num_matrices, width = d_out_RWN.shape
    if num_rows % ALIGNED:
        rows, d_out = (_to_eights(a) for a in (rows_RK, d_out_RWN))
        return weight_gradient(rows, d_out, sizes_E, dtype=dtype, interpret=interpret)
    num_groups = sizes_E.shape[0]
    plan = WeightGradients(num_matrices, rows_RK.shape[1], width, num_groups, rows_RK.dtype, jnp.dtype(dtype))
    out_type = [jax.ShapeDtypeStruct((num_groups, rows_RK.shape[1], width), dtype)] * num_matrices
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    bounds = jnp.stack([ends_E - sizes_E, ends_E], 1)
    return tuple(run(plan, out_type, interpret)(bounds, rows_RK, d_out_RWN))


def _to_eights(a):
    return jnp.pad(a, [(0, -a.shape[0] % ALIGNED)] + [(0, 0)] * (a.ndim - 1))
