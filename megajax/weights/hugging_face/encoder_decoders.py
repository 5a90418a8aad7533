"""Tables of the options and tensors of T5 (v1.0, v1.1 and flan), used by mapping.py in both directions.

Sources: the configuration and modeling files of transformers 5. There tie_word_embeddings=False says that the logits
are not multiplied by 1 / sqrt(d_model), and the output layer has a matrix of its own if the files have one.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megajax.data.tokenizers.span_tokens import SpanTokens
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.weights.hugging_face.form import Family, Form
from megajax.weights.hugging_face.options import Choice, Option, Options
from megajax.weights.tensor_map import Row

HEAD = "lm_head.weight"


class T5Form(Form[EncoderDecoderConfig]):
    """Encoder-decoders."""

    def with_sizes(self, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        return dataclasses.replace(
            config,
            num_decoder_layers=config.decoder_layers,
            attention_multiplier=config.attention_scale,
            logit_multiplier=config.logit_scale,
        )

    def without_training(self, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        default = self.default
        return dataclasses.replace(
            config,
            dropout=0.0,
            attention_dropout=0.0,
            init_factor=default.init_factor,
            decoder_length=default.decoder_length,
        )

    def canonical(self, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
        default = self.default
        config = super().canonical(config)
        unused = default.max_positions if config.position == "relative" else config.max_positions
        return dataclasses.replace(config, vocab_multiple=default.vocab_multiple, max_positions=unused)

    def in_files(self, config: EncoderDecoderConfig, names: Collection[str]) -> EncoderDecoderConfig:
        """transformers ties an output layer that the files do not have; with tied ones a matrix is a copy if the logits
        are multiplied."""
        is_tied = HEAD not in names or (config.tied_embeddings and config.logit_multiplier != 1.0)
        return dataclasses.replace(config, tied_embeddings=is_tied)

    def copied(self, config: EncoderDecoderConfig, name: str) -> str | None:
        copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)
        return "embedding" if name in copies else None

    def generation(self, found: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """The decoder starts with the padding."""
        if "pad_token_id" not in found:
            special = SpanTokens.of(tokenizer)
            found = {**found, "pad_token_id": special.pad_id, "eos_token_id": special.eos_id}
        return {"decoder_start_token_id": found["pad_token_id"], **found}


class OutputLayer:
    """tie_word_embeddings, and scale_decoder_outputs, which transformers 5 makes of it and writes beside it."""

    keys = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        is_tied = theirs.get("tie_word_embeddings") is not False
        is_scaled = theirs.get("scale_decoder_outputs", is_tied)
        multiplier = 1 / math.sqrt(theirs["d_model"]) if is_scaled else 1.0
        return {"tied_embeddings": is_tied, "logit_multiplier": multiplier}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        is_tied = ours["tied_embeddings"]
        multiplier = ours["logit_multiplier"]
        is_scaled = is_tied and multiplier == 1 / math.sqrt(ours["embed_dim"])
        if not is_scaled and multiplier != 1.0:
            raise ValueError(f"model.logit_multiplier={multiplier} with model.tied_embeddings={is_tied}")
        return {"tie_word_embeddings": is_tied, "scale_decoder_outputs": is_scaled}


_ACTIVATIONS = {
    "relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gelu": "gelu", "gelu_new": "gelu_tanh",
}  # fmt: skip
_T5: Options = (
    Option("vocab_size", "vocab_size", 32128),
    Option("d_model", "embed_dim", 512),
    Option("d_kv", "head_dim", 64),
    Option("d_ff", "mlp_dim", 2048),
    Option("num_layers", "num_layers", 6),
    Option("num_decoder_layers", "num_decoder_layers", None),
    Option("num_heads", "num_heads", 8),
    Option("relative_attention_num_buckets", "num_buckets", 32),
    Option("relative_attention_max_distance", "max_distance", 128),
    Option("dropout_rate", ("dropout", "attention_dropout"), 0.1),
    Option("layer_norm_epsilon", "norm_epsilon", 1e-6),
    Option("initializer_factor", "init_factor", 1.0),
    Option("feed_forward_proj", "activation", "relu", values=_ACTIVATIONS),
    OutputLayer(),
    Choice("is_encoder_decoder", True),
)


def _matrix(theirs: str, ours: str, **where: Any) -> Row:
    return Row(f"{theirs}.weight", (ours,), "linear", where)


def _vector(theirs: str, ours: str) -> Row:
    return Row(f"{theirs}.weight", (f"{ours}.scale",))


def _attention(theirs: str, ours: str) -> list[Row]:
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return [_matrix(f"{theirs}.{name}", f"{ours}.{names[name]}") for name in names]


def _stack(name: str, branches: Sequence[str]) -> tuple[Row, ...]:
    """branches: names in their layers of attention; the last is the MLP."""
    ours = {"SelfAttention": "attention", "EncDecAttention": "cross_attention"}
    rows = [
        Row(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (f"{name}_bias.table",)),
        _vector(f"{name}.final_layer_norm", f"{name}_norm"),
    ]
    for number, branch in enumerate(branches):
        layer = name + ".block.{}.layer." + str(number)
        rows += _attention(f"{layer}.{branch}", f"{name}.*.{ours[branch]}")
        rows.append(_vector(f"{layer}.layer_norm", f"{name}.*.{ours[branch].removesuffix('_attention')}_norm"))
    layer = name + ".block.{}.layer." + str(len(branches))
    mlp = f"{layer}.DenseReluDense"
    return (
        *rows,
        _vector(f"{layer}.layer_norm", f"{name}.*.mlp_norm"),
        _matrix(f"{mlp}.wi", f"{name}.*.mlp.up", is_gated=False),
        _matrix(f"{mlp}.wi_0", f"{name}.*.mlp.gate", is_gated=True),
        _matrix(f"{mlp}.wi_1", f"{name}.*.mlp.up", is_gated=True),
        _matrix(f"{mlp}.wo", f"{name}.*.mlp.down"),
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        "T5ForConditionalGeneration",
        "t5",
        dict(
            position="relative",
            norm="rmsnorm",
            final_norm=True,
            bias=False,
            attention_multiplier=1.0,
        ),
        _T5,
        (
            Row("shared.weight", ("embedding",)),
            *_stack("encoder", ("SelfAttention",)),
            *_stack("decoder", ("SelfAttention", "EncDecAttention")),
            Row(HEAD, ("head",), "linear"),
        ),
        form=T5Form(EncoderDecoderConfig()),
        # of the first files, which had one that no layer read
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    ),
)
