"""Between memory and registers, for all supported versions of JAX."""

import inspect

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Until jax 0.12 an index comes after the reference.
_NO_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load_as(ref, layout, *, optimized: bool = True) -> jax.Array:
    """All that a reference has, in shared or global memory, in a layout of registers. Pallas refuses a load that it
    cannot do in wide pieces, unless optimized=False."""
    return plgpu.load(ref, *_NO_INDEX, layout=layout, optimized=optimized)


def store_narrow(ref, value: jax.Array) -> None:
    """ref[...] = value, also in pieces that are no whole cache lines of global memory, which jax 0.12 else refuses."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_transposed(ref, value: jax.Array) -> None:
    """value: [N, R] in the registers of tensor cores. ref: [R, N], not swizzled."""
    store_narrow(ref.transpose((1, 0)), plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED))
