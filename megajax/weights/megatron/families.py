"""The families whose checkpoints are read: how each follows from Megatron's arguments, and its table of parameters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megajax.config import Config
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.interface import ModelConfig
from megajax.weights.megatron import decoders, encoder_decoders, encoders, hybrids
from megajax.weights.megatron.arguments import UNSUPPORTED, Arguments, Shapes, decoder_model, read_config
from megajax.weights.megatron.rows import EMBEDDING, Table


class Family(NamedTuple):
    kind: str
    """Of the config of its models."""
    has: str
    """Part of the name of a parameter that no later family has."""
    read_model: Callable[[Arguments, Shapes], ModelConfig]
    table: Callable[[Any], Table]
    supported: tuple[str, ...] = ()
    """Arguments in UNSUPPORTED that it supports."""


# The first one that fits; the last one fits every checkpoint.
_FAMILIES = (
    Family(BertConfig.kind, "lm_head.dense.", encoders.read_model, encoders.table),
    Family(
        EncoderDecoderConfig.kind, ".cross_attention.", encoder_decoders.read_model, encoder_decoders.table,
        encoder_decoders.SUPPORTED,
    ),
    Family(HybridConfig.kind, "decoder.final_norm.", hybrids.read_model, hybrids.table, hybrids.SUPPORTED),
    Family(DecoderConfig.kind, "", decoder_model, decoders.table),
)  # fmt: skip


def read_arguments(arguments: Mapping[str, Any], shapes: Shapes, folder: Path) -> Config:
    """shapes: of the parameters. folder: of the checkpoint, which may hold the tokenizer.

    Raises ValueError, with the name of an argument, for a model that cannot be described here.
    """
    given = Arguments(arguments)
    family = next(family for family in _FAMILIES if any(family.has in name for name in shapes))
    given.require({name: values for name, values in UNSUPPORTED.items() if name not in family.supported})
    return read_config(given, family.read_model(given, shapes), shapes[EMBEDDING][0], folder)


def table_of(config: ModelConfig) -> Table:
    return next(family.table for family in _FAMILIES if family.kind == config.kind)(config)
