"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2): a layer at depth k predicts, for
token i, token i + k + 1.

Dimensions: B batch, T sequence, D model width.
h_k = norm(layer(W [norm(e_(i + k)), norm(h_(k - 1))])), where e are embeddings and h_0 is the normalised output of the
main model; the embedding and the output layer are those of the main model. The norm and the order of the two halves are
those of the released weights and of Megatron.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm
from megajax.layers.transformer import TransformerLayerConfig
from megajax.mesh.sharding import constrain
from megajax.parallel.context import ContextMethod, current_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTokenConfig(TransformerLayerConfig):
    """Its layer reads `next_embeddings` [B, T, D] among its inputs."""

    projection_std: float
    """Initial standard deviation of W."""

    @property
    def projection_flops(self) -> Flops:
        return Flops(2 * 2 * self.embed_dim**2)

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return MultiTokenLayer(self, super().build, rngs=rngs)

    def flops(self, sequence_length: int) -> Flops:
        return super().flops(sequence_length) + self.projection_flops

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        joined = Activation(2 * self.embed_dim)
        residual = Activation(self.embed_dim, self.projection_flops)
        return {"hidden": joined, "joined": joined} | super().activations(sequence_length) | {"residual": residual}


class MultiTokenLayer(nnx.Module):
    """(h [B, T, D] of depth k - 1, inputs, cache, key) -> (h of depth k, cache, Terms)."""

    def __init__(self, config: MultiTokenConfig, build_layer: Callable[[nnx.Rngs], nnx.Module], *, rngs: nnx.Rngs):
        D = config.embed_dim
        self.embedding_norm = Norm(config.norm, D, rngs=rngs)
        self.hidden_norm = Norm(config.norm, D, rngs=rngs)
        self.projection = Linear((2 * D,), (D,), ("embed", "head_dim"), config.projection_std, rngs=rngs)
        self.layer = build_layer(rngs)
        self.final_norm = Norm(config.norm, D, rngs=rngs)

    def __call__(self, h_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None):
        normed = self.embedding_norm(inputs["next_embeddings"]), self.hidden_norm(h_BTD)
        joined = checkpoint_name(jnp.concatenate(normed, -1), "joined")
        x_BTD = constrain(self.projection(joined), "batch", "sequence", None)
        x_BTD, cache, terms = self.layer(x_BTD, inputs, cache, key)
        return self.final_norm(x_BTD), cache, terms


def shifted(batch: dict, names: Sequence[str], depth: int, context: ContextMethod) -> dict:
    """These arrays [B, T] of a batch, of the tokens `depth` places later in the sequence; 0 beyond its end, and for
    `loss_weights` where the later token belongs to another document."""
    length = batch["tokens"].shape[1]
    order = current_order(length, context)  # index -> place in the sequence
    index_of = order.argsort()
    places = order + depth
    source = index_of[places.clip(max=length - 1)]
    inside = places < length

    def shift(array_BT: jax.Array) -> jax.Array:
        whole_BT = constrain(array_BT, "batch", None)
        return constrain(jnp.where(inside, whole_BT[:, source], 0), "batch", "time")

    found = {name: shift(batch[name]) for name in names}
    if "loss_weights" in found and "segment_ids" in batch:
        same = shift(batch["segment_ids"]) == batch["segment_ids"]
        found["loss_weights"] = jnp.where(same, found["loss_weights"], 0.0)
    return found
