"""The largest values of each row, for routers on Hopper (Pallas, Mosaic GPU).

    top_k  numbers[t] = where the count largest of values[t] are, descending, the first of equal ones first

Dimensions: T rows, E values of a row. float32. XLA sorts the rows, or takes three kernels for few of them.

A block of 128 threads has a row: it compares all pairs, so that the rank of a value is how many are before it, and sums
the numbers of those with the ranks 0, 1, ... The limit is E^2 comparisons a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registers import load_as, store_narrow

MAX_VALUES = 512
TILE = 64  # values that are compared with all others at a time


def problem(num_values: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used, or an empty string."""
    if dtype != jnp.float32:
        return f"dtype {dtype}"
    return f"{num_values} values" if num_values > MAX_VALUES or num_values % TILE else ""


@functools.partial(jax.jit, static_argnames=("count", "interpret"))  # lowered once for all layers
def top_k(values_TE: jax.Array, count: int, *, interpret: Any = None) -> jax.Array:
    """-> int32 [T, count]; of rows with NaN any numbers, also above E."""
    num_rows, num_values = values_TE.shape
    columns = -(-count // 8) * 8
    tiles = num_values // TILE
    own, other = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))

    def wide(a, shape, dim):
        return plgpu.layout_cast(lax.broadcast_in_dim(a, shape, [dim]), plgpu.Layout.WGMMA)

    def index(shape, dim, tile):
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) + tile * TILE

    def body(own_ref, other_ref, out_ref):
        row = lax.axis_index("row")

        def load(ref, tile, layout):
            return load_as(ref.at[row, pl.ds(tile * TILE, TILE)], layout, optimized=False)

        def add_before(tile, other_tile, count):
            """Adds how many values of the other tile are before each of a tile."""
            shape = TILE, TILE
            mine = wide(load(own_ref, tile, own), shape, 0)
            theirs = wide(load(other_ref, other_tile, other), shape, 1)
            is_earlier = index(shape, 1, other_tile) < index(shape, 0, tile)
            is_before = (theirs > mine) | ((theirs == mine) & is_earlier)
            return count + plgpu.layout_cast(jnp.sum(jnp.where(is_before, 1.0, 0.0), 1), own)

        def add_chosen(tile, numbers):
            """Adds the numbers of the values of a tile that have the ranks 0, 1, ..."""
            shape = TILE, columns
            none = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), own)
            rank = lax.fori_loop(0, tiles, functools.partial(add_before, tile), none)
            is_here = wide(rank, shape, 0).astype(jnp.int32) == index(shape, 1, 0)
            number = index(shape, 0, tile).astype(jnp.float32)
            return numbers + plgpu.layout_cast(jnp.sum(jnp.where(is_here, number, 0.0), 0), other)

        nothing = plgpu.layout_cast(jnp.zeros(columns, jnp.float32), other)
        store_narrow(out_ref.at[row], lax.fori_loop(0, tiles, add_chosen, nothing).astype(jnp.int32))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        # No barrier is missing: the kernel writes nothing to shared memory itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    # Twice: a value has one layout of registers, and two loads of the same address would be one value.
    return run(values_TE, values_TE)[:, :count]
