"""Evaluates a model: python -m megajax.evaluation {perplexity,lambada,wikitext,questions,lm_eval} --run=DIR [options]

  perplexity  perplexity and bits per byte of text or .bin/.idx files: --text=FILE ... --tokens=PREFIX ...
  lambada     how often the last word of a passage is predicted: --data=FILE.jsonl [--strict]
  wikitext    perplexity per token and per word of a file of WikiText: --data=FILE
  questions   short answers, also about images: --data=FILE.jsonl --metric=NAME [--images=DIR]
  lm_eval     tasks of lm-eval: --tasks=NAME,NAME; needs pip install 'megajax[evaluation]'

DIR is a run or a Hugging Face folder. Prints a JSON object. --watch evaluates all checkpoints of a run, also those that
are still to come, and writes to DIR/evaluations.jsonl (docs/evaluation.md). --mesh.tensor=2, or another axis, spreads
the model over devices. `megajax evaluate` is the same command.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from megajax import hub
from megajax.data.indexed.dataset import prefix_of
from megajax.evaluation.perplexity import Totals, check_files, perplexity
from megajax.evaluation.questions import Images, evaluate_questions, read_questions
from megajax.evaluation.text_model import TextModel
from megajax.evaluation.watch import to_json, watch
from megajax.evaluation.zero_shot import lambada, wikitext
from megajax.inference.config import WeightDtype
from megajax.inference.shapes import BATCH_TOKENS
from megajax.mesh.processes import use_compilation_cache
from megajax.terminal.command_line import OnDevices, choose, errors_in_one_line, values_of
from megajax.training.reporting.console import log_to_stderr
from megajax.weights.hugging_face.folder import is_folder

Task = Callable[[TextModel], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Precision:
    compute: Literal["float32", "bfloat16"] | None = None
    """Format of activations; default: as in the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(OnDevices):
    run: str
    """Directory of a run, or a Hugging Face folder."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    watch: bool = False
    """All steps of the run, and new ones until its end."""
    max_length: int | None = None
    """Tokens that are read at once; default: training.sequence_length."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens of a batch, over all devices."""
    precision: Precision = Precision()
    weight_dtype: WeightDtype = "auto"
    """As of infer.py."""

    def task(self) -> Task:
        """Raises ValueError for options that are wrong."""
        raise NotImplementedError

    def __call__(self) -> None:
        task = self.task()
        if self.watch and (is_folder(hub.local(self.run)) or self.step is not None):
            raise ValueError("--watch evaluates every step of a run: give it the directory of a run, and no --step")
        mesh = self.started_mesh()
        use_compilation_cache()

        def load(step: int | None) -> TextModel:
            sizes = dict(max_length=self.max_length, batch_tokens=self.batch_tokens)
            return TextModel.load(self.run, mesh, step, self.precision.compute, self.weight_dtype, **sizes)

        about = {"task": self._name, "settings": self._settings()}
        if not self.watch:
            model = load(self.step)
            print(to_json({"step": getattr(model.source, "step", None), **about, "results": task(model)}, indent=2))
            return
        models: list[TextModel] = []

        def evaluate(step: int) -> dict[str, Any]:
            if models:
                models[0].use_step(step)
            else:
                models.append(load(step))
            return task(models[0])

        for record in watch(self.run, about, evaluate):
            print(to_json(record), flush=True)

    @property
    def _name(self) -> str:
        return next(name for name, kind in TASKS.items() if isinstance(self, kind))

    def _settings(self) -> dict[str, Any]:
        """What determines the results besides the weights."""
        others = {"run", "step", "watch", "batch_tokens"}
        return {
            name: value
            for name, value in values_of(self).items()
            if name not in others and not name.startswith(("mesh.", "launch."))
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity(Evaluation):
    """Perplexity and bits per byte of files."""

    text: tuple[str, ...] = ()
    """Text, .jsonl or .parquet files, also .gz or .zst."""
    tokens: tuple[str, ...] = ()
    """Prefixes of .bin and .idx files."""
    overlap: int | None = None
    """Tokens that consecutive windows share; default: half of max_length."""
    limit: int | None = None
    """Evaluate only the first N documents of each file."""

    def task(self) -> Task:
        if not self.text and not self.tokens:
            raise ValueError("perplexity: name files with --text=FILE ... or --tokens=PREFIX ...")
        prefixes = [prefix_of(path) for path in self.tokens]
        check_files(self.text, prefixes)

        def task(model: TextModel) -> dict[str, Any]:
            found = perplexity(model, self.text, prefixes, overlap=self.overlap, limit=self.limit)
            results = {name: totals.metrics() for name, totals in found.items()}
            return results if len(found) == 1 else results | {"all": sum(found.values(), Totals()).metrics()}

        return task

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"tokens": [prefix_of(path) for path in self.tokens]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lambada(Evaluation):
    """Last words of passages, as Megatron's LAMBADA task."""

    data: str
    """File of JSON lines with a field text."""
    strict: bool = False
    """The whole last word, instead of the last token."""
    limit: int | None = None
    """Evaluate only the first N passages."""

    def task(self) -> Task:
        _check_data(self.data)
        return lambda model: lambada(model, self.data, strict=self.strict, limit=self.limit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wikitext(Evaluation):
    """Perplexity per word, as Megatron's WIKITEXT103 task."""

    data: str
    """A file of WikiText, with spaces around punctuation."""
    overlap: int | None = None
    """Tokens that consecutive windows share; default: none."""

    def task(self) -> Task:
        _check_data(self.data)
        return lambda model: wikitext(model, self.data, overlap=self.overlap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions(Evaluation):
    """Questions with short answers, also about images."""

    data: str
    """File of JSON lines with question, answers and, where it is about one, image."""
    metric: Literal["exact_match", "vqa_accuracy", "anls", "relaxed_accuracy"] = "exact_match"
    """How an answer is compared with those in the file."""
    images: str | None = None
    """Folder of the images; default: that of the file."""
    look: Images = "own"
    """What the model sees: the images of the question, those of the next one (exchanged), or grey ones."""
    instruction: str = ""
    """A line after each question."""
    max_tokens: int = 32
    """Of an answer."""
    limit: int | None = None
    """Ask only the first N questions."""

    def task(self) -> Task:
        _check_data(self.data)
        questions = read_questions(self.data, self.images, self.limit)
        how = dict(instruction=self.instruction, max_tokens=self.max_tokens, images=self.look)
        return lambda model: evaluate_questions(model, questions, self.metric, **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEval(Evaluation):
    """Tasks of lm-eval."""

    tasks: str
    """Names of tasks, separated by commas."""
    num_fewshot: int | None = None
    """Examples before each question; default: as the task says."""
    limit: int | None = None
    """Evaluate only the first N examples of each task."""
    include_path: str | None = None
    """Folder with further tasks."""
    apply_chat_template: bool = False
    """Ask as a user in a conversation."""

    def task(self) -> Task:
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError("lm_eval needs the package lm-eval; pip install 'megajax[evaluation]'")
        from megajax.evaluation.harness import check_tasks, evaluate

        tasks = self.tasks.split(",")
        check_tasks(tasks, self.include_path)
        names = ("num_fewshot", "limit", "include_path", "apply_chat_template")
        return lambda model: evaluate(model, tasks, **{name: getattr(self, name) for name in names})


TASKS = {
    "perplexity": Perplexity,
    "lambada": Lambada,
    "wikitext": Wikitext,
    "questions": Questions,
    "lm_eval": LmEval,
}


def _check_data(path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"data={path}: the file does not exist")


def main(arguments: Sequence[str] | None = None) -> None:
    log_to_stderr()
    with errors_in_one_line():
        choose(TASKS, arguments, "megajax evaluate", __doc__)()


if __name__ == "__main__":
    main()
