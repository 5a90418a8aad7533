"""LoRA: adapters of low rank beside frozen matrices (Hu et al. 2021, arXiv 2106.09685), and the section `lora`.

y = x w + scale (x a) b, with a [K, r] drawn from U(-1/sqrt(K), 1/sqrt(K)) and b [r, N] zero: the initialisation and the
scale of PEFT, so that its files say the same (weights/hugging_face/adapter.py). Before training an adapted model
computes what its base computes, bit for bit. The adapters are float32, whatever the base is.
"""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import PositiveFloat, PositiveInt
from megajax.layers.linear import Matrix
from megajax.layers.transform import Transform
from megajax.ops.grouped_matmul import GroupedWeight, LowRankSum
from megajax.ops.matmul import matmul
from megajax.parameters import weight


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

    @property
    def scale(self) -> float:
        rank = self.rank or 1
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return () if self.rank is None else (Lora(self.targets, self.rank, self.scale),)


class _Adapted(Matrix):
    """A Matrix with an adapter."""

    lora_a: nnx.Param
    lora_b: nnx.Param


@dataclasses.dataclass(frozen=True)
class Lora(Transform):
    rank: int
    scale: float

    field = "lora.targets"
    trains_alone = True

    def apply(self, matrix: Matrix, rngs: nnx.Rngs) -> None:
        super().apply(matrix, rngs)
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
        adapted.lora_a = weight((*shape[:end], self.rank), a_axes, draw, rngs, "adapter", record.num_inputs)
        b_shape = (*shape[:first], self.rank, *shape[end:])
        adapted.lora_b = weight(b_shape, b_axes, nnx.initializers.zeros, rngs, "adapter")

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
        return y + matmul(self.scale * matmul(x, a, matrix.record.num_inputs), b)

    def grouped(self, matrix: Matrix, w: GroupedWeight) -> GroupedWeight:
        a, b = _factors(matrix)
        return LowRankSum(w, a, self.scale * b)


def _factors(matrix: Matrix) -> tuple[jax.Array, jax.Array]:
    adapted = cast(_Adapted, matrix)
    return adapted.lora_a[...], adapted.lora_b[...]
