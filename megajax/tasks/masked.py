"""Masked language modelling, alone or with a task on two texts (Devlin et al. 2018, Lan et al. 2019)."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp

from megajax.data.config import DataConfig
from megajax.data.datasets import Formats
from megajax.data.prepare.text_corpus import TextForm
from megajax.data.samples.bert import BertFormat
from megajax.data.samples.masking import Masking
from megajax.data.tokenizers.masking_tokens import SPELLINGS, masking_tokens
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.fields.ranges import Range
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.ops.token_scores import class_scores
from megajax.tasks.interface import Task, rate, with_labels

MaskProbability = Annotated[float, Range(above=0, below=1)]


@dataclasses.dataclass(frozen=True)
class Masked(Task):
    kind: Literal["masked"] = "masked"
    """What the model is trained for. masked: masked tokens of a text, or of two (BERT)."""
    sentences: Literal["none", "nsp", "sop"] = "none"
    """none: one text. nsp and sop: two, of which the second follows, or is of another document (nsp) or precedes (sop);
    on files written with --split_sentences."""
    mask_probability: MaskProbability = 0.15
    """Fraction of the tokens that are predicted."""

    num_added_ids: ClassVar[int] = len(SPELLINGS)

    @property
    def heads(self) -> tuple[str, ...]:
        return ("masked_token",) if self.sentences == "none" else ("masked_token", "sentence_order")

    @property
    def text_form(self) -> TextForm:
        return TextForm("documents" if self.sentences == "none" else "sentences", appends_end=False)

    @classmethod
    def of(cls, model: ModelConfig) -> "Masked | None":
        if "masked_token" not in model.heads:
            return None
        return cls(sentences="nsp" if "sentence_order" in model.heads else "none")

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        if "masked_token" in model.heads:
            has_order = "sentence_order" in model.heads
            if has_order != (self.sentences != "none"):
                needs, other = ("sentence_order", "sop") if has_order else ("no sentence_order", "none")
                raise ValueError(
                    f"task.sentences={self.sentences} does not fit this model, which has {needs} among its heads "
                    f"(model.next_sentence={has_order}); use --task.sentences={other}"
                )
        super().check(data, model)
        if data.source == "mock" and self.sentences != "none":
            raise ValueError(
                f"task.sentences={self.sentences} needs sentences, which mock documents do not have; use "
                "--task.sentences=none"
            )

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        arrays = with_labels(model.inputs(sequence_length, packed=True))
        return arrays | ({} if self.sentences == "none" else {"next_sentence": BatchArray((), (), jnp.int32)})

    def num_ids(self, tokenizer: Tokenizer) -> int:
        return masking_tokens(tokenizer).vocab_size

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        special = masking_tokens(tokenizer)._asdict()
        form = BertFormat(**special, next_sentence=self.sentences, masking=Masking(probability=self.mask_probability))
        return Formats(form, form)

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        labels = batch["labels"]
        weights = batch["loss_weights"]
        terms = LossTerms(module.cross_entropy(h, labels, weights, options))
        if options.evaluates:
            terms = terms._replace(rates={"accuracy": rate(module.log_probs(h, labels).top == labels, weights > 0)})
        if self.sentences == "none":
            return terms
        scores = class_scores(module.pair_logits(h, batch), batch["next_sentence"])
        # Every microbatch has the same number of texts, so the mean of its means is that of the batch.
        terms = terms._replace(auxiliary={"next_sentence_loss": -jnp.mean(scores.log_probs)})
        if options.evaluates:
            right = scores.top == batch["next_sentence"]
            found = {"next_sentence_accuracy": rate(right, jnp.ones_like(right))}
            terms = terms._replace(rates=terms.rates | found)
        return terms
