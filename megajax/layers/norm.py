"""Normalisation layer: LayerNorm or RMSNorm, optionally with a zero-centred scale (Megatron's layernorm-1p)."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from megajax.ops.norm import layer_norm, rms_norm
from megajax.sharding import weight


@dataclasses.dataclass(frozen=True)
class NormConfig:
    kind: Literal["layernorm", "rmsnorm"]
    epsilon: float
    zero_centered: bool


class Norm(nnx.Module):
    """x [..., D] -> normalised over D, scaled, in x's dtype. Zero-centred: the scale is 1 + the parameter."""

    def __init__(self, config: NormConfig, dim: int, *, rngs: nnx.Rngs):
        self.config = config
        start = nnx.initializers.zeros if config.zero_centered else nnx.initializers.ones
        self.scale = weight((dim,), ("norm",), start, rngs)
        if config.kind == "layernorm":
            self.bias = weight((dim,), ("norm",), nnx.initializers.zeros, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...] + 1 if self.config.zero_centered else self.scale[...]
        if self.config.kind == "layernorm":
            return layer_norm(x, scale, self.bias[...], self.config.epsilon)
        return rms_norm(x, scale, self.config.epsilon)
