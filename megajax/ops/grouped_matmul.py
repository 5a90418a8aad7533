"""Grouped matmul: rows sorted by group, times one matrix per group.

Dimensions: R rows, K contracted width, N result width, E groups (the experts of a device).
Rows are sorted by group, and `sizes` says how many each group has; rows after the last group give zeros.

Each device has its own rows (parallel/expert.py) and the matrices of its experts. `tensor` splits the width of rows,
both outside the experts ("embed") and inside ("mlp"): "embed" is gathered before a product that contracts it, and a
product that results in "embed" is reduce-scattered. Matrices are gathered over the axes that share the weights.

On Hopper our kernel computes the products of a device (pallas_kernels/grouped_matmul), elsewhere a loop over tiles
(ops/grouped_tiles.py). Both have the same three functions.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import compat
from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import ACTIVATION_AXES, SHARING_AXES, WEIGHT_AXES, local_weight_spec, rows_spec
from megajax.ops import grouped_tiles
from megajax.ops.choice import log_choice
from megajax.ops.matmul import Float32Gradient, Weight, dot_precision

(TENSOR,) = WEIGHT_AXES["mlp"]


def reference(rows_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """-> [R, N] in the dtype of the rows; the definition, on one device."""
    return lax.ragged_dot(rows_RK, matrices_EKN.astype(rows_RK.dtype), sizes_E, precision=dot_precision(rows_RK.dtype))


def grouped_matmul(
    rows_RK: jax.Array, weights: Sequence[Weight], sizes_E: jax.Array, axes: tuple[str, str]
) -> jax.Array:
    """The products of the rows of each group with its matrices, side by side -> [R, len(weights), N].

    Args:
        rows_RK: laid out by `rows_spec` with the first of `axes`; the result has the second.
        weights: [E, K, N] each, of the same shape, with the axes ("experts", *axes).
        sizes_E: int32, rows per group, concatenated over devices.
        axes: ("embed", "mlp"), or ("mlp", "embed") and one weight.

    Computes in the dtype of the rows and accumulates in float32, as ops/matmul.py does; the gradient of a weight is
    summed over devices in the same dtype, unless the weight is a Float32Gradient.
    """
    is_wide = isinstance(weights[0], Float32Gradient)
    arrays = tuple(w.array if isinstance(w, Float32Gradient) else w for w in weights)
    assert axes == ("embed", "mlp") or (axes == ("mlp", "embed") and len(arrays) == 1), (axes, len(arrays))
    return _grouped_matmul(rows_RK, arrays, sizes_E, (axes, is_wide))


def _products(matrices_EKN: jax.Array):
    """The module that computes the products of a device with matrices like this one; logs which."""
    from pallas_kernels import grouped_matmul as kernel  # not at the top: it takes time to import

    reason = compat.mosaic_problem() or kernel.problem(matrices_EKN.shape[1], matrices_EKN.shape[2], matrices_EKN.dtype)
    choice = f"XLA, a loop over tiles ({reason})" if reason else "our kernel (pallas_kernels/grouped_matmul)"
    log_choice("grouped matmul", choice)
    return grouped_tiles if reason else kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(rows_RK, weights, sizes_E, options):
    return _forward(rows_RK, weights, sizes_E, options)[0]


def _specs(axes, num_weights):
    """-> specs of (rows, weights, sizes), spec of the result."""
    weight = local_weight_spec(("experts", *axes), free_axes())
    given = (rows_spec(axes[0]), (weight,) * num_weights, rows_spec())
    return given, rows_spec(None, axes[1])


def _forward(rows_RK, weights, sizes_E, options):
    axes, _ = options
    given, result = _specs(axes, len(weights))

    def body(rows_RK, weights, sizes_E):
        matrices = _gathered(weights, rows_RK.dtype, axes)
        out_RWN = _products(matrices[0]).forward(_whole(rows_RK, axes[0]), matrices, sizes_E)
        return _split(_varying(out_RWN, rows_RK, matrices), axes[1])

    return manual(body, given, result)(rows_RK, weights, sizes_E), (rows_RK, weights, sizes_E)


def _backward(options, residuals, d_out_RWN):
    rows_RK, weights, sizes_E = residuals
    axes, is_wide = options
    given, result = _specs(axes, len(weights))

    def body(rows_RK, weights, sizes_E, d_out_RWN):
        d_out_RWN = _whole(d_out_RWN, axes[1])
        matrices = _gathered(weights, rows_RK.dtype, axes)
        products = _products(matrices[0])
        d_rows_RK = _varying(products.input_gradient(d_out_RWN, matrices, sizes_E), d_out_RWN, matrices)
        dtype = jnp.float32 if is_wide else rows_RK.dtype
        rows_RK = _whole(rows_RK, axes[0])
        d_matrices = products.weight_gradient(rows_RK, d_out_RWN, sizes_E, dtype=dtype)
        d_matrices = _varying(d_matrices, rows_RK, d_out_RWN)
        return _split(d_rows_RK, axes[0]), tuple(_reduced(d, axes) for d in d_matrices)

    run = manual(body, (*given, result), given[:2])
    d_rows_RK, d_weights = run(rows_RK, weights, sizes_E, d_out_RWN)
    return d_rows_RK, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True)), None


_grouped_matmul.defvjp(_forward, _backward)


def _varying(results, *operands):
    """A kernel does not say over which axes of the mesh its results vary."""
    axes = frozenset().union(*(compat.varying_axes(a) for a in jax.tree.leaves(operands)))
    return compat.vary(results, axes)


def _whole(rows, axis: str):
    return lax.all_gather(rows, TENSOR, axis=rows.ndim - 1, tiled=True) if axis == "embed" else rows


def _split(rows, axis: str):
    return lax.psum_scatter(rows, TENSOR, scatter_dimension=rows.ndim - 1, tiled=True) if axis == "embed" else rows


def _shared_dim(axes) -> int:
    """The dimension of a weight that SHARING_AXES split."""
    return 1 + axes.index("embed")


def _gathered(weights, dtype, axes) -> list[jax.Array]:
    """[E, K, N] each."""
    return [lax.all_gather(w.astype(dtype), SHARING_AXES, axis=_shared_dim(axes), tiled=True) for w in weights]


def _reduced(d_matrices_EKN, axes):
    """The gradient of a weight, summed over devices and laid out like the weight."""
    d = lax.psum_scatter(d_matrices_EKN, SHARING_AXES, scatter_dimension=_shared_dim(axes), tiled=True)
    held = (*WEIGHT_AXES["experts"], *SHARING_AXES)
    return lax.psum(d, tuple(axis for axis in ACTIVATION_AXES["rows"] if axis not in held))
