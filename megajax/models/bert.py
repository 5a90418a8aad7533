"""BERT and RoBERTa: a bidirectional encoder with a head for masked tokens, or for classes of texts or tokens.

Dimensions: B batch, T sequence, D model width, V vocabulary (padded), C classes.
Sources: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), Liu et al. 2019 (RoBERTa,
https://arxiv.org/abs/1907.11692), Lan et al. 2019 (sentence order, https://arxiv.org/abs/1909.11942), and Megatron-LM,
megatron/core/models/bert.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import MAY_CHANGE, DropRate, Epsilon, InitStd, NumLayers, PositiveInt, Range, VocabMultiple
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.layer import Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.stack import Stack
from megajax.layers.transformer import ResidualLayerConfig, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.decoder_fields import check_embedding_divides, padded_vocab_size
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, ModelConfig, OneStack
from megajax.ops.activation import activate
from megajax.ops.attention_mask import FULL
from megajax.ops.embedding import embed
from megajax.ops.matmul import matmul
from megajax.parallel.context import current_order
from megajax.parallel.schedule import Stages
from megajax.parameters import weight

Head = Literal["masked_lm", "sequence_classification", "token_classification", "none"]


@dataclasses.dataclass(frozen=True)
class BertConfig(ModelConfig):
    kind: Literal["bert"] = "bert"
    """The family of the model."""
    num_layers: NumLayers = 12
    """Transformer layers."""
    embed_dim: PositiveInt = 768
    """Width of the residual stream."""
    num_heads: PositiveInt = 12
    """Attention heads."""
    mlp_dim: PositiveInt | None = None
    """Feed-forward width; None = 4 * embed_dim."""
    vocab_size: Annotated[int, Range(at_least=2)] = 30522
    """Token ids of the tokenizer, with [CLS], [SEP], [MASK] and [PAD]."""
    vocab_multiple: VocabMultiple = 128
    """The stored vocabulary and the position table are padded to a multiple of this, the same on every mesh."""
    max_positions: PositiveInt = 512
    """Longest sequence, in tokens."""
    position_offset: Annotated[int, Range(at_least=0)] = 0
    """Row of the position table for the first token (RoBERTa: 2)."""
    num_token_types: Annotated[int, Range(at_least=0)] = 2
    """Rows of the token type embedding: 2 for pairs of texts, 1 adds the same row to every token (RoBERTa), 0: none."""
    norm_epsilon: Epsilon = 1e-12
    """Added to the variance by layer normalisation."""
    norm_placement: Literal["pre", "post_residual"] = "post_residual"
    """Normalise the residual stream after each addition (post_residual: BERT), or the inputs of attention and MLP, and
    the output of the last layer (pre: Megatron-LM)."""
    embedding_norm: bool = True
    """Normalise the embeddings before the first layer (Megatron-LM: False)."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Of the feed-forward layers."""
    head_activation: Literal["gelu", "gelu_tanh", "relu"] | None = None
    """Of the masked-LM head; None: as in the feed-forward layers."""
    tied_embeddings: bool = True
    """The output layer of the masked-LM head is the transposed embedding."""
    head: Head = "masked_lm"
    """masked_lm: predict masked tokens. sequence_classification: a class for each text, from its first token.
    token_classification: a class for each token. none: hidden states only, which cannot be trained."""
    next_sentence: bool = True
    """With head=masked_lm: also predict whether the second text follows the first; needs task.sentences=nsp or sop."""
    num_classes: Annotated[int, Range(at_least=2)] = 2
    """Classes of a classification head."""
    dropout: DropRate = dataclasses.field(default=0.1, metadata=MAY_CHANGE)
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention_dropout: DropRate = dataclasses.field(default=0.1, metadata=MAY_CHANGE)
    """Dropout rate of attention probabilities."""
    init_std: InitStd = 0.02
    """Standard deviation of the initial weights; output projections get init_std / sqrt(2 * num_layers)."""

    # ------------------------------------------------------------------ derived sizes

    @property
    def width_of_mlp(self) -> int:
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def norm_config(self) -> NormConfig:
        return NormConfig("layernorm", self.norm_epsilon, zero_centered=False, bias=True)

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.vocab_multiple)

    @property
    def position_rows(self) -> int:
        """Rows of the position table that are used."""
        return self.max_positions + self.position_offset

    @property
    def has_next_sentence(self) -> bool:
        return self.head == "masked_lm" and self.next_sentence

    @property
    def has_pooler(self) -> bool:
        """Whether the first token passes through one more layer, for a class of the text."""
        return self.has_next_sentence or self.head in ("sequence_classification", "none")

    @property
    def classifies(self) -> bool:
        return self.head in ("sequence_classification", "token_classification")

    # ------------------------------------------------------------------ interface of a model config

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None) -> "Bert":
        return Bert(self, dtype, execution, stages, rngs=rngs)

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[ResidualLayerConfig, ...]]:
        return {"layers": tuple(self._layer_config(number, execution) for number in range(self.num_layers))}

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """segment_ids separates the text from its padding; it is always read."""
        names = ["tokens", "positions", "segment_ids"] + (["token_types"] if self.num_token_types > 1 else [])
        return {name: BatchArray.sequence(sequence_length) for name in names}

    def flops_outside(self, sequence_length: int) -> Flops:
        if self.head == "masked_lm":
            return Flops(2 * self.embed_dim * (self.padded_vocab_size + self.embed_dim))
        return Flops(2 * self.embed_dim * self.num_classes if self.head == "token_classification" else 0)

    @property
    def max_length(self) -> int | None:
        return self.max_positions

    def _layer_config(self, number: int, execution: ExecutionConfig) -> TransformerLayerConfig:
        D = self.embed_dim
        out_std = self.init_std / math.sqrt(2 * self.num_layers)
        attention = AttentionConfig(
            embed_dim=D,
            num_heads=self.num_heads,
            head_dim=D // self.num_heads,
            qkv_bias=True,
            out_bias=True,
            mask=FULL,
            dropout=self.attention_dropout,
            **execution.of_attention,
            init_std=self.init_std,
            out_init_std=out_std,
        )
        layer = TransformerLayerConfig(
            attention=attention,
            mlp=MlpConfig(D, self.width_of_mlp, self.activation, True, self.init_std, out_std),
            norm=self.norm_config,
            norm_placement=self.norm_placement,
            dropout=self.dropout,
        )
        return layer.saving(execution.recompute_of(number), execution.recompute_modules, execution.offload)

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.embed_dim={self.embed_dim} is not divisible by model.num_heads={self.num_heads}; use a width "
                "of whole heads"
            )
        if sequence_length > self.max_positions:
            raise ValueError(
                f"training.sequence_length={sequence_length} is longer than model.max_positions={self.max_positions}; "
                f"use --training.sequence_length={self.max_positions}"
            )
        super().check(mesh, sequence_length, execution)
        check_embedding_divides(mesh, self.vocab_size, self.vocab_multiple, self.embed_dim)

    @property
    def heads(self) -> tuple[str, ...]:
        if self.classifies:
            return ("classes",)
        masked = ("masked_token",) if self.head == "masked_lm" else ()
        return masked + (("sentence_order",) if self.has_next_sentence else ())

    @property
    def has_output_layer(self) -> bool:
        return self.head == "masked_lm"

    @property
    def encoder_tasks(self) -> tuple[str, ...]:
        return (*(["fill"] if self.head == "masked_lm" else []), *(["classify"] if self.classifies else []), "embed")

    def check_generates(self) -> None:
        raise ValueError(
            "model.kind=bert reads texts in both directions and cannot continue them; use "
            + " or ".join(f"infer.py {task}" for task in self.encoder_tasks)
        )


class Bert(OneStack):
    """embed -> layers -> a head; see models/interface.py for the batch."""

    def __init__(
        self, config: BertConfig, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None, *,
        rngs: nnx.Rngs
    ):  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.context = execution.context_attention
        D = config.embed_dim
        V = config.padded_vocab_size
        init = nnx.initializers.normal(config.init_std)
        rows = padded_vocab_size(config.position_rows, config.vocab_multiple)
        self.embedding = weight((V, D), ("vocab", "embed"), init, rngs, "embedding")
        self.position_embedding = weight((rows, D), ("positions", "embed"), init, rngs, "embedding")
        if config.num_token_types:
            shape = (config.num_token_types, D)
            self.token_type_embedding = weight(shape, ("classes", "embed"), init, rngs, "embedding")
        if config.embedding_norm:
            self.embedding_norm = Norm(config.norm_config, D, rngs=rngs)
        (layers,) = config.stacks(execution).values()
        self.layers = Stack(layers, scan=execution.scans(config.num_layers), rngs=rngs, stages=stages)
        if config.norm_placement == "pre":
            self.final_norm = Norm(config.norm_config, D, rngs=rngs)

        def linear(outputs: int, axis: str) -> Linear:
            made = Linear((D,), (outputs,), ("embed", axis), config.init_std, rngs=rngs)
            made.add_bias_parameter(rngs)
            return made

        if config.head == "masked_lm":
            self.head_dense = linear(D, "head_dim")
            self.head_norm = Norm(config.norm_config, D, rngs=rngs)
            self.head_bias = weight((V,), ("vocab",), nnx.initializers.zeros, rngs, "vector")
            if not config.tied_embeddings:
                self.head = Linear((D,), (V,), ("embed", "vocab"), config.init_std, rngs=rngs, role="head")
        if config.has_pooler:
            self.pooler = linear(D, "head_dim")
        if config.has_next_sentence:
            self.next_sentence = linear(2, "classes")
        if config.classifies:
            self.classifier = linear(config.num_classes, "classes")

    def embed(self, batch: dict, key: DropoutKey | None) -> jax.Array:
        """tokens, positions, token_types int32 [B, T] -> [B, T, D] in the compute dtype."""
        config = self.config
        x_BTD = embed(self.embedding[...], batch["tokens"], self.dtype)
        x_BTD += embed(self.position_embedding[...], batch["positions"] + config.position_offset, self.dtype)
        if config.num_token_types:
            types_BT = batch.get("token_types", jnp.zeros_like(batch["tokens"]))
            types_BTC = jax.nn.one_hot(types_BT, config.num_token_types, dtype=self.dtype)
            x_BTD += constrain(matmul(types_BTC, self.token_type_embedding[...]), "batch", "sequence", None)
        if config.embedding_norm:
            _, x_BTD = self.embedding_norm.residual(x_BTD)
        order = None if key is None else current_order(x_BTD.shape[1], self.context)
        return constrain(dropout(x_BTD, config.dropout, key, order), "batch", "sequence", None)

    def block_inputs(self, batch: dict) -> dict:
        return {"segment_ids": batch["segment_ids"]}

    def output(self, x_BTD: jax.Array) -> jax.Array:
        return self.final_norm(x_BTD) if self.config.norm_placement == "pre" else x_BTD

    # ------------------------------------------------------------------ masked tokens

    def before_head(self, h_BTD: jax.Array) -> jax.Array:
        wide_BTD = constrain(self.head_dense(h_BTD), "batch", "sequence", None)
        return self.head_norm(activate(wide_BTD[..., None, :], self.config.head_activation or self.config.activation))

    def logit_options(self) -> dict[str, Any]:
        return dict(vocab_size=self.config.vocab_size, bias_V=self.head_bias[...])

    # ------------------------------------------------------------------ classes

    def pair_logits(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        """Of the next-sentence head float32 [B, 2]."""
        return self.next_sentence(self.pooled(h_BTD, batch)).astype(jnp.float32)

    def class_logits(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        """Hidden states of `hidden` -> logits float32 [B, C] of each text, or [B, T, C] of each token."""
        is_of_texts = self.config.head == "sequence_classification"
        read = self.pooled(h_BTD, batch) if is_of_texts else constrain(h_BTD, "batch", "sequence", None)
        return self.classifier(read).astype(jnp.float32)

    def pooled(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        """tanh(dense(first token)) [B, D]."""
        return jnp.tanh(self.pooler(self.of_first(h_BTD, batch)))

    @staticmethod
    def of_first(array: jax.Array, batch: dict) -> jax.Array:
        """[B, T, ...] -> [B, ...] of the first token of each text. A sum, because slicing a sequence that the mesh
        splits would need a permutation of all devices, which a pipeline stage must not use."""
        is_first_BT = (batch["positions"] == 0).reshape(*array.shape[:2], *(1,) * (array.ndim - 2))
        return jnp.sum(jnp.where(is_first_BT, array, 0), axis=1)
