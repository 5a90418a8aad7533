"""Inverses of unit lower triangular matrices, for the chunks of gated delta nets on Hopper (Pallas, Mosaic GPU).

By blocks of 1, 2, 4, ... rows: with D the inverses of the blocks on the diagonal, and C what is below them in blocks of
twice the size, the inverses of these are D - D C D. A warpgroup inverts one matrix [Q, Q] on the chip. Each of the two
products is three of the tensor cores, with every float32 number as a sum of two in bfloat16: 16 bits are right.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registers import load_as, store_narrow
from pallas_kernels.shared_memory import swizzled

SIZE = 64
# commit_smem is the only barrier that is needed.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def problem(size: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used for matrices [size, size] whose inverse has this dtype, or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    return "" if size == SIZE else f"chunks of {size} tokens"


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def inverse(systems_MQQ: jax.Array, *, interpret: Any = None) -> jax.Array:
    """-> bfloat16 [M, Q, Q]. systems: float32, of which what is below the diagonal is read."""
    num_systems, size, _ = systems_MQQ.shape

    def body(systems_ref, inverses_ref, below_smem, inverse_smem):
        number = lax.axis_index("system")
        system = load_as(systems_ref.at[number], plgpu.Layout.WGMMA, optimized=False)
        row, column = (_iota(axis) for axis in range(2))
        below = jnp.where((row == column + 1) & (lax.rem(row, 2) == 1), system, 0.0)
        found = jnp.where(row == column, 1.0, 0.0) - below
        block = 2
        while block < size:
            rows, columns = lax.div(row, block), lax.div(column, block)
            below = jnp.where((rows == columns + 1) & (lax.rem(rows, 2) == 1), system, 0.0)
            parts = _parts(found)
            for smem, both in ((below_smem, _parts(below)), (inverse_smem, parts)):
                for place, part in enumerate(both):
                    smem[place] = part
            plgpu.commit_smem()
            product = _product(_parts(_product(parts, below_smem)), inverse_smem)
            plgpu.commit_smem()  # all threads have read the shared memory
            found -= product
            block *= 2
        store_narrow(inverses_ref.at[number], found.astype(inverses_ref.dtype))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(systems_MQQ.shape, jnp.bfloat16),
        scratch_types=[swizzled((2, size, size), jnp.bfloat16) for _ in range(2)],
        grid=(num_systems,),
        grid_names=("system",),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(systems_MQQ)


def _iota(axis: int):
    return plgpu.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis, layout=plgpu.Layout.WGMMA)


def _parts(a):
    """-> two arrays in bfloat16, whose sum is a to 16 bits."""
    high = a.astype(jnp.bfloat16)
    return high, (a - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _product(parts, other_smem):
    high, low = parts

    def product(ref):
        plgpu.wgmma(ref, high, other_smem.at[0])
        plgpu.wgmma(ref, high, other_smem.at[1])
        plgpu.wgmma(ref, low, other_smem.at[0])
        return ref[...]

    return pl.run_scoped(product, plgpu.ACC((SIZE, SIZE), jnp.float32))
