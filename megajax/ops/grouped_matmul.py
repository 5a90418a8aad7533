"""Grouped matmul: rows sorted by group, times one matrix per group.

Dimensions: R rows, K contracted width, N result width, E groups (the experts of a device).
Rows are sorted by group, and `sizes` says how many each group has; rows after the last group give zeros.

Each device has its own rows (parallel/expert.py) and the matrices of its experts. `tensor` splits the width of rows,
both outside the experts ("embed") and inside ("mlp"): "embed" is gathered before a product that contracts it, and a
product that results in "embed" is reduce-scattered. In a region that is manual over `tensor` the "embed" of rows is
whole, and such a product is left to be summed. Matrices are gathered over the axes that share the weights.

On Hopper our kernel computes the products of a device (pallas_kernels/grouped_matmul), elsewhere a loop over tiles
(ops/grouped_tiles.py). Both have the same three functions.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import compat
from megajax.mesh.current import axis_size, free_axes, manual
from megajax.mesh.sharding import (
    ACTIVATION_AXES,
    SHARING_AXES,
    WEIGHT_AXES,
    local_experts_spec,
    local_weight_spec,
    rows_spec,
    splits_experts,
)
from megajax.ops import grouped_tiles
from megajax.ops.choice import log_choice
from megajax.ops.matmul import Float32Gradient, Weight, dot_precision

(TENSOR,) = WEIGHT_AXES["mlp"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankSum:
    """A weight w + a b, whose products are x w + (x a) b: rounded to bfloat16, the sum would lose a small change."""

    base: "GroupedWeight"
    a: jax.Array
    """[E, K, r]."""
    b: jax.Array
    """[E, r, N]."""


GroupedWeight = Weight | LowRankSum


def reference(rows_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """-> [R, N] in the dtype of the rows; the definition, on one device."""
    return lax.ragged_dot(rows_RK, matrices_EKN.astype(rows_RK.dtype), sizes_E, precision=dot_precision(rows_RK.dtype))


def grouped_matmul(
    rows_RK: jax.Array, weights: Sequence[GroupedWeight], sizes_E: jax.Array, axes: tuple[str, str]
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
    if any(isinstance(w, LowRankSum) for w in weights):
        bases = [w.base if isinstance(w, LowRankSum) else w for w in weights]
        out_RWN = grouped_matmul(rows_RK, bases, sizes_E, axes)
        changes = [_low_rank(rows_RK, w.a, w.b, sizes_E, axes) if isinstance(w, LowRankSum) else None for w in weights]
        none = jnp.zeros_like(out_RWN[:, 0])
        return out_RWN + jnp.stack([none if change is None else change for change in changes], 1)
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


def _specs(axes, weights):
    """-> specs of (rows, weights, sizes), spec of the result."""
    weight = local_experts_spec(("experts", *axes), len(weights[0]))
    given = (rows_spec(axes[0]), (weight,) * len(weights), rows_spec())
    return given, rows_spec(None, axes[1])


def _forward(rows_RK, weights, sizes_E, options):
    axes, _ = options
    is_split = _are_split(axes)
    given, result = _specs(axes, weights)
    shared_dim = _shared_dim(axes, weights)

    def body(rows_RK, weights, sizes_E):
        matrices = _gathered(weights, rows_RK.dtype, shared_dim)
        out_RWN = _products(matrices[0]).forward(_whole(rows_RK, is_split[0]), matrices, sizes_E)
        return _split(_varying(out_RWN, rows_RK, matrices), is_split[1])

    return manual(body, given, result)(rows_RK, weights, sizes_E), (rows_RK, weights, sizes_E)


def _backward(options, residuals, d_out_RWN):
    rows_RK, weights, sizes_E = residuals
    axes, is_wide = options
    is_split = _are_split(axes)
    given, result = _specs(axes, weights)
    shared_dim = _shared_dim(axes, weights)

    def body(rows_RK, weights, sizes_E, d_out_RWN):
        d_out_RWN = _whole(d_out_RWN, is_split[1])
        matrices = _gathered(weights, rows_RK.dtype, shared_dim)
        products = _products(matrices[0])
        d_rows_RK = _varying(products.input_gradient(d_out_RWN, matrices, sizes_E), d_out_RWN, matrices)
        dtype = jnp.float32 if is_wide else rows_RK.dtype
        rows_RK = _whole(rows_RK, is_split[0])
        d_matrices = products.weight_gradient(rows_RK, d_out_RWN, sizes_E, dtype=dtype)
        d_matrices = _varying(d_matrices, rows_RK, d_out_RWN)
        return _split(d_rows_RK, is_split[0]), tuple(_reduced(d, shared_dim) for d in d_matrices)

    run = manual(body, (*given, result), given[:2])
    d_rows_RK, d_weights = run(rows_RK, weights, sizes_E, d_out_RWN)
    return d_rows_RK, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True)), None


_grouped_matmul.defvjp(_forward, _backward)


def _varying(results, *operands):
    """A kernel does not say over which axes of the mesh its results vary."""
    axes = frozenset().union(*(compat.varying_axes(a) for a in jax.tree.leaves(operands)))
    return compat.vary(results, axes)


def _are_split(axes: Sequence[str]) -> list[bool]:
    """Of rows with each of these axes: whether `tensor` splits their width, which a product needs, or gives, whole."""
    return [axis == "embed" and TENSOR in free_axes() for axis in axes]


def _whole(rows, is_split: bool):
    return lax.all_gather(rows, TENSOR, axis=rows.ndim - 1, tiled=True) if is_split else rows


def _split(rows, is_split: bool):
    return lax.psum_scatter(rows, TENSOR, scatter_dimension=rows.ndim - 1, tiled=True) if is_split else rows


def _shared_dim(axes, weights) -> int:
    """The dimension of a weight that SHARING_AXES split."""
    return 0 if splits_experts(len(weights[0]), free_axes()) else 1 + axes.index("embed")


def _gathered(weights, dtype, shared_dim: int) -> list[jax.Array]:
    """[E, K, N] each."""
    return [lax.all_gather(w.astype(dtype), SHARING_AXES, axis=shared_dim, tiled=True) for w in weights]


def _reduced(d_matrices_EKN, shared_dim: int):
    """The gradient of a weight, summed over devices and laid out like the weight."""
    d = lax.psum_scatter(d_matrices_EKN, SHARING_AXES, scatter_dimension=shared_dim, tiled=True)
    held = (*WEIGHT_AXES["experts"], *SHARING_AXES)
    return lax.psum(d, tuple(axis for axis in ACTIVATION_AXES["rows"] if axis not in held))


# ----------------------------------------------------------------------------- (rows a) b, with thin a and b

RANK_MULTIPLE = 64  # of our kernel; a and b are padded with zeros


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _low_rank(rows_RK, a_EKr, b_ErN, sizes_E, axes):
    """-> [R, N]. `tensor` splits K and N here, also where they are "embed", so that nothing is gathered but the
    matrices, and only rows [R, r] are summed."""
    assert TENSOR in free_axes(), (
        "a device that has only parts of experts (ops/mailboxes.py) cannot add to their products"
    )
    return _low_rank_forward(rows_RK, a_EKr, b_ErN, sizes_E, axes)[0]


def _low_rank_specs(axes):
    """-> specs of (rows, a, b, sizes), of the rows times a, and of the result."""
    a, b = (
        local_weight_spec(dims, free_axes()) for dims in (("experts", axes[0], "rank"), ("experts", "rank", axes[1]))
    )
    return (rows_spec(axes[0]), a, b, rows_spec()), rows_spec(None), rows_spec(axes[1])


def _low_rank_forward(rows_RK, a_EKr, b_ErN, sizes_E, axes):
    given, of_low, result = _low_rank_specs(axes)

    def body(rows_RK, a_EKr, b_ErN, sizes_E):
        a_EKr, b_ErN = _parts(a_EKr, b_ErN, rows_RK.dtype, axes)
        low_Rr = lax.psum(_varying(_products(a_EKr).forward(rows_RK, [a_EKr], sizes_E)[:, 0], rows_RK, a_EKr), TENSOR)
        return _varying(_products(b_ErN).forward(low_Rr, [b_ErN], sizes_E)[:, 0], low_Rr, b_ErN), low_Rr

    out_RN, low_Rr = manual(body, given, (result, of_low))(rows_RK, a_EKr, b_ErN, sizes_E)
    return out_RN, (rows_RK, a_EKr, b_ErN, sizes_E, low_Rr)


def _low_rank_backward(axes, residuals, d_out_RN):
    given, of_low, result = _low_rank_specs(axes)

    def body(rows_RK, a_EKr, b_ErN, sizes_E, low_Rr, d_out_RN):
        rank = a_EKr.shape[2]
        a_EKr, b_ErN = _parts(a_EKr, b_ErN, rows_RK.dtype, axes)
        d_out_R1N = d_out_RN[:, None]
        d_low_Rr = _varying(_products(b_ErN).input_gradient(d_out_R1N, [b_ErN], sizes_E), d_out_RN, b_ErN)
        d_low_Rr = lax.psum(d_low_Rr, TENSOR)
        d_low_R1r = d_low_Rr[:, None]
        d_rows_RK = _varying(_products(a_EKr).input_gradient(d_low_R1r, [a_EKr], sizes_E), d_low_Rr, a_EKr)
        (d_a,) = _products(a_EKr).weight_gradient(rows_RK, d_low_R1r, sizes_E, dtype=jnp.float32)
        (d_b,) = _products(b_ErN).weight_gradient(low_Rr, d_out_R1N, sizes_E, dtype=jnp.float32)
        d_a = _varying(d_a, rows_RK, d_low_Rr)[:, :, :rank]
        d_b = _varying(d_b, low_Rr, d_out_RN)[:, :rank]
        return d_rows_RK, _summed(d_a, 1, axes[0]), _summed(d_b, 2, axes[1])

    d_rows_RK, d_a, d_b = manual(body, (*given, of_low, result), given[:3])(*residuals, d_out_RN)
    return d_rows_RK, d_a.astype(residuals[1].dtype), d_b.astype(residuals[2].dtype), None


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def _parts(a_EKr, b_ErN, dtype, axes):
    """The matrices as `tensor` splits the rows, with a rank that the kernel takes."""
    missing = 0 if compat.mosaic_problem() else -a_EKr.shape[2] % RANK_MULTIPLE
    a_EKr = jnp.pad(_part(a_EKr.astype(dtype), 1, axes[0]), ((0, 0), (0, 0), (0, missing)))
    b_ErN = jnp.pad(_part(b_ErN.astype(dtype), 2, axes[1]), ((0, 0), (0, missing), (0, 0)))
    return a_EKr, b_ErN


def _part(matrix, dim: int, axis: str):
    if axis != "embed":
        return matrix
    matrix = lax.all_gather(matrix, SHARING_AXES, axis=dim, tiled=True)
    size = matrix.shape[dim] // axis_size(TENSOR)
    return lax.dynamic_slice_in_dim(matrix, lax.axis_index(TENSOR) * size, size, dim)


def _summed(d_matrix, dim: int, axis: str):
    """The gradient of such a part, summed over devices and laid out like the matrix."""
    over = tuple(axis for axis in ACTIVATION_AXES["rows"] if axis not in WEIGHT_AXES["experts"])
    if axis != "embed":
        return lax.psum(d_matrix, over)
    size = d_matrix.shape[dim]
    shape = [*d_matrix.shape]
    shape[dim] *= axis_size(TENSOR)
    whole = _varying(jnp.zeros(shape, d_matrix.dtype), d_matrix)
    whole = lax.dynamic_update_slice_in_dim(whole, d_matrix, lax.axis_index(TENSOR) * size, dim)
    whole = lax.psum_scatter(whole, SHARING_AXES, scatter_dimension=dim, tiled=True)
    return lax.psum(whole, (TENSOR, *(axis for axis in over if axis not in SHARING_AXES)))
