"""Decoder-only language model (GPT, Llama and related models): each feature is a choice in the config.

Dimensions: B batch, T sequence, D model width, V vocabulary (padded).
"""

import dataclasses
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import (
    MAY_CHANGE,
    Coefficient,
    DropRate,
    Epsilon,
    InitStd,
    Multiplier,
    PositiveFloat,
    PositiveInt,
    Range,
    VocabMultiple,
    changed_fields,
)
from megajax.layers.attention.latent import LatentAttentionConfig, LatentConfig
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.attention.rope import RopeConfig, rope_tables
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.feed_forward.moe import ExpertsConfig, MoeConfig
from megajax.layers.layer import FeedForwardConfig, Flops
from megajax.layers.linear import Linear
from megajax.layers.multi_token import MultiTokenConfig, shifted
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.stack import Stack, add_by_name
from megajax.layers.transformer import NormPlacement, ParallelResidual, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, LossOptions, LossTerms, ModelConfig, OneStack, StackRole
from megajax.ops.activation import Activation
from megajax.ops.attention_mask import CAUSAL, window
from megajax.ops.embedding import embed
from megajax.parallel.context import current_order
from megajax.parallel.schedule import Stages
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    kind: Literal["decoder"] = "decoder"
    """The family of the model."""
    num_layers: Annotated[int, Range(at_least=1, at_most=10_000)] = 12
    """Transformer layers."""
    embed_dim: PositiveInt = 768
    """Width of the residual stream."""
    num_heads: PositiveInt = 12
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key-value heads: None = num_heads (multi-head), fewer = grouped-query, 1 = multi-query."""
    head_dim: PositiveInt | None = None
    """Width of a head; None = embed_dim / num_heads. With latent attention without its rotary part."""
    mlp_dim: PositiveInt | None = None
    """Feed-forward width; None = 4 * embed_dim."""
    vocab_size: Annotated[int, Range(at_least=2)] = 50257
    """Token ids of the tokenizer."""
    vocab_multiple: VocabMultiple = 128
    """The stored vocabulary is padded to a multiple of this, the same on every mesh."""
    position: Literal["learned", "rope", "alibi", "none"] = "learned"
    """How positions are encoded: a learned table, rotary embedding, scores that fall with distance (ALiBi), or not."""
    max_positions: PositiveInt = 1024
    """Rows of the learned position table. With any other position it limits nothing; it is the length that the model
    was trained for, as Hugging Face folders say it."""
    rope: RopeConfig = RopeConfig()
    """Rotary embedding, with position=rope."""
    no_rope_every: PositiveInt | None = None
    """Every n-th layer has no rotary embedding (NoPE)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance."""
    norm_zero_centered: bool = False
    """Store the norm's scale minus one (Megatron's layernorm-1p)."""
    norm_bias: bool = True
    """Bias of layernorm; rmsnorm has none."""
    norm_placement: NormPlacement = "pre"
    """Normalise the inputs of attention and MLP (pre), their outputs before they are added (post, as in OLMo 2), both
    (sandwich, as in Gemma 2), or the residual stream after each addition (post_residual, as in BERT)."""
    embedding_norm: bool = False
    """Normalise the embeddings before the first layer (BLOOM)."""
    parallel_residual: ParallelResidual = "none"
    """Compute x + attention(norm(x)) + mlp(norm(x)) with a shared norm (one_norm, as in GPT-J) or two norms (two_norms,
    as in GPT-NeoX); none: attention, then MLP."""
    qk_norm: bool | Literal["all_heads"] = False
    """Normalise queries and keys before the rotary embedding: each head (True), or all heads of a token together
    (all_heads, as in OLMo 2)."""
    activation: Activation = "gelu"
    """Feed-forward activation: gelu and geglu are exact (erf), gelu_tanh and geglu_tanh approximate; swiglu and the
    geglus are gated."""
    bias: bool = True
    """Biases in the linear layers of attention and MLP, unless one of the next three fields is set."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; None: as `bias`."""
    attention_out_bias: bool | None = None
    """Bias of the output projection of attention; None: as `bias`."""
    mlp_bias: bool | None = None
    """Biases of the MLP; None: as `bias`."""
    head_bias: bool = False
    """Add a bias to the logits."""
    tied_embeddings: bool = True
    """The output layer is the transposed embedding."""
    window: PositiveInt | None = None
    """Sliding-window attention: a token sees this many tokens, itself included."""
    full_attention_every: PositiveInt | None = None
    """With a window: every n-th layer has full attention."""
    attention_multiplier: Multiplier | None = None
    """Factor on the attention scores; None = 1 / sqrt(width of a head)."""
    attention_soft_cap: PositiveFloat | None = None
    """Scores become cap * tanh(scores / cap)."""
    attention_sinks: bool = False
    """Add a learned score per head to the softmax, without a value (gpt-oss)."""
    embedding_multiplier: Multiplier = 1.0
    """Factor on the token embeddings, rounded to the compute dtype as in Gemma."""
    residual_multiplier: Multiplier = 1.0
    """Factor on the outputs of attention and MLP before they are added to the residual stream."""
    logit_multiplier: Multiplier = 1.0
    """Factor on the logits."""
    logit_soft_cap: PositiveFloat | None = None
    """Logits become cap * tanh(logits / cap)."""
    latent: LatentConfig = LatentConfig()
    """Attention with latents of keys and values (DeepSeek)."""
    moe: MoeConfig = MoeConfig()
    """Layers with experts instead of one feed-forward network (docs/experts.md)."""
    mtp_layers: Annotated[int, Range(at_least=0, at_most=16)] = 0
    """Multi-token prediction: layer k of these predicts the token k places after the next one (DeepSeek-V3: 1)."""
    mtp_loss: Coefficient = dataclasses.field(default=0.3, metadata=MAY_CHANGE)
    """With mtp_layers: coefficient of the mean of their losses (DeepSeek-V3: 0.3, later 0.1)."""
    dropout: DropRate = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention_dropout: DropRate = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Dropout rate of attention probabilities."""
    init_std: InitStd = 0.02
    """Standard deviation of the initial weights; output projections get init_std / sqrt(2 * num_layers)."""

    # ------------------------------------------------------------------ derived sizes

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def rotary_head_dim(self) -> int:
        """Width of what rotary embedding applies to in each head."""
        return self.width_of_head if self.latent.kv_rank is None else self.latent.rope_dim

    @property
    def width_of_mlp(self) -> int:
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        width = self.width_of_head + (0 if self.latent.kv_rank is None else self.latent.rope_dim)
        return self.attention_multiplier or 1.0 / math.sqrt(width)

    @property
    def norm_config(self) -> NormConfig:
        return NormConfig(self.norm, self.norm_epsilon, self.norm_zero_centered, self.norm_bias)

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_attention_out_bias(self) -> bool:
        return self.bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def num_branches(self) -> int:
        """Branches that are added to the residual stream."""
        return 2 * self.num_layers

    @property
    def out_init_std(self) -> float:
        """Of output projections."""
        return self.init_std / math.sqrt(self.num_branches)

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.vocab_multiple)

    # ------------------------------------------------------------------ interface of a model config

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None) -> "Decoder":
        return Decoder(self, dtype, execution, stages, rngs=rngs)

    def stacks(self, execution: ExecutionConfig) -> dict[str, tuple[TransformerLayerConfig, ...]]:
        """The layers of multi-token prediction are stacks of one, because each reads other tokens."""
        found = {"layers": tuple(self._layer_config(number, execution) for number in range(self.num_layers))}
        for depth in range(1, self.mtp_layers + 1):
            layer = self._layer_config(self.num_layers - 1, execution)
            found[mtp_name(depth)] = (MultiTokenConfig(layer, self.init_std),)
        return found

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        return dict.fromkeys(map(mtp_name, range(1, self.mtp_layers + 1)), "guess")

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        names = ("tokens", "positions", "segment_ids") if packed else ("tokens", "positions")
        return {name: BatchArray.sequence(sequence_length) for name in names}

    def flops_outside(self, sequence_length: int) -> Flops:
        return Flops(2 * self.padded_vocab_size * self.embed_dim * (1 + self.mtp_layers))

    @property
    def max_length(self) -> int | None:
        return {"learned": self.max_positions, "rope": self.rope.max_length}.get(self.position)

    def has_experts(self, number: int) -> bool:
        """Whether the layer with this number has experts."""
        return self.moe.has_experts(number)

    def _layer_config(self, number: int, execution: ExecutionConfig) -> TransformerLayerConfig:
        def is_nth(every: int | None) -> bool:
            return every is not None and (number + 1) % every == 0

        size = None if is_nth(self.full_attention_every) else self.window
        rope = "none"
        if self.position == "rope" and not is_nth(self.no_rope_every):
            rope = "global" if size is None or self.rope.local_base is None else "local"
        fields = dict(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width_of_head,
            qkv_bias=self.has_qkv_bias,
            out_bias=self.has_attention_out_bias,
            qk_norm=self.norm_config if self.qk_norm else None,
            qk_norm_scope="all_heads" if self.qk_norm == "all_heads" else "head",
            rope=rope,
            rope_interleaved=self.rope.interleaved,
            alibi=self.position == "alibi",
            mask=CAUSAL & window(size),
            scale=self.attention_scale,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
            dropout=self.attention_dropout,
            **execution.of_attention,
            init_std=self.init_std,
            out_init_std=self.out_init_std,
        )
        if self.latent.kv_rank is None:
            attention = AttentionConfig(**fields)
        else:
            attention = LatentAttentionConfig(**fields, latent=self.latent, norm=self.norm_config)
        layer = TransformerLayerConfig(
            attention=attention,
            mlp=self._feed_forward(number, execution),
            norm=self.norm_config,
            norm_placement=self.norm_placement,
            parallel_residual=self.parallel_residual,
            residual_multiplier=self.residual_multiplier,
            dropout=self.dropout,
        )
        return layer.saving(execution.recompute_of(number), execution.recompute_modules, execution.offload)

    def _feed_forward(self, number: int, execution: ExecutionConfig) -> FeedForwardConfig:
        D = self.embed_dim
        F = self.width_of_mlp
        if not self.has_experts(number):
            return MlpConfig(D, F, self.activation, self.has_mlp_bias, self.init_std, self.out_init_std)
        return ExpertsConfig(
            moe=self.moe,
            embed_dim=D,
            mlp_dim=self.moe.expert_dim or F,
            activation=self.activation,
            init_std=self.init_std,
            out_init_std=self.out_init_std,
            context=execution.context_attention,
            dispatch=execution.expert_dispatch,
            buffer=execution.expert_buffer,
        )

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        self._check_sizes(sequence_length)
        self._check_choices()
        super().check(mesh, sequence_length, execution)
        self._check_divides(mesh)

    def _check_sizes(self, sequence_length: int) -> None:
        self._check_heads()
        if self.position == "learned" and sequence_length > self.max_positions:
            raise ValueError(
                f"training.sequence_length={sequence_length} is longer than model.max_positions={self.max_positions}; "
                f"use --model.max_positions={sequence_length} or --model.position=rope"
            )
        if self.position == "rope" and sequence_length > (self.max_length or sequence_length):
            raise ValueError(
                f"training.sequence_length={sequence_length} is longer than the {self.max_length} tokens that set the "
                f"wavelengths of model.rope.scaling={self.rope.scaling}; use --model.rope.length={sequence_length}"
            )

    def _check_heads(self) -> None:
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.embed_dim={self.embed_dim} is not divisible by model.num_heads={self.num_heads}; "
                "set --model.head_dim explicitly"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.kv_heads}; "
                "each key-value head serves the same number of query heads"
            )

    def _check_choices(self) -> None:
        """Raises ValueError for choices that have no effect or contradict each other."""
        if self.full_attention_every is not None and self.window is None:
            raise ValueError("model.full_attention_every needs a window: set --model.window, or leave it out")
        if self.parallel_residual != "none" and self.norm_placement == "post_residual":
            raise ValueError(
                f"model.parallel_residual={self.parallel_residual} adds attention and MLP at once, and "
                "model.norm_placement=post_residual normalises between them; use --model.parallel_residual=none"
            )
        if self.parallel_residual == "one_norm" and self.norm_placement == "post":
            raise ValueError(
                "model.parallel_residual=one_norm shares the input norm of attention and MLP, which "
                "model.norm_placement=post does not have; use --model.parallel_residual=two_norms"
            )
        if self.rope.local_base is not None and (self.position != "rope" or self.window is None):
            raise ValueError(
                f"model.rope.local_base={self.rope.local_base} is for rotary layers with a window: set "
                "--model.position=rope and --model.window, or leave it out"
            )
        self.rope.check(self.rotary_head_dim)
        self._check_latent()
        if self.mtp_layers and (self.dropout or self.attention_dropout):
            raise ValueError(
                f"model.mtp_layers={self.mtp_layers}: layers of multi-token prediction have no dropout; use "
                "--model.dropout=0 --model.attention_dropout=0"
            )
        self.moe.check(self.num_layers, has_bias=self.has_mlp_bias)

    def _check_latent(self) -> None:
        if self.latent.kv_rank is None:
            if changed := changed_fields(self.latent, LatentConfig()):
                raise ValueError(
                    f"model.latent: {', '.join(changed)} set, but not kv_rank; set --model.latent.kv_rank, or leave "
                    "them out"
                )
            return
        allowed = {
            "position": (self.position, "rope"),
            "num_kv_heads": (self.kv_heads, self.num_heads),
            "qk_norm": (self.qk_norm, False),
            "qkv_bias": (self.has_qkv_bias, False),
            "attention_out_bias": (self.has_attention_out_bias, False),
        }
        for name, (value, needed) in allowed.items():
            if value != needed:
                raise ValueError(
                    f"model.{name}={value} is not supported by latent attention (model.latent.kv_rank="
                    f"{self.latent.kv_rank}); use --model.{name}={needed}"
                )

    def _check_divides(self, mesh: MeshConfig) -> None:
        check_embedding_divides(mesh, self.vocab_size, self.vocab_multiple, self.embed_dim)
        vocab_shards = mesh.tensor * mesh.pipeline
        if self.position == "learned" and self.max_positions % vocab_shards:
            raise ValueError(
                f"model.max_positions={self.max_positions} is not divisible by {vocab_shards} = mesh.tensor("
                f"{mesh.tensor}) * mesh.pipeline({mesh.pipeline}); "
                f"use --model.max_positions={-(-self.max_positions // vocab_shards) * vocab_shards}"
            )


def mtp_name(depth: int) -> str:
    """Name of the stack of multi-token prediction at this depth, from 1."""
    return f"mtp_{depth}"


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // multiple) * multiple


def check_embedding_divides(mesh: MeshConfig, vocab_size: int, vocab_multiple: int, embed_dim: int) -> None:
    """Raises ValueError if the mesh does not divide the vocabulary embedding [padded vocabulary, embed_dim]."""
    padded = padded_vocab_size(vocab_size, vocab_multiple)
    vocab_shards = mesh.tensor * mesh.pipeline
    if padded % vocab_shards:
        raise ValueError(
            f"model.vocab_size={vocab_size}, padded to {padded}, is not divisible by {vocab_shards} = mesh.tensor("
            f"{mesh.tensor}) * mesh.pipeline({mesh.pipeline}); "
            f"use --model.vocab_multiple={math.lcm(vocab_multiple, vocab_shards)}"
        )
    if embed_dim % mesh.weight_shards:
        raise ValueError(
            f"model.embed_dim={embed_dim} is not divisible by {mesh.weight_shards} = mesh.fsdp({mesh.fsdp}) * "
            f"mesh.context({mesh.context}), over which weights are sharded; use --mesh.fsdp="
            f"{math.gcd(embed_dim // math.gcd(embed_dim, mesh.context), mesh.fsdp)}"
        )


class Decoder(OneStack):
    """embed -> layers -> loss or logits; see models/interface.py for the batch."""

    def __init__(
        self, config: DecoderConfig, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None, *,
        rngs: nnx.Rngs
    ):  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.context = execution.context_attention
        D = config.embed_dim
        V = config.padded_vocab_size
        init = nnx.initializers.normal(config.init_std)
        self.embedding = weight((V, D), ("vocab", "embed"), init, rngs, "embedding")
        if config.embedding_norm:
            self.embedding_norm = Norm(config.norm_config, D, rngs=rngs)
        if config.position == "learned":
            axes = ("positions", "embed")
            self.position_embedding = weight((config.max_positions, D), axes, init, rngs, "embedding")
        scan = execution.scans(config.num_layers)
        stacks = config.stacks(execution)
        self.layers = Stack(stacks.pop("layers"), scan=scan, rngs=rngs, stages=stages)
        for name, layers in stacks.items():
            setattr(self, name, Stack(layers, scan=False, rngs=rngs, is_on_all_ranks=stages is not None))
        self.final_norm = Norm(config.norm_config, D, rngs=rngs)
        if not config.tied_embeddings:
            self.head = Linear((D,), (V,), ("embed", "vocab"), config.init_std, rngs=rngs, role="head")
        if config.head_bias:
            self.head_bias = weight((V,), ("vocab",), nnx.initializers.zeros, rngs, "vector")

    def embed(self, batch: dict, key: DropoutKey | None) -> jax.Array:
        """tokens, positions int32 [B, T] -> [B, T, D] in the compute dtype."""
        x_BTD = embed(self.embedding[...], batch["tokens"], self.dtype)
        if self.config.embedding_multiplier != 1.0:
            x_BTD *= jnp.asarray(self.config.embedding_multiplier, self.dtype)
        if self.config.position == "learned":
            x_BTD += embed(self.position_embedding[...], batch["positions"], self.dtype)
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        order = None if key is None else current_order(x_BTD.shape[1], self.context)
        return constrain(dropout(x_BTD, self.config.dropout, key, order), "batch", "sequence", None)

    def block_inputs(self, batch: dict) -> dict:
        """What every layer reads besides x."""
        inputs = {name: batch[name] for name in ("segment_ids",) if name in batch}
        ropes = {"global": self.config.rope} if self.config.position == "rope" else {}
        if self.config.rope.local_base is not None:
            ropes["local"] = self.config.rope.local
        for name, rope in ropes.items():
            tables = rope_tables(rope, self.config.rotary_head_dim, batch["positions"])
            inputs[f"cos_{name}"], inputs[f"sin_{name}"] = tables
        return inputs

    def output(self, x_BTD: jax.Array) -> jax.Array:
        return self.final_norm(x_BTD)

    def further_terms(self, h_BTD: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        """The losses of multi-token prediction (layers/multi_token.py) and, in an evaluation, the share of its
        predictions that greedy speculative decoding would accept: those that the main model makes too."""
        terms = super().further_terms(h_BTD, batch, options)
        if not self.config.mtp_layers:
            return terms
        inputs = self.block_inputs(batch)
        likely_BT = self._most_likely(h_BTD, batch) if options.evaluates else None
        total = jnp.float32(0)
        metrics = {}
        rates = {}
        for depth in range(1, self.config.mtp_layers + 1):
            later = batch | shifted(batch, [name for name in batch if name != "segment_ids"], depth, self.context)
            next_embeddings = {"next_embeddings": self.embed(later, None)}
            h_BTD, _, found = getattr(self, mtp_name(depth))(h_BTD, inputs | next_embeddings)
            weights_BT = later["loss_weights"]
            loss = self.cross_entropy(h_BTD, later["labels"], weights_BT, options)
            total += loss
            metrics[f"mtp_loss/{depth}"] = loss / jnp.maximum(jnp.sum(weights_BT), jnp.finfo(jnp.float32).tiny)
            terms = terms._replace(auxiliary=add_by_name(terms.auxiliary, found.auxiliary))
            if options.evaluates:
                later_BT = shifted(batch | {"likely": likely_BT}, ["likely"], depth, self.context)["likely"]
                counts_BT = weights_BT > 0
                agrees_BT = counts_BT & (self._most_likely(h_BTD, batch) == later_BT)
                rates[f"mtp_acceptance/{depth}"] = tuple(jnp.sum(a, dtype=jnp.float32) for a in (agrees_BT, counts_BT))
        further = {"mtp_loss": self.config.mtp_loss / self.config.mtp_layers * total}
        return terms._replace(metrics=terms.metrics | metrics, further=further, rates=rates)

    def _most_likely(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        return jax.lax.stop_gradient(self.log_probs(h_BTD, batch["labels"]).top)

    def guess(self, depth: int, x_BTD: jax.Array, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        h_BTD = self.final_norm(x_BTD) if depth == 1 else x_BTD
        later = batch | {"positions": batch["positions"] + depth}
        inputs = self.block_inputs(batch) | {"next_embeddings": self.embed(later, None)}
        name = mtp_name(depth)
        h_BTD, cache, _ = getattr(self, name)(h_BTD, inputs, caches[name])
        return h_BTD, {name: cache}

    def head_matrix(self) -> jax.Array:
        """[D, V]."""
        return self.embedding[...].T if self.config.tied_embeddings else self.head.matrix()

    def logit_options(self) -> dict:
        return dict(
            vocab_size=self.config.vocab_size,
            bias_V=self.head_bias[...] if self.config.head_bias else None,
            multiplier=self.config.logit_multiplier,
            soft_cap=self.config.logit_soft_cap,
        )
