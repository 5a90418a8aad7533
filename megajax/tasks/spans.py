"""Span corruption: a text without some spans, and these spans (Raffel et al. 2019)."""

import dataclasses
from typing import ClassVar, Literal

import jax

from megajax.data.config import DataConfig
from megajax.data.datasets import Formats
from megajax.data.samples.masking import Masking
from megajax.data.samples.t5 import T5Format
from megajax.data.tokenizers.span_tokens import NUM_ADDED, SpanTokens
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.tasks.interface import Task, rate, with_labels
from megajax.tasks.masked import MaskProbability


@dataclasses.dataclass(frozen=True)
class Spans(Task):
    kind: Literal["spans"] = "spans"
    """What the model is trained for. spans: the missing spans of a text, for an encoder-decoder (docs/t5.md)."""
    mask_probability: MaskProbability = 0.15
    """Fraction of the tokens that are predicted."""

    heads = ("target_token",)
    num_added_ids: ClassVar[int] = NUM_ADDED

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        return with_labels(model.inputs(sequence_length, packed=True))

    def num_ids(self, tokenizer: Tokenizer) -> int:
        return SpanTokens.of(tokenizer).vocab_size

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        special = SpanTokens.of(tokenizer)
        (decoder_length,) = self.arrays(model, sequence_length)["labels"].shape
        form = T5Format(
            bos_id=special.pad_id,
            eos_id=special.eos_id,
            pad_id=special.pad_id,
            sentinel_ids=special.sentinel_ids,
            vocab_size=special.vocab_size,
            decoder_length=decoder_length,
            masking=Masking(probability=self.mask_probability, max_ngram=10),
        )
        return Formats(form, form)

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        labels = batch["labels"]
        weights = batch["loss_weights"]
        main = module.cross_entropy(h, labels, weights, options)
        right = rate(module.log_probs(h, labels).top == labels, weights > 0) if options.evaluates else None
        return LossTerms(main, rates={} if right is None else {"accuracy": right})
