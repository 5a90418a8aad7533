"""What a run does whose directory, disk, data or clock are no longer what they were."""

import dataclasses
import fcntl
import shutil
import time

import numpy as np
import pytest

from launch import losses, metrics, saved_steps, tiny_config
from megajax import run
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.training.loop import CannotGoOn, Trainer

pytestmark = pytest.mark.fault
VOCABULARY = 127  # of TINY's tokenizer
LENGTH = ["--training.steps=9", "--checkpoint.every_steps=3", "--mesh.data=8"]


def at_step(monkeypatch, number, action):
    """Calls it before that step of a run."""
    rate = Trainer.learning_rate

    def and_act(self, done):
        if done + 1 == number:
            action()
        return rate(self, done)

    monkeypatch.setattr(Trainer, "learning_rate", and_act)


@pytest.mark.parametrize("is_used_again", [True, False])
def test_a_run_whose_directory_is_removed_stops_and_writes_nothing_to_that_of_another_run(
    is_used_again, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"

    def remove():
        while not (run_dir / "latest").exists():  # step 3 is written in the background
            time.sleep(0.01)
        shutil.rmtree(run_dir)
        if is_used_again:
            run_dir.mkdir()
            other = (run_dir / ".lock").open("w")
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    at_step(monkeypatch, 5, remove)
    with pytest.raises(CannotGoOn, match=f"^step 5: run_dir={run_dir} was removed, moved or replaced .*nothing more"):
        run.train(tiny_config(run_dir, *LENGTH))
    assert [path.name for path in run_dir.glob("*")] == [".lock"] * is_used_again


@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_an_id_beyond_the_vocabulary_ends_a_run_with_file_and_document_after_saving_it(part, tmp_path):
    """One of ten documents is wrong: a training document, or the only one held out."""
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        for document in range(10):
            tokens = np.arange(320) % VOCABULARY
            tokens[100:] += VOCABULARY * (document == (7 if part == "training" else 9))
            writer.add_document([tokens])
    data = [
        "--data.source=indexed",
        f"--data.paths={tmp_path / 'x'}",
        "--data.split=9,1,0",
        "--data.tokenizer=null:127",
    ]
    evaluate = ["--training.eval_every_steps=3", "--training.eval_steps=1"]
    config = tiny_config(tmp_path / "run", *LENGTH, *data, *evaluate)
    document = r"x\.bin, document [79], token 100 of sequence [79]: token ids \d+ to \d+ do not fit .* 127 ids"
    with pytest.raises(CannotGoOn, match=rf"{document}.*; stopped after step \d+, which is saved$") as stopped:
        run.train(config)
    step = int(str(stopped.value).split("step ")[-1].split(",")[0])
    assert saved_steps(tmp_path / "run")[-1] == step == max(losses(tmp_path / "run")) > 0
    # An evaluation is not repeated, so the run fails at the next one.
    again = f"{step}, without saving" if part == "training" else f"{step + 3}, which is saved"
    with pytest.raises(CannotGoOn, match=rf"{document}.*; stopped after step {again}$"):
        run.train(config)


@pytest.mark.parametrize("jump", [-400 * 86400.0, 400 * 86400.0], ids=["back", "forward"])
def test_a_clock_that_jumps_changes_no_loss_and_no_checkpoint(jump, tmp_path, monkeypatch):
    """By more than a year, in the middle of the run, which goes on after another start."""
    run.train(tiny_config(tmp_path / "usual", *LENGTH))
    config = tiny_config(tmp_path / "run", *LENGTH, "--launch.exit_after_minutes=60")
    now = time.time
    at_step(monkeypatch, 5, lambda: monkeypatch.setattr(time, "time", lambda: now() + jump))
    assert (
        run.train(dataclasses.replace(config, launch=dataclasses.replace(config.launch, exit_at_step=7)))
        == "interrupted"
    )
    assert run.train(config) == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "usual")
    assert saved_steps(tmp_path / "run") == [6, 7, 9]
    assert all(0 <= line["goodput"] <= 1 for line in metrics(tmp_path / "run"))
