"""Classification: the class of each text, or of each of its words."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts, Datasets
from megajax.data.labelled import Labels, labelled_datasets
from megajax.data.tokenizers.masking_tokens import masking_tokens
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.ops.token_scores import class_scores
from megajax.tasks.interface import Task, check_source, rate, with_labels


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    kind: Literal["classification"] = "classification"
    """What the model is trained for. classification: the labels of texts or words in .jsonl or .csv files
    (docs/bert.md)."""

    heads = ("classes",)

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        super().check(data, model)
        check_source(self.kind, data, "text")
        if data.tokenizer.startswith("sentencepiece:"):
            raise ValueError(
                f"data.tokenizer={data.tokenizer} is not trained on labelled texts; name that of the model to start "
                "from, such as runs/NAME/tokenizer.model"
            )

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        """The class of a text is the label of its first token, which has all its weight."""
        return with_labels(model.inputs(sequence_length, packed=True))

    def num_ids(self, tokenizer: Tokenizer) -> int:
        return masking_tokens(tokenizer).vocab_size

    def datasets(self, data: DataConfig, model: ModelConfig, amounts: Amounts) -> Datasets:
        data.check()
        datasets, labels = labelled_datasets(data, amounts)
        _check_classes(model, labels)
        return datasets

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        logits = module.class_logits(h, batch)
        labels = batch["labels"]
        weights = batch["loss_weights"]
        if logits.ndim == 2:  # of texts
            labels = module.of_first(labels, batch)
            weights = module.of_first(weights, batch)
        scores = class_scores(logits, labels)
        losses = -scores.log_probs
        if options.label_smoothing:
            num_classes = logits.shape[-1]
            share = options.label_smoothing * num_classes / (num_classes - 1)
            losses = (1 - share) * losses - share * jnp.mean(jax.nn.log_softmax(logits), -1)
        if options.z_loss:
            losses += options.z_loss * jax.nn.logsumexp(logits, -1) ** 2
        total = jnp.sum(weights * losses)
        rates = {"accuracy": rate(scores.top == labels, weights > 0)} if options.evaluates else {}
        return LossTerms(total, rates=rates)


def _check_classes(model: Any, labels: Labels) -> None:
    """Raises ValueError if the model does not have the classes of the data. model: of a family with this head."""
    head = "token_classification" if labels.of_words else "sequence_classification"
    if model.head != head:
        raise ValueError(f"model.head={model.head}: the labels in data.text are for --model.head={head}")
    if model.num_classes != len(labels.classes):
        raise ValueError(
            f"model.num_classes={model.num_classes}: data.text has the classes {', '.join(labels.classes)}; "
            f"use --model.num_classes={len(labels.classes)}"
        )
