"""Products of a few rows with the matrices of several groups, for decoding with experts on Hopper (Pallas, Mosaic GPU).

    products  out[z] = rows[z] @ matrix[groups[z]]                 for each slot z that has a group
    hidden    out[z] = f(rows @ gate[groups[z]]) * (rows @ up[groups[z]]) * weights[z]

Dimensions: Z slots, each with a group and up to R rows, or with group E: none; R a multiple of 8; E groups, K and N
the axes of a matrix, S parts into which the contracted axis is split. bfloat16; sums are float32, and those of the S
parts are added by the caller.

The limit is memory bandwidth: the matrices of the slots that are used are read once, 2 K N bytes each, whatever R is.
The columns of a matrix are the rows of the tensor-core products (transposed matrix times transposed rows), so that
nothing is computed for rows that do not exist. A block of 128 threads computes 128 columns of one part of a product, or
64 columns of both matrices of hidden, with the activation in registers. A ring of steps of 64 contracted elements is in
flight (TMA), up to 8 rows 17 KB each; products have four and three blocks per multiprocessor, and K is split until
there are at least two; hidden has six and two blocks. Slots without a group are skipped, and their results are
undefined.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gated, registers
from pallas_kernels.shared_memory import swizzled

COLUMNS, STEP, STAGES = 128, 64, 4
HIDDEN_COLUMNS, HIDDEN_STAGES = 64, 6
MAX_ROWS = 64
BLOCKS = 2 * 132  # at least: two per multiprocessor of an H100 SXM, H200 or GH200
# commit_smem is the only barrier that is needed: threads write no shared memory.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def problem(num_rows: int, contracted: int, width: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used for matrices [contracted, width], or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if contracted % STEP or width % COLUMNS:
        return f"widths {contracted} and {width}"
    return f"{num_rows} rows" if num_rows > MAX_ROWS else ""


def num_parts(num_blocks: int, steps: int, wanted: int) -> int:
    """Parts of the steps of the contracted axis, so that num_blocks times as many blocks are at least `wanted`."""
    parts = [number for number in range(1, steps + 1) if steps % number == 0 and steps // number >= STAGES]
    return next((number for number in parts if number * num_blocks >= wanted), max(parts, default=1))


@functools.partial(jax.jit, static_argnames=("function", "interpret"))  # lowered once for all layers
def hidden(
    rows_nK: jax.Array, gate_EKF: jax.Array, up_EKF: jax.Array, groups_Z: jax.Array, weights_ZR: jax.Array, *,
    function: str, interpret: Any = None
) -> jax.Array:  # fmt: skip
    """-> [Z, R, F], zero where a weight is. groups: int32. weights: float32. function: a name in gated.FUNCTIONS.

    n: up to R; further rows are zero.
    """
    num_slots, num_rows = weights_ZR.shape
    contracted = rows_nK.shape[1]
    num_groups, _, width = gate_EKF.shape
    steps = contracted // STEP
    stages = min(HIDDEN_STAGES, steps)
    dtype = rows_nK.dtype

    def body(rows_ref, groups_ref, weights_ref, *refs):
        *matrix_refs, out_ref, full, rows_smem, matrices_smem = refs
        slot, column = (lax.axis_index(name) for name in ("slot", "column"))
        columns = pl.ds(column * HIDDEN_COLUMNS, HIDDEN_COLUMNS)
        group = groups_ref[slot]
        # TMA fills rows beyond the array with zeros, but Pallas refuses a slice that it knows to end there.
        first = lax.rem(slot, 1)
        all_rows = pl.ds(first, num_rows)

        def copy(step):
            stage = lax.rem(step, stages)
            inner = pl.ds(step * STEP, STEP)
            plgpu.copy_gmem_to_smem(rows_ref.at[all_rows, inner], rows_smem.at[stage], full.at[stage])
            for number, ref in enumerate(matrix_refs):
                target = matrices_smem.at[number, stage]
                plgpu.copy_gmem_to_smem(ref.at[group, inner, columns], target, full.at[stage])

        def sums(*acc_refs):
            def products_of(stage):
                for number, acc_ref in enumerate(acc_refs):
                    matrix = _transposed(matrices_smem.at[number, stage])
                    plgpu.wgmma(acc_ref, matrix, _transposed(rows_smem.at[stage]))

            _for_each_step(steps, stages, full, products_of, copy)
            return [acc_ref[...] for acc_ref in acc_refs]

        @pl.when(group < num_groups)
        def _compute():
            for step in range(stages):
                copy(step)
            gate, up = pl.run_scoped(sums, *[plgpu.ACC((HIDDEN_COLUMNS, num_rows), jnp.float32)] * 2)
            weights = registers.load_as(weights_ref.at[slot], plgpu.Layout.WGMMA.reduce(0), optimized=False)
            wide = lax.broadcast_in_dim(weights, gate.shape, [1])
            value = jnp.where(wide != 0, gated.FUNCTIONS[function](gate)[0] * up * wide, 0.0)
            registers.store_transposed(out_ref.at[slot, :, columns], value.astype(dtype))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_slots, num_rows, width), dtype),
        scratch_types=[
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            swizzled((stages, num_rows, STEP), dtype),
            swizzled((2, stages, STEP, HIDDEN_COLUMNS), dtype),
        ],
        grid=(num_slots, width // HIDDEN_COLUMNS),
        grid_names=("slot", "column"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(rows_nK, groups_Z, weights_ZR, gate_EKF, up_EKF)


@functools.partial(jax.jit, static_argnames=("interpret",))
def products(rows_ZRK: jax.Array, matrix_EKN: jax.Array, groups_Z: jax.Array, *, interpret: Any = None) -> jax.Array:
    """-> float32 [S, Z, R, N]. groups: int32."""
    num_slots, num_rows, contracted = rows_ZRK.shape
    num_groups, _, width = matrix_EKN.shape
    tiles = width // COLUMNS
    parts = num_parts(num_slots * tiles, contracted // STEP, BLOCKS)
    steps = contracted // STEP // parts
    stages = min(STAGES, steps)

    def body(rows_ref, groups_ref, matrix_ref, out_ref, full, rows_smem, matrix_smem):
        slot, column, part = (lax.axis_index(name) for name in ("slot", "column", "part"))
        columns = pl.ds(column * COLUMNS, COLUMNS)
        group = groups_ref[slot]

        def copy(step):
            stage = lax.rem(step, stages)
            inner = pl.ds((part * steps + step) * STEP, STEP)
            plgpu.copy_gmem_to_smem(rows_ref.at[slot, :, inner], rows_smem.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(matrix_ref.at[group, inner, columns], matrix_smem.at[stage], full.at[stage])

        def sums(acc_ref):
            def product_of(stage):
                plgpu.wgmma(acc_ref, _transposed(matrix_smem.at[stage]), _transposed(rows_smem.at[stage]))

            _for_each_step(steps, stages, full, product_of, copy)
            return acc_ref[...]

        @pl.when(group < num_groups)
        def _compute():
            for step in range(stages):
                copy(step)
            products = pl.run_scoped(sums, plgpu.ACC((COLUMNS, num_rows), jnp.float32))
            registers.store_transposed(out_ref.at[part, slot, :, columns], products)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, num_slots, num_rows, width), jnp.float32),
        scratch_types=[
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            swizzled((stages, num_rows, STEP), rows_ZRK.dtype),
            swizzled((stages, STEP, COLUMNS), rows_ZRK.dtype),
        ],
        grid=(num_slots, tiles, parts),
        grid_names=("slot", "column", "part"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(rows_ZRK, groups_Z, matrix_EKN)


def _for_each_step(steps: int, stages: int, full, products_of: Callable, copy: Callable) -> None:
    """Multiplies what a step has copied, and then copies another one to its place."""

    def one_step(step, _):
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(full.at[stage])
        products_of(stage)
        plgpu.wgmma_wait(0)
        plgpu.commit_smem()  # all threads have read this stage
        pl.when(step + stages < steps)(lambda: copy(step + stages))

    lax.fori_loop(0, steps, one_step, None)


def _transposed(ref):
    return ref.transpose((1, 0))
