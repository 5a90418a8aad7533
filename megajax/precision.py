"""Number formats of the stored parameters and of the computation."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from megajax.fields.ranges import MAX_INT32, NonNegativeInt

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

Recipe = Literal["bf16", "fp16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]

HEAD = "head"  # in low_modules: the output layer


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    recipe: Recipe = "bf16"
    """Number formats of the layers' matmuls (docs/low_precision.md): those of `compute`; fp16 with loss scaling; FP8
    with one scale a tensor (fp8), a row (fp8_rowwise) or a block (fp8_blockwise); or mxfp8 and nvfp4, which Hopper GPUs
    emulate slowly."""
    low_modules: tuple[str, ...] = ("*",)
    """With a low-precision recipe: shell patterns of the matrices of a layer that use it, by their name in the layer:
    attention.query, mlp.down. The name `head` adds the products of the output layer in the loss; no pattern does.
    Embedding, routers and experts never do, nor do attention scores."""
    high_layers: tuple[NonNegativeInt, NonNegativeInt] = (1, 1)
    """With a low-precision recipe: how many layers at the start and at the end of a stack remain in `compute`."""
    params: Literal["float32", "bfloat16"] = "float32"
    """Format of the stored matrices and embeddings. Of bfloat16 ones the optimizer keeps the other 16 bits, so that its
    updates are those of float32 weights, in the same memory, and no step rounds them for its matmuls
    (docs/low_precision.md). Norm scales, biases, routers and gradient sums are float32."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Format of activations and of the weights that matmuls read; norms, softmax and loss are float32 inside. With
    recipe fp16, float16 takes the place of bfloat16."""
    gradient_reduce: Literal["compute", "float32"] = "compute"
    """Format in which the gradients of the layers' matrices are summed over devices: `compute`, or float32, which is
    Megatron's default and costs time and memory (docs/design.md). Sums over microbatches are always float32."""

    def check(self, layers: Mapping[str, int]) -> None:
        """layers: the number of layers of each stack. Raises ValueError for formats that contradict each other, or if
        no layer would use the recipe."""
        if self.recipe == "fp16" and self.compute != "bfloat16":
            raise ValueError(
                f"precision.recipe=fp16 with precision.compute={self.compute}: the recipe computes in float16, in "
                "place of bfloat16; use --precision.compute=bfloat16 with it"
            )
        first, last = self.high_layers
        if self.is_low and max(layers.values()) <= first + last:
            counts = " and ".join(f"{count} layers in {stack}" for stack, count in layers.items())
            raise ValueError(
                f"precision.high_layers={first},{last} leaves no layer for precision.recipe={self.recipe}: the model "
                f"has {counts}; use --precision.high_layers=0,0"
            )

    @property
    def for_inference(self) -> "PrecisionConfig":
        """The same parameters in a model that does not round them: in a low-precision format a result would depend on
        the other sequences of the batch."""
        return dataclasses.replace(self, high_layers=(MAX_INT32, 0), low_modules=self.low_matrices)

    def with_compute(self, compute: str | None) -> "PrecisionConfig":
        """The same, but computing in this format, also in place of float16; None: unchanged."""
        if compute is None:
            return self
        recipe = "bf16" if self.recipe == "fp16" else self.recipe
        return dataclasses.replace(self, recipe=recipe, compute=compute)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow without loss scaling (optim/loss_scale.py)."""
        return self.compute_dtype == jnp.float16

    @property
    def is_low(self) -> bool:
        """Whether matmuls of layers round their operands to a low-precision format."""
        return self.recipe not in ("bf16", "fp16")

    @property
    def low_matrices(self) -> tuple[str, ...]:
        """`low_modules` without the output layer: the patterns of matrices of layers."""
        return tuple(pattern for pattern in self.low_modules if pattern != HEAD)

    @property
    def head_recipe(self) -> Recipe | None:
        """The recipe, if the loss rounds the operands of the output layer to it."""
        return self.recipe if self.is_low and HEAD in self.low_modules else None

    @property
    def has_float32_gradients(self) -> bool:
        """Whether gradients of matrices have more precision than the compute dtype."""
        return self.gradient_reduce == "float32" and self.compute != "float32"

    @property
    def params_dtype(self) -> jnp.dtype:
        return DTYPES[self.params]

    @property
    def compute_dtype(self) -> jnp.dtype:
        is_float16 = self.recipe == "fp16" and self.compute == "bfloat16"
        return DTYPES["float16" if is_float16 else self.compute]


def cast_floating(tree, dtype: jnp.dtype):
    """Casts the floating-point leaves of a pytree to dtype; other leaves are unchanged."""

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
