"""megajax as a model of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness), in the same process.

Needs pip install 'megajax[evaluation]'. Importing this module registers the model `megajax`:

    import lm_eval, megajax.evaluation.harness
    lm_eval.simple_evaluate(model="megajax", model_args={"run": "runs/a"}, tasks=["hellaswag"])
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager

from megajax.evaluation.text_model import TextModel, sampling_of
from megajax.mesh.config import MeshConfig

BOOTSTRAP_SAMPLES = 1000  # for the standard error of metrics that are not means: its own error is 2 %


@register_model("megajax")
class HarnessModel(LM):
    """Requests are batched by length whatever their order; lm-eval's batch_size is ignored. With lm-eval's
    apply_chat_template, special tokens that the template of the tokenizer writes are recognised."""

    def __init__(
        self,
        run: str | Path | TextModel,
        mesh: MeshConfig | None = None,
        step: int | None = None,
        max_length: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        """run: run directory, Hugging Face folder, or a loaded model. The last three are given by lm-eval, and have no
        effect."""
        super().__init__()
        loaded = isinstance(run, TextModel)
        self.model = run if loaded else TextModel.load(run, mesh, step, max_length=max_length)
        self._is_rendered = False

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        texts = [self.model.continuation(*pair, is_rendered=self._is_rendered) for pair in pairs]
        results = [tuple(likelihood) for likelihood in self.model.likelihoods(texts)]
        return self._cached("loglikelihood", pairs, results)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        arguments = [request.args for request in requests]
        texts = (self.model.document(text) for (text,) in arguments)
        results = list(self.model.log_probs(texts, self.model.max_length, overlap=0))
        return self._cached("loglikelihood_rolling", arguments, results)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        arguments = [request.args for request in requests]
        settings = [(context, sampling_of(given)) for context, given in arguments]
        return self._cached("generate_until", arguments, self.model.generate(settings, is_rendered=self._is_rendered))

    def _cached(self, kind: str, arguments: Sequence[tuple], results: list) -> list:
        """The results, which lm-eval stores if it was asked to."""
        for given, result in zip(arguments, results, strict=True):
            self.cache_hook.add_partial(kind, given, result)
        return results

    # ------------------------------------------------------------------ chat templates

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """add_generation_prompt False: the last message is the beginning of the answer."""
        self._is_rendered = True
        template = self.model.chat_template
        if add_generation_prompt:
            return template.render(chat_history, add_generation_prompt=True)
        return template.render(chat_history[:-1], add_generation_prompt=True) + chat_history[-1]["content"]

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.model.chat_template.source if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.identity


@functools.cache
def _task_manager(include_path: str | None) -> TaskManager:
    """Reads thousands of files."""
    return TaskManager(include_path=include_path)


def check_tasks(tasks: Sequence[str], include_path: str | None = None) -> None:
    """Raises ValueError for a task that lm-eval does not know."""
    manager = _task_manager(include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name]) and not Path(name).is_file()]:
        raise ValueError(
            f"tasks={','.join(unknown)}: unknown to lm-eval; `lm-eval ls tasks` lists its tasks, and --include_path "
            "names a folder with others"
        )


def evaluate(
    model: TextModel,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: str | None = None,
    apply_chat_template: bool = False,
) -> dict[str, dict[str, Any]]:
    """{task: its metrics} of lm-eval's tasks. include_path: folder with further tasks. limit: examples of each task."""
    found = simple_evaluate(
        model=HarnessModel(model),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=_task_manager(include_path),
        apply_chat_template=apply_chat_template,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
    )
    return json.loads(json.dumps(found["results"], default=float))
