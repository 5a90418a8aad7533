"""Self-attention layer: multi-head, grouped-query (Ainslie et al. 2023) or multi-query.

Dimensions: B batch, T sequence, S keys, D model width, N heads, K key-value heads, H head dim.
Tensor parallel: query, key and value split the heads, out splits them again, one reduction at the end.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.norm import Norm, NormConfig
from megajax.layers.rope import apply_rope
from megajax.ops.attention import AttentionMask, Backend
from megajax.ops.matmul import add_bias, matmul, matmul_side_by_side
from megajax.parallel.context import ContextMethod, attention
from megajax.sharding import constrain, weight


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    qk_norm: NormConfig | None
    use_rope: bool
    window: int | None
    soft_cap: float | None
    dropout: float
    context: ContextMethod
    backend: Backend
    deterministic: bool
    init_std: float
    out_init_std: float


class Attention(nnx.Module):
    """x [B, T, D] -> [B, T, D]."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        init, zeros = nnx.initializers.normal(config.init_std), nnx.initializers.zeros
        self.query = weight((D, N, H), ("embed", "heads", "head_dim"), init, rngs)
        self.key = weight((D, K, H), ("embed", "kv_heads", "head_dim"), init, rngs)
        self.value = weight((D, K, H), ("embed", "kv_heads", "head_dim"), init, rngs)
        out_init = nnx.initializers.normal(config.out_init_std)
        self.out = weight((N, H, D), ("heads", "head_dim", "embed"), out_init, rngs)
        if config.bias:
            self.query_bias = weight((N, H), ("heads", "head_dim"), zeros, rngs, decay=False)
            self.key_bias = weight((K, H), ("kv_heads", "head_dim"), zeros, rngs, decay=False)
            self.value_bias = weight((K, H), ("kv_heads", "head_dim"), zeros, rngs, decay=False)
            self.out_bias = weight((D,), ("norm",), zeros, rngs)
        if config.qk_norm is not None:
            self.query_norm = Norm(config.qk_norm, H, rngs=rngs)
            self.key_norm = Norm(config.qk_norm, H, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache=None, dropout_key: jax.Array | None = None):
        """-> (out, cache).

        inputs: `cos`, `sin` (if rotary), `segment_ids` int32 [B, T] (optional).
        cache: has `append(k, v) -> (cache, k, v, (query index, key index))`, see inference; None in training.
        dropout_key: drops attention probabilities if given and the config says so.
        """
        config = self.config
        q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(y, "qkv") for y in self._project(x_BTD))
        if config.qk_norm is not None:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if config.use_rope:
            q_BTNH = apply_rope(q_BTNH, inputs["cos"], inputs["sin"])
            k_BTKH = apply_rope(k_BTKH, inputs["cos"], inputs["sin"])
        segment_ids = inputs.get("segment_ids")
        segments, indices = None if segment_ids is None else (segment_ids, segment_ids), None
        if cache is not None:
            cache, k_BTKH, v_BTKH, indices = cache.append(k_BTKH, v_BTKH)
        out_BTNH = attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            method=config.context,
            backend=config.backend,
            deterministic=config.deterministic,
            mask=AttentionMask(causal=True, window=config.window),
            scale=1.0 / math.sqrt(config.head_dim),
            soft_cap=config.soft_cap,
            segments=segments,
            indices=indices,
            dropout=(config.dropout, dropout_key) if config.dropout and dropout_key is not None else None,
        )
        out_BTD = matmul(out_BTNH, self.out[...], num_contracted=2)
        return (add_bias(out_BTD, self.out_bias[...]) if config.bias else out_BTD), cache

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values; side by side within each key-value head, which is what `tensor` splits."""
        config = self.config
        D, K, H = config.embed_dim, config.num_kv_heads, config.head_dim
        weights = [self.query[...].reshape(D, K, -1, H), self.key[...][:, :, None], self.value[...][:, :, None]]
        heads = config.num_heads // K
        q, k, v = jnp.split(matmul_side_by_side(x_BTD, weights, axis=2), (heads, heads + 1), axis=3)
        q, k, v = q.reshape(*x_BTD.shape[:2], config.num_heads, H), k[..., 0, :], v[..., 0, :]
        if config.bias:
            q = add_bias(q, self.query_bias[...])
            k = add_bias(k, self.key_bias[...])
            v = add_bias(v, self.value_bias[...])
        place = lambda y, heads: constrain(y, "batch", "time", heads, None)
        return place(q, "heads"), place(k, "kv_heads"), place(v, "kv_heads")
