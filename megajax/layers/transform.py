"""Transforms of the matrices of layers, chosen by name: a number format, an adapter.

A transform wraps a matrix, never a layer: no layer and no family knows of it. It can put parameters beside the weight,
change the weight, or change the product. Those of a model (Model.transforms: of precision.recipe, of its family and of
the section lora) are applied, in their order, when a stack builds its layers.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax
from flax import nnx

from megajax.ops.grouped_matmul import GroupedWeight, LowRankSum
from megajax.ops.matmul import changed
from megajax.parameters import Parameter, matches
from megajax.precision import Recipe

if TYPE_CHECKING:
    from megajax.layers.linear import Matrix

logger = logging.getLogger("megajax")

_CURRENT: ContextVar[tuple["Transform", ...]] = ContextVar("transforms", default=())
_INPUTS: ContextVar[Mapping[str, Any]] = ContextVar("inputs")


class Joined(Protocol):
    """How arrays of several matrices, [..., *N] with the outputs of each, are side by side."""

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array: ...

    def split(self, y: jax.Array) -> list[jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class Transform:
    """Base of a transform: a frozen dataclass. Its methods get the Matrix (layers/linear.py) that it is applied to."""

    field: ClassVar[str]
    """The field of the config that chooses the matrices."""
    trains_alone: ClassVar[bool] = False
    """Whether only adapters are trained unless training.trained names others. Frozen matrices are then stored in the
    compute dtype, without a copy in float32."""
    matrices: tuple[str, ...]
    """Shell patterns of the matrices, by their name in a layer: attention.query, mlp.down."""

    def in_layer(self, number: int, num_layers: int) -> Self:
        """The transform as a layer of a stack has it. All layers of one kind must have the same parameters."""
        return self

    def fits(self, record: Parameter) -> bool:
        """Whether it can be applied to a matrix with this record."""
        return True

    def takes(self, name: str, record: Parameter) -> bool:
        """Whether it is applied to the matrix of this name in a layer."""
        return self.fits(record) and matches(name, self.matrices)

    def apply(self, matrix: "Matrix", rngs: nnx.Rngs) -> None:
        """Called once a layer is built. An override adds parameters: `matrix.lora_a = weight(..., "adapter")`, which
        is `query_lora_a` in a checkpoint, with axes from `matrix.record`."""
        matrix.transforms += (self,)

    def merged(self, matrix: "Matrix", w: jax.Array) -> jax.Array:
        """The weight [*K, *N] or, of experts, [E, K, N], in w's dtype, that alone gives the products of `w` with this
        transform. Raises ValueError if there is none; then `output` is needed, and the model cannot be exported."""
        raise NotImplementedError

    def output(self, matrix: "Matrix", x: jax.Array, y: jax.Array) -> jax.Array:
        """The product of x [..., *K], from the product y [..., *N] before this transform. Without an override products
        read the merged weight."""
        raise NotImplementedError

    def joined_output(self, matrices: Sequence["Matrix"], x: jax.Array, y: jax.Array, joined: Joined) -> jax.Array:
        """`output` of several matrices with this transform, whose products of x are side by side in y. An override
        changes them in one go, so that they need not be separated."""
        parts = zip(matrices, joined.split(y), strict=True)
        return joined.join([self.output(matrix, x, part) for matrix, part in parts])

    def grouped(self, matrix: "Matrix", w: GroupedWeight) -> GroupedWeight:
        """Of experts: the weight [E, K, N] that their products read, by default the merged one."""
        assert not isinstance(w, LowRankSum), "adapters come last"
        return changed(w, lambda array: self.merged(matrix, array))

    @property
    def has_output(self) -> bool:
        return type(self).output is not Transform.output


@contextlib.contextmanager
def transforming(transforms: Sequence[Transform]) -> Generator[None]:
    """Stacks that are built inside apply these transforms to the matrices of their layers."""
    token = _CURRENT.set(tuple(transforms))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_transforms() -> tuple[Transform, ...]:
    return _CURRENT.get()


@contextlib.contextmanager
def computing(inputs: Mapping[str, Any]) -> Generator[None]:
    """Products inside are those of a layer with these inputs: arrays of the trace in which it is called."""
    token = _INPUTS.set(inputs)
    try:
        yield
    finally:
        _INPUTS.reset(token)


def layer_inputs() -> Mapping[str, Any]:
    """Of the layer whose product a transform changes."""
    return _INPUTS.get({})


@dataclasses.dataclass(frozen=True)
class LowPrecision(Transform):
    """Rounds the operands of products to the format of precision.recipe."""

    recipe: Recipe
    high_layers: tuple[int, int]
    """First and last layers that stay in precision.compute."""
    is_active: bool = True
    """False in one of these."""

    field = "precision.low_modules"

    def in_layer(self, number: int, num_layers: int) -> Self:
        first, last = self.high_layers
        return dataclasses.replace(self, is_active=first <= number < num_layers - last)

    def fits(self, record: Parameter) -> bool:
        if "experts" in record.axes:
            _log_experts(self.recipe)
        return "experts" not in record.axes

    def apply(self, matrix: "Matrix", rngs: nnx.Rngs) -> None:
        matrix.recipe = self.recipe if self.is_active else None


@functools.cache
def _log_experts(recipe: Recipe) -> None:
    logger.warning("precision.recipe=%s: matmuls of experts remain in precision.compute", recipe)
