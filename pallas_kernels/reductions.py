"""Reductions over the threads of all warpgroups of a block. Pallas's own use one location in shared memory for all of
them (jax 0.11.2) or refuse several warpgroups (0.10.2)."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector

Kind = Literal["sum", "max"]
OVER_ARRAYS = {"sum": jnp.sum, "max": jnp.max}
OVER_PARTS = {"sum": jnp.add, "max": jnp.maximum}
IN_KERNEL = {
    "sum": functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract),
    "max": arith.maximumf,  # NaN if one of the two is
}


def scratch(values: int, warpgroups: int) -> tuple:
    """For two alternating rows and two reductions of each, of at most `values` numbers at once; and a barrier for the
    interpreter."""
    return plgpu.SMEM((2, 2, values, 4 * warpgroups), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)


def strided(shape: tuple[int, ...]):
    """Layout of 16-bit numbers: each thread holds up to 16 consecutive bytes; the 128 threads are adjacent."""
    vector = next(v for v in (8, 4, 2, 1) if math.prod(shape) % (128 * v) == 0)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=vector)


def reduced(
    values: list[list[jax.Array]],
    parts: tuple,
    slot: tuple,
    interpret: Any,
    kind: Kind = "sum",
    layout: Callable = strided,
) -> list[jax.Array]:
    """-> for each value, a list of float32 arrays, its sum or maximum over their elements and all threads.

    parts: what `scratch` made. slot: (row modulo 2, which reduction of the row); it must not be the one of the previous
    reduction, as the only barrier is between writing and reading. layout: of the arrays, by their shape.
    """
    parts_ref = parts[0].at[slot]
    met = parts[1]
    if interpret:  # the interpreter does not support inline_mgpu
        for i, value in enumerate(values):
            of_warpgroup = functools.reduce(OVER_PARTS[kind], map(OVER_ARRAYS[kind], value))
            parts_ref[i, lax.axis_index("warpgroup")] = of_warpgroup
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        groups = range(parts_ref.shape[-1] // 4)
        return [
            functools.reduce(OVER_PARTS[kind], [parts_ref[i, group] for group in groups]) for i in range(len(values))
        ]
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))
    layouts = [[layout(array.shape) for array in value] for value in values]
    inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layouts), return_type=[scalar] * len(values))
    return inline(functools.partial(_reduced, kind))(parts_ref, values)


def _reduced(kind: Kind, _, parts_ref, values):
    """parts_ref: [values or more, warps]."""
    combine = IN_KERNEL[kind]
    thread = utils.thread_idx()
    warps = ir.MemRefType(parts_ref.type).shape[-1]

    def index(i):
        return arith.index_cast(ir.IndexType.get(), i)

    def constant(i):
        return mgpu.c(i, thread.type)

    def over_registers(array):
        total = functools.reduce(combine, array.registers.flat)
        (size,) = ir.VectorType(total.type).shape
        elements = (vector.extract(total, [], ir.DenseI64ArrayAttr.get([i])) for i in range(size))
        return functools.reduce(combine, elements)

    def over_lanes(totals, lanes):
        for bit in reversed(range(lanes.bit_length() - 1)):
            totals = [combine(total, utils.shfl_bfly(total, 1 << bit)) for total in totals]
        return totals

    totals = over_lanes([functools.reduce(combine, map(over_registers, value)) for value in values], 32)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, constant(31)), constant(0))):
        for i, total in enumerate(totals):
            memref.store(total, parts_ref, [index(constant(i)), index(arith.shrui(thread, constant(5)))])
    gpu.barrier()
    warp = index(arith.andi(thread, constant(warps - 1)))
    parts = [memref.load(parts_ref, [index(constant(i)), warp]) for i in range(len(totals))]
    return [mgpu.FragmentedArray.splat(total, ()) for total in over_lanes(parts, warps)]
