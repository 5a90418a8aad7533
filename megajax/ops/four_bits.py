"""Products of a few rows with a matrix in 4 bits, as in decoding: on Hopper our kernel reads the levels
(pallas_kernels/four_bits.py). Other devices, meshes of several, other groups than of 128 inputs and more rows have a
copy of the matrix in their dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.mesh.current import free_axes
from megajax.ops.choice import log_choice
from megajax.quantization.weights import QuantizedWeight

ALIGNED = 8  # rows of the kernel


def problem(x: jax.Array, weight: QuantizedWeight) -> str:
    """Why the kernel cannot be used for x [..., *K], or an empty string; logs which."""
    devices = math.prod(free_axes().values())
    reason = compat.mosaic_problem() or (f"{devices} devices" if devices > 1 else "")
    if not reason:
        # not at the top: only Hopper needs it, and it takes time to import
        from pallas_kernels import four_bits as kernel

        num_groups, *outputs = weight.scale.shape
        num_outputs = math.prod(outputs)
        inputs = weight.size // num_outputs
        reason = kernel.problem(x.size // inputs, inputs, num_outputs, num_groups, x.dtype)
    log_choice(
        "matrices in 4 bits",
        f"copies in {x.dtype} ({reason})" if reason else "our kernel (pallas_kernels/four_bits.py)",
    )
    return reason


def multiply(x: jax.Array, weight: QuantizedWeight, kernel: Any = None) -> jax.Array:
    """x [..., *K] -> [..., *N] in x's dtype; sums are float32. kernel: in place of ours, for tests."""
    if kernel is None:
        from pallas_kernels import four_bits as kernel
    num_groups, *outputs = weight.scale.shape
    num_outputs = math.prod(outputs)
    inputs = weight.size // num_outputs
    leading = x.shape[: x.ndim - (weight.values.ndim - len(outputs))]
    num_rows = math.prod(leading)
    padded = -(-num_rows // ALIGNED) * ALIGNED
    rows_RK = jnp.pad(x.reshape(num_rows, inputs), ((0, padded - num_rows), (0, 0)))
    values_NB = weight.values.reshape(num_outputs, inputs // 2)
    of_groups = [None if a is None else a.reshape(num_groups, num_outputs) for a in (weight.scale, weight.zero)]
    # As an addition of slices, which XLA fuses with what reads the sum; a reduction would be a kernel of its own.
    sums_NR = functools.reduce(jnp.add, list(kernel.products(rows_RK, values_NB, *of_groups)))
    return sums_NR.T[:num_rows].astype(x.dtype).reshape(*leading, *outputs)
