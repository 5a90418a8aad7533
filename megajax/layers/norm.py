"""Normalisation layer: LayerNorm or RMSNorm, optionally with a zero-centred scale (Megatron's layernorm-1p)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.ops.norm import for_each_head, layer_norm, residual_norm, rms_norm
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class NormConfig:
    kind: Literal["layernorm", "rmsnorm"]
    epsilon: float
    zero_centered: bool
    bias: bool
    """For layernorm; rmsnorm has no bias."""


class Norm(nnx.Module):
    """x [..., D] -> normalised over D, scaled, in x's dtype. Zero-centred: the scale is 1 + the parameter."""

    def __init__(self, config: NormConfig, dim: int, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.zeros if config.zero_centered else nnx.initializers.ones
        self.scale = weight((dim,), ("norm",), init, rngs, "vector")
        if config.kind == "layernorm" and config.bias:
            self.bias = weight((dim,), ("norm",), nnx.initializers.zeros, rngs, "vector")

    def __call__(self, x: jax.Array, *, num_heads: int | None = None) -> jax.Array:
        """num_heads: the last but one dim of x, if it counts heads: then the gradient of an RMSNorm is faster."""
        scale, bias = self._parameters()
        if bias is not None:
            return layer_norm(x, scale, bias, self.config.epsilon)
        return rms_norm(x, scale if num_heads is None else for_each_head(scale, num_heads), self.config.epsilon)

    def residual(self, x_BTD: jax.Array, y_BTD: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(x + y, norm(x + y)): the residual stream, and the input of the next sublayer."""
        return residual_norm(x_BTD, y_BTD, *self._parameters(), self.config.epsilon)

    def _parameters(self) -> tuple[jax.Array, jax.Array | None]:
        scale = self.scale[...] + 1 if self.config.zero_centered else self.scale[...]
        if self.config.kind == "rmsnorm":
            return scale, None
        return scale, self.bias[...] if self.config.bias else jnp.zeros_like(scale)
