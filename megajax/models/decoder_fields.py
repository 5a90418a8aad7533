"""The fields of a decoder-only language model, the sizes that follow from them, and their checks."""

import dataclasses
import math
from typing import Annotated, Literal

from megajax.fields.ranges import (
    MAY_CHANGE,
    Coefficient,
    DropRate,
    Epsilon,
    InitStd,
    Multiplier,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    Range,
    VocabMultiple,
    changed_fields,
)
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.norm import NormConfig
from megajax.layers.transformer import NormPlacement, ParallelResidual
from megajax.mesh.config import MeshConfig
from megajax.models.pattern import read_pattern
from megajax.ops.activation import Activation

NormKind = Literal["layernorm", "rmsnorm", "layernorm_1p", "rmsnorm_1p"]
Bias = Literal["qkv", "attention_out", "mlp", "norm", "head"]


@dataclasses.dataclass(frozen=True)
class DecoderFields:
    """DecoderConfig (models/decoder.py) without the interface of a model."""

    kind: str = "decoder"
    """The family of the model."""
    num_layers: NumLayers = 12
    """Transformer layers."""
    pattern: str = ""
    """Which layers have a window (w), full attention (f) or no rotary embedding (n), and which are dense (d) or have
    experts (e), repeated over the stack: "w5f", "d3e58", "wf/de" (models/pattern.py). Empty: all are alike."""
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
    norm: NormKind = "layernorm"
    """Kind of normalisation; _1p: the scale is stored minus one (Megatron's layernorm-1p)."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance."""
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
    biases: tuple[Bias, ...] = ("qkv", "attention_out", "mlp", "norm")
    """Which have biases: queries, keys and values; the output projection of attention; the MLP; layernorm (rmsnorm has
    none); the logits (head)."""
    tied_embeddings: bool = True
    """The output layer is the transposed embedding."""
    window: PositiveInt | None = None
    """Sliding-window attention: a token sees this many tokens, itself included."""
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
        kind = "layernorm" if self.norm.startswith("layernorm") else "rmsnorm"
        return NormConfig(kind, self.norm_epsilon, zero_centered=kind != self.norm, bias="norm" in self.biases)

    def attention_letter(self, number: int) -> str:
        """w, f or n, of the layer with this number."""
        letters = read_pattern(self.pattern).attention or ("f" if self.window is None else "w")
        return letters[number % len(letters)]

    def has_experts(self, number: int) -> bool:
        """Whether the layer with this number has experts."""
        letters = read_pattern(self.pattern).feed_forward or "e"
        return self.moe.num_experts is not None and letters[number % len(letters)] == "e"

    @property
    def num_branches(self) -> int:
        """Branches that are added to the residual stream."""
        return 2 * self.num_layers

    @property
    def out_init_std(self) -> float:
        """Of output projections."""
        return self.init_std / math.sqrt(self.num_branches)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens; None: unlimited."""
        return {"learned": self.max_positions, "rope": self.rope.max_length}.get(self.position)

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.vocab_multiple)

    # ------------------------------------------------------------------ checks

    def check_fields(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Raises ValueError for values that contradict each other, the length or the mesh."""
        self._check_sizes(sequence_length)
        self._check_choices()
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
        self._check_pattern()
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
        self.moe.check(has_bias="mlp" in self.biases)

    def _check_pattern(self) -> None:
        found = read_pattern(self.pattern)
        letters = {self.attention_letter(number) for number in range(self.num_layers)}
        if ("w" in letters) != (self.window is not None):
            raise ValueError(
                f"model.pattern={self.pattern} and model.window={self.window} contradict each other: layers w are "
                "those with a window; change one of them"
            )
        if "n" in letters and self.position != "rope":
            raise ValueError(
                f"model.pattern={self.pattern}: layers n are those without rotary embedding, and model.position="
                f"{self.position} has none anywhere; use f"
            )
        if found.feed_forward and self.moe.num_experts is None:
            raise ValueError(
                f"model.pattern={self.pattern} names layers with experts; set --model.moe.num_experts, or use "
                "letters of attention alone"
            )
        if self.moe.num_experts is not None and not any(map(self.has_experts, range(self.num_layers))):
            raise ValueError(
                f"model.pattern={self.pattern} gives none of the model.num_layers={self.num_layers} layers experts; "
                "change it, or leave model.moe.num_experts out"
            )

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
        }
        for name, (value, needed) in allowed.items():
            if value != needed:
                raise ValueError(
                    f"model.{name}={value} is not supported by latent attention (model.latent.kv_rank="
                    f"{self.latent.kv_rank}); use --model.{name}={needed}"
                )
        if found := {"qkv", "attention_out"}.intersection(self.biases):
            raise ValueError(
                f"model.biases: {', '.join(sorted(found))} is not supported by latent attention (model.latent.kv_rank="
                f"{self.latent.kv_rank}); leave it out"
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
