"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1): keys and values of all
heads are projections of one small vector per token, their latent.

Dimensions: B batch, T sequence, D model width, N heads, Q and R rank of the latents of queries and of keys and values,
H head dim without positions, P rotary head dim, V head dim of the values.

    c_q = norm(x W_qd)                      [Q]             q = (c_q W_qu)_H, rotary((c_q W_qu)_P)        [N, H + P]
    c, p = norm((x W_kvd)_R), rotary((x W_kvd)_P)           k = c W_ku, p (the same for all heads)        [N, H + P]
                                                            v = c W_vu                                    [N, V]

In training queries, keys and values are computed as above (Megatron and transformers do the same). A cache stores c and
p only, R + P numbers per token, and decoding does not compute k and v either: since q k = (q_H W_ku^T) c + q_P p, all
heads attend to the same key (c, p), with c as its value, and W_vu is applied to the result ("absorbed").
Tensor parallel: the heads are split; latents are computed from the sequence shards of the residual stream, and gathered
instead of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.fields.ranges import Epsilon, PositiveInt
from megajax.layers.attention.multi_head import AttentionConfig, attend, attention_options, rotated
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, Branch, Flops, Terms
from megajax.layers.linear import Linear, SideBySide, side_by_side
from megajax.layers.norm import Norm, NormConfig
from megajax.mesh.sharding import constrain
from megajax.ops.matmul import dot_precision
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """The section model.latent."""

    kv_rank: PositiveInt | None = None
    """Width of the latent of keys and values (DeepSeek-V3: 512); None: ordinary attention."""
    q_rank: PositiveInt | None = None
    """Width of the latent of queries (DeepSeek-V3: 1536); None: queries are projected directly."""
    rope_dim: PositiveInt = 64
    """Width of the rotary part of a head, in addition to head_dim; its key is shared by all heads."""
    value_dim: PositiveInt | None = None
    """Head dim of the values; None = head_dim."""
    norm_epsilon: Epsilon | None = None
    """Of the norms of latents (DeepSeek-V3: 1e-6); None = model.norm_epsilon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """head_dim is that of the part without positions; num_kv_heads = num_heads."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    value_dim: int
    norm: NormConfig
    """Of the latents."""

    caches_values = False

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {
            "qkv": ("qkv",),
            "core_attention": ("attention_out",),
            "attention": ("latents", "qkv", "attention_out"),
        }

    @property
    def down_dim(self) -> int:
        """Width of what all heads share: the latents and the rotary key."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim

    @property
    def cached_heads(self) -> tuple[int, int]:
        return 1, self.kv_rank + self.rope_dim

    @property
    def gathered_dim(self) -> int:
        return self.down_dim + (self.embed_dim if self.q_rank is None else 0)

    @property
    def heads_dim(self) -> int:
        return self.num_heads * (self.head_dim + self.rope_dim)

    @property
    def kv_dim(self) -> int:
        return self.heads_dim + self.out_dim

    @property
    def out_dim(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def down_flops(self) -> float:
        """FLOPs of the projections to the latents per token."""
        return 2 * self.embed_dim * self.down_dim

    @property
    def up_flops(self) -> float:
        """FLOPs of the projections to queries, keys and values per token."""
        keys_and_values = self.num_heads * (self.head_dim + self.value_dim)
        return 2 * ((self.q_rank or self.embed_dim) * self.heads_dim + self.kv_rank * keys_and_values)

    @property
    def qkv_flops(self) -> float:
        return self.down_flops + self.up_flops

    def build(self, rngs: nnx.Rngs) -> Branch:
        return LatentAttention(self, rngs=rngs)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        of_heads = super().activations(sequence_length)
        # The rotary part of the keys is among the latents.
        elements = of_heads["qkv"].elements - self.num_heads * self.rope_dim
        qkv = Activation(elements, Flops(self.up_flops))
        return {"latents": Activation(self.down_dim, Flops(self.down_flops))} | of_heads | {"qkv": qkv}


class LatentAttention(nnx.Module):
    """x [B, T, D] -> [B, T, D]."""

    input_axis = "sequence"
    """As Attention."""

    def __init__(self, config: LatentAttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        N = config.num_heads
        H = config.head_dim
        Q = config.q_rank
        R = config.kv_rank
        P = config.rope_dim
        V = config.value_dim
        std = config.init_std
        if Q is None:
            self.query = Linear((D,), (N, H + P), ("embed", "heads", "head_dim"), std, rngs=rngs)
        else:
            self.query_down = Linear((D,), (Q,), ("embed", "head_dim"), std, rngs=rngs)
            self.query_norm = Norm(config.norm, Q, rngs=rngs)
            self.query_up = Linear((Q,), (N, H + P), ("latent", "heads", "head_dim"), std, rngs=rngs)
        self.key_value_down = Linear((D,), (R + P,), ("embed", "head_dim"), std, rngs=rngs)
        self.key_value_norm = Norm(config.norm, R, rngs=rngs)
        self.key_up = Linear((R,), (N, H), ("latent", "heads", "head_dim"), std, rngs=rngs)
        self.value_up = Linear((R,), (N, V), ("latent", "heads", "head_dim"), std, rngs=rngs)
        self.out = Linear((N, V), (D,), ("heads", "head_dim", "embed"), config.out_init_std, rngs=rngs)
        if config.sinks:
            self.sinks = weight((N,), ("heads",), nnx.initializers.zeros, rngs, "vector")

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        """As Attention."""
        config = self.config
        q_BTNH, latent_BTR, position_BT1P = self._project(x_BTD, inputs, has_gradient=cache is None)
        options = attention_options(config, self.sinks[...] if config.sinks else None)
        cached_BT1C = jnp.concatenate([latent_BTR[:, :, None], position_BT1P], -1)
        if cache is not None:
            out_BTNV, cache = self._absorbed(q_BTNH, cached_BT1C, cache, options)
        else:
            k_BTNH, v_BTNV = self._expand(latent_BTR, position_BT1P)
            out_BTNV = attend(q_BTNH, k_BTNH, v_BTNV, config, inputs, key, options)
        return self.out(out_BTNV), cache, Terms()

    @property
    def side_by_side(self) -> SideBySide:
        config = self.config
        down = (self.key_value_down,) if config.q_rank is None else (self.key_value_down, self.query_down)
        return SideBySide(down, (config.embed_dim, -1), 1)

    def _project(
        self, x_BTD: jax.Array, inputs: dict, *, has_gradient: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """-> (queries [B, T, N, H + P], normalised latent [B, T, R], key of the positions [B, T, 1, P])."""
        config = self.config
        rank = config.kv_rank
        joined = side_by_side(x_BTD, *self.side_by_side, has_gradient=has_gradient)
        latents = checkpoint_name(joined, "latents")
        latent, position, of_queries = jnp.split(latents, (rank, rank + config.rope_dim), -1)
        latent_BTR = constrain(self.key_value_norm(latent), "batch", "time", None)
        position_BT1P = rotated(constrain(position, "batch", "time", None)[:, :, None], config, inputs)
        if config.q_rank is None:
            q_BTNH = self.query(constrain(x_BTD, "batch", "time", None))
        else:
            q_BTNH = self.query_up(constrain(self.query_norm(of_queries), "batch", "time", None))
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch", "time", "heads", None), "qkv")
        plain, turned = jnp.split(q_BTNH, (config.head_dim,), -1)
        return jnp.concatenate([plain, rotated(turned, config, inputs)], -1), latent_BTR, position_BT1P

    def _expand(self, latent_BTR: jax.Array, position_BT1P: jax.Array) -> tuple[jax.Array, jax.Array]:
        """-> (keys [B, T, N, H + P], values [B, T, N, V])."""
        config = self.config
        shape = (config.kv_rank, config.num_heads, -1)
        joined = side_by_side(latent_BTR, (self.key_up, self.value_up), shape, axis=2)
        joined = checkpoint_name(constrain(joined, "batch", "time", "heads", None), "qkv")
        plain, v_BTNV = jnp.split(joined, (config.head_dim,), -1)
        position = jnp.broadcast_to(position_BT1P, (*plain.shape[:3], config.rope_dim))
        return jnp.concatenate([plain, position], -1), v_BTNV

    def _absorbed(self, q_BTNH: jax.Array, cached_BT1C: jax.Array, cache, options: dict):
        """-> (attention [B, T, N, V] computed from the latents, cache)."""
        config = self.config

        plain, turned = jnp.split(q_BTNH, (config.head_dim,), -1)
        precision = dot_precision(plain.dtype)
        # As an einsum, the product would have T as its last dim, and be transposed in memory.
        key_up = jnp.transpose(self.key_up.array().astype(plain.dtype), (1, 2, 0))
        absorbed_NBTR = jax.lax.dot_general(plain, key_up, (((3,), (1,)), ((2,), (0,))), precision=precision)
        q_BTNC = jnp.concatenate([jnp.moveaxis(absorbed_NBTR, 0, 2), turned], -1)
        mixed_BTNR, cache = cache.attend(q_BTNC, cached_BT1C, None, value_dim=config.kv_rank, **options)
        value_up = self.value_up.array().astype(mixed_BTNR.dtype)
        return jnp.einsum("btnr,rnv->btnv", mixed_BTNR, value_up, precision=precision), cache
