"""Encoder-decoder (T5, Raffel et al. 2019, https://arxiv.org/abs/1910.10683): an encoder reads a text, a decoder writes
another.

Dimensions: B batch, S tokens of the encoder (training.sequence_length), T tokens of the decoder (model.decoder_length),
D model width, V vocabulary (padded).

| | position | activation | tied_embeddings | biases, norm |
|---|---|---|---|---|
| T5 v1.0 | relative | relu | yes | no, rmsnorm |
| T5 v1.1, flan | relative | geglu_tanh | no | no, rmsnorm |
| Megatron-LM | relative or learned | gelu | yes or no | yes, layernorm; attention_multiplier=None, logit_multiplier=1 |
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.fields.ranges import (
    MAY_CHANGE,
    DropRate,
    Epsilon,
    InitStd,
    Multiplier,
    NumLayers,
    PositiveInt,
    Range,
    VocabMultiple,
)
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.attention.relative_position import RelativeBias, RelativeBiasConfig
from megajax.layers.cross_attention import CrossAttentionLayerConfig, CrossCache
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.layer import Flops, Totals
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.stack import Stack
from megajax.layers.transformer import ResidualLayerConfig, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.decoder_fields import check_embedding_divides, padded_vocab_size
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import AnyModule, BatchArray, ModelConfig, StackRole, split_key
from megajax.ops.activation import GATED, Activation
from megajax.ops.attention_mask import CAUSAL, FULL, Mask
from megajax.ops.embedding import embed
from megajax.parallel.schedule import Stages
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    kind: Literal["t5"] = "t5"
    """The family of the model."""
    num_layers: NumLayers = 12
    """Layers of the encoder."""
    num_decoder_layers: NumLayers | None = None
    """Layers of the decoder; None: as many as the encoder has."""
    embed_dim: PositiveInt = 768
    """Width of the residual stream."""
    num_heads: PositiveInt = 12
    """Attention heads."""
    head_dim: PositiveInt = 64
    """Width of a head; all heads together may be wider than embed_dim."""
    mlp_dim: PositiveInt = 3072
    """Feed-forward width."""
    vocab_size: Annotated[int, Range(at_least=2)] = 32128
    """Token ids, sentinels included."""
    vocab_multiple: VocabMultiple = 128
    """The stored vocabulary is padded to a multiple of this, the same on every mesh."""
    decoder_length: PositiveInt = dataclasses.field(default=128, metadata=MAY_CHANGE)
    """Tokens of the decoder in training; those of the encoder are training.sequence_length."""
    position: Literal["relative", "learned"] = "relative"
    """How positions are encoded: a bias of the attention scores by distance, shared by the layers of a stack, or a
    learned table, shared by encoder and decoder."""
    num_buckets: PositiveInt = 32
    """With position=relative: buckets of distances."""
    max_distance: PositiveInt = 128
    """With position=relative: greater distances share a bucket."""
    max_positions: PositiveInt = 512
    """With position=learned: rows of the table."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Kind of normalisation."""
    norm_epsilon: Epsilon = 1e-6
    """Added to the variance."""
    final_norm: bool = True
    """Normalise the outputs of encoder and decoder. Megatron Core's T5Model does only with Transformer Engine."""
    activation: Activation = "relu"
    """Feed-forward activation; swiglu and the geglus are gated."""
    bias: bool = False
    """Biases in the linear layers of attention and MLP."""
    attention_multiplier: Multiplier | None = 1.0
    """Factor on the attention scores; None = 1 / sqrt(head_dim)."""
    tied_embeddings: bool = True
    """The output layer is the transposed embedding."""
    logit_multiplier: Multiplier | None = None
    """Factor on the logits; None = 1 / sqrt(embed_dim) with tied embeddings, otherwise 1."""
    head_bias: bool = False
    """Bias of the output layer, which Megatron Core has with tied embeddings."""
    dropout: DropRate = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention_dropout: DropRate = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Dropout rate of attention probabilities."""
    init_factor: InitStd = 1.0
    """Factor on the standard deviations of the initial weights: 1 / sqrt(inputs) of a matrix, 1 of the embedding (tied)
    as in T5."""

    reads_source = True

    # ------------------------------------------------------------------ derived

    @property
    def decoder_layers(self) -> int:
        return self.num_decoder_layers or self.num_layers

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.vocab_multiple)

    @property
    def norm_config(self) -> NormConfig:
        return NormConfig(self.norm, self.norm_epsilon, zero_centered=False, bias=True)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layers have a gate."""
        return self.activation in GATED

    @property
    def attention_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.attention_multiplier is None else self.attention_multiplier

    @property
    def logit_scale(self) -> float:
        if self.logit_multiplier is not None:
            return self.logit_multiplier
        return 1 / math.sqrt(self.embed_dim) if self.tied_embeddings else 1.0

    def init_std(self, num_inputs: int) -> float:
        """Of a matrix."""
        return self.init_factor / math.sqrt(num_inputs)

    # ------------------------------------------------------------------ interface of a model config

    def build(
        self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None
    ) -> "EncoderDecoder":
        return EncoderDecoder(self, dtype, execution, rngs=rngs)

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[ResidualLayerConfig, ...]]:
        how = (execution.recompute_modules, execution.offload)
        encoder = self._layer(execution, FULL)
        decoder = CrossAttentionLayerConfig(
            **vars(self._layer(execution, CAUSAL)),
            cross_attention=dataclasses.replace(encoder.attention, relative_bias=False),
            length=self.decoder_length,
        )
        return {
            "encoder": tuple(encoder.saving(execution.recompute_of(n), *how) for n in range(self.num_layers)),
            "decoder": tuple(decoder.saving(execution.recompute_of(n), *how) for n in range(self.decoder_layers)),
        }

    def _layer(self, execution: ExecutionConfig, mask: Mask) -> TransformerLayerConfig:
        """Self-attention with this mask, and the MLP."""
        attention = AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            qkv_bias=self.bias,
            out_bias=self.bias,
            mask=mask,
            scale=self.attention_scale,
            dropout=self.attention_dropout,
            **execution.of_attention,
            init_std=self.init_std(self.embed_dim),
            out_init_std=self.init_std(self.num_heads * self.head_dim),
            # With a scale of 1 the queries begin smaller instead.
            query_init_std=self.init_std(self.embed_dim) / (self.attention_scale * math.sqrt(self.head_dim)),
            relative_bias=self.position == "relative",
        )
        stds = (self.init_std(self.embed_dim), self.init_std(self.mlp_dim))
        return TransformerLayerConfig(
            attention=attention,
            mlp=MlpConfig(self.embed_dim, self.mlp_dim, self.activation, self.bias, *stds),
            norm=self.norm_config,
            dropout=self.dropout,
        )

    @property
    def heads(self) -> tuple[str, ...]:
        return ("target_token",)

    def check_generates(self) -> None:
        raise ValueError(
            "model.kind=t5 writes a text from another one, and the engine continues texts; use infer.py generate"
        )

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        return {"encoder": "embed"}

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """Of one text per sample: `packed` changes nothing."""
        source = BatchArray.sequence(sequence_length)
        target = BatchArray.sequence(self.decoder_length)
        return {"encoder_tokens": source, "encoder_segment_ids": source, "tokens": target}

    def flops_outside(self, sequence_length: int) -> Flops:
        return Flops(2 * self.padded_vocab_size * self.embed_dim * self.decoder_length / sequence_length)

    @property
    def max_length(self) -> int | None:
        return self.max_positions if self.position == "learned" else None

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        if mesh.context > 1:
            raise ValueError(
                f"mesh.context={mesh.context} is not supported by model.kind=t5: its decoder attends to the whole text "
                "of the encoder, and relative positions to whole sequences; use --mesh.context=1"
            )
        if self.decoder_length % mesh.tensor:
            raise ValueError(
                f"model.decoder_length={self.decoder_length} is not divisible by mesh.tensor={mesh.tensor}, which "
                f"splits sequences; use --model.decoder_length={-(-self.decoder_length // mesh.tensor) * mesh.tensor}"
            )
        longest = max(sequence_length, self.decoder_length)
        if self.position == "learned" and longest > self.max_positions:
            raise ValueError(
                f"training.sequence_length={sequence_length} and model.decoder_length={self.decoder_length} must be at "
                f"most model.max_positions={self.max_positions}; use --model.max_positions={longest}"
            )
        if self.position == "relative":
            self._check_buckets()
        super().check(mesh, sequence_length, execution)
        check_embedding_divides(mesh, self.vocab_size, self.vocab_multiple, self.embed_dim)
        if self.position == "learned" and self.max_positions % mesh.tensor:
            raise ValueError(
                f"model.max_positions={self.max_positions} is not divisible by mesh.tensor={mesh.tensor}; use "
                f"--model.max_positions={-(-self.max_positions // mesh.tensor) * mesh.tensor}"
            )

    def _check_buckets(self) -> None:
        if self.num_buckets % 4:
            raise ValueError(
                f"model.num_buckets={self.num_buckets} must be a multiple of 4: half of the buckets are for either "
                "direction, and half of these for exact distances; T5 uses 32"
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"model.max_distance={self.max_distance} must be more than {self.num_buckets // 2} = model.num_buckets "
                "/ 2, the distances with a bucket of their own in the decoder; T5 uses 128"
            )


class EncoderDecoder(AnyModule):
    """encode, then decode -> loss or logits; see models/interface.py for the batch."""

    def __init__(
        self, config: EncoderDecoderConfig, dtype: jnp.dtype, execution: ExecutionConfig, *, rngs: nnx.Rngs
    ):  # fmt: skip
        self.config = config
        self.dtype = dtype
        D = config.embed_dim
        V = config.padded_vocab_size
        init = nnx.initializers.normal(config.init_factor)
        self.embedding = weight((V, D), ("vocab", "embed"), init, rngs, "embedding")
        if config.position == "learned":
            axes = ("positions", "embed")
            self.position_embedding = weight((config.max_positions, D), axes, init, rngs, "embedding")
        else:
            for name, bidirectional in (("encoder_bias", True), ("decoder_bias", False)):
                sizes = (config.num_heads, config.num_buckets, config.max_distance, bidirectional)
                setattr(self, name, RelativeBias(RelativeBiasConfig(*sizes, config.init_std(D)), rngs=rngs))
        stacks = config.stacks(execution)
        self.encoder = Stack(stacks["encoder"], scan=execution.scans(config.num_layers), rngs=rngs)
        self.decoder = Stack(stacks["decoder"], scan=execution.scans(config.decoder_layers), rngs=rngs)
        if config.final_norm:
            self.encoder_norm = Norm(config.norm_config, D, rngs=rngs)
            self.decoder_norm = Norm(config.norm_config, D, rngs=rngs)
        if not config.tied_embeddings:
            self.head = Linear((D,), (V,), ("embed", "vocab"), config.init_std(D), rngs=rngs, role="head")
        if config.head_bias:
            self.head_bias = weight((V,), ("vocab",), nnx.initializers.zeros, rngs, "vector")

    def hidden(self, batch: dict, key: DropoutKey | None = None) -> tuple[jax.Array, tuple[Totals, ...]]:
        encoder_key, decoder_key = split_key(key)
        encoded_BSD, of_encoder = self._encode(batch, encoder_key)
        h_BTD, of_decoder = self._decode(batch, encoded_BSD, decoder_key)
        return h_BTD, (of_encoder, of_decoder)

    def output(self, x_BTD: jax.Array) -> jax.Array:
        return self._normed("decoder_norm", x_BTD)

    def encode(self, batch: dict) -> jax.Array:
        return self._encode(batch, None)[0]

    def new_caches(self, num_rows: int, length: int) -> dict[str, tuple[CrossCache, ...]]:
        cache = CrossCache.zeros(num_rows, length, self.config.num_heads, self.config.head_dim, self.dtype)
        return {"decoder": (cache,) * self.config.decoder_layers}

    def extend(self, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        """Reads the next T tokens of each row -> (their hidden states [B, T, D], caches).

        batch: tokens, positions int32 [B, T], the same positions in every row; encoder_segment_ids, and in the first
        call encoded [B, S, D], from `encode`.
        """
        num_keys = caches["decoder"][0].own.keys.shape[1]
        x_BTD = self._embed(batch["tokens"], batch["positions"], None)
        inputs = self._relative_bias("decoder_bias", batch["positions"][0], jnp.arange(num_keys))
        inputs |= {"encoded": batch.get("encoded"), "encoded_segment_ids": batch["encoder_segment_ids"]}
        inputs["places"] = batch["positions"]
        x_BTD, layers, _ = self.decoder(x_BTD, inputs, caches["decoder"])
        return x_BTD, {"decoder": layers}

    # ------------------------------------------------------------------ the two stacks

    def _encode(self, batch: dict, key: DropoutKey | None) -> tuple[jax.Array, Totals]:
        embed_key, layers_key = split_key(key)
        places_S = jnp.arange(batch["encoder_tokens"].shape[1])
        x_BSD = self._embed(batch["encoder_tokens"], places_S, embed_key)
        inputs = self._relative_bias("encoder_bias", places_S, places_S)
        inputs["segment_ids"] = batch["encoder_segment_ids"]
        x_BSD, _, terms = self.encoder(x_BSD, inputs, key=layers_key)
        # gathered over `tensor` once, not by each layer of the decoder
        return constrain(self._normed("encoder_norm", x_BSD), "batch", "time", None), terms

    def _decode(self, batch: dict, encoded_BSD: jax.Array, key: DropoutKey | None) -> tuple[jax.Array, Totals]:
        """The padding at the end of a row needs no mask: no token before it attends to it."""
        embed_key, layers_key = split_key(key)
        places_T = jnp.arange(batch["tokens"].shape[1])
        x_BTD = self._embed(batch["tokens"], places_T, embed_key)
        inputs = self._relative_bias("decoder_bias", places_T, places_T)
        inputs |= {"encoded": encoded_BSD, "encoded_segment_ids": batch["encoder_segment_ids"]}
        x_BTD, _, terms = self.decoder(x_BTD, inputs, key=layers_key)
        return self.output(x_BTD), terms

    def _embed(self, tokens_BT: jax.Array, positions: jax.Array, key: DropoutKey | None) -> jax.Array:
        """positions: int32 [T] or [B, T]."""
        x_BTD = embed(self.embedding[...], tokens_BT, self.dtype)
        if self.config.position == "learned":
            positions_BT = jnp.broadcast_to(positions, tokens_BT.shape)
            x_BTD += embed(self.position_embedding[...], positions_BT, self.dtype)
        return constrain(dropout(x_BTD, self.config.dropout, key, np.arange(x_BTD.shape[1])), "batch", "sequence", None)

    def _relative_bias(self, name: str, q_positions_T: jax.Array, k_positions_S: jax.Array) -> dict:
        """What the layers of a stack read of it, by name."""
        if self.config.position != "relative":
            return {}
        return {"relative_bias": getattr(self, name)(q_positions_T, k_positions_S)}

    def _normed(self, name: str, x_BTD: jax.Array) -> jax.Array:
        return getattr(self, name)(x_BTD) if self.config.final_norm else x_BTD

    def logit_options(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.config.vocab_size,
            bias_V=self.head_bias[...] if self.config.head_bias else None,
            multiplier=self.config.logit_scale,
        )
