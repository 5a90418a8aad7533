"""Likelihoods and generations equal those of transformers, and of lm-eval's own model of it, recorded and live.

python tests/weights/hugging_face/test_evaluation.py, with lm-eval, records the requests that lm-eval makes for three
tasks and the answers of its model `hf`.
"""

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest

from megajax.evaluation.text_model import TextModel, sampling_of

LOGITS = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
REQUESTS = Path(__file__).parents[2] / "oracles" / "lm_eval_requests.json"
TOLERANCE = 1e-5  # of a float32 log-probability of one token: other sums of the same numbers

QUESTIONS = [
    dict(question="One and two are", choices=["four", "three", "nine", "ten"], answer=1),
    dict(question="The sky is ", choices=["green", "loud", "blue"], answer=2),  # a space that moves to the choice
    dict(question="", choices=["a", "b"], answer=0),
    dict(question="A question that is longer than what the model reads at once, which is 64 tokens,", choices=["yes",
         "no"], answer=0),
]  # fmt: skip
TASKS = {
    "choices": dict(
        output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
    ),
    "rolling": dict(
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{question}} {{choices[0]}}.",
        metric_list=[dict(metric="bits_per_byte"), dict(metric="word_perplexity")],
    ),
    "generate": dict(
        output_type="generate_until", doc_to_text="Q: {{question}} A:", doc_to_target="{{choices[answer]}}",
        generation_kwargs=dict(until=["\n", "e"], max_gen_toks=12, do_sample=False),
        metric_list=[dict(metric="exact_match")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama3 scaling"])
def test_log_probabilities_are_those_of_transformers(name, write_drawn, tmp_path):
    write_drawn(tmp_path, json.loads(str(LOGITS["families"]))[name])
    logits = LOGITS[name][0].astype(np.float64)
    tokens = np.random.default_rng(0).integers(0, logits.shape[-1], (2, len(logits)))[0]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    model = TextModel.load(tmp_path, compute="float32", batch_tokens=1)
    (found,) = model.scorer.score([tokens])
    np.testing.assert_allclose(
        found.log_probs, log_probs[np.arange(len(tokens) - 1), tokens[1:]], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_array_equal(found.is_top, logits[:-1].argmax(-1) == tokens[1:])


@pytest.fixture(scope="module")
def llama(small_llama_folder):
    return TextModel.load(small_llama_folder, compute="float32", batch_tokens=512)


def answers(model: TextModel, kind: str, arguments: list) -> list:
    if kind == "loglikelihood":
        return [list(found) for found in model.likelihoods([model.continuation(*pair) for pair in arguments])]
    if kind == "loglikelihood_rolling":
        return list(model.log_probs((model.document(text) for (text,) in arguments), model.max_length, 0))
    return model.generate([(context, sampling_of(settings)) for context, settings in arguments])


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_requests_of_lm_eval_are_answered_as_by_its_model_of_transformers(llama, kind):
    recorded = json.loads(REQUESTS.read_text())[kind]
    assert len(recorded) >= 4
    compare(answers(llama, kind, [entry["arguments"] for entry in recorded]), [entry["answer"] for entry in recorded])


@pytest.fixture
def harness(monkeypatch):
    """megajax.evaluation.harness with the parts of lm-eval's interface that it uses, so that lm-eval is not needed."""

    class LM:
        def __init__(self):
            self.cached = []
            self.cache_hook = types.SimpleNamespace(add_partial=lambda *result: self.cached.append(result))

    def simple_evaluate(model, tasks, **_):
        results = {}
        for kind in tasks:
            requests = [
                types.SimpleNamespace(args=entry["arguments"]) for entry in json.loads(REQUESTS.read_text())[kind]
            ]
            results[kind] = getattr(model, kind)(requests)
            assert model.cached == [
                (kind, request.args, found) for request, found in zip(requests, results[kind], strict=True)
            ]
            model.cached.clear()
        return {"results": results}

    contents = {
        "lm_eval": dict(simple_evaluate=simple_evaluate),
        "lm_eval.api": {},
        "lm_eval.api.instance": dict(Instance=object),
        "lm_eval.api.model": dict(LM=LM),
        "lm_eval.api.registry": dict(register_model=lambda name: lambda kind: kind),
        "lm_eval.tasks": dict(TaskManager=lambda include_path: types.SimpleNamespace(match_tasks={"arc": ["arc"]}.get)),
    }
    for name, attributes in contents.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(attributes)
    monkeypatch.delitem(sys.modules, "megajax.evaluation.harness", raising=False)
    yield importlib.import_module("megajax.evaluation.harness")
    del sys.modules["megajax.evaluation.harness"]


def test_the_model_of_lm_eval_answers_and_stores_its_requests(llama, harness):
    recorded = json.loads(REQUESTS.read_text())
    found = harness.evaluate(llama, list(recorded))
    for kind, entries in recorded.items():
        compare(found[kind], [entry["answer"] for entry in entries])


def compare(found: list, want: list) -> None:
    """A text has up to 90 tokens, whose errors add up."""
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        elif isinstance(theirs, list):
            assert ours == [pytest.approx(theirs[0], rel=TOLERANCE), theirs[1]]
        else:
            assert ours == pytest.approx(theirs, rel=TOLERANCE)


# ----------------------------------------------------------------------------- lm-eval itself


def write_tasks(folder: Path) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    data = dict(dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(folder / "data.jsonl"))))
    for name, task in TASKS.items():
        # JSON is YAML
        (folder / f"tiny_{name}.yaml").write_text(
            json.dumps(dict(task=f"tiny_{name}", test_split="test") | data | task)
        )


def run_theirs(folder: Path, tasks: Path, record) -> dict:
    """Results of lm-eval's model `hf`. record(kind, arguments, answers) is called for each list of requests."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class Recorded(HFLM):
        def loglikelihood(self, requests, disable_tqdm=True):
            return self.recorded("loglikelihood", requests)

        def loglikelihood_rolling(self, requests, disable_tqdm=True):
            # By default it puts <s> before a text that the tokenizer has already begun with <s>, and scores the second.
            self.add_bos_token = False
            found = self.recorded("loglikelihood_rolling", requests)
            self.add_bos_token = None
            return found

        def generate_until(self, requests, disable_tqdm=True):
            return self.recorded("generate_until", requests)

        def recorded(self, kind, requests):
            found = getattr(super(), kind)(requests, disable_tqdm=True)
            record(kind, [request.args for request in requests], found)
            return found

    model = Recorded(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2)
    names = [f"tiny_{name}" for name in TASKS]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False, bootstrap_iters=1000)["results"]


@pytest.mark.slow
def test_lm_eval_gives_the_same_results_as_with_transformers(llama, small_llama_folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from megajax.evaluation.harness import check_tasks, evaluate

    write_tasks(tmp_path)
    names = [f"tiny_{name}" for name in TASKS]
    theirs = run_theirs(small_llama_folder, tmp_path, lambda *_: None)
    ours = evaluate(llama, names, include_path=str(tmp_path))
    for name in names:
        numbers = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert numbers and {key: ours[name][key] for key in numbers} == pytest.approx(numbers, rel=TOLERANCE)
    with pytest.raises(ValueError, match="tasks=unheard_of: unknown to lm-eval"):
        check_tasks(["tiny_choices", "unheard_of"], str(tmp_path))


@pytest.mark.slow
def test_lm_eval_with_the_chat_template_asks_as_a_user(llama, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from megajax.evaluation.harness import evaluate

    write_tasks(tmp_path)
    read = []
    score = llama.scorer.score
    monkeypatch.setattr(llama.scorer, "score", lambda sequences: read.extend(sequences) or score(sequences))
    results = evaluate(llama, ["tiny_choices"], include_path=str(tmp_path), apply_chat_template=True, limit=1)
    assert results["tiny_choices"]["acc,none"] in (0.0, 1.0)
    special = llama.tokenizer.special_tokens
    begin = [special["<s>"], special["<|user|>"], *llama.tokenizer.encode(QUESTIONS[0]["question"])]
    for tokens, choice in zip(read, QUESTIONS[0]["choices"], strict=True):
        assert list(tokens) == [*begin, special["<|assistant|>"], *llama.tokenizer.encode(choice)]


def record_requests(path: Path) -> None:
    from conftest import write_small_llama

    found: dict[str, list] = {}

    def record(kind, arguments, answers):
        found[kind] = [dict(arguments=a, answer=b) for a, b in zip(arguments, answers, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        write_small_llama(Path(folder) / "llama")
        write_tasks(Path(folder))
        run_theirs(Path(folder) / "llama", Path(folder), record)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    record_requests(REQUESTS)
