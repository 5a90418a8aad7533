"""Supervised fine-tuning on conversations: predict the answers only."""

import dataclasses
from typing import Literal

import jax

from megajax.data.config import DataConfig
from megajax.data.datasets import Formats
from megajax.data.samples.sft import SftFormat
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.tasks.interface import Task, check_source, with_labels
from megajax.tasks.language import next_token_loss


@dataclasses.dataclass(frozen=True)
class Conversations(Task):
    kind: Literal["conversations"] = "conversations"
    """What the model is trained for. conversations: the answers of conversations, in files written by preprocess
    --conversations (supervised fine-tuning)."""
    on_misfit: Literal["raise", "skip", "truncate"] = "raise"
    """What to do with a conversation longer than a sample: raise an error, skip it or truncate it. One without an
    answer is an error with raise, and skipped otherwise."""

    heads = ("next_token",)

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        super().check(data, model)
        check_source(self.kind, data, "indexed")

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        return with_labels(model.inputs(sequence_length, packed=True))

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        form = SftFormat(on_misfit=self.on_misfit, vocab_size=tokenizer.vocab_size)
        return Formats(form, form)

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        return next_token_loss(module, h, batch, options)
