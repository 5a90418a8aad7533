"""Linear layers: the only place where layers multiply by their weight matrices.

A Linear owns a weight, optionally a bias, and whatever belongs to them: the scales of a number format, an adapter. Its
parameters are named after the Linear itself: `query` and `query_bias` in a checkpoint (parameters.py).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.ops import matmul as ops
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


def side_by_side(x: jax.Array, linears: Sequence[Linear], shape: Sequence[int], axis: int) -> jax.Array:
    """Multiplies x [..., D] by several weights in one matmul, without biases; results are concatenated along `axis`.

    shape: what each weight is reshaped to, [D, ...] with -1 at `axis`, which must not be a dim that the mesh splits.
    """
    return ops.matmul_side_by_side(x, [linear.weight[...].reshape(shape) for linear in linears], axis)


def add_stacked_biases(y: jax.Array, linears: Sequence[Linear]) -> jax.Array:
    """y [..., len(linears), N], their stacked products, plus their biases if they have any."""
    if not hasattr(linears[0], "bias"):
        return y
    return ops.add_bias(y, jnp.stack([linear.bias[...] for linear in linears]))
