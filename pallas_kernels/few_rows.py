"""Products of a few rows with the matrices of several groups, for decoding with experts on Hopper (Pallas, Mosaic GPU).

    out[w, z] = (rows[z] @ matrices[w][groups[z]]).T    for each slot z that has a group

Dimensions: Z slots, each with a group and up to R rows, or with group E: none; R a multiple of 8; E groups, W matrices
per group, K and N the axes of a matrix, S parts into which the contracted axis is split. rows [Z, R, K], or [1, R, K]
for the same rows in all slots; bfloat16. Sums are float32, and those of the S parts are added by the caller.

The limit is memory bandwidth: the matrices of the slots that are used are read once, 2 K N bytes each, whatever R is. A
block of 128 threads computes 128 columns of one matrix and one part: the columns are the rows of the tensor-core
products (transposed matrix times transposed rows), so that nothing is computed for rows that do not exist. A ring of
STAGES steps of 64 contracted elements is in flight (TMA), 17 KB each up to 8 rows; three blocks fit on a
multiprocessor, and K is split until there are at least two. Slots without a group are skipped, and their results are
undefined.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS, STEP, STAGES = 128, 64, 4
ALIGNED = 8  # rows
MAX_ROWS = 64
BLOCKS = 2 * 132  # at least: two per multiprocessor of an H100 SXM, H200 or GH200


def problem(num_rows: int, contracted: int, width: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used for matrices [contracted, width], or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if contracted % STEP or width % COLUMNS:
        return f"widths {contracted} and {width}"
    return f"{num_rows} rows" if num_rows > MAX_ROWS else ""


def num_parts(num_blocks: int, contracted: int) -> int:
    """Parts of the contracted axis, so that num_blocks times as many blocks fill the GPU."""
    steps = contracted // STEP
    parts = [number for number in range(1, steps + 1) if steps % number == 0 and steps // number >= STAGES]
    return next((number for number in parts if number * num_blocks >= BLOCKS), max(parts, default=1))


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def products(
    rows_ZRK: jax.Array, matrices: Sequence[jax.Array], groups_Z: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """-> float32 [W, S, Z, N, R]. matrices: [E, K, N] each. groups: int32."""
    num_slots = groups_Z.shape[0]
    _, num_rows, contracted = rows_ZRK.shape
    num_groups, _, width = matrices[0].shape
    tiles = width // COLUMNS
    parts = num_parts(num_slots * len(matrices) * tiles, contracted)
    steps = contracted // STEP // parts
    stages = min(STAGES, steps)

    def body(rows_ref, groups_ref, *refs):
        *matrix_refs, out_ref, full, rows_smem, matrix_smem = refs
        slot, column, part = (lax.axis_index(name) for name in ("slot", "column", "part"))
        of_rows = slot if rows_ref.shape[0] > 1 else 0
        which = lax.div(column, tiles)
        columns = pl.ds(lax.rem(column, tiles) * COLUMNS, COLUMNS)

        def copy(group, step):
            stage = lax.rem(step, stages)
            inner = pl.ds((part * steps + step) * STEP, STEP)
            plgpu.copy_gmem_to_smem(rows_ref.at[of_rows, :, inner], rows_smem.at[stage], full.at[stage])
            for number, ref in enumerate(matrix_refs):

                @pl.when(which == number)
                def _(ref=ref):
                    plgpu.copy_gmem_to_smem(ref.at[group, inner, columns], matrix_smem.at[stage], full.at[stage])

        def sums(group, acc_ref):
            def one_step(step, _):
                stage = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(acc_ref, _transposed(matrix_smem.at[stage]), _transposed(rows_smem.at[stage]))
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # all threads have read this stage
                pl.when(step + stages < steps)(lambda: copy(group, step + stages))

            lax.fori_loop(0, steps, one_step, None)
            return acc_ref[...]

        group = groups_ref[slot]

        @pl.when(group < num_groups)
        def _compute():
            for step in range(stages):
                copy(group, step)
            result = pl.run_scoped(functools.partial(sums, group), plgpu.ACC((COLUMNS, num_rows), jnp.float32))
            out_ref[which, part, slot, columns] = result

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(matrices), parts, num_slots, width, num_rows), jnp.float32),
        scratch_types=[
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            _swizzled((stages, num_rows, STEP), rows_ZRK.dtype),
            _swizzled((stages, STEP, COLUMNS), rows_ZRK.dtype),
        ],
        grid=(num_slots, len(matrices) * tiles, parts),
        grid_names=("slot", "column", "part"),
        # commit_smem is the only barrier that is needed: threads write no shared memory.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return run(rows_ZRK, groups_Z, *matrices)


def _transposed(ref):
    return ref.transpose((1, 0))


def _swizzled(shape, dtype):
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128)))
