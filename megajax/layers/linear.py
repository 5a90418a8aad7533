"""Linear layers: the only place where layers multiply by their weight matrices.

A Linear owns a weight, optionally a bias, and whatever belongs to them: the scales of a number format, an adapter. Its
parameters are named after the Linear itself: `query` and `query_bias` in a checkpoint (parameters.py).
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.ops import matmul as ops
from megajax.ops.low_precision import DelayedScaling, low_precision_matmul
from megajax.parameters import LAYER_AXES, Role, matches, variable, weight
from megajax.precision import PrecisionConfig, Recipe
from megajax.sharding import constrain

logger = logging.getLogger("megajax")


class Linear(nnx.Module):
    """x [..., *K] -> x w + b [..., *N], with w [*K, *N] and, if there is one, b [*N]."""

    recipe: Recipe | None = None
    """The low-precision format of the product; None: the dtype of x."""

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

    def use_low_precision(self, precision: PrecisionConfig, *, is_active: bool) -> None:
        """Computes the product in the format of precision.recipe if active. Adds the scales of earlier steps in either
        case, so that all layers of a stack have the same parameters."""
        self.recipe = precision.recipe if is_active else None
        if precision.recipe == "fp8_delayed":
            axes = self.weight.get_metadata()["record"].axes
            lead = [axis for axis in axes if axis in LAYER_AXES]
            shape = (*self.weight.get_value().shape[: len(lead)], 3, 1 + precision.amax_history)
            initial = DelayedScaling.initial(precision.amax_history)
            self.scaling = variable(
                shape,
                (*lead, "scaling", "scaling"),
                lambda key, shape: jnp.broadcast_to(initial, shape),
                nnx.Rngs(params=0),
                DelayedScaling(precision.amax_margin),
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.recipe is not None:
            return self.add_bias(_low_precision(x, (self,), (self.weight[...],), 0, self.num_inputs))
        return self.add_bias(ops.matmul(x, self.weight[...], self.num_inputs))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """y [..., *N], a product with the weight, plus the bias; y itself without one."""
        return ops.add_bias(y, self.bias[...]) if hasattr(self, "bias") else y


class GatheredLinear(Linear):
    """A Linear with one input and one output dim and few outputs, whose matrix all devices gather before the product.

    Without that XLA exchanges parts of the matrix among the devices that split the sequence, by a permutation; in a
    stage of a pipeline, which only some devices run, all devices would have to take part in it.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.add_bias(ops.matmul(x, constrain(self.weight[...], None, None)))


class GroupedLinear(nnx.Module):
    """One matrix per group [E, K, N], for ops/grouped_matmul.py."""

    def __init__(
        self, num_groups: int, num_inputs: int, num_outputs: int, axes: tuple[str, str], init_std: float, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """axes: logical axes of inputs and outputs; the groups have "experts"."""
        init = nnx.initializers.normal(init_std)
        self.weight = weight((num_groups, num_inputs, num_outputs), ("experts", *axes), init, rngs, "matrix")


def side_by_side(
    x: jax.Array, linears: Sequence[Linear], shape: Sequence[int], axis: int, *, has_gradient: bool = True
) -> jax.Array:  # fmt: skip
    """Multiplies x [..., D] by several weights in one matmul, without biases; results are concatenated along `axis`.

    shape: what each weight is reshaped to, [D, ...] with -1 at `axis`, which must not be a dim that the mesh splits.
    With a low-precision format the weights share a scale, if all of them have that format. has_gradient: False with a
    cache, where one product per weight is faster.
    """
    weights = [linear.weight[...].reshape(shape) for linear in linears]
    if all(linear.recipe is not None for linear in linears):
        return _low_precision(x, linears, weights, axis, 1)
    return ops.matmul_side_by_side(x, weights, axis, has_gradient=has_gradient)


def input_axis(linears: Sequence[Linear]) -> str:
    """Logical axis of the sequence in an input of these Linears: in a low-precision format they gather what `tensor`
    splits after rounding it."""
    return "sequence" if all(linear.recipe is not None for linear in linears) else "time"


def _low_precision(x, linears: Sequence[Linear], weights: Sequence[ops.Weight], axis: int, num_contracted: int):
    scalings = [linear.scaling.get_value() for linear in linears if hasattr(linear, "scaling")]
    axes = linears[0].weight.get_metadata()["record"].axes
    residual = ("embed",)
    gathered = (axes[:num_contracted] == residual, len(linears) == 1 and axes[num_contracted:] == residual)
    return low_precision_matmul(x, weights, axis, num_contracted, linears[0].recipe, gathered, scalings)


def add_stacked_biases(y: jax.Array, linears: Sequence[Linear]) -> jax.Array:
    """y [..., len(linears), N], their stacked products, plus their biases if they have any."""
    if not hasattr(linears[0], "bias"):
        return y
    return ops.add_bias(y, jnp.stack([linear.bias[...] for linear in linears]))


def use_low_precision(module: nnx.Module, precision: PrecisionConfig, *, is_active: bool) -> list[str]:
    """Gives the matrices of a layer, or of several stacked ones, the format of precision.recipe, where
    precision.low_modules names them in the layer -> their names."""
    found = []
    for path, part in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        if isinstance(part, GroupedLinear):
            _log_experts(precision.recipe)
        if isinstance(part, Linear) and part.weight.get_metadata()["record"].role == "matrix":
            found.append(name)
            if matches(name, precision.low_matrices):
                part.use_low_precision(precision, is_active=is_active)
    return found


@functools.cache
def _log_experts(recipe: Recipe) -> None:
    logger.warning("precision.recipe=%s: matmuls of experts remain in precision.compute", recipe)
