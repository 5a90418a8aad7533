"""Linear layers: the only place where layers multiply by their weight matrices.

A Linear owns a weight, optionally a bias, and whatever belongs to them: the scales of a number format, an adapter. Its
parameters are named after the Linear itself: `query` and `query_bias` in a checkpoint (parameters.py).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.ops import matmul as ops
from megajax.ops.grouped_matmul import grouped_matmul
from megajax.parameters import Role, weight


class Linear(nnx.Module):
    """x [..., *K] -> x w + b [..., *N], with w [*K, *N] and, if there is one, b [*N]."""

    def __init__(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        axes: Sequence[str],
        init_std: float,
        *,
        rngs: nnx.Rngs,
        role: Role = "matrix",
    ):
        """inputs, outputs: the dims *K and *N; axes: the logical axis of each, in that order."""
        self.num_inputs = len(inputs)
        init = nnx.initializers.normal(init_std)
        self.weight = weight((*inputs, *outputs), axes, init, rngs, role, self.num_inputs)

    def add_bias_parameter(self, rngs: nnx.Rngs) -> None:
        """Adds a bias of zeros. A bias on the residual stream is replicated on every device, like the scales of
        norms."""
        value = self.weight.get_value()
        axes = self.weight.get_metadata()["record"].axes[self.num_inputs :]
        axes = ["norm" if axis == "embed" else axis for axis in axes]
        self.bias = weight(value.shape[self.num_inputs :], axes, nnx.initializers.zeros, rngs, "vector")

    def matrix(self) -> jax.Array:
        """The effective weight, for operations that do their own matmul (the chunked loss)."""
        return self.weight[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.add_bias(ops.matmul(x, self.weight[...], self.num_inputs))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """y [..., *N], a product with the weight, plus the bias; y itself without one."""
        return ops.add_bias(y, self.bias[...]) if hasattr(self, "bias") else y


class GroupedLinear(nnx.Module):
    """Rows [R, K], sorted by group -> [R, N]: the rows of each group times its matrix, of [E, K, N]."""

    def __init__(
        self, num_groups: int, num_inputs: int, num_outputs: int, axes: tuple[str, str], init_std: float, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """axes: logical axes of inputs and outputs; the groups have "experts"."""
        self.axes = axes
        init = nnx.initializers.normal(init_std)
        self.weight = weight((num_groups, num_inputs, num_outputs), ("experts", *axes), init, rngs, "matrix")

    def __call__(self, rows_RK: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """sizes: rows per group (ops/grouped_matmul.py)."""
        return grouped_side_by_side(rows_RK, (self,), sizes_E)[:, 0]


def grouped_side_by_side(rows_RK: jax.Array, linears: Sequence[GroupedLinear], sizes_E: jax.Array) -> jax.Array:
    """The products of the rows with several GroupedLinears [R, len(linears), N], computed as one."""
    return grouped_matmul(rows_RK, [linear.weight[...] for linear in linears], sizes_E, linears[0].axes)


def side_by_side(
    x: jax.Array, linears: Sequence[Linear], shape: Sequence[int], axis: int, *, has_gradient: bool = True
) -> jax.Array:  # fmt: skip
    """Multiplies x [..., D] by several weights in one matmul, without biases; results are concatenated along `axis`.

    shape: what each weight is reshaped to, [D, ...] with -1 at `axis`, which must not be a dim that the mesh splits.
    has_gradient: False with a cache, where one product per weight is faster.
    """
    weights = [linear.weight[...].reshape(shape) for linear in linears]
    return ops.matmul_side_by_side(x, weights, axis, has_gradient=has_gradient)


def add_stacked_biases(y: jax.Array, linears: Sequence[Linear]) -> jax.Array:
    """y [..., len(linears), N], their stacked products, plus their biases if they have any."""
    if not hasattr(linears[0], "bias"):
        return y
    return ops.add_bias(y, jnp.stack([linear.bias[...] for linear in linears]))
