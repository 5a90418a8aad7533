"""The pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

import dataclasses

import jax
from flax import nnx

from megajax.layers.attention import Attention, AttentionConfig
from megajax.layers.dropout import dropout
from megajax.layers.mlp import Mlp, MlpConfig
from megajax.layers.norm import Norm, NormConfig
from megajax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class TransformerLayerConfig:
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig
    dropout: float

    @property
    def kind(self) -> str:
        """Layers of one kind have parameters of the same shapes and are stored stacked under this name."""
        return "dense"

    def build(self, rngs: nnx.Rngs) -> "TransformerLayer":
        return TransformerLayer(self, rngs=rngs)


class TransformerLayer(nnx.Module):
    """(x [B, T, D], inputs, cache, key) -> (x, cache, auxiliary losses); the stack's contract with every layer."""

    def __init__(self, config: TransformerLayerConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = Norm(config.norm, config.attention.embed_dim, rngs=rngs)
        self.attention = Attention(config.attention, rngs=rngs)
        self.mlp_norm = Norm(config.norm, config.attention.embed_dim, rngs=rngs)
        self.mlp = Mlp(config.mlp, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache, key: jax.Array | None):
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        y_BTD = constrain(self.attention_norm(x_BTD), "batch", "time", None)
        y_BTD, cache = self.attention(y_BTD, inputs, cache, keys[0])
        x_BTD = self._add(x_BTD, y_BTD, keys[1])
        y_BTD = self.mlp(constrain(self.mlp_norm(x_BTD), "batch", "time", None))
        return self._add(x_BTD, y_BTD, keys[2]), cache, {}

    def _add(self, x_BTD: jax.Array, y_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        y_BTD = dropout(constrain(y_BTD, "batch", "sequence", None), self.dropout, key)
        return _gradient_barrier(constrain(x_BTD + y_BTD, "batch", "sequence", None))


@jax.custom_vjp
def _gradient_barrier(x: jax.Array) -> jax.Array:
    """x; its gradient is computed as such, not inside whatever reads it.

    Everything on the residual stream is local to a row, so XLA would fuse the norm gradients of all layers into each
    other: compile time grows with the square of the layers (7 B, 4 layers: 47 s instead of 5 s) and each fusion
    computes the later layers again.
    """
    return x


_gradient_barrier.defvjp(lambda x: (x, None), lambda _, d_x: (jax.lax.optimization_barrier(d_x),))
