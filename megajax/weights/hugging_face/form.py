"""A Hugging Face family, and what its tables need to know of a kind of our models; mapping.py and folder.py ask it."""

import dataclasses
import logging
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.layers.attention.rope import RAMPS, RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.decoder_fields import Bias
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.pattern import pattern_of
from megajax.weights.hugging_face.options import Options
from megajax.weights.hugging_face.rope import SCALINGS
from megajax.weights.hugging_face.weights import multi_token_rows
from megajax.weights.tensor_map import Row, WeightMap

logger = logging.getLogger("megajax")

LINEAR = ("qkv", "attention_out", "mlp")
"""Biases that other libraries switch together."""


def replaced(config: Any, fields: Mapping[str, Any], prefix: str = "") -> Any:
    """The config with other values of some fields, which are named as in fields_of."""
    changes = {}
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if dataclasses.is_dataclass(getattr(config, field.name)):
            changes[field.name] = replaced(getattr(config, field.name), fields, f"{name}.")
        elif name in fields:
            changes[field.name] = fields[name]
    return dataclasses.replace(config, **changes)


def fields_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields by name; those of sections as rope.base and moe.router.top_k."""
    fields = {}
    for field in dataclasses.fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        fields |= fields_of(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return fields


# The configs of models that folders hold.
Foldable = DecoderConfig | BertConfig | EncoderDecoderConfig
C = TypeVar("C", bound=Foldable)
D = TypeVar("D", bound=DecoderConfig)


class Form(Generic[C]):
    """Of a kind of models whose config has the class of `default`. The methods here fit a model without features that a
    folder cannot express."""

    def __init__(self, default: C):
        self.default = default

    def with_sizes(self, config: C) -> C:
        """The same model with default sizes resolved."""
        return config

    def without_training(self, config: C) -> C:
        """Without what only concerns training: dropout, coefficients of losses."""
        return config

    def canonical(self, config: C) -> C:
        """Equal for all configs of models that compute the same: unused fields have their defaults."""
        return self.without_training(self.with_sizes(config))

    def words(self, config: C) -> dict[str, Any]:
        """The model as the options of the tables read and write it; by default its fields."""
        return fields_of(config)

    def config(self, words: Mapping[str, Any]) -> C:
        """The model with these words; others are those of `default`."""
        return replaced(self.default, words)

    def typed(self, word: str, config: C, words: Mapping[str, Any]) -> str:
        """A word of this model as one types it."""
        return f"model.{word}={words[word]}"

    def rows(self, config: C, table: Sequence[Row]) -> list[Row]:
        """The table of this model."""
        return list(table)

    def sizes(self, config: C) -> dict[str, int]:
        """{logical axis that we pad: its size in their tensors}."""
        return {"vocab": config.vocab_size}

    def in_files(self, config: C, names: Collection[str]) -> C:
        """The model that files with these tensors have."""
        return config

    def read_beside(self, config: C, folder: Path) -> C:
        """The model, with what other files of a folder than config.json say of it."""
        return config

    def write_beside(self, config: C, folder: Path) -> None:
        """Writes these files."""

    def copied(self, config: C, name: str) -> str | None:
        """Which of our parameters a tensor that the table lacks is a copy of."""
        return None

    def is_unused(self, config: C, name: str) -> bool:
        """Whether files may have this tensor, which the model does not use."""
        return False

    def generation(self, found: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """The token ids that generation_config.json needs. found: those that are known."""
        return dict(found)

    def trained_for(self, config: C, sequence_length: int) -> C:
        """The model to write after training on sequences of this length."""
        return config


class DecoderForm(Form[D]):
    """Decoders, dense or with experts."""

    def words(self, config: D) -> dict[str, Any]:
        """As other libraries say it: a flag for each bias, and lists of the layers with a window, rotary embedding and
        experts, empty where all layers are alike."""
        words = super().words(config)
        biases = words.pop("biases")
        del words["pattern"]
        words |= {f"{name}_bias": name in biases for name in typing.get_args(Bias)}
        words["bias"] = all(words[f"{name}_bias"] for name in LINEAR)
        words["norm"] = config.norm_config.kind
        words["norm_zero_centered"] = config.norm_config.zero_centered
        letters = [config.attention_letter(number) for number in range(config.num_layers)]
        words["windows"] = _unless_all([letter == "w" for letter in letters], config.window is not None)
        words["rotary"] = _unless_all([letter != "n" for letter in letters], True)
        has_experts = [config.has_experts(number) for number in range(config.num_layers)]
        words["experts"] = _unless_all(has_experts, config.moe.num_experts is not None)
        return words

    def config(self, words: Mapping[str, Any]) -> D:
        """bias: of all linear layers but the head, unless a flag says otherwise."""
        words = self.words(self.default) | {f"{name}_bias": words.get("bias", True) for name in LINEAR} | dict(words)
        words["norm_bias"] = words["norm_bias"] and words["norm"] != "rmsnorm"
        biases = tuple(name for name in typing.get_args(Bias) if words[f"{name}_bias"])
        norm = words["norm"] + ("_1p" if words["norm_zero_centered"] else "")
        return super().config(words | dict(biases=biases, norm=norm, pattern=self.pattern(words)))

    def pattern(self, words: Mapping[str, Any]) -> str:
        """Raises ValueError for a layer with a window and without rotary embedding."""
        number = words["num_layers"]
        windows = words["windows"] or (words["window"] is not None,) * number
        rotary = words["rotary"] or (True,) * number
        if any(window and not rope for window, rope in zip(windows, rotary, strict=True)):
            raise ValueError("layers with a window and without rotary embedding are not supported")
        letters = ["w" if window else "f" if rope else "n" for window, rope in zip(windows, rotary, strict=True)]
        if all(letter == "w" for letter in letters):
            letters = []
        return pattern_of(letters, ["e" if has else "d" for has in words["experts"]])

    def typed(self, word: str, config: D, words: Mapping[str, Any]) -> str:
        if word in ("windows", "rotary", "experts"):
            return f"model.pattern={config.pattern}"
        if word.endswith("bias"):
            return f"model.biases={','.join(config.biases)}"
        return f"model.norm={config.norm}" if word == "norm_zero_centered" else super().typed(word, config, words)

    def with_sizes(self, config: D) -> D:
        moe = config.moe
        if moe.num_experts is not None and moe.expert_dim is None:
            moe = dataclasses.replace(moe, expert_dim=config.width_of_mlp)
        latent = config.latent
        if latent.kv_rank is not None:
            latent = dataclasses.replace(
                latent,
                value_dim=latent.value_dim or config.width_of_head,
                norm_epsilon=latent.norm_epsilon or config.norm_epsilon,
            )
        return dataclasses.replace(
            config,
            num_kv_heads=config.kv_heads,
            head_dim=config.width_of_head,
            mlp_dim=config.width_of_mlp,
            attention_multiplier=config.attention_scale,
            latent=latent,
            moe=moe,
        )

    def without_training(self, config: D) -> D:
        """Without what only concerns training: dropout, and the losses and the capacity of routers."""
        default = RouterConfig()
        names = ("aux_loss", "aux_loss_scope", "z_loss", "capacity_factor", "drop")
        router = dataclasses.replace(config.moe.router, **{name: getattr(default, name) for name in names})
        moe = dataclasses.replace(config.moe, router=router)
        return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0, moe=moe)

    def canonical(self, config: D) -> D:
        default = self.default
        config = super().canonical(config)
        has_experts = [config.has_experts(number) for number in range(config.num_layers)]
        without = ("norm",) if config.norm_config.kind == "rmsnorm" else ()
        return dataclasses.replace(
            config,
            vocab_multiple=default.vocab_multiple,
            init_std=default.init_std,
            max_positions=config.max_positions if config.position == "learned" else default.max_positions,
            rope=_canonical_rope(config.rope) if config.position == "rope" else default.rope,
            biases=tuple(name for name in typing.get_args(Bias) if name in config.biases and name not in without),
            mlp_dim=default.mlp_dim if all(has_experts) else config.mlp_dim,
            mtp_loss=default.mtp_loss,
            moe=_canonical_moe(config.moe) if any(has_experts) else default.moe,
        )

    def rows(self, config: D, table: Sequence[Row]) -> list[Row]:
        rows = list(table)
        for depth in range(1, config.mtp_layers + 1):
            rows += multi_token_rows(table, config.num_layers + depth - 1, depth)
        return rows

    def in_files(self, config: D, names: Collection[str]) -> D:
        """Without its layers of multi-token prediction if the files lack them: transformers does not save them."""
        first = f"layers.{config.num_layers}."
        if not config.mtp_layers or any(first in name for name in names):
            return config
        logger.warning("the files have no layers of multi-token prediction, although config.json says so")
        return dataclasses.replace(config, mtp_layers=0)

    def copied(self, config: D, name: str) -> str | None:
        if config.tied_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            return "embedding"
        if config.mtp_layers and name.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
            is_head = name.endswith("head.weight") and not config.tied_embeddings
            return "head" if is_head else "embedding"
        return None

    def trained_for(self, config: D, sequence_length: int) -> D:
        """With positions other than learned ones, the weights say nothing of the length."""
        if config.position == "learned":
            return config
        return dataclasses.replace(config, max_positions=max(config.max_positions, sequence_length))


def _unless_all(marks: Sequence[bool], usual: bool) -> tuple[bool, ...]:
    """Nothing if all layers are as usual."""
    return () if all(mark == usual for mark in marks) else tuple(marks)


def _canonical_moe(moe: MoeConfig) -> MoeConfig:
    rate = moe.router.bias_update_rate
    router = dataclasses.replace(moe.router, bias_update_rate=None if rate is None else 1.0)  # of training
    return dataclasses.replace(moe, router=router)


def _canonical_rope(rope: RopeConfig) -> RopeConfig:
    always = ("base", "fraction", "interleaved", "local_base", "scaling", "attention_factor")
    read = (*always, "factors", *SCALINGS.get(rope.scaling.removesuffix("_exact"), {}).values())
    ramp = None if rope.ramp == RAMPS.get(rope.scaling) else rope.ramp
    return RopeConfig(**{name: getattr(rope, name) for name in read}, ramp=ramp)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    architecture: str
    model_type: str
    always: Mapping[str, Any]
    """Words common to all models of the family."""
    options: Options
    weights: tuple[Row, ...]
    """As the tensors are written."""
    other_weights: tuple[tuple[Row, ...], ...] = ()
    """Other forms of the tensors, which are read if a folder has them."""
    form: Form[Any] = DecoderForm(DecoderConfig())
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that files may have and the architecture does not use."""

    @property
    def tables(self) -> tuple[tuple[Row, ...], ...]:
        return (self.weights, *self.other_weights)

    def map_of(self, config: Foldable, table: Sequence[Row] | None = None) -> WeightMap:
        """table: one of `tables`; default: the one that is written. Raises ValueError if it has no tensor for a
        parameter of the model."""
        rows = self.form.rows(config, table or self.weights)
        return WeightMap(self.form.without_training(config), rows, self.form.sizes(config), self.architecture)
