"""Language modelling: predict the next token of documents."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts, Datasets, Formats
from megajax.data.prepare.text_corpus import prepare_text
from megajax.data.samples.fim import FillInTheMiddle
from megajax.data.samples.gpt import GptFormat
from megajax.data.samples.retro import RetroFormat
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.fields.ranges import Probability
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.retrieval.build import WHOLE, build
from megajax.retrieval.inputs import NO_TOKEN, NeighbourInputs
from megajax.tasks.interface import Task, of_next_row, with_labels


@dataclasses.dataclass(frozen=True)
class Language(Task):
    kind: Literal["language"] = "language"
    """What the model is trained for. language: predict the next token of documents (pre-training). Other tasks, such as
    conversations, have fields of their own (docs/data.md)."""
    cross_document_attention: bool = False
    """Let documents packed into one sample attend to each other (Megatron's default)."""
    reset_positions: bool = False
    """Restart positions at 0 with each document."""
    mask_document_end: bool = False
    """No loss on predicting the end-of-document token."""
    fim_rate: Probability = 0.0
    """Probability that a training document is rearranged for fill-in-the-middle (data/samples/fim.py)."""
    fim_spm_rate: Probability = 0.5
    """Probability that such a document starts with its suffix (SPM)."""
    fim_tokens: tuple[str, str, str] = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    """Special tokens before the three parts, as spelled in the tokenizer."""

    heads = ("next_token",)
    # Up to four epochs are about as good as new text (Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264).
    max_epochs: ClassVar[int | None] = 4

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        return with_labels(model.inputs(sequence_length, packed=not self.cross_document_attention))

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        plain = GptFormat(
            cross_document_attention=self.cross_document_attention,
            reset_positions=self.reset_positions,
            mask_document_end=self.mask_document_end,
            eod_id=tokenizer.eod_id,
            vocab_size=tokenizer.vocab_size,
        )
        if model.neighbours is not None:
            return self._with_neighbours(plain, data, model.neighbours)
        return Formats(dataclasses.replace(plain, fill_in_the_middle=self._fill_in_the_middle(tokenizer)), plain)

    def datasets(self, data: DataConfig, model: ModelConfig, amounts: Amounts) -> Datasets:
        if model.neighbours is not None and data.source == "text":
            train, held_out, _ = prepare_text(data, self.text_form)
            for prefix in (train, held_out):
                build(prefix, database=train, split=WHOLE, chunk_length=model.neighbours.chunk_length)
        return super().datasets(data, model, amounts)

    def _with_neighbours(self, plain: GptFormat, data: DataConfig, inputs: NeighbourInputs) -> Formats:
        if self.fim_rate:
            raise ValueError(
                f"task.fim_rate={self.fim_rate} moves the text of a document, and its neighbours are those of the text "
                "as it stands; use --task.fim_rate=0"
            )
        # as data/datasets.py splits what is trained on
        split = data.split if data.source == "indexed" and not data.eval_paths else WHOLE
        form = RetroFormat(**vars(plain), inputs=inputs, split=split)
        return Formats(form, dataclasses.replace(form, trains=False))

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        return next_token_loss(module, h, batch, options)

    def controls(self, batch: dict) -> dict[str, dict]:
        """Of a model that reads neighbours: with those of another sample, and without any."""
        neighbours = batch.get("neighbour_tokens")
        if neighbours is None:
            return {}
        return {
            "random": batch | {"neighbour_tokens": of_next_row(neighbours)},
            "without": batch | {"neighbour_tokens": jnp.full_like(neighbours, NO_TOKEN)},
        }

    def _fill_in_the_middle(self, tokenizer: Tokenizer) -> FillInTheMiddle | None:
        if not self.fim_rate:
            return None
        ids = {name: number for name in self.fim_tokens if (number := tokenizer.token_id(name)) is not None}
        if missing := [name for name in self.fim_tokens if name not in ids]:
            raise ValueError(
                f"task.fim_tokens: {', '.join(missing)} are not tokens of {tokenizer.identity}; name tokens of it"
            )
        prefix, middle, suffix = (ids[name] for name in self.fim_tokens)
        return FillInTheMiddle(self.fim_rate, self.fim_spm_rate, prefix, middle, suffix)


def next_token_loss(module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
    """The cross-entropy of the labels, and what the model adds to it (multi-token prediction)."""
    main = module.cross_entropy(h, batch["labels"], batch["loss_weights"], options)
    return module.further_terms(h, batch, options)._replace(main=main)
