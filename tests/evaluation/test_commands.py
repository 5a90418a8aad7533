"""The commands of python -m megajax.evaluation, and --watch on a run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from megajax.checkpoint.steps import saved_steps
from megajax.config import Config
from megajax.evaluation.__main__ import main
from megajax.evaluation.perplexity import perplexity
from megajax.evaluation.text_model import TextModel
from megajax.evaluation.watch import watch
from megajax.training.config import TrainingConfig

TEXT = "A text, of which bits per byte are measured."


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def test_perplexity_prints_json(run_dir, text, text_model, capsys):
    main(["perplexity", f"--run={run_dir}", "--step=1", "--text", text, "--overlap=16"])
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["task"], found["settings"]["overlap"]) == (1, "perplexity", 16)
    results = found["results"][text]
    assert (results["tokens"], results["bytes"]) == (len(TEXT), len(TEXT))
    assert results["bits_per_byte"] == pytest.approx(np.log2(results["perplexity"]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("perplexity --run=RUN", "name files with --text"),
        ("perplexity --run=RUN --txt TEXT", "--txt is unknown; did you mean --text?"),
        ("perplexity --run=RUN --text TEXT --launch.cpu_devices=-1", "launch.cpu_devices=-1 must be a whole number"),
        ("perplexity --run=RUN --text nowhere.txt", "text=nowhere.txt: the file does not exist"),
        ("perplexity --run=RUN --tokens nowhere.bin", "nowhere.idx does not exist"),
        ("perplexity --run=nowhere --text TEXT", "run=nowhere: no checkpoint"),
        ("perplexity --run=RUN --text TEXT --mesh.pipeline=2", "inference does not support pipelines"),
        ("perplexity --run=RUN --text TEXT --overlap=64", "overlap=64 must be at least 0 and less than max_length=64"),
        ("perplexity --run=RUN --text TEXT --batch_tokens=0", "batch_tokens=0 must be at least 1"),
        ("perplexity --run=RUN --text TEXT --watch --step=1", "--watch evaluates every step of a run"),
        ("lambada --run=RUN --data=nowhere", "data=nowhere: the file does not exist"),
    ],
)
def test_mistakes_are_named_in_one_line(run_dir, text, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments.replace("RUN", str(run_dir)).replace("TEXT", text).split())
    error = capsys.readouterr().err.splitlines()[-1]
    assert exit.value.code == 2 and error.startswith("error: ") and message in error


def test_watch_evaluates_each_checkpoint_of_a_run_once(run_dir, text, text_model, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(run_dir, tmp_path / "run")
    loaded = []
    load = TextModel.load
    monkeypatch.setattr(TextModel, "load", lambda *given, **sizes: loaded.append(given) or load(*given, **sizes))
    command = ["perplexity", f"--run={run}", "--text", text]
    main([*command, "--watch"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["step"] for record in printed] == [1, 2] and len(loaded) == 1
    written = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == printed
    assert list((run / "tensorboard" / "evaluations").iterdir())
    (want,) = perplexity(text_model, [text]).values()
    assert printed[1]["results"][text]["nats"] == pytest.approx(want.nats)  # not those of step 1, loaded first
    main([*command, "--watch"])
    assert capsys.readouterr().out == ""  # nothing is left to do


def test_watch_waits_for_checkpoints_and_survives_their_deletion(tmp_path):
    (tmp_path / "config.json").write_text(dataclasses.replace(Config(), training=TrainingConfig(steps=30)).to_json())
    folder = tmp_path / "checkpoints"
    (folder / "10").mkdir(parents=True)

    def evaluate(step):
        if step == 10:
            (folder / "10").rmdir()
            raise OSError("checkpoint of step 10 is gone")
        return {"accuracy": step / 100, "loss": float("inf")}

    def sleep(_):
        new = max(saved_steps(tmp_path), default=10) + 10
        (folder / str(new)).mkdir()

    task = {"task": "any", "settings": {"data": ["x"]}}
    lines = list(watch(tmp_path, task, evaluate, sleep=sleep))
    assert [(line["step"], line["results"]["accuracy"]) for line in lines] == [(20, 0.2), (30, 0.3)]
    written = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert written[0] == {"step": 20, **task, "results": {"accuracy": 0.2, "loss": None}}


def test_watch_ends_with_the_error_of_a_task(tmp_path):
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)

    def evaluate(step):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(watch(tmp_path, {"task": "any"}, evaluate))
