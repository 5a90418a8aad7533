"""A Hugging Face family, and what its tables need to know of a kind of our models; mapping.py and folder.py ask it."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.layers.attention.rope import RAMPS, RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig, layer_pattern
from megajax.models.decoder import DecoderConfig
from megajax.models.interface import ModelConfig
from megajax.weights.hugging_face.options import Options
from megajax.weights.hugging_face.rope import SCALINGS
from megajax.weights.hugging_face.weights import Row, multi_token_rows

logger = logging.getLogger("megajax")


class Form:
    """Of a kind of models whose config has the class of `default`. The methods here fit a model without features that a
    folder cannot express."""

    default: ModelConfig

    def with_sizes(self, config: ModelConfig) -> ModelConfig:
        """The same model with default sizes resolved."""
        return config

    def without_training(self, config: ModelConfig) -> ModelConfig:
        """Without what only concerns training: dropout, coefficients of losses."""
        return config

    def canonical(self, config: ModelConfig) -> ModelConfig:
        """Equal for all configs of models that compute the same: unused fields have their defaults."""
        return self.without_training(self.with_sizes(config))

    def rows(self, config: ModelConfig, table: Sequence[Row]) -> list[Row]:
        """The table of this model."""
        return list(table)

    def sizes(self, config: ModelConfig) -> dict[str, int]:
        """{logical axis that we pad: its size in their tensors}."""
        return {"vocab": config.vocab_size}

    def in_files(self, config: ModelConfig, names: Collection[str]) -> ModelConfig:
        """The model that files with these tensors have."""
        return config

    def copied(self, config: ModelConfig, name: str) -> str | None:
        """Which of our parameters a tensor that the table lacks is a copy of."""
        return None

    def generation(self, found: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """The token ids that generation_config.json needs. found: those that are known."""
        return dict(found)

    def trained_for(self, config: ModelConfig, sequence_length: int) -> ModelConfig:
        """The model to write after training on sequences of this length."""
        return config


class DecoderForm(Form):
    """Decoders, dense or with experts."""

    default = DecoderConfig()

    def with_sizes(self, config: DecoderConfig) -> DecoderConfig:
        biases = ("qkv_bias", "attention_out_bias", "mlp_bias")
        given = {name: getattr(config, name) for name in biases}
        moe = config.moe
        if moe.num_experts is not None and moe.expert_dim is None:
            moe = dataclasses.replace(moe, expert_dim=config.width_of_mlp)
        return dataclasses.replace(
            config,
            num_kv_heads=config.kv_heads,
            head_dim=config.width_of_head,
            mlp_dim=config.width_of_mlp,
            attention_multiplier=config.attention_scale,
            bias=all(config.bias if value is None else value for value in given.values()),
            moe=moe,
            **{name: config.bias if value is None else value for name, value in given.items()},
        )

    def without_training(self, config: DecoderConfig) -> DecoderConfig:
        """Without what only concerns training: dropout, and the losses and the capacity of routers."""
        losses = dict(aux_loss=0.0, sequence_aux_loss=0.0, global_aux_loss=0.0, z_loss=0.0)
        router = dataclasses.replace(config.moe.router, **losses, capacity_factor=None, drop="probability")
        moe = dataclasses.replace(config.moe, router=router)
        return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0, moe=moe)

    def canonical(self, config: DecoderConfig) -> DecoderConfig:
        default = self.default
        config = super().canonical(config)
        has_experts = [config.has_experts(number) for number in range(config.num_layers)]
        is_rope = config.position == "rope"
        return dataclasses.replace(
            config,
            vocab_multiple=default.vocab_multiple,
            init_std=default.init_std,
            max_positions=config.max_positions if config.position == "learned" else default.max_positions,
            rope=_canonical_rope(config.rope) if is_rope else default.rope,
            no_rope_every=config.no_rope_every if is_rope else None,
            full_attention_every=config.full_attention_every if config.window else None,
            norm_bias=config.norm_bias if config.norm == "layernorm" else default.norm_bias,
            mlp_dim=default.mlp_dim if all(has_experts) else config.mlp_dim,
            mtp_loss=default.mtp_loss,
            moe=_canonical_moe(config.moe, has_experts) if any(has_experts) else default.moe,
        )

    def rows(self, config: DecoderConfig, table: Sequence[Row]) -> list[Row]:
        rows = list(table)
        for depth in range(1, config.mtp_layers + 1):
            rows += multi_token_rows(table, config.num_layers + depth - 1, depth)
        return rows

    def in_files(self, config: DecoderConfig, names: Collection[str]) -> DecoderConfig:
        """Without its layers of multi-token prediction if the files lack them: transformers does not save them."""
        first = f"layers.{config.num_layers}."
        if not config.mtp_layers or any(first in name for name in names):
            return config
        logger.warning("the files have no layers of multi-token prediction, although config.json says so")
        return dataclasses.replace(config, mtp_layers=0)

    def copied(self, config: DecoderConfig, name: str) -> str | None:
        if config.tied_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            return "embedding"
        if config.mtp_layers and name.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
            is_head = name.endswith("head.weight") and not config.tied_embeddings
            return "head" if is_head else "embedding"
        return None

    def trained_for(self, config: DecoderConfig, sequence_length: int) -> DecoderConfig:
        """With positions other than learned ones, the weights say nothing of the length."""
        if config.position == "learned":
            return config
        return dataclasses.replace(config, max_positions=max(config.max_positions, sequence_length))


def _canonical_moe(moe: MoeConfig, has_experts: Sequence[bool]) -> MoeConfig:
    rate = moe.router.bias_update_rate
    router = dataclasses.replace(moe.router, bias_update_rate=None if rate is None else 1.0)  # of training
    return dataclasses.replace(moe, layers=layer_pattern(has_experts), router=router)


def _canonical_rope(rope: RopeConfig) -> RopeConfig:
    always = ("base", "fraction", "interleaved", "local_base", "scaling", "attention_factor")
    read = (*always, *SCALINGS.get(rope.scaling, {}).values())
    ramp = None if rope.ramp == RAMPS.get(rope.scaling) else rope.ramp
    return RopeConfig(**{name: getattr(rope, name) for name in read}, ramp=ramp)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    architecture: str
    model_type: str
    always: Mapping[str, Any]
    """Values of our config fields common to all models of the family."""
    options: Options
    weights: tuple[Row, ...]
    """As the tensors are written."""
    other_weights: tuple[Row, ...] = ()
    """Another form of the tensors, which is read if a folder has it."""
    form: Form = DecoderForm()
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that files may have and the architecture does not use."""

    @property
    def tables(self) -> tuple[tuple[Row, ...], ...]:
        return (self.weights, self.other_weights) if self.other_weights else (self.weights,)
