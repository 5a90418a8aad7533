"""Supervised fine-tuning on conversations: predict the answers only."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from megajax.data.config import DataConfig
from megajax.data.datasets import Formats
from megajax.data.prepare.text_corpus import CONVERSATIONS, TextForm
from megajax.data.samples.sft import SftFormat
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.media.kinds import KINDS
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.tasks.interface import Task, check_source, of_next_row, rate, with_labels
from megajax.tasks.language import next_token_loss


@dataclasses.dataclass(frozen=True)
class Conversations(Task):
    kind: Literal["conversations"] = "conversations"
    """What the model is trained for. conversations: the answers of conversations (supervised fine-tuning)."""
    on_misfit: Literal["raise", "skip", "truncate"] = "raise"
    """What to do with a conversation longer than a sample: raise an error, skip it or truncate it. One without an
    answer is an error with raise, and skipped otherwise."""

    rates_answers: bool = False
    """Evaluations also report which share of the conversations gets all tokens of its answers right, each from the
    right ones before it, and with images or sound the same share with those of other conversations, with grey images
    and with silent clips."""

    heads = ("next_token",)
    reads_conversations: ClassVar[bool] = True
    default_epochs: ClassVar[float | None] = 3
    max_epochs: ClassVar[int | None] = 4

    @property
    def text_form(self) -> TextForm:
        return CONVERSATIONS

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        super().check(data, model)
        check_source(self.kind, data, "indexed", "drawn", "mock")

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        return with_labels(model.inputs(sequence_length, packed=True))

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        form = SftFormat(on_misfit=self.on_misfit, vocab_size=tokenizer.vocab_size, media=model.media)
        return Formats(form, form)

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        terms = next_token_loss(module, h, batch, options)
        if not (options.evaluates and self.rates_answers):
            return terms
        return terms._replace(rates=terms.rates | {"answers": answered(module, h, batch)})

    def controls(self, batch: dict) -> dict[str, dict]:
        return changed_media(batch) if self.rates_answers else {}


def answered(module: AnyModule, h_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
    """(conversations whose answers are the most likely tokens, conversations), float32 scalars."""
    is_answer_BT = batch["loss_weights"] > 0
    segments_BT = batch["segment_ids"]
    is_wrong_BT = is_answer_BT & (module.log_probs(h_BTD, batch["labels"]).top != batch["labels"])
    numbers_S = jnp.arange(1, segments_BT.shape[1] + 1)

    def of_row(segments_T: jax.Array, marked_T: jax.Array) -> jax.Array:
        """Which conversations of the row have a marked token, bool [T]: by their numbers from 1."""
        return jnp.zeros(numbers_S.shape, bool).at[segments_T - 1].max(marked_T & (segments_T > 0), mode="drop")

    has_answer_BS = jax.vmap(of_row)(segments_BT, is_answer_BT)
    is_wrong_BS = jax.vmap(of_row)(segments_BT, is_wrong_BT)
    return rate(~is_wrong_BS, has_answer_BS)


def changed_media(batch: dict) -> dict[str, dict]:
    """The batch with the images and clips of the next row, and with blank ones of each kind; nothing without any.
    batch: arrays [M, B, ...]."""
    kinds = [kind for kind in KINDS if kind.values in batch]
    if not kinds:
        return {}
    exchanged = {name: of_next_row(batch[name]) for kind in kinds for name in (kind.values, kind.places)}
    blank = {kind.blank: batch | {kind.values: jnp.full_like(batch[kind.values], kind.blank_value)} for kind in kinds}
    return {"exchanged": batch | exchanged} | blank
