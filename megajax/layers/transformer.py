"""The pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention import Attention, AttentionConfig
from megajax.layers.block import Saved
from megajax.layers.dropout import dropout
from megajax.layers.mlp import Mlp, MlpConfig
from megajax.layers.norm import Norm, NormConfig
from megajax.parallel.context import current_order
from megajax.sharding import constrain

Recompute = Literal["none", "selective", "full"]

# What the backward pass of a layer reads, by the names that the forward pass gives, in its order.
ACTIVATIONS = ("residual", "normed", "qkv", "attention_out", "residual_mid", "mlp_wide", "mlp_hidden")
# Modules that the backward pass can compute again, and which of the activations need not be kept then.
MODULES = {
    "norm": ("normed",),
    "qkv": ("qkv",),
    "core_attention": ("attention_out",),
    "attention": ("qkv", "attention_out"),
    "activation": ("mlp_hidden",),
    "mlp": ("mlp_wide", "mlp_hidden"),
}


def saved_activations(
    recompute: Recompute, modules: Sequence[str], offload: Sequence[str], *, by_name: bool = False
) -> Saved | None:
    """modules: of MODULES, what is computed again if selective. offload: of ACTIVATIONS, kept in any case. by_name: all
    names rather than None where nothing is computed again."""
    if recompute == "none" and not offload and not by_name:
        return None
    again = {
        "none": (),
        "selective": {name for module in modules for name in MODULES[module]},
        "full": ACTIVATIONS,
    }[recompute]
    on_device = tuple(name for name in ACTIVATIONS if name not in again and name not in offload)
    if "attention_out" in (*on_device, *offload):
        on_device += ("attention_lse",)  # without it the attention runs again; 4 bytes a head and token
    return Saved(on_device, tuple(offload))


@dataclasses.dataclass(frozen=True)
class TransformerLayerConfig:
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig
    dropout: float
    saved: Saved | None

    @property
    def kind(self) -> str:
        """Layers of one kind have parameters of the same shapes and are stored stacked under this name."""
        return "dense"

    def build(self, rngs: nnx.Rngs) -> "TransformerLayer":
        return TransformerLayer(self, rngs=rngs)


class TransformerLayer(nnx.Module):
    """(x [B, T, D], inputs, cache, key) -> (x, cache, auxiliary losses); the stack's contract with every layer."""

    def __init__(self, config: TransformerLayerConfig, *, rngs: nnx.Rngs):
        self.dropout, self.saved, self.context = config.dropout, config.saved, config.attention.context
        self.attention_norm = Norm(config.norm, config.attention.embed_dim, rngs=rngs)
        self.attention = Attention(config.attention, rngs=rngs)
        self.mlp_norm = Norm(config.norm, config.attention.embed_dim, rngs=rngs)
        self.mlp = Mlp(config.mlp, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache, key: jax.Array | None):
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x_BTD, y_BTD = self._residual(self.attention_norm, "residual", x_BTD, None)
        y_BTD, cache = self.attention(y_BTD, inputs, cache, keys[0])
        x_BTD, y_BTD = self._residual(self.mlp_norm, "residual_mid", x_BTD, self._drop(y_BTD, keys[1]))
        return x_BTD + self._drop(self.mlp(y_BTD), keys[2]), cache, {}

    def _residual(self, norm: Norm, name: str, x_BTD: jax.Array, y_BTD: jax.Array | None):
        """(x + y under this name, the same normalised for attention or MLP)."""
        if self.saved is not None:
            # The sum stands alone, so that normalising it again needs no y, which would be a matmul again.
            x_BTD, y_BTD = checkpoint_name(x_BTD if y_BTD is None else x_BTD + y_BTD, name), None
        x_BTD, y_BTD = norm.residual(x_BTD, y_BTD)
        return x_BTD, checkpoint_name(constrain(y_BTD, "batch", "time", None), "normed")

    def _drop(self, y_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        # The barrier keeps XLA from adding x in place inside the matmul that makes y: x, needed again, would be copied.
        y_BTD = jax.lax.optimization_barrier(constrain(y_BTD, "batch", "sequence", None))
        order = None if key is None else current_order(y_BTD.shape[1], self.context)
        return dropout(y_BTD, self.dropout, key, order)
