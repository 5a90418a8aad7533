"""Linear layers: the only place where layers multiply by their weight matrices.

A Linear owns a weight, optionally a bias, and what transforms put beside them (layers/transform.py): the scales of a
number format, an adapter. Its parameters are named after the Linear itself: `query` and `query_bias` in a checkpoint
(parameters.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from megajax.layers.transform import Transform
from megajax.mesh.sharding import between_blocks, constrain, weight_spec
from megajax.ops import matmul as ops
from megajax.ops.grouped_matmul import GroupedWeight
from megajax.ops.low_precision import low_precision_matmul
from megajax.ops.mailboxes import summed_matmul
from megajax.parameters import LAYER_AXES, Parameter, Role, weight
from megajax.precision import Recipe

RESIDUAL = ("embed",)  # the axes of the residual stream as inputs or outputs of a matrix


class Matrix(nnx.Module):
    """A weight and what its transforms put beside it."""

    weight: nnx.Param
    transforms: tuple[Transform, ...] = ()
    recipe: Recipe | None = None
    """The low-precision format of the product; None: the dtype of its input."""

    @property
    def record(self) -> Parameter:
        """Of the weight of this layer, also where the stack has stored it with those of others."""
        record = self.weight.get_metadata()["record"]
        axes = tuple(axis for axis in record.axes if axis not in LAYER_AXES)
        return dataclasses.replace(record, axes=axes)

    def matrix(self) -> ops.Weight:
        """The effective weight, for operations that do their own product (of latents, of the chunked loss)."""
        return self._merged(self.transforms)

    def array(self) -> jax.Array:
        """`matrix()` of a weight that always comes as one array: of the output layer, and of latents, which are neither
        quantised nor have a gradient in float32 where this is called."""
        w = self.matrix()
        assert isinstance(w, jax.Array), type(w)
        return w

    def _merged(self, transforms: Sequence[Transform]) -> ops.Weight:
        w = self.weight[...]
        for transform in transforms:
            w = ops.changed(w, lambda array, transform=transform: transform.merged(self, array))
        return w


class Linear(Matrix):
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
        self.outputs = tuple(outputs)
        init = nnx.initializers.normal(init_std)
        self.weight = weight((*inputs, *outputs), axes, init, rngs, role, self.num_inputs)

    def add_bias_parameter(self, rngs: nnx.Rngs) -> None:
        """Adds a bias of zeros. A bias on the residual stream is replicated on every device, like the scales of
        norms."""
        axes = ["norm" if axis == "embed" else axis for axis in self.record.axes[self.num_inputs :]]
        self.bias = weight(self.outputs, axes, nnx.initializers.zeros, rngs, "vector")

    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.multiplied()
        if self.recipe is not None:
            y = _low_precision(x, self.recipe, (self,), (w,), 0, self.num_inputs)
        else:
            y = summed_matmul(x, w, self.num_inputs, self.record.axes)
            if y.ndim == 3 and self.record.axes[self.num_inputs :] == RESIDUAL:
                y = between_blocks(y)
        return self.add_bias(self.changed(x, y))

    def multiplied(self) -> ops.Weight:
        """The weight by which x is multiplied, with all transforms merged but those that `changed` applies."""
        return self._merged(self.transforms[: self._num_merged])

    def changed(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The product of x, from that with `multiplied()`."""
        for transform in self.applied:
            y = transform.output(self, x, y)
        return y

    @property
    def applied(self) -> tuple[Transform, ...]:
        """The transforms that `changed` applies."""
        return self.transforms[self._num_merged :]

    @property
    def is_multiplied_as_stored(self) -> bool:
        return self.recipe is None and not self._num_merged

    @property
    def _num_merged(self) -> int:
        """Up to the last transform that has to be merged, all are, so that they keep their order."""
        return max((n for n, transform in enumerate(self.transforms, 1) if not transform.has_output), default=0)

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


class GroupedLinear(Matrix):
    """One matrix per group [E, K, N], for ops/grouped_matmul.py."""

    def __init__(
        self, num_groups: int, num_inputs: int, num_outputs: int, axes: tuple[str, str], init_std: float, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """axes: logical axes of inputs and outputs; the groups have "experts"."""
        init = nnx.initializers.normal(init_std)
        self.weight = weight((num_groups, num_inputs, num_outputs), ("experts", *axes), init, rngs, "matrix")

    def multiplied(self) -> GroupedWeight:
        """The weights by which rows are multiplied, with all transforms."""
        w = self.weight[...]
        for transform in self.transforms:
            w = transform.grouped(self, w)
        return w


class SideBySide(NamedTuple):
    """Matrices that multiply the same input, as `side_by_side` takes them. A layer with such a property has an engine
    store them as one (inference/device/weights.py)."""

    linears: tuple[Linear, ...]
    shape: tuple[int, ...]
    axis: int


class _Joined(NamedTuple):
    """Products of several Linears, or what is beside them, side by side: the outputs are the last dims."""

    linears: Sequence[Linear]
    outputs: tuple[int, ...]
    """What those of each are reshaped to, with any extent along `axis`."""
    axis: int

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Arrays [..., *N] of each."""
        return jnp.concatenate([self._reshaped(*pair) for pair in zip(self.linears, arrays, strict=True)], self._axis)

    def split(self, y: jax.Array) -> list[jax.Array]:
        leading = y.shape[: y.ndim - len(self.outputs)]
        ends = itertools.accumulate(self._extent(linear) for linear in self.linears[:-1])
        parts = jnp.split(y, tuple(ends), self._axis)
        return [part.reshape(*leading, *linear.outputs) for linear, part in zip(self.linears, parts, strict=True)]

    @property
    def _axis(self) -> int:
        return self.axis - len(self.outputs)

    def _extent(self, linear: Linear) -> int:
        others = self.outputs[: self.axis] + self.outputs[self.axis + 1 :]
        return math.prod(linear.outputs) // math.prod(others)

    def _reshaped(self, linear: Linear, array: jax.Array) -> jax.Array:
        return array.reshape(*array.shape[: array.ndim - len(linear.outputs)], *self.outputs)


def side_by_side(
    x: jax.Array, linears: Sequence[Linear], shape: Sequence[int], axis: int, *, has_gradient: bool = True
) -> jax.Array:  # fmt: skip
    """Multiplies x [..., D] by several weights in one matmul, without biases; results are concatenated along `axis`.

    shape: what each weight is reshaped to, [D, ...] with -1 at `axis`, which must not be a dim that the mesh splits.
    With a low-precision format the weights share a scale, if all of them have that format. has_gradient: False with a
    cache, where one product per weight is faster.
    """
    weights = [linear.multiplied().reshape(shape) for linear in linears]
    recipe = _common_recipe(linears)
    if recipe is not None:
        y = _low_precision(x, recipe, linears, weights, axis, 1)
    else:
        outputs = _outputs_spec(linears[0], len(shape) - 1, axis - 1)
        y = ops.matmul_side_by_side(x, weights, axis, has_gradient=has_gradient, outputs=outputs)
    return _changed(x, y, _Joined(linears, tuple(shape[1:]), axis - 1))


def _outputs_spec(linear: Linear, num_outputs: int, axis: int) -> P:
    """How the mesh splits the outputs of Linears side by side along `axis`: the first of the other dims, if any."""
    first, *_ = weight_spec(linear.record.axes[linear.num_inputs :])
    dims = [None] * num_outputs
    others = [dim for dim in range(num_outputs) if dim != axis]
    if others:
        dims[others[0]] = first
    return P(*dims)


def _changed(x: jax.Array, y: jax.Array, joined: _Joined) -> jax.Array:
    """Products side by side, as the transforms of their matrices change them."""
    linears = joined.linears
    if any(linear.applied != linears[0].applied for linear in linears):
        parts = zip(linears, joined.split(y), strict=True)
        return joined.join([linear.changed(x, part) for linear, part in parts])
    for transform in linears[0].applied:
        y = transform.joined_output(linears, x, y, joined)
    return y


def input_axis(linears: Sequence[Linear]) -> str:
    """Logical axis of the sequence in an input of these Linears: in a low-precision format they gather what `tensor`
    splits after rounding it."""
    return "sequence" if _common_recipe(linears) is not None else "time"


def _common_recipe(linears: Sequence[Linear]) -> Recipe | None:
    """The low-precision format of products side by side: that of the first, if all have one."""
    return linears[0].recipe if all(linear.recipe is not None for linear in linears) else None


def _low_precision(
    x, recipe: Recipe, linears: Sequence[Linear], weights: Sequence[ops.Weight], axis: int, num_contracted: int
):
    axes = linears[0].record.axes
    gathered = (axes[:num_contracted] == RESIDUAL, len(linears) == 1 and axes[num_contracted:] == RESIDUAL)
    return low_precision_matmul(x, weights, axis, num_contracted, recipe, gathered)


def stacked_biases(linears: Sequence[Linear]) -> jax.Array | None:
    """Those of Linears with equal outputs [N], [len(linears), N], if they have any."""
    return jnp.stack([linear.bias[...] for linear in linears]) if hasattr(linears[0], "bias") else None


def joinable(layer: nnx.Module) -> Iterator[tuple[list[str], tuple[int, ...], int]]:
    """(names of the matrices, shape, axis) of each SideBySide in a layer whose matrices are multiplied as they are
    stored."""
    names = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(layer)}
    for _, part in nnx.iter_modules(layer):
        found = getattr(part, "side_by_side", None)
        if found is None or len(found.linears) == 1:
            continue
        if all(linear.is_multiplied_as_stored for linear in found.linears):
            yield [names[id(linear)] for linear in found.linears], found.shape, found.axis


def matrices_of(layer: nnx.Module) -> Iterator[tuple[str, Matrix]]:
    """The matrices of a layer that have the role of one, by name."""
    for path, part in nnx.iter_modules(layer):
        if isinstance(part, Matrix) and part.record.role == "matrix":
            yield ".".join(map(str, path)), part
