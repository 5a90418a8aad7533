"""Products with a matrix in 4 bits. For up to 512 rows, as in decoding, our kernel reads the levels on Hopper
(pallas_kernels/four_bits.py); where `tensor` is the only axis of the mesh, each GPU those of its part. Other devices
and meshes, other groups than of 128 inputs and more rows have a copy of the matrix in their dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import free_axes, manual
from megajax.ops.choice import log_choice
from megajax.quantization.weights import QuantizedWeight

AXIS = "tensor"


def matmul(x: jax.Array, weight: QuantizedWeight, num_contracted: int, outputs: P | None) -> jax.Array:
    """x [..., *K] -> [..., *N] in x's dtype. outputs: how the mesh splits the dims N; None: not known."""
    if outputs is None or not splits_alone():
        return _matmul(x, weight, num_contracted)
    of_groups = P(None, *outputs)
    specs = weight.specs(P(*outputs, *(None,) * num_contracted), of_groups)
    out_spec = P(*(None,) * (x.ndim - num_contracted), *outputs)
    # check_vma: it does not know kernels.
    return manual(lambda x, w: _matmul(x, w, num_contracted), (P(), specs), out_spec, check_vma=False)(x, weight)


def splits_alone() -> bool:
    """Whether AXIS is the only axis that splits here."""
    sizes = free_axes()
    return sizes.get(AXIS, 1) > 1 and math.prod(sizes.values()) == sizes[AXIS]


def _matmul(x: jax.Array, weight: QuantizedWeight, num_contracted: int) -> jax.Array:
    return weight.multiply(x, num_contracted) if problem(x, weight) else multiply(x, weight)


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
    rows_RK = jnp.pad(x.reshape(num_rows, inputs), ((0, kernel.padded(num_rows) - num_rows), (0, 0)))
    values_NB = weight.values.reshape(num_outputs, inputs // 2)
    of_groups = [None if a is None else a.reshape(num_groups, num_outputs) for a in (weight.scale, weight.zero)]
    # As an addition of slices, which XLA fuses with what reads the sum; a reduction would be a kernel of its own.
    sums_RN = functools.reduce(jnp.add, list(kernel.products(rows_RK, values_NB, *of_groups)))
    return sums_RN[:num_rows].astype(x.dtype).reshape(*leading, *outputs)
