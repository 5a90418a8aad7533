"""What a run does whose directory, or disk, is no longer what it was."""

import fcntl
import shutil
import time

import pytest

from launch import tiny_config
from megajax import run
from megajax.training.loop import CannotGoOn, Trainer

pytestmark = pytest.mark.fault
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
