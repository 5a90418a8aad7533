"""Kill -9 loses no more than what came after the last checkpoint, and not a bit of the rest."""

import os
import random
import signal
from pathlib import Path

import pytest
from launch import losses, run, saved_steps, started

STEPS = 40
LENGTH = [f"--training.steps={STEPS}", "--checkpoint.every_steps=3", "--optimizer.schedule=constant"]


def exact(run_dir):
    return {step: float(loss).hex() for step, loss in losses(run_dir).items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run(run_dir, *LENGTH)
    return exact(run_dir)


@pytest.mark.fault
def test_killed_at_random_moments_the_run_ends_with_the_same_losses(undisturbed, tmp_path):
    """Also in the middle of a save: steps take milliseconds here, and every third is saved in the background."""
    run_dir, rng = tmp_path / "run", random.Random(0)
    for kill_after in (5, 14, 23):
        with started(run_dir, *LENGTH) as (process,):
            process.wait_for_step(run_dir, kill_after + rng.randrange(4))
            process.popen.kill()
            assert process.popen.wait() == -9
    output = run(run_dir, *LENGTH)
    assert "resuming from step" in output
    assert exact(run_dir) == undisturbed
    assert saved_steps(run_dir)[-1] == STEPS  # and no temporary directories


@pytest.mark.fault
def test_a_supervised_run_that_is_killed_ends_by_itself(undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *LENGTH, "--training.max_restarts=3") as (process,):
        process.wait_for_step(run_dir, 8)
        supervisor = process.popen.pid
        (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        assert process.wait() == 0, process.output
    assert "the run ended with signal SIGKILL" in process.output and "finished" in process.output
    assert exact(run_dir) == undisturbed
