"""Layouts of shared memory."""

import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape, dtype, columns=0):
    """Shared memory in the layout that TMA writes and wgmma reads. A row of a tile has 128, 64 or 32 bytes, the most
    that divide the last dim, and its parts of `columns` elements if it is read in parts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, shape[-1] * itemsize, columns * itemsize)
    tile = (8, swizzle // itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))
