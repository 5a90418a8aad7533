"""LoRA: adapters of low rank beside frozen matrices (Hu et al. 2021, arXiv 2106.09685), and the section `lora`.

y = x w + scale (x a) b, with a [K, r] drawn from U(-1/sqrt(K), 1/sqrt(K)) and b [r, N] zero: the initialisation and the
scale of PEFT, so that its files say the same (weights/hugging_face/adapter.py). Before training an adapted model
computes what its base computes, bit for bit. The adapters are float32, whatever the base is.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.fields.ranges import PositiveFloat, PositiveInt
from megajax.layers.layer import ADAPTERS
from megajax.layers.linear import Matrix
from megajax.layers.transform import Joined, Transform, layer_inputs
from megajax.ops.grouped_matmul import GroupedWeight, LowRankSum
from megajax.ops.mailboxes import summed_matmul
from megajax.ops.matmul import JOINED_MULTIPLE, matmul
from megajax.parameters import Parameter, weight
from megajax.precision import PrecisionConfig
from megajax.quantization.formats import scale_of, to_levels
from megajax.quantization.weights import DTYPES

NO_ADAPTER = -1


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The section `lora`."""

    rank: PositiveInt | None = None
    """Train adapters of this rank beside the matrices of layers, which are frozen like all other parameters; None:
    train the parameters themselves."""
    alpha: PositiveFloat = 32.0
    """An adapter is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("*",)
    """Shell patterns of the matrices that get one, by their name in a layer: attention.query, mlp.down."""
    base: Literal["compute", "int8", "float8"] = "compute"
    """Format of the frozen matrices of layers: precision.compute, or 8 bits (QLoRA, arXiv 2305.14314) with a scale per
    output, except for those of experts and latents."""

    def check(self, precision: PrecisionConfig) -> None:
        """Raises ValueError for fields that contradict each other or the number formats."""
        if self.base == "compute":
            return
        if self.rank is None:
            raise ValueError(f"lora.base={self.base} is the format of frozen matrices beside adapters; set --lora.rank")
        if precision.is_low:
            raise ValueError(
                f"lora.base={self.base} with precision.recipe={precision.recipe}: matrices in 8 bits are multiplied in "
                "precision.compute; leave one of them out"
            )

    @property
    def scale(self) -> float:
        rank = self.rank or 1
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        if self.rank is None:
            return ()
        base = () if self.base == "compute" else (EightBitBase(("*",), self.base),)
        return (*base, Lora(self.targets, self.rank, self.scale))


class _Adapted(Matrix):
    """A Matrix with what these transforms put beside it."""

    scale: nnx.Param
    lora_a: nnx.Param
    lora_b: nnx.Param


def to_eight_bits(w: jax.Array, axes: Sequence[int], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """-> (levels like w, float32 scale without these axes, those of the inputs), w = scale * level."""
    scale = scale_of(w, dtype, axes)
    return to_levels(w.astype(jnp.float32) / scale, dtype), jnp.squeeze(scale, tuple(axes))


@dataclasses.dataclass(frozen=True)
class EightBitBase(Transform):
    """Stores the levels of a matrix in its place and the scale beside it; the product is that with the levels, times
    the scale."""

    dtype: Literal["int8", "float8"]

    field = "lora.base"

    def fits(self, record: Parameter) -> bool:
        return not {"experts", "latent"} & {*record.axes}

    def apply(self, matrix: Matrix, rngs: nnx.Rngs) -> None:
        super().apply(matrix, rngs)
        record = matrix.record
        inputs = range(record.num_inputs)
        levels, scale = to_eight_bits(matrix.weight.get_value(), inputs, DTYPES[self.dtype])
        matrix.weight = nnx.Param(levels, record=record)
        cast(_Adapted, matrix).scale = nnx.Param(scale, record=Parameter(record.axes[len(inputs) :], "vector"))

    def merged(self, matrix: Matrix, w: jax.Array) -> jax.Array:
        """float32."""
        return w.astype(jnp.float32) * cast(_Adapted, matrix).scale[...]

    def output(self, matrix: Matrix, x: jax.Array, y: jax.Array) -> jax.Array:
        return (y.astype(jnp.float32) * cast(_Adapted, matrix).scale[...]).astype(y.dtype)

    def joined_output(self, matrices: Sequence[Matrix], x: jax.Array, y: jax.Array, joined: Joined) -> jax.Array:
        scales = joined.join([cast(_Adapted, matrix).scale[...] for matrix in matrices])
        return (y.astype(jnp.float32) * scales).astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class Lora(Transform):
    """Adds an adapter to the product of a matrix."""

    rank: int
    scale: float

    field = "lora.targets"
    trains_alone = True

    def apply(self, matrix: Matrix, rngs: nnx.Rngs) -> None:
        super().apply(matrix, rngs)
        _add_factors(matrix, self.rank, rngs)

    def merged(self, matrix: Matrix, w: jax.Array) -> jax.Array:
        """Added in float32, then rounded to w's dtype."""
        stack = w.shape[: matrix.record.num_stacked]
        a, b = _factors(matrix)
        a = a.reshape(*stack, -1, self.rank)
        b = b.reshape(*stack, self.rank, -1)
        change = self.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (w.astype(jnp.float32) + change.reshape(w.shape)).astype(w.dtype)

    def output(self, matrix: Matrix, x: jax.Array, y: jax.Array) -> jax.Array:
        a, b = _factors(matrix)
        return y + matmul(_narrow(matrix, x, self.scale * a), b)

    def joined_output(self, matrices: Sequence[Matrix], x: jax.Array, y: jax.Array, joined: Joined) -> jax.Array:
        """All a side by side, and each b in the rows of its a, with zeros in the columns of the other matrices: two
        products, the second added to y where it is."""
        factors = [_factors(matrix) for matrix in matrices]
        a = jnp.concatenate([a for a, _ in factors], -1)
        rows = range(0, a.shape[-1], self.rank)
        padded = [
            jnp.pad(b, ((start, a.shape[-1] - start - self.rank), *[(0, 0)] * (b.ndim - 1)))
            for start, (_, b) in zip(rows, factors, strict=True)
        ]
        return y + matmul(matmul(x, self.scale * a), joined.join(padded))

    def grouped(self, matrix: Matrix, w: GroupedWeight) -> GroupedWeight:
        a, b = _factors(matrix)
        return LowRankSum(w, a, self.scale * b)


@dataclasses.dataclass(frozen=True)
class NamedAdapter:
    name: str
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True)
class AdapterChoice(Transform):
    """Adds one of several adapters, or none, to the product of each token, for serving.

    The a [*K, R] and b [R, *N] of all adapters are side by side, followed by zeros up to a multiple of 64 columns; of
    x a those of the token's adapter are scaled and the others become zero. So one product serves any mix of adapters,
    and a token without one gets that of the base.
    """

    adapters: tuple[NamedAdapter, ...]

    field = "adapters"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.adapters)

    @property
    def num_columns(self) -> int:
        """R, so that x can be multiplied by the matrix and by all adapters at once."""
        return -(-sum(adapter.rank for adapter in self.adapters) // JOINED_MULTIPLE) * JOINED_MULTIPLE

    def fits(self, record: Parameter) -> bool:
        """Rows of experts are in another order than tokens, and latents are multiplied by merged matrices."""
        return not {"experts", "latent"} & {*record.axes}

    def apply(self, matrix: Matrix, rngs: nnx.Rngs) -> None:
        super().apply(matrix, rngs)
        _add_factors(matrix, self.num_columns, rngs)

    def merged(self, matrix: Matrix, w: jax.Array) -> jax.Array:
        raise ValueError(f"adapters={','.join(self.names)} cannot be merged into one matrix")

    def output(self, matrix: Matrix, x: jax.Array, y: jax.Array) -> jax.Array:
        chosen = layer_inputs().get(ADAPTERS)
        if chosen is None:
            return y
        a, b = _factors(matrix)
        owners_R = np.full(self.num_columns, NO_ADAPTER)
        scales_R = np.zeros(self.num_columns)
        end = 0
        for number, adapter in enumerate(self.adapters):
            start, end = end, end + adapter.rank
            owners_R[start:end] = number
            scales_R[start:end] = adapter.scale
        scales = jnp.where(chosen[..., None] == owners_R, jnp.asarray(scales_R, x.dtype), 0)
        return y + matmul(scales * _narrow(matrix, x, a), b)


def _add_factors(matrix: Matrix, rank: int, rngs: nnx.Rngs) -> None:
    adapted = cast(_Adapted, matrix)
    record = matrix.record
    shape = matrix.weight.get_value().shape
    first = record.num_stacked
    end = first + record.num_inputs
    bound = 1 / math.sqrt(math.prod(shape[first:end]))

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    a_axes = (*record.axes[:end], "rank")
    b_axes = (*record.axes[:first], "rank", *record.axes[end:])
    adapted.lora_a = weight((*shape[:end], rank), a_axes, draw, rngs, "adapter", record.num_inputs)
    b_shape = (*shape[:first], rank, *shape[end:])
    adapted.lora_b = weight(b_shape, b_axes, nnx.initializers.zeros, rngs, "adapter")


def _narrow(matrix: Matrix, x: jax.Array, a: jax.Array) -> jax.Array:
    """x a, [..., R]."""
    count = matrix.record.num_inputs
    return summed_matmul(x, a, count, (*matrix.record.axes[:count], "rank"))


def _factors(matrix: Matrix) -> tuple[jax.Array, jax.Array]:
    adapted = cast(_Adapted, matrix)
    return adapted.lora_a[...], adapted.lora_b[...]
