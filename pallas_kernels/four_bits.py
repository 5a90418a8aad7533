"""Products of a few rows with a matrix in 4 bits, for decoding on Hopper (Pallas, Mosaic GPU).

    out[n, r] = sum_g scale[g, n] * sum_(k in g) (level[n, k] - zero[g, n]) * rows[r, k]

Dimensions: R rows, a multiple of 8; K inputs, N outputs; G groups of GROUP consecutive inputs; B = K / 2 bytes, in
order of the groups, with the levels of the first half of a group in the lower bits and those of the second half in the
upper ones, as int4; S parts into which the groups are split. Rows are bfloat16, sums float32, and those of the S parts
are added by the caller.

The limit is memory bandwidth: the bytes are read once, whatever R is. The outputs are the rows of the tensor-core
products, and their factors are made in registers: a bfloat16 holds level - zero, and 16 times it, exactly, so that both
levels of a byte stay where they are. A block of 128 threads computes 128 outputs of a part, with a ring of steps of one
group in flight (TMA), 11 KB each with 8 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.few_rows import num_parts

GROUP, OUTPUTS, STAGES = 128, 128, 4
MAX_ROWS = 32
# commit_smem is the only barrier that is needed: threads write no shared memory.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def problem(num_rows: int, inputs: int, outputs: int, num_groups: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used, or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if inputs != GROUP * num_groups:
        return f"groups of {inputs // num_groups}"
    if outputs % OUTPUTS:
        return f"{outputs} outputs"
    return f"{num_rows} rows" if num_rows > MAX_ROWS else ""


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def products(
    rows_RK: jax.Array, values_NB: jax.Array, scale_GN: jax.Array, zero_GN: jax.Array | None, *, interpret: Any = None
) -> jax.Array:
    """-> float32 [S, N, R]. values: uint8. scale: a dtype of floats. zero: int8; None: 0."""
    num_rows = rows_RK.shape[0]
    num_groups, num_outputs = scale_GN.shape
    dtype = rows_RK.dtype
    parts = num_parts(num_outputs // OUTPUTS, num_groups)
    steps = num_groups // parts
    stages = min(STAGES, steps)
    half = GROUP // 2

    def body(*refs):
        *sources, out_ref, full, rows_smem, values_smem, scale_smem, zero_smem = refs
        rows_ref, values_ref, *of_groups_refs = sources
        tile, part = (lax.axis_index(name) for name in ("tile", "part"))
        outputs = pl.ds(tile * OUTPUTS, OUTPUTS)

        def copy(step):
            stage = lax.rem(step, stages)
            group = part * steps + step
            inputs, inner = pl.ds(group * GROUP, GROUP), pl.ds(group * half, half)
            plgpu.copy_gmem_to_smem(rows_ref.at[:, inputs], rows_smem.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(values_ref.at[outputs, inner], values_smem.at[stage], full.at[stage])
            for source, target in zip(of_groups_refs, (scale_smem, zero_smem), strict=False):
                plgpu.copy_gmem_to_smem(source.at[group, outputs], target.at[stage], full.at[stage])

        def of_group(ref, stage):
            return plgpu.load(ref, (stage,), layout=plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)

        def one_step(step, sums):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(full.at[stage])
            scale = of_group(scale_smem, stage)
            zero = None if zero_smem is None else of_group(zero_smem, stage)
            factors = _factors(values_smem.at[stage], zero, dtype)
            products_of = functools.partial(_products, factors, rows_smem.at[stage])
            lower, upper = pl.run_scoped(products_of, *[plgpu.ACC((OUTPUTS, num_rows), jnp.float32)] * 2)
            plgpu.commit_smem()  # all threads have read this stage
            pl.when(step + stages < steps)(lambda: copy(step + stages))
            return sums + (lower + upper * (1 / 16)) * lax.broadcast_in_dim(scale, lower.shape, [0])

        for step in range(stages):
            copy(step)
        zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, num_rows), jnp.float32), plgpu.Layout.WGMMA)
        out_ref[part, outputs] = lax.fori_loop(0, steps, one_step, zeros)

    of_groups = [array for array in (scale_GN, zero_GN) if array is not None]
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, num_outputs, num_rows), jnp.float32),
        scratch_types=[
            plgpu.Barrier(num_arrivals=2 + len(of_groups), num_barriers=stages),
            _swizzled((stages, num_rows, GROUP), dtype),
            _swizzled((stages, OUTPUTS, half), values_NB.dtype),
            plgpu.SMEM((stages, OUTPUTS), scale_GN.dtype),
            None if zero_GN is None else plgpu.SMEM((stages, OUTPUTS), zero_GN.dtype),
        ],
        grid=(num_outputs // OUTPUTS, parts),
        grid_names=("tile", "part"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(rows_RK, values_NB, *of_groups)


def _factors(values_ref, zero, dtype):
    """-> (level - zero of the lower bits, 16 times that of the upper ones), [N, B] in registers."""
    pairs = lax.bitcast_convert_type(plgpu.load(values_ref, (), layout=plgpu.Layout.WGMMA_UPCAST_2X), jnp.int8)

    def converted(levels):
        return plgpu.layout_cast(levels.astype(dtype), plgpu.Layout.WGMMA)

    lower = converted((pairs & 15) ^ 8)  # level + 8
    upper = converted(pairs & -16)
    if zero is None:
        return lower - jnp.asarray(8, dtype), upper

    def wide(of_output):
        return lax.broadcast_in_dim(of_output.astype(dtype), lower.shape, [0])

    return lower - wide(zero + 8), upper - wide(zero * 16)


def _products(factors, rows_ref, *sum_refs):
    for number, (factor, sum_ref) in enumerate(zip(factors, sum_refs, strict=True)):
        half = pl.ds(number * GROUP // 2, GROUP // 2)
        plgpu.wgmma(sum_ref, factor, rows_ref.at[:, half].transpose((1, 0)))
    return [sum_ref[...] for sum_ref in sum_refs]


def _swizzled(shape, dtype):
    size = jnp.dtype(dtype).itemsize
    width = min(128, shape[-1] * size)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))
    )
