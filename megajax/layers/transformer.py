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
        x_BTD, y_BTD = self.attention_norm.residual(x_BTD)
        y_BTD, cache = self.attention(constrain(y_BTD, "batch", "time", None), inputs, cache, keys[0])
        x_BTD, y_BTD = self.mlp_norm.residual(x_BTD, self._drop(y_BTD, keys[1]))
        y_BTD = self.mlp(constrain(y_BTD, "batch", "time", None))
        return x_BTD + self._drop(y_BTD, keys[2]), cache, {}

    def _drop(self, y_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        # The barrier keeps XLA from adding x in place inside the matmul that makes y: x, needed again, would be copied.
        y_BTD = jax.lax.optimization_barrier(constrain(y_BTD, "batch", "sequence", None))
        return dropout(y_BTD, self.dropout, key)
