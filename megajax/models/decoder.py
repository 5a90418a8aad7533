"""Decoder-only language model (GPT, Llama and related models): each feature is a choice in the config.

Dimensions: B batch, T sequence, D model width, V vocabulary (padded).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.layers.attention.latent import LatentAttentionConfig
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.attention.rope import rope_tables
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.feed_forward.moe import ExpertsConfig
from megajax.layers.layer import Flops, read_by_layers
from megajax.layers.linear import Linear
from megajax.layers.multi_token import MultiTokenConfig, shifted
from megajax.layers.norm import Norm
from megajax.layers.stack import Stack, add_by_name
from megajax.layers.transformer import ResidualLayerConfig, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.decoder_fields import DecoderFields
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, LossOptions, LossTerms, ModelConfig, OneStack, StackRole
from megajax.ops.attention_mask import CAUSAL, window
from megajax.ops.embedding import embed
from megajax.parallel.context import current_order
from megajax.parallel.schedule import Stages
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class DecoderConfig(DecoderFields, ModelConfig):
    kind: Literal["decoder"] = "decoder"
    """The family of the model."""

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None) -> "Decoder":
        return Decoder(self, dtype, execution, stages, rngs=rngs)

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[ResidualLayerConfig, ...]]:
        """The layers of multi-token prediction are stacks of one, because each reads other tokens."""
        found: dict[str, tuple[TransformerLayerConfig, ...]] = {
            "layers": tuple(self._layer_config(number, execution) for number in range(self.num_layers))
        }
        for depth in range(1, self.mtp_layers + 1):
            layer = self._layer_config(self.num_layers - 1, execution)
            found[mtp_name(depth)] = (MultiTokenConfig(**vars(layer), projection_std=self.init_std),)
        return found

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        return dict.fromkeys(map(mtp_name, range(1, self.mtp_layers + 1)), "guess")

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        names = ("tokens", "positions", "segment_ids") if packed else ("tokens", "positions")
        return {name: BatchArray.sequence(sequence_length) for name in names}

    def flops_outside(self, sequence_length: int) -> Flops:
        return Flops(2 * self.padded_vocab_size * self.embed_dim * (1 + self.mtp_layers))

    def _layer_config(self, number: int, execution: ExecutionConfig) -> TransformerLayerConfig:
        layer = TransformerLayerConfig(
            attention=self._attention(number, execution),
            mlp=self._feed_forward(number, execution),
            norm=self.norm_config,
            norm_placement=self.norm_placement,
            parallel_residual=self.parallel_residual,
            residual_multiplier=self.residual_multiplier,
            dropout=self.dropout,
        )
        return layer.saving(execution.recompute_of(number), execution.recompute_modules, execution.offload)

    def _attention(self, number: int, execution: ExecutionConfig) -> AttentionConfig:
        letter = self.attention_letter(number)
        size = self.window if letter == "w" else None
        rope = "none"
        if self.position == "rope" and letter != "n":
            rope = "global" if size is None or self.rope.local_base is None else "local"
        attention = AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width_of_head,
            qkv_bias="qkv" in self.biases,
            out_bias="attention_out" in self.biases,
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
            return attention
        return LatentAttentionConfig(
            **vars(attention),
            kv_rank=self.latent.kv_rank,
            q_rank=self.latent.q_rank,
            rope_dim=self.latent.rope_dim,
            value_dim=self.latent.value_dim or self.width_of_head,
            norm=dataclasses.replace(self.norm_config, epsilon=self.latent.norm_epsilon or self.norm_epsilon),
        )

    def _feed_forward(self, number: int, execution: ExecutionConfig) -> MlpConfig:
        has_bias = "mlp" in self.biases
        sizes = (self.activation, has_bias, self.init_std, self.out_init_std)
        moe = self.moe
        if moe.num_experts is None or not self.has_experts(number):
            return MlpConfig(self.embed_dim, self.width_of_mlp, *sizes)
        return ExpertsConfig(
            self.embed_dim,
            moe.expert_dim or self.width_of_mlp,
            *sizes,
            num_experts=moe.num_experts,
            router=moe.router,
            shared=MlpConfig(self.embed_dim, moe.shared_dim, *sizes) if moe.shared_dim is not None else None,
            shared_gate=moe.shared_gate,
            context=execution.context_attention,
            dispatch=execution.expert_dispatch,
            buffer=execution.expert_buffer,
        )

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        self.check_fields(mesh, sequence_length)
        super().check(mesh, sequence_length, execution)

    def check_one_branch(self) -> None:
        """For families whose layers have one branch. Raises ValueError for fields that say how two go together."""
        for name, needed in {"norm_placement": "pre", "parallel_residual": "none", "mtp_layers": 0}.items():
            if getattr(self, name) != needed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is not supported by model.kind={self.kind}, whose layers have "
                    f"one branch; use --model.{name}={needed}"
                )


def mtp_name(depth: int) -> str:
    """Name of the stack of multi-token prediction at this depth, from 1."""
    return f"mtp_{depth}"


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
        stacks = dict(config.stacks(execution))
        self.layers = Stack(stacks.pop("layers"), scan=scan, rngs=rngs, stages=stages)
        for name, layers in stacks.items():
            scan = len(layers) > 1 and execution.scans(len(layers))
            setattr(self, name, Stack(layers, scan=scan, rngs=rngs, is_on_all_ranks=stages is not None))
        self.final_norm = Norm(config.norm_config, D, rngs=rngs)
        if not config.tied_embeddings:
            self.head = Linear((D,), (V,), ("embed", "vocab"), config.init_std, rngs=rngs, role="head")
        if "head" in config.biases:
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
                agreeing, counted = (jnp.sum(a, dtype=jnp.float32) for a in (agrees_BT, counts_BT))
                rates[f"mtp_acceptance/{depth}"] = (agreeing, counted)
        further = {"mtp_loss": self.config.mtp_loss / self.config.mtp_layers * total}
        return terms._replace(metrics=terms.metrics | metrics, further=further, rates=rates)

    def _most_likely(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        return jax.lax.stop_gradient(self.log_probs(h_BTD, batch["labels"]).top)

    def guess(self, depth: int, x_BTD: jax.Array, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        h_BTD = self.final_norm(x_BTD) if depth == 1 else x_BTD
        later = batch | {"positions": batch["positions"] + depth}
        inputs = self.block_inputs(batch) | {"next_embeddings": self.embed(later, None)} | read_by_layers(batch)
        name = mtp_name(depth)
        h_BTD, cache, _ = getattr(self, name)(h_BTD, inputs, caches[name])
        return h_BTD, {name: cache}

    def logit_options(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.config.vocab_size,
            bias_V=self.head_bias[...] if "head" in self.config.biases else None,
            multiplier=self.config.logit_multiplier,
            soft_cap=self.config.logit_soft_cap,
        )
