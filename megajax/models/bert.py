"""BERT and RoBERTa: a bidirectional encoder with a head for masked tokens, or for classes of texts or tokens.

Dimensions: B batch, T sequence, D model width, V vocabulary (padded), C classes.
Sources: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), Liu et al. 2019 (RoBERTa,
https://arxiv.org/abs/1907.11692), Lan et al. 2019 (sentence order, https://arxiv.org/abs/1909.11942), and Megatron-LM,
megatron/core/models/bert.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.layers.attention import AttentionConfig
from megajax.layers.block import Stack
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.layer import Flops
from megajax.layers.linear import Linear
from megajax.layers.mlp import MlpConfig
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.transformer import TransformerLayerConfig
from megajax.mesh import MeshConfig
from megajax.models.decoder import check_embedding_divides, padded_vocab_size
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, LossOptions, LossTerms, ModelConfig, OneStack
from megajax.ops.activation import activate
from megajax.ops.cross_entropy import TokenScores, cross_entropy, finish_logits, token_scores
from megajax.ops.embedding import embed
from megajax.ops.matmul import matmul
from megajax.parallel.context import current_order
from megajax.parallel.schedule import Stages
from megajax.parameters import weight
from megajax.ranges import MAY_CHANGE, DropRate, Epsilon, InitStd, PositiveInt, Range, VocabMultiple
from megajax.sharding import constrain

_NO_LOSS = "model.head=none has no loss; use --model.head=masked_lm or a classification head"
Head = Literal["masked_lm", "sequence_classification", "token_classification", "none"]


@dataclasses.dataclass(frozen=True)
class BertConfig(ModelConfig):
    kind: Literal["bert"] = "bert"
    """The family of the model."""
    num_layers: Annotated[int, Range(at_least=1, at_most=10_000)] = 12
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
    """With head=masked_lm: also predict whether the second text follows the first; needs data.kind=masked_nsp or
    masked_sop."""
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

    def stacks(self, execution: ExecutionConfig) -> dict[str, tuple[TransformerLayerConfig, ...]]:
        return {"layers": tuple(self._layer_config(number, execution) for number in range(self.num_layers))}

    def batch(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """segment_ids separates the text from its padding; it is always read."""
        if self.head == "none":
            raise ValueError(_NO_LOSS)
        names = ["tokens", "labels", "positions", "segment_ids"]
        names += ["token_types"] if self.num_token_types > 1 else []
        batch = {name: BatchArray.sequence(sequence_length) for name in names}
        batch["loss_mask"] = BatchArray.sequence(sequence_length, jnp.float32)
        return batch | ({"next_sentence": BatchArray((), (), jnp.int32)} if self.has_next_sentence else {})

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
        head_dim = D // self.num_heads
        attention = AttentionConfig(
            embed_dim=D,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            qkv_bias=True,
            out_bias=True,
            qk_norm=None,
            qk_norm_scope="head",
            rope="none",
            rope_interleaved=False,
            alibi=False,
            causal=False,
            window=None,
            scale=1.0 / math.sqrt(head_dim),
            soft_cap=None,
            sinks=False,
            dropout=self.attention_dropout,
            context=execution.context_attention,
            backend=execution.attention_backend,
            deterministic=execution.deterministic,
            init_std=self.init_std,
            out_init_std=out_std,
        )
        layer = TransformerLayerConfig(
            attention=attention,
            mlp=MlpConfig(D, self.width_of_mlp, self.activation, True, self.init_std, out_std),
            norm=self.norm_config,
            norm_placement=self.norm_placement,
            parallel_residual="none",
            residual_multiplier=1.0,
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
    def data_kinds(self) -> tuple[str, ...]:
        if self.head == "masked_lm":
            return ("masked_nsp", "masked_sop") if self.next_sentence else ("masked",)
        return ("classification",) if self.classifies else ()

    @property
    def has_output_layer(self) -> bool:
        return self.head == "masked_lm"

    def check_data(self, kind: str) -> None:
        if self.head == "none":
            raise ValueError(_NO_LOSS)
        super().check_data(kind)

    def check_labels(self, labels: Any) -> None:
        if labels is None:
            return
        head = "token_classification" if labels.of_words else "sequence_classification"
        if self.head != head:
            raise ValueError(f"model.head={self.head}: the labels in data.text are for --model.head={head}")
        if self.num_classes != len(labels.classes):
            raise ValueError(
                f"model.num_classes={self.num_classes}: data.text has the classes {', '.join(labels.classes)}; "
                f"use --model.num_classes={len(labels.classes)}"
            )

    @property
    def encoder_tasks(self) -> tuple[str, ...]:
        return (*(["fill"] if self.head == "masked_lm" else []), *(["classify"] if self.classifies else []), "embed")

    def check_generates(self) -> None:
        raise ValueError(
            "model.kind=bert reads texts in both directions and cannot continue them; use "
            + " or ".join(f"infer.py {task}" for task in self.encoder_tasks)
        )


class Bert(OneStack):
    """embed -> layers -> a head; see models/interface.py for the batch.

    With head=sequence_classification the class of a text is the label of its first token, which has all its weight.
    """

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
        """What every layer reads besides x."""
        return {"segment_ids": batch["segment_ids"]}

    def hidden(self, batch: dict) -> jax.Array:
        """The hidden states of the last layer [B, T, D], normalised, without dropout."""
        x_BTD, _, _ = self.layers(self.embed(batch, None), self.block_inputs(batch))
        return self._normed(x_BTD)

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        return self.final_norm(x_BTD) if self.config.norm_placement == "pre" else x_BTD

    # ------------------------------------------------------------------ masked tokens

    def loss(self, x_BTD: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        loss = self._class_loss if self.config.classifies else self._masked_loss
        return loss(self._normed(x_BTD), batch, options)

    def _masked_loss(self, h_BTD: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        transformed_BTD = self._transformed(h_BTD)
        labels_BT = batch["labels"]
        weights_BT = batch["loss_weights"]
        how = dict(z_loss=options.z_loss, label_smoothing=options.label_smoothing, recipe=self.head_recipe)
        terms = LossTerms(
            cross_entropy(transformed_BTD, self._head(), labels_BT, weights_BT, **how, **self._logit_options())
        )
        if options.evaluates:
            top_BT = token_scores(transformed_BTD, self._head(), labels_BT, **self._logit_options()).top
            terms = terms._replace(rates={"accuracy": _rate(top_BT == labels_BT, weights_BT > 0)})
        if not self.config.has_next_sentence:
            return terms
        logits_BC = self.pair_logits(h_BTD, batch)
        followed_B = batch["next_sentence"]
        log_probs_B = _label_scores(logits_BC, followed_B).log_probs
        right_B = jnp.argmax(logits_BC, -1) == followed_B
        # Every microbatch has the same number of texts, so the mean of its means is that of the batch.
        terms = terms._replace(auxiliary={"next_sentence_loss": -jnp.mean(log_probs_B)})
        if options.evaluates:
            rate = _rate(right_B, jnp.ones_like(right_B))
            terms = terms._replace(rates=terms.rates | {"next_sentence_accuracy": rate})
        return terms

    def label_scores(self, x_BTD: jax.Array, batch: dict) -> TokenScores:
        transformed_BTD = self._transformed(self._normed(x_BTD))
        return token_scores(transformed_BTD, self._head(), batch["labels"], **self._logit_options())

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Hidden states of `hidden` -> logits of the masked-LM head float32 [B, T, V]; minus infinity for the padding
        of the vocabulary."""
        products_BTV = matmul(self._transformed(h_BTD), self._head()).astype(jnp.float32)
        logits_BTV = finish_logits(products_BTV, self.head_bias[...], 1.0, None)
        is_token = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        return constrain(jnp.where(is_token, logits_BTV, -jnp.inf), "batch", "time", "vocab")

    def _transformed(self, h_BTD: jax.Array) -> jax.Array:
        wide_BTD = constrain(self.head_dense(h_BTD), "batch", "sequence", None)
        return self.head_norm(activate(wide_BTD[..., None, :], self.config.head_activation or self.config.activation))

    def _head(self) -> jax.Array:
        """[D, V]."""
        return self.embedding[...].T if self.config.tied_embeddings else self.head.matrix()

    def _logit_options(self) -> dict:
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
        return jnp.tanh(self.pooler(_of_first(h_BTD, batch)))

    def _class_loss(self, h_BTD: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        logits = self.class_logits(h_BTD, batch)
        labels = batch["labels"]
        weights = batch["loss_weights"]
        if self.config.head == "sequence_classification":
            labels = _of_first(labels, batch)
            weights = _of_first(weights, batch)
        scores = _label_scores(logits, labels)
        losses = -scores.log_probs
        if options.label_smoothing:
            share = options.label_smoothing * self.config.num_classes / (self.config.num_classes - 1)
            losses = (1 - share) * losses - share * jnp.mean(jax.nn.log_softmax(logits), -1)
        if options.z_loss:
            losses += options.z_loss * jax.nn.logsumexp(logits, -1) ** 2
        total = jnp.sum(weights * losses)
        rates = {"accuracy": _rate(scores.top == labels, weights > 0)} if options.evaluates else {}
        return LossTerms(total, rates=rates)


def _of_first(array: jax.Array, batch: dict) -> jax.Array:
    """[B, T, ...] -> [B, ...] of the first token of each text. A sum, because slicing a sequence that the mesh splits
    would need a permutation of all devices, which a pipeline stage must not use."""
    is_first_BT = (batch["positions"] == 0).reshape(*array.shape[:2], *(1,) * (array.ndim - 2))
    return jnp.sum(jnp.where(is_first_BT, array, 0), axis=1)


def _label_scores(logits: jax.Array, labels: jax.Array) -> TokenScores:
    """logits float32 [..., C], labels int32 [...] -> log-probabilities of the labels, and the most likely classes."""
    log_probs = jax.nn.log_softmax(logits)
    of_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return TokenScores(jnp.sum(log_probs * of_label, -1), jnp.argmax(logits, -1).astype(jnp.int32))


def _rate(is_right: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(number of right ones among those that count, number of these), float32."""
    return jnp.sum(is_right & counts, dtype=jnp.float32), jnp.sum(counts, dtype=jnp.float32)
