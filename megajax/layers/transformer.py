"""The pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention import Attention, AttentionConfig
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.kv_cache import EmptyCache
from megajax.layers.layer import Activation, Flops, Saved, Terms
from megajax.layers.mlp import Mlp, MlpConfig
from megajax.layers.norm import Norm, NormConfig
from megajax.mesh import MeshConfig
from megajax.parallel.context import current_order
from megajax.sharding import constrain

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
    recompute: Literal["none", "selective", "full"], recomputed: Sequence[str], offload: Sequence[str]
) -> Saved | None:
    """Of a transformer layer: see Saved.choose."""
    saved = Saved.choose(recompute, recomputed, offload, ACTIVATIONS, MODULES)
    return saved and _with_attention(saved)


def _with_attention(saved: Saved) -> Saved:
    if "attention_out" not in saved.kept:
        return saved
    # Without it the attention runs again; 4 bytes a head and token.
    return dataclasses.replace(saved, on_device=(*saved.on_device, "attention_lse"))


@dataclasses.dataclass(frozen=True)
class TransformerLayerConfig:
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig
    dropout: float
    saved: Saved | None

    kind = "dense"
    modules = MODULES

    @property
    def embed_dim(self) -> int:
        return self.attention.embed_dim

    def build(self, rngs: nnx.Rngs) -> "TransformerLayer":
        return TransformerLayer(self, rngs=rngs)

    def saving_by_name(self) -> "TransformerLayerConfig":
        return self if self.saved else dataclasses.replace(self, saved=_with_attention(Saved(ACTIVATIONS, ())))

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        self.attention.check(mesh, sequence_length)
        self.mlp.check(mesh)

    def flops(self, sequence_length: int) -> Flops:
        return self.attention.flops(sequence_length) + self.mlp.flops()

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        D = self.embed_dim
        out = Flops(matmuls=self.attention.out_flops)
        return {
            "residual": Activation(D),
            "normed": Activation(2 * D),
            **self.attention.activations(sequence_length),
            "residual_mid": Activation(D, out),
            **self.mlp.activations(),
        }

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        # Each half gathers its input over `tensor` and scatters its result, forward and backward; a forward pass that
        # is done again does so again.
        passes = 2 if self.saved is None or {"qkv", "mlp_wide"} & set(self.saved.kept) else 3
        return {"tensor": 4 * passes * self.embed_dim * itemsize, "context": self.attention.sent(mesh, itemsize)}

    def new_cache(self, length: int) -> EmptyCache:
        return EmptyCache(length)


class TransformerLayer(nnx.Module):
    """(x [B, T, D], inputs, cache, key) -> (x, cache, Terms)."""

    def __init__(self, config: TransformerLayerConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.saved = config.saved
        self.context = config.attention.context
        self.attention_norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.attention = Attention(config.attention, rngs=rngs)
        self.mlp_norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.mlp = Mlp(config.mlp, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache, key: DropoutKey | None):
        keys = [None] * 3 if key is None else key.split(3)
        x_BTD, y_BTD = self._residual(self.attention_norm, "residual", x_BTD, None)
        y_BTD, cache = self.attention(y_BTD, inputs, cache, keys[0])
        x_BTD, y_BTD = self._residual(self.mlp_norm, "residual_mid", x_BTD, self._drop(y_BTD, keys[1]))
        return x_BTD + self._drop(self.mlp(y_BTD), keys[2]), cache, Terms()

    def _residual(self, norm: Norm, name: str, x_BTD: jax.Array, y_BTD: jax.Array | None):
        """(x + y under this name, the same normalised for attention or MLP)."""
        if self.saved is not None:
            # The sum stands alone, so that normalising it again needs no y, which would be a matmul again.
            x_BTD = checkpoint_name(x_BTD if y_BTD is None else x_BTD + y_BTD, name)
            y_BTD = None
        x_BTD, y_BTD = norm.residual(x_BTD, y_BTD)
        return x_BTD, checkpoint_name(constrain(y_BTD, "batch", "time", None), "normed")

    def _drop(self, y_BTD: jax.Array, key: DropoutKey | None) -> jax.Array:
        # The barrier keeps XLA from adding x in place inside the matmul that makes y: x, needed again, would be copied.
        y_BTD = jax.lax.optimization_barrier(constrain(y_BTD, "batch", "sequence", None))
        order = None if key is None else current_order(y_BTD.shape[1], self.context)
        return dropout(y_BTD, self.dropout, key, order)
