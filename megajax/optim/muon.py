"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

With g the gradient of one matrix [K, N] of one layer, K inputs and N outputs, lr the learning rate, d the decay:

    m = momentum m + g
    u = g + momentum m                                  Nesterov
    x = u / (|u| + 1e-7)                                Frobenius norm
    x = a x + (b s + c s s) x,  s = x x^T               five times (Newton-Schulz): a, b, c = 3.4445, -4.7750, 2.0315
    p = p - lr * (0.2 sqrt(max(K, N)) x + d p)

The iteration moves every singular value of u near 1: with u = U S V^T, x is about U V^T, whose root mean square is
1 / sqrt(max(K, N)). The factor in the last line makes it about 0.2, that of AdamW's updates, so one learning rate and
one decay serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

NorMuon (Li et al. 2025, arXiv 2510.05491) gives all outputs of a matrix updates of about the same size: with r the root
mean square of x over a matrix, b2 and epsilon those of AdamW, and means over the inputs of each output,

    v = b2 v + (1 - b2) mean(x^2)
    y = x / (sqrt(v) + epsilon),  x = r y / rms(y)

A weight holds many matrices, [*stack, *inputs, *outputs]: each is orthogonalised separately, with its inputs and
outputs flattened to K and N. Zeros, such as a pipeline's padding rows, remain zeros. The iteration is bfloat16 on GPUs,
like that of Jordan et al., and float32 elsewhere; momentum and update are float32.

optax.contrib.muon (0.2.8) also treats each layer separately, but divides both terms of the Nesterov sum by bias
corrections that the papers do not have, keeps a, b and c in the state, applies weight decay to all or none of the
parameters that AdamW updates, and leaves the sharding on a mesh to XLA, see `_layouts`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from megajax.mesh import compat
from megajax.mesh.current import free_axes, has_mesh
from megajax.mesh.sharding import entry_of, split_by
from megajax.parameters import Parameter

PyTree = Any

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
NORM_EPSILON = 1e-7  # Jordan's; keeps a matrix of zeros finite
UPDATE_RMS = 0.2  # of AdamW's updates, as Liu et al. measured it


class OutputMoments(NamedTuple):
    nu: PyTree
    """v of each weight: float32 [*stack, 1, ..., *outputs]."""


def scale_by_muon(momentum: float, records: PyTree) -> optax.GradientTransformation:
    """Gradients to 0.2 sqrt(max(K, N)) x, as above; the state is the momentum, float32 like the gradients.

    Args:
        momentum: decay of the momentum.
        records: megajax.parameters.Parameter of each gradient, in a tree of the same structure.
    """
    orthogonalise = optax.stateless(lambda updates, _: jax.tree.map(muon_direction, updates, records))
    return optax.chain(optax.trace(momentum, nesterov=True), orthogonalise)


def scale_by_normuon(momentum: float, beta: float, epsilon: float, records: PyTree) -> optax.GradientTransformation:
    """The same for NorMuon, whose state also has OutputMoments. beta: b2 above."""

    def init(params: PyTree) -> OutputMoments:
        def zeros(param: jax.Array, record: Parameter) -> jax.Array:
            inputs = _input_dims(record)
            return jnp.zeros([1 if dim in inputs else size for dim, size in enumerate(param.shape)], jnp.float32)

        return OutputMoments(jax.tree.map(zeros, params, records))

    def new_moment(x: jax.Array, v: jax.Array, record: Parameter) -> jax.Array:
        return beta * v + (1 - beta) * jnp.mean(jnp.square(x), _input_dims(record), keepdims=True)

    def scaled(x: jax.Array, v: jax.Array, record: Parameter) -> jax.Array:
        y = x / (jnp.sqrt(v) + epsilon)
        matrix = tuple(range(record.num_stacked, x.ndim))
        squares = [jnp.mean(jnp.square(array), matrix, keepdims=True) for array in (x, y)]
        return y * jnp.sqrt(squares[0] / jnp.where(squares[1] > 0, squares[1], 1.0))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        moments = jax.tree.map(new_moment, updates, state.nu, records)
        return jax.tree.map(scaled, updates, moments, records), OutputMoments(moments)

    return optax.chain(scale_by_muon(momentum, records), optax.GradientTransformation(init, update))


def _input_dims(record: Parameter) -> tuple[int, ...]:
    return tuple(range(record.num_stacked, record.num_stacked + record.num_inputs))


def muon_direction(u: jax.Array, record: Parameter) -> jax.Array:
    """u -> 0.2 sqrt(max(K, N)) x, for every matrix of a weight; float32, same shape."""
    stack, num_inputs, num_outputs = _matrix_shape(u.shape, record)
    x = u.reshape(*stack, num_inputs, num_outputs)
    is_tall = num_inputs > num_outputs  # then x^T is used, with the same result, so that s is the smaller product
    x = (x.mT if is_tall else x).astype(_iteration_dtype())
    layouts = _layouts(x.shape, record, is_tall)
    for layout in layouts[1:]:
        x = jax.lax.with_sharding_constraint(x, layout)
    x = orthogonalised(x)
    for layout in reversed(layouts):
        x = jax.lax.with_sharding_constraint(x, layout)
    x = UPDATE_RMS * math.sqrt(max(num_inputs, num_outputs)) * x.astype(u.dtype)
    return (x.mT if is_tall else x).reshape(u.shape)


def muon_flops(shape: tuple[int, ...], record: Parameter) -> int:
    """Floating-point operations of the iteration for a weight of this shape."""
    stack, *matrix = _matrix_shape(shape, record)
    k, n = sorted(matrix)
    return NUM_ITERATIONS * math.prod(stack) * (4 * k * k * n + 2 * k**3)


def _matrix_shape(shape: tuple[int, ...], record: Parameter) -> tuple[tuple[int, ...], int, int]:
    """-> (dims of the stack, number of inputs, number of outputs)."""
    first_output = record.num_stacked + record.num_inputs
    inputs = shape[record.num_stacked : first_output]
    outputs = shape[first_output:]
    return shape[: record.num_stacked], math.prod(inputs), math.prod(outputs)


def orthogonalised(x: jax.Array) -> jax.Array:
    """[..., K, N], K <= N, with new singular values: those above 0.002 of the norm of their [K, N] end between 0.68 and
    1.21, smaller ones between 0 and that."""
    a, b, c = COEFFICIENTS
    x32 = x.astype(jnp.float32)
    x = (x32 / (jnp.linalg.norm(x32, axis=(-2, -1), keepdims=True) + NORM_EPSILON)).astype(x.dtype)
    for _ in range(NUM_ITERATIONS):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x


def _iteration_dtype() -> jnp.dtype:
    return jnp.bfloat16 if compat.mesh_platform() in ("gpu", "cuda") else jnp.float32


def _layouts(shape: tuple[int, ...], record: Parameter, is_tall: bool) -> list[PartitionSpec]:
    """Shardings of [*stack, K, N], K <= N: from that of the weight to that in which the matrices are orthogonalised.

    In the last one each mesh axis splits the stack, or N if it does not divide the rest of the stack. A matrix that is
    whole on one device needs no communication, one split along N needs a sum for each s. With the sharding of the
    weight XLA would gather x and s of all layers in every iteration. From one sharding to the next a single mesh axis
    moves, which is an all-to-all; if several move at once XLA may gather the array. Empty without a mesh.
    """
    if not has_mesh():
        return []
    sizes = free_axes()
    num_stacked = record.num_stacked
    first_output = num_stacked + record.num_inputs
    axes_of_dim = split_by(record.axes, record.num_experts, sizes)
    of_inputs = sum(axes_of_dim[num_stacked:first_output], ())
    of_outputs = sum(axes_of_dim[first_output:], ())
    small, large = (of_outputs, of_inputs) if is_tall else (of_inputs, of_outputs)
    layouts = [[*axes_of_dim[:num_stacked], small, large]]
    unused = [axis for axis in sizes if not any(axis in axes for axes in layouts[0])]
    for axis in (*unused, *reversed(small), *reversed(large)):
        moved = [tuple(other for other in axes if other != axis) for axes in layouts[-1]]
        for dim in (*range(num_stacked), len(shape) - 1):
            if shape[dim] % (sizes[axis] * math.prod(sizes[other] for other in moved[dim])) == 0:
                moved[dim] += (axis,)
                layouts.append(moved)
                break
    return [PartitionSpec(*(entry_of(axes) for axes in layout)) for layout in layouts]
