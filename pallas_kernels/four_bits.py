"""Products of up to 512 rows with a matrix in 4 bits, for decoding on Hopper (Pallas, Mosaic GPU).

    out[r, n] = sum_g scale[g, n] * sum_(k in g) (level[n, k] - zero[g, n]) * rows[r, k]

Dimensions: R rows, those of T tiles, each a multiple of 8; K inputs, N outputs; G groups of GROUP consecutive inputs;
B = K / 2 bytes of two levels as int4, one of the first half of a group in the lower bits and one of the second half in
the upper ones; S parts into which the groups are split. Rows are bfloat16, sums float32, and those of the S parts are
added by the caller.

The limit of one tile is memory bandwidth, that of several the tensor cores: the blocks of all tiles that read the same
bytes follow one another, so that they find these in the cache, and each makes the factors anew. The outputs are the
rows of the tensor-core products, and their factors are made in registers, with 11 instructions for eight levels. A
thread of the tensor cores has inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of 16. So that it reads them as one word, and
threads exchange nothing, the eight pairs of 16 bytes are in bit-reversed order: 0 4 2 6 1 5 3 7. A block of 128 threads
computes 128 outputs of a part and of a tile, with a ring of steps of one group in flight (TMA), 11 KB each with 8 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import few_rows, registers
from pallas_kernels.shared_memory import swizzled

GROUP, OUTPUTS, STAGES = 128, 128, 4
TILE, MAX_ROWS = 64, 512
BIAS = 136
MULTIPROCESSORS = 132  # of an H100 SXM, H200 or GH200
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


def padded(num_rows: int) -> int:
    """The next number of rows that can be multiplied."""
    multiple = 8 * num_tiles_of(num_rows)
    return -(-num_rows // multiple) * multiple


def num_tiles_of(num_rows: int) -> int:
    return -(-num_rows // TILE)


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def products(
    rows_RK: jax.Array, values_NB: jax.Array, scale_GN: jax.Array, zero_GN: jax.Array | None, *, interpret: Any = None
) -> jax.Array:
    """-> float32 [S, R, N]. values: uint8. scale: a dtype of floats. zero: int8; None: 0."""
    num_tiles = num_tiles_of(rows_RK.shape[0])
    num_rows = rows_RK.shape[0] // num_tiles
    num_groups, num_outputs = scale_GN.shape
    dtype = rows_RK.dtype
    # At least as many blocks as fit: four per multiprocessor, or two if they have many rows.
    blocks = (4 if num_rows <= TILE // 2 else 2) * MULTIPROCESSORS
    parts = few_rows.num_parts(num_tiles * num_outputs // OUTPUTS, num_groups, blocks)
    steps = num_groups // parts
    stages = min(STAGES, steps)
    half = GROUP // 2

    def body(*refs):
        *sources, out_ref, full, rows_smem, values_smem, scale_smem, zero_smem = refs
        rows_ref, values_ref, *of_groups_refs = sources
        column, part, tile = (lax.axis_index(name) for name in ("column", "part", "tile"))
        outputs = pl.ds(column * OUTPUTS, OUTPUTS)
        rows = pl.ds(tile * num_rows, num_rows)

        def copy(step):
            stage = lax.rem(step, stages)
            group = part * steps + step
            inputs, inner = pl.ds(group * GROUP, GROUP), pl.ds(group * half, half)
            plgpu.copy_gmem_to_smem(rows_ref.at[rows, inputs], rows_smem.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(values_ref.at[outputs, inner], values_smem.at[stage], full.at[stage])
            for source, target in zip(of_groups_refs, (scale_smem, zero_smem), strict=False):
                plgpu.copy_gmem_to_smem(source.at[group, outputs], target.at[stage], full.at[stage])

        def of_group(ref, stage):
            return registers.load_as(ref.at[stage], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)

        def one_step(step, sums):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(full.at[stage])
            scale = of_group(scale_smem, stage)
            zero = None if zero_smem is None else of_group(zero_smem, stage)
            factors = _factors(values_smem.at[stage], zero, dtype)
            product = pl.run_scoped(
                functools.partial(_product, factors, rows_smem.at[stage]),
                plgpu.ACC((OUTPUTS, num_rows), jnp.float32),
            )
            plgpu.commit_smem()  # all threads have read this stage
            pl.when(step + stages < steps)(lambda: copy(step + stages))
            return sums + product * lax.broadcast_in_dim(scale, product.shape, [0])

        for step in range(stages):
            copy(step)
        zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, num_rows), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, steps, one_step, zeros)
        registers.store_transposed(out_ref.at[part, rows, outputs], sums)

    of_groups = [array for array in (scale_GN, zero_GN) if array is not None]
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, num_tiles * num_rows, num_outputs), jnp.float32),
        scratch_types=[
            plgpu.Barrier(num_arrivals=2 + len(of_groups), num_barriers=stages),
            swizzled((stages, num_rows, GROUP), dtype),
            swizzled((stages, OUTPUTS, half), values_NB.dtype),
            plgpu.SMEM((stages, OUTPUTS), scale_GN.dtype),
            None if zero_GN is None else plgpu.SMEM((stages, OUTPUTS), zero_GN.dtype),
        ],
        grid=(num_outputs // OUTPUTS, parts, num_tiles),  # the last axis changes first
        grid_names=("column", "part", "tile"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(rows_RK, values_NB, *of_groups)


def _factors(values_ref, zero, dtype):
    """-> (level - zero of the lower bits, that of the upper ones), [N, B] in registers."""
    shape = values_ref.shape
    factors = _biased(registers.load_as(values_ref, plgpu.Layout.WGMMA_UPCAST_2X), shape, dtype)
    if zero is None:
        return [factor - jnp.asarray(BIAS, dtype) for factor in factors]
    wide = lax.broadcast_in_dim((zero + BIAS).astype(dtype), shape, [0])
    return [factor - wide for factor in factors]


def _biased(values, shape, dtype):
    """uint8 [N, B] -> (BIAS + level of the lower bits, that of the upper ones).

    A level plus 8 becomes the lowest bits of a bfloat16 between 128 and 256, where these count ones.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,),
        return_type=[plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)] * 2,
    )
    def unpacked(_, values):
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())

        def constant(value):
            return arith.constant(word, value)

        found = [np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object) for _ in range(2)]
        for (rows, columns, *others, _), register in np.ndenumerate(values.registers):
            packed = mgpu_utils.bitcast(register, word)
            for halves, levels in zip(found, (packed, arith.shrui(packed, constant(4))), strict=True):
                levels = arith.xori(arith.andi(levels, constant(0x0F0F0F0F)), constant(0x08080808))
                for half, bytes_of_pair in enumerate((0x4140, 0x4342)):
                    value = mgpu_utils.prmt(levels, constant(0x43), constant(bytes_of_pair))
                    halves[rows, 2 * columns + half, *others] = mgpu_utils.bitcast(value, pair)
        return [mgpu.FragmentedArray(_registers=halves, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None) for halves in found]

    return unpacked(values)


def _product(factors, rows_ref, sum_ref):
    for number, factor in enumerate(factors):
        half = pl.ds(number * GROUP // 2, GROUP // 2)
        plgpu.wgmma(sum_ref, factor, rows_ref.at[:, half].transpose((1, 0)))
    return sum_ref[...]
