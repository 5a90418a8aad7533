"""Decoder-only language model (GPT, Llama and their relatives): each feature is a choice in the config.

Dimensions: B batch, T sequence, D model width, V vocabulary (padded).
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.layers.attention import AttentionConfig
from megajax.layers.block import Stack
from megajax.layers.dropout import dropout
from megajax.layers.mlp import MlpConfig
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.rope import RopeConfig, rope_tables
from megajax.layers.transformer import ACTIVATIONS, MODULES, Recompute, TransformerLayerConfig, saved_activations
from megajax.mesh import MeshConfig
from megajax.ops.activation import Activation
from megajax.ops.attention import Backend
from megajax.ops.cross_entropy import cross_entropy
from megajax.ops.embedding import embed
from megajax.ops.matmul import matmul
from megajax.parallel.context import ContextMethod, current_order
from megajax.parallel.schedule import Stages, make_stages
from megajax.sharding import constrain, weight

MAX_DROPOUT_LENGTH = 65536  # attention numbers a query and a key in one 32-bit counter
MAX_UNROLLED_LAYERS = 40  # beyond this, compile time grows more than the step shrinks


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    num_layers: int = 12
    """Transformer layers."""
    embed_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: int | None = None
    """Key-value heads: None = num_heads (multi-head), fewer = grouped-query, 1 = multi-query."""
    head_dim: int | None = None
    """Width of a head; None = embed_dim / num_heads."""
    mlp_dim: int | None = None
    """Feed-forward width; None = 4 * embed_dim."""
    vocab_size: int = 50257
    """Token ids of the tokenizer."""
    vocab_multiple: int = 128
    """The stored vocabulary is padded to a multiple of this, the same on every mesh."""
    position: Literal["learned", "rope", "none"] = "learned"
    """How tokens know their place."""
    max_positions: int = 1024
    """Rows of the learned position table."""
    rope: RopeConfig = RopeConfig()
    """Rotary embedding, where position is rope."""
    no_rope_every: int | None = None
    """Every n-th layer has no rotary embedding (NoPE)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    norm_epsilon: float = 1e-5
    """Added to the variance."""
    norm_zero_centered: bool = False
    """Store the norm's scale minus one (Megatron's layernorm-1p)."""
    qk_norm: bool = False
    """Normalise queries and keys of each head before the rotary embedding."""
    activation: Activation = "gelu"
    """Feed-forward activation: gelu is the exact (erf) one; swiglu and geglu are gated."""
    bias: bool = True
    """Biases in the linear layers."""
    tied_embeddings: bool = True
    """The output layer is the transposed embedding."""
    window: int | None = None
    """Sliding-window attention: a token sees this many tokens, itself included."""
    full_attention_every: int | None = None
    """With a window: every n-th layer sees everything."""
    attention_soft_cap: float | None = None
    """Scores become cap * tanh(scores / cap)."""
    dropout: float = 0.0
    """Drop rate of embeddings and of what each half layer adds."""
    attention_dropout: float = 0.0
    """Drop rate of attention probabilities."""
    attention_backend: Backend = "auto"
    """cudnn, pallas (pallas_kernels/flash_attention) or reference, where it can do what is asked; auto: the fastest
    that was measured. The log says which one it is."""
    deterministic: bool = False
    """On a GPU too, a step gives the same bits each time, after a restart as well; it takes longer, and several GPUs
    were not tried (docs/reliability.md). On CPU this is always so."""
    context_attention: ContextMethod = "ring"
    """Where mesh.context splits the sequence: keys and values in a ring, gathered (all_gather), or the heads split
    instead (all_to_all)."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections get init_std / sqrt(2 * num_layers)."""
    z_loss: float = 0.0
    """Weight of logsumexp^2 of the logits in the training loss."""
    label_smoothing: float = 0.0
    """Probability mass moved from the label to the whole vocabulary in the training loss."""
    scan_layers: bool | None = None
    """Compile one layer and loop (fast compile) or all layers (fast step); None = loop beyond 40 layers, and
    with offload, which needs it."""
    recompute: Recompute = "none"
    """What the backward pass computes again: nothing, the modules of recompute_modules (selective), or whole layers."""
    recompute_modules: tuple[str, ...] = ("norm", "activation")
    """With recompute=selective: any of norm, qkv, core_attention, attention, activation, mlp; see docs/memory.md."""
    recompute_every: int = 1
    """Of each n consecutive layers the first is recomputed, the others are not."""
    offload: tuple[str, ...] = ()
    """Activations kept in host memory between forward and backward pass: any of residual, normed, qkv, attention_out,
    residual_mid, mlp_wide, mlp_hidden."""

    # ------------------------------------------------------------------ derived sizes

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def width_of_mlp(self) -> int:
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.vocab_multiple)

    @property
    def scanned(self) -> bool:
        if self.scan_layers is not None:
            return self.scan_layers
        return self.num_layers > MAX_UNROLLED_LAYERS or bool(self.offload)

    def layer_configs(self, *, by_name: bool = False) -> tuple[TransformerLayerConfig, ...]:
        """by_name: what a layer keeps for its backward pass is said in any case, and never left to differentiation."""
        return tuple(self._layer_config(number, by_name) for number in range(self.num_layers))

    def _layer_config(self, number: int, by_name: bool = False) -> TransformerLayerConfig:
        norm = NormConfig(self.norm, self.norm_epsilon, self.norm_zero_centered)
        out_std = self.init_std / math.sqrt(2 * self.num_layers)
        is_nth = lambda every: every is not None and (number + 1) % every == 0
        attention = AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width_of_head,
            bias=self.bias,
            qk_norm=norm if self.qk_norm else None,
            use_rope=self.position == "rope" and not is_nth(self.no_rope_every),
            window=None if is_nth(self.full_attention_every) else self.window,
            soft_cap=self.attention_soft_cap,
            dropout=self.attention_dropout,
            context=self.context_attention,
            backend=self.attention_backend,
            deterministic=self.deterministic,
            init_std=self.init_std,
            out_init_std=out_std,
        )
        mlp = MlpConfig(self.embed_dim, self.width_of_mlp, self.activation, self.bias, self.init_std, out_std)
        recompute = self.recompute if number % self.recompute_every == 0 else "none"
        saved = saved_activations(recompute, self.recompute_modules, self.offload, by_name=by_name)
        return TransformerLayerConfig(attention, mlp, norm, self.dropout, saved)

    # ------------------------------------------------------------------ what others ask of a model config

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, stages: Stages | None = None) -> "Decoder":
        return Decoder(self, dtype, stages=stages, rngs=rngs)

    def num_parameters(self) -> int:
        """Counted from the sizes alone; equals the real count."""
        D, N, K, H = self.embed_dim, self.num_heads, self.kv_heads, self.width_of_head
        layer = _layer_config_matrices(self)
        norm = D * (2 if self.norm == "layernorm" else 1)
        layer += 2 * norm
        if self.qk_norm:
            layer += 2 * H * (2 if self.norm == "layernorm" else 1)
        if self.bias:
            wide = self._layer_config(0).mlp.num_matrices - 1
            layer += (N + 2 * K) * H + D + wide * self.width_of_mlp + D
        total = self.num_layers * layer + norm + self.padded_vocab_size * D * (1 if self.tied_embeddings else 2)
        return total + (self.max_positions * D if self.position == "learned" else 0)

    def flops_per_token(self, sequence_length: int, *, causal: bool) -> float:
        """FLOPs of forward and backward, a token; a multiply-add is two, the backward is twice the forward.

        causal=False counts the attention as if every token saw every other (PaLM's and most tables' convention);
        causal=True only what a token sees, windows included (Megatron Core's current convention).
        """
        matrices = self.num_layers * _layer_config_matrices(self) + self.padded_vocab_size * self.embed_dim
        return 6 * matrices + self.attention_flops_per_token(sequence_length, causal=causal)

    def attention_flops_per_token(self, sequence_length: int, *, causal: bool) -> float:
        """Of these the attention itself."""
        return 3 * sum(self._attention_forward_flops(layer, sequence_length, causal) for layer in self.layer_configs())

    def _attention_forward_flops(self, layer: TransformerLayerConfig, length: int, causal: bool) -> float:
        window = min(layer.attention.window or length, length)
        seen = window - window * (window - 1) / (2 * length) if causal else length
        return 2 * 2 * seen * self.num_heads * self.width_of_head

    def activation_elements(self) -> dict[str, int]:
        """Elements a token of each activation of a layer, by its name; a name that stands for several, all of them."""
        D, heads = self.embed_dim, self.num_heads * self.width_of_head
        wide = (self._layer_config(0).mlp.num_matrices - 1) * self.width_of_mlp
        qkv = heads + 2 * self.kv_heads * self.width_of_head
        sizes = (D, 2 * D, qkv, heads, D, wide, self.width_of_mlp)
        return dict(zip(ACTIVATIONS, sizes, strict=True))

    def recomputed_flops_per_token(self, sequence_length: int) -> tuple[float, float]:
        """-> FLOPs that the backward pass does again, a token: (matmuls, attention, counted causally). Of the matmuls
        those whose results a layer does not keep; the last one, down, is never needed again."""
        D, elements, matmuls, attention = self.embed_dim, self.activation_elements(), 0.0, 0.0
        width = {"qkv": D, "residual_mid": elements["attention_out"], "mlp_wide": D}
        for layer in self.layer_configs():
            kept = layer.saved.kept if layer.saved else ACTIVATIONS
            matmuls += sum(2 * elements[name] * width[name] for name in width if name not in kept)
            if "attention_out" not in kept:
                attention += self._attention_forward_flops(layer, sequence_length, causal=True)
        return matmuls, attention

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Raises ValueError for sizes that do not fit each other or the mesh."""
        self._check_ranges()
        self._check_recompute()
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
        if self.position == "learned" and sequence_length > self.max_positions:
            raise ValueError(
                f"training.sequence_length={sequence_length} is longer than model.max_positions={self.max_positions}; "
                f"use --model.max_positions={sequence_length} or --model.position=rope"
            )
        if self.full_attention_every is not None and self.window is None:
            raise ValueError("model.full_attention_every needs a window: set --model.window, or leave it out")
        if self.attention_dropout > 0 and sequence_length > MAX_DROPOUT_LENGTH:
            raise ValueError(
                f"model.attention_dropout={self.attention_dropout} draws no more than {MAX_DROPOUT_LENGTH} x "
                f"{MAX_DROPOUT_LENGTH} numbers that differ, training.sequence_length={sequence_length} is longer; "
                "use --model.attention_dropout=0"
            )
        self.rope.check()
        self._check_divisible("tensor", mesh.tensor, {
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "mlp_dim": self.width_of_mlp,
        })  # fmt: skip
        vocab_shards = mesh.tensor * mesh.pipeline
        if self.padded_vocab_size % vocab_shards:
            raise ValueError(
                f"model.vocab_size={self.vocab_size}, padded to {self.padded_vocab_size}, is not divisible by "
                f"{vocab_shards} = mesh.tensor({mesh.tensor}) * mesh.pipeline({mesh.pipeline}); "
                f"use --model.vocab_multiple={math.lcm(self.vocab_multiple, vocab_shards)}"
            )
        if self.position == "learned" and self.max_positions % vocab_shards:
            raise ValueError(
                f"model.max_positions={self.max_positions} is not divisible by {vocab_shards} = mesh.tensor("
                f"{mesh.tensor}) * mesh.pipeline({mesh.pipeline}); "
                f"use --model.max_positions={-(-self.max_positions // vocab_shards) * vocab_shards}"
            )
        if self.embed_dim % mesh.weight_shards:
            raise ValueError(
                f"model.embed_dim={self.embed_dim} is not divisible by {mesh.weight_shards} = mesh.fsdp({mesh.fsdp}) * "
                f"mesh.context({mesh.context}), which share the weights; use --mesh.fsdp="
                f"{math.gcd(self.embed_dim // math.gcd(self.embed_dim, mesh.context), mesh.fsdp)}"
            )
        if mesh.context > 1:
            self._check_context(mesh, sequence_length)
        if make_stages(mesh, self.num_layers) is not None:
            self._check_pipeline()

    def _check_ranges(self) -> None:
        counts = ("num_layers", "embed_dim", "num_heads", "vocab_size", "vocab_multiple", "max_positions")
        counts += ("recompute_every",)
        optional = ("num_kv_heads", "head_dim", "mlp_dim", "window", "no_rope_every", "full_attention_every")
        for name in (*counts, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value} must be at least 1{', or None' if name in optional else ''}")
        for name in ("dropout", "attention_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0 and below 1")

    def _check_recompute(self) -> None:
        for name, known in (("recompute_modules", tuple(MODULES)), ("offload", ACTIVATIONS)):
            for word in getattr(self, name):
                if word not in known:
                    raise ValueError(f"model.{name}: {word!r} is unknown; use any of {', '.join(known)}")
        if self.offload and self.scan_layers is False:
            raise ValueError(
                f"model.offload={','.join(self.offload)} needs layers that run as a loop, whose turns wait for their "
                "copies: leave out --model.scan_layers=False"
            )
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError(
                "model.recompute=selective with no model.recompute_modules computes nothing again; "
                "name some, or use --model.recompute=none"
            )
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(
                f"model.recompute_every={self.recompute_every} needs something to recompute: set "
                "--model.recompute=full or selective, or leave it out"
            )

    def _check_context(self, mesh: MeshConfig, sequence_length: int) -> None:
        if self.context_attention != "all_to_all":
            if sequence_length % (2 * mesh.context):
                raise ValueError(
                    f"training.sequence_length={sequence_length} is not divisible by {2 * mesh.context} = 2 * "
                    f"mesh.context, the chunks of model.context_attention={self.context_attention}; use "
                    f"--training.sequence_length={-(-sequence_length // (2 * mesh.context)) * 2 * mesh.context}"
                )
            return
        for name, value in (("num_heads", self.num_heads), ("num_kv_heads", self.kv_heads)):
            if value % (mesh.tensor * mesh.context):
                raise ValueError(
                    f"model.{name}={value} is not divisible by {mesh.tensor * mesh.context} = mesh.tensor("
                    f"{mesh.tensor}) * mesh.context({mesh.context}), over which model.context_attention=all_to_all "
                    "splits the heads; use --model.context_attention=ring"
                )

    def _check_pipeline(self) -> None:
        if self.scan_layers:
            raise ValueError(
                "model.scan_layers=True: the layers of a stage of a pipeline run one after the other, the loop is over "
                "microbatches; leave it out"
            )
        if self.offload:
            raise ValueError(
                f"model.offload={','.join(self.offload)} is not there for a pipeline; use --model.recompute=full"
            )

    @staticmethod
    def _check_divisible(axis: str, size: int, fields: dict[str, int]) -> None:
        for name, value in fields.items():
            if value % size:
                largest = math.gcd(value, size)
                raise ValueError(
                    f"model.{name}={value} is not divisible by mesh.{axis}={size}; use --mesh.{axis}={largest}"
                )


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // multiple) * multiple


def _layer_config_matrices(config: DecoderConfig) -> int:
    """Entries of the weight matrices of one layer."""
    attention = 2 * config.embed_dim * (config.num_heads + config.kv_heads) * config.width_of_head
    return attention + config._layer_config(0).mlp.num_matrices * config.embed_dim * config.width_of_mlp


class Decoder(nnx.Module):
    """embed -> layers -> loss or logits; see Model for the batch."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, *, stages: Stages | None = None, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        D, V = config.embed_dim, config.padded_vocab_size
        init = nnx.initializers.normal(config.init_std)
        self.embedding = weight((V, D), ("vocab", "embed"), init, rngs)
        if config.position == "learned":
            self.position_embedding = weight((config.max_positions, D), ("positions", "embed"), init, rngs)
        layers = config.layer_configs(by_name=stages is not None)
        self.layers = Stack(layers, scan=config.scanned, rngs=rngs, stages=stages)
        self.final_norm = Norm(NormConfig(config.norm, config.norm_epsilon, config.norm_zero_centered), D, rngs=rngs)
        if not config.tied_embeddings:
            self.head = weight((D, V), ("embed", "vocab"), init, rngs)

    def embed(self, batch: dict, key: jax.Array | None) -> jax.Array:
        """tokens, positions int32 [B, T] -> [B, T, D] in the compute dtype."""
        x_BTD = embed(self.embedding[...], batch["tokens"], self.dtype)
        if self.config.position == "learned":
            x_BTD += embed(self.position_embedding[...], batch["positions"], self.dtype)
        order = None if key is None else current_order(x_BTD.shape[1], self.config.context_attention)
        return constrain(dropout(x_BTD, self.config.dropout, key, order), "batch", "sequence", None)

    def block_inputs(self, batch: dict) -> dict:
        """What every layer reads beside x."""
        inputs = {name: batch[name] for name in ("segment_ids",) if name in batch}
        if self.config.position == "rope":
            tables = rope_tables(self.config.rope, self.config.width_of_head, batch["positions"])
            inputs["cos"], inputs["sin"] = tables
        return inputs

    def loss(self, x_BTD: jax.Array, batch: dict, *, train: bool) -> jax.Array:
        """Sum of the weighted token losses; regularising terms (z-loss, label smoothing) in training only."""
        return cross_entropy(
            self.final_norm(x_BTD),
            self._head(),
            batch["labels"],
            batch["loss_weights"],
            z_loss=self.config.z_loss if train else 0.0,
            label_smoothing=self.config.label_smoothing if train else 0.0,
        )

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, V]; entries of the padding are minus infinity."""
        logits_BTV = matmul(self.final_norm(x_BTD), self._head()).astype(jnp.float32)
        real = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        return constrain(jnp.where(real, logits_BTV, -jnp.inf), "batch", "time", "vocab")

    def _head(self) -> jax.Array:
        return self.embedding[...].T if self.config.tied_embeddings else self.head[...]
