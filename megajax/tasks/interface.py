"""The interface between what a model is used for and everything that trains, plans, resumes or evaluates it.

A task is one file: a frozen dataclass that derives from Task, whose fields are the section `task` of a configuration.
The class registers itself by its `kind`, which is also the tag in config.json; no other file refers to it by name. A
task says which arrays a batch has, how samples are made from the sources of `data`, and which loss is minimised, from
what the model gives (models/interface.py AnyModule).
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts, Datasets, Formats, build_datasets
from megajax.data.loader import BatchSource, IndexedSource
from megajax.data.prepare.text_corpus import TextForm
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.fields.kinds import Kinds
from megajax.models.interface import AnyModule, BatchArray, LossOptions, LossTerms, ModelConfig
from megajax.models.model import Model

TASKS = Kinds("task", "megajax.tasks", default="language")


class Task:
    """Base of the config of a task: a frozen dataclass with a field `kind: Literal[NAME] = NAME`."""

    max_epochs: ClassVar[int | None] = None
    """A run that reads its data more often warns; None: no limit."""
    reads_conversations: ClassVar[bool] = False
    """Whether data.paths may name files of conversations."""
    default_epochs: ClassVar[float | None] = None
    """Of a run on data.paths of the user's, if neither training.steps nor training.epochs is given; None: the steps of
    the recipe."""
    num_added_ids: ClassVar[int] = 0
    """Special tokens of the task, for a tokenizer that has none of them."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        TASKS.add(cls)

    # ------------------------------------------------------------------ what a task defines

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the model that the loss reads (ModelConfig.heads)."""
        raise NotImplementedError

    def arrays(self, model: ModelConfig, sequence_length: int) -> dict[str, BatchArray]:
        """The arrays of a batch: those that the model reads (ModelConfig.inputs), and those of the loss. Among them is
        loss_mask float32, what the loss averages over; the step replaces it with loss_weights (training/step.py)."""
        raise NotImplementedError

    def formats(self, data: DataConfig, model: ModelConfig, sequence_length: int, tokenizer: Tokenizer) -> Formats:
        """Raises ValueError if the tokenizer lacks a token that the samples need."""
        raise NotImplementedError

    def loss(self, module: AnyModule, h: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        """The loss of a microbatch. h: the hidden states `module.hidden` gives for it. batch: arrays [B, ...] as
        `arrays` names them, with loss_weights instead of loss_mask. If options.evaluates, with the rates of an
        evaluation."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what most tasks keep

    def controls(self, batch: dict) -> dict[str, dict]:
        """Batches of which an evaluation reports the rates, or the loss if the task has no rates, beside those of this
        one, {name: batch}: without what the answers depend on, say. batch: arrays [M, B, ...]."""
        return {}

    @property
    def text_form(self) -> TextForm:
        """How data.text and datasets of Hugging Face are tokenized."""
        return TextForm()

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        """Raises ValueError if the model has not the heads of the task, or the data not what its samples need; opens no
        file."""
        if data.conversations and not self.reads_conversations:
            raise ValueError(
                f"data.paths: {data.conversations[0]} is a file or folder of conversations, which "
                f"task.kind={self.kind} does not read; use --task.kind=conversations, or --data.text for files of text"
            )
        missing = [name for name in self.heads if name not in model.heads]
        if not missing:
            return
        fitting = task_of(model)
        way_out = f"; use --task.kind={fitting.kind}" if fitting else ""
        has = ", ".join(model.heads) or "none, so it cannot be trained"
        raise ValueError(
            f"task.kind={self.kind} learns from the head {', '.join(missing)}, and this model of model.kind="
            f"{model.kind} has {has}{way_out}"
        )

    @classmethod
    def of(cls, model: ModelConfig) -> "Task | None":
        """The task as this model can learn it, otherwise with its defaults; None if it cannot."""
        task = cls()
        return task if set(task.heads) <= set(model.heads) else None

    def num_ids(self, tokenizer: Tokenizer) -> int:
        """Ids of the tokenizer, and of special tokens that it lacks."""
        return tokenizer.vocab_size

    def num_token_ids(self, data: DataConfig, vocab_size: int) -> int:
        """The same for the tokenizer that the config names. vocab_size: of the model. Raises ValueError if it cannot be
        read."""
        spec = data.with_tokenizer(vocab_size, self.num_added_ids).tokenizer
        if spec.startswith("sentencepiece:"):  # not trained yet
            return int(spec.removeprefix("sentencepiece:")) + self.num_added_ids
        return self.num_ids(load_tokenizer(spec))

    def datasets(self, data: DataConfig, model: ModelConfig, amounts: Amounts) -> Datasets:
        """Training and evaluation data of a run. The tokenizer of `data` must be resolved (Config.check_on).

        Raises ValueError if files are missing or damaged, a split is too small, the tokenizer did not write the data,
        or the model does not have what the data needs.
        """

        def formats(tokenizer: Tokenizer) -> Formats:
            return self.formats(data, model, amounts.sequence_length, tokenizer)

        return build_datasets(data, amounts, formats, self.text_form)

    # ------------------------------------------------------------------ what few tasks change

    def source(
        self,
        datasets: Datasets,
        schedule: Callable[[int], tuple[int, int, int]],
        data: DataConfig,
        model: Model,
        mesh: Mesh,
    ) -> BatchSource:
        """What feeds the training loop. schedule: step -> (first sample, microbatches, microbatch size)."""
        return IndexedSource(datasets.train, schedule, data)


def task_of(model: ModelConfig) -> Task | None:
    """The usual task of a model; None if it cannot be trained."""
    return next(filter(None, (task.of(model) for task in TASKS.all().values())), None)


def with_labels(inputs: dict[str, BatchArray]) -> dict[str, BatchArray]:
    """The arrays that the model reads, and a label and a weight for each token."""
    labels = inputs["tokens"]
    return inputs | {"labels": labels, "loss_mask": labels._replace(dtype=jnp.float32)}


def check_source(kind: str, data: DataConfig, *needed: str) -> None:
    """Raises ValueError for another data.source than those that the task reads."""
    if data.source not in needed:
        raise ValueError(f"task.kind={kind} needs data.source={' or '.join(needed)}, not {data.source}")


def rate(is_right: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(number of right ones among those that count, number of these), float32 scalars."""
    return jnp.sum(is_right & counts, dtype=jnp.float32), jnp.sum(counts, dtype=jnp.float32)


def of_next_row(array: jax.Array) -> jax.Array:
    """[M, B, ...]: each row is that of the next sample."""
    rows = array.reshape(-1, *array.shape[2:])
    return jnp.roll(rows, 1, axis=0).reshape(array.shape)
