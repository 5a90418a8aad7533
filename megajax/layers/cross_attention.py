"""The layer of a decoder that reads the output of an encoder: self-attention, cross-attention, MLP.

Dimensions: B batch, T tokens of the decoder, S tokens of the encoder, D model width, N heads, K key-value heads, H head
dim.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.layers.attention.multi_head import Attention, AttentionConfig, attention_options, dropout_of
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, BranchConfig, Flops, Terms
from megajax.layers.linear import SideBySide, side_by_side
from megajax.layers.norm import Norm
from megajax.layers.transformer import TransformerLayer, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.current import manual
from megajax.mesh.sharding import activation_spec, constrain
from megajax.parallel.context import attention

CACHE_AXES = ("batch", None, "kv_heads", None)


class CrossAttention(Attention):
    """x [B, T, D] -> [B, T, D]: the queries are those of x, keys and values those of the encoder's output."""

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: tuple | None = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Terms]:
        """-> (out, (keys, values), no Terms).

        inputs: `encoded` [B, S, D], the output of the encoder; `encoded_segment_ids` int32 [B, S], 1 for its text and 0
            for its padding.
        cache: keys and values of an earlier call, [B, S, K, H]; None: they are computed.
        """
        q_BTNH = constrain(self.query(x_BTD), "batch", "time", "heads", None)
        q_BTNH = checkpoint_name(q_BTNH, "qkv")
        if cache is None:
            cache = self.keys_and_values(inputs["encoded"])
        segment_ids_BS = inputs["encoded_segment_ids"]
        segments = (jnp.ones(x_BTD.shape[:2], segment_ids_BS.dtype), segment_ids_BS)
        options = attention_options(self.config, None)
        dropout = dropout_of(self.config, key)
        return self.out(attention(q_BTNH, *cache, segments=segments, dropout=dropout, **options)), cache, Terms()

    @property
    def side_by_side(self) -> SideBySide:
        config = self.config
        return SideBySide((self.key, self.value), (config.embed_dim, config.kv_heads, 1, config.head_dim), 2)

    def keys_and_values(self, encoded_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S, K, H] each."""
        joined = side_by_side(encoded_BSD, *self.side_by_side)
        k, v = (linear.add_bias(joined[..., i, :]) for i, linear in enumerate((self.key, self.value)))
        k, v = (checkpoint_name(constrain(a, "batch", "time", "kv_heads", None), "qkv") for a in (k, v))
        return k, v


class KeysAndValues(NamedTuple):
    """Of the tokens of a row, one slot each."""

    keys: jax.Array
    """[B, S, K, H] in the compute dtype."""
    values: jax.Array


class OwnTokens(NamedTuple):
    """Keys and values of the tokens so far, ready for the next ones: slot s of a row holds its token s, so the causal
    mask hides the slots beyond."""

    cache: KeysAndValues
    places_BT: jax.Array
    """int32: slots of the next T tokens, distinct within a row."""

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **options: Any
    ) -> tuple[jax.Array, KeysAndValues]:
        """-> (attention of the new tokens to all tokens of their row [B, T, N, H], the updated cache).

        options: keyword arguments of parallel/context.py's `attention`.
        """
        keys = _write(self.cache.keys, k_BTKH, self.places_BT)
        cache = KeysAndValues(keys, _write(self.cache.values, v_BTKH, self.places_BT))
        slots_BS = jnp.broadcast_to(jnp.arange(cache.keys.shape[1], dtype=jnp.int32), cache.keys.shape[:2])
        return attention(q_BTNH, *cache, indices=(self.places_BT, slots_BS), **options), cache


def _write(cache_BSKH: jax.Array, new_BTKH: jax.Array, places_BT: jax.Array) -> jax.Array:
    """Updates in place if the cache is donated; every device writes its own rows and heads."""
    spec = activation_spec(cache_BSKH.shape, CACHE_AXES)

    @jax.vmap
    def write(row_SKH, new_TKH, places_T):
        return row_SKH.at[places_T].set(new_TKH, unique_indices=True)

    return manual(write, (spec, spec, P(spec[0], None)), spec)(cache_BSKH, new_BTKH, places_BT)


class CrossCache(NamedTuple):
    """What a layer remembers of the tokens before."""

    own: KeysAndValues
    """Of the decoder's tokens."""
    encoded: tuple[jax.Array, jax.Array] | None
    """Keys and values of the encoder's output [B, S, K, H], from the first call on."""

    @staticmethod
    def zeros(num_rows: int, length: int, num_heads: int, head_dim: int, dtype: jnp.dtype) -> "CrossCache":
        """For `length` tokens of each row."""
        zeros = constrain(jnp.zeros((num_rows, length, num_heads, head_dim), dtype), *CACHE_AXES)
        return CrossCache(KeysAndValues(zeros, zeros), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttentionLayerConfig(TransformerLayerConfig):
    """Its inputs are normalised, its outputs are not. FLOPs and activations are per token of the encoder, of which a
    sequence has `sequence_length`; what it sends is as if the decoder read as many, which is an upper bound."""

    cross_attention: AttentionConfig
    length: int
    """Tokens of a sequence of the decoder."""

    @property
    def branches(self) -> tuple[BranchConfig, ...]:
        return self.attention, self.cross_attention, self.mlp

    def build(self, rngs: nnx.Rngs) -> "CrossAttentionLayer":
        return CrossAttentionLayer(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        super().check(mesh, max(self.length, sequence_length))

    def flops(self, sequence_length: int) -> Flops:
        cross = self.cross_attention
        own = self.attention.flops(self.length) + self.mlp.flops(self.length) + self._cross_mixing(sequence_length)
        own += Flops(2 * self.embed_dim * cross.heads_dim + cross.out_flops)
        return own * (self.length / sequence_length) + Flops(2 * self.embed_dim * cross.kv_dim)

    def _cross_mixing(self, sequence_length: int) -> Flops:
        pairs = 2 * (self.cross_attention.heads_dim + self.cross_attention.out_dim) * sequence_length
        return Flops(mixing=pairs, mixing_causal=pairs)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        D = self.embed_dim
        cross = self.cross_attention
        share = self.length / sequence_length
        own = {name: _scaled(a, share) for name, a in super().activations(self.length).items()}
        found = {name: own.pop(name) for name in ("residual", "normed", "qkv", "attention_out")}
        query = Activation(cross.heads_dim, Flops(2 * D * cross.heads_dim))
        read = Activation(cross.kv_dim, Flops(2 * D * cross.kv_dim))
        mixed = cross.activations(sequence_length)["attention_out"]._replace(flops=self._cross_mixing(sequence_length))
        found["normed"] = found["normed"].and_also(Activation(D * share))
        found["qkv"] = found["qkv"].and_also(_scaled(query, share)).and_also(read)
        found["attention_out"] = found["attention_out"].and_also(_scaled(mixed, share))
        between = Activation(D, Flops(matmuls=self.attention.out_flops))
        return found | {"residual_cross": _scaled(between, share)} | own


def _scaled(activation: Activation, share: float) -> Activation:
    """An activation of the decoder per token of the encoder."""
    return activation._replace(
        elements=activation.elements * share, flops=activation.flops * share, scores=activation.scores * share
    )


class CrossAttentionLayer(TransformerLayer):
    """(x [B, T, D], inputs, cache, key) -> (x, cache, Terms): x + attention(x), x + cross_attention(x), x + mlp(x)."""

    def __init__(self, config: CrossAttentionLayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.cross_norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.cross_attention = CrossAttention(config.cross_attention, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache: CrossCache | None, key: DropoutKey | None):
        """inputs: with a cache also `places`, int32 [B, T], of the tokens in their rows."""
        keys = [None] * 5 if key is None else key.split(5)
        own, encoded = (None, None) if cache is None else (OwnTokens(cache.own, inputs["places"]), cache.encoded)
        x_BTD, read_BTD = self._branch_input(self.attention_norm, "residual", x_BTD, axis=self.attention.input_axis)
        y_BTD, own, _ = self.attention(read_BTD, inputs, own, keys[0])
        y_BTD = self._branch_output(None, y_BTD, keys[1], cache)
        axis = self.cross_attention.input_axis
        x_BTD, read_BTD = self._branch_input(self.cross_norm, "residual_cross", x_BTD, y_BTD, axis=axis)
        y_BTD, encoded, _ = self.cross_attention(read_BTD, inputs, encoded, keys[2])
        y_BTD = self._branch_output(None, y_BTD, keys[3], cache)
        x_BTD, read_BTD = self._branch_input(self.mlp_norm, "residual_mid", x_BTD, y_BTD, axis=self.mlp.input_axis)
        y_BTD, _, terms = self.mlp(read_BTD, inputs, cache, None)
        y_BTD = self._branch_output(None, y_BTD, keys[4], cache)
        return x_BTD + y_BTD, None if cache is None else CrossCache(own, encoded), terms
