"""Kill -9 loses no more than what came after the last checkpoint, and not a bit of the rest."""

import json
import os
import random
import signal

import pytest

from launch import evaluations, losses, metrics, run, saved_steps, started, tiny_config
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.run import train

STEPS = 30
LENGTH = [f"--training.steps={STEPS}", "--checkpoint.every_steps=3", "--optimizer.schedule=constant"]


def exact(run_dir):
    return {step: float(loss).hex() for step, loss in losses(run_dir).items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Its program is compiled anew and its data come from two processes; those that are killed do without."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
        run(run_dir, *LENGTH, "--data.num_workers=2")
    return exact(run_dir)


@pytest.mark.fault
def test_killed_at_random_moments_a_supervised_run_ends_with_the_same_losses(undisturbed, tmp_path):
    """Also in the middle of a save: steps take milliseconds here, and every third is saved in the background."""
    run_dir, rng = tmp_path / "run", random.Random(0)
    with started(run_dir, *LENGTH, "--launch.max_restarts=3") as (supervisor,):
        for _ in range(2):
            supervisor.wait_for_step(run_dir, max(losses(run_dir), default=0) + 5 + rng.randrange(4))
            os.kill(supervisor.child, signal.SIGKILL)
        assert supervisor.wait() == 0, supervisor.output
    assert supervisor.output.count("the run ended with signal SIGKILL") == 2 and "finished" in supervisor.output
    assert supervisor.output.count("resuming from step") == 2
    assert exact(run_dir) == undisturbed
    assert saved_steps(run_dir)[-1] == STEPS  # and no temporary directories
    # Of each step that is part of the run, whichever start did it; a start does not time its first one.
    seconds = sum(line.get("step_seconds", 0) for line in metrics(run_dir))
    meta = json.loads((run_dir / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())
    assert meta["productive_seconds"] == pytest.approx(seconds, rel=0.3)
    assert 0 < metrics(run_dir)[-1]["goodput"] < 0.5


@pytest.mark.fault
def test_a_skipped_update_leaves_every_array_as_it_was_and_the_next_one_does_not(tmp_path, capfd):
    """By the digests of the checkpoints of all steps. The gradient norm is above 0.8 in some of the first steps."""
    run_dir = tmp_path / "run"
    config = tiny_config(
        run_dir, "--training.steps=8", "--checkpoint.every_steps=1", "--checkpoint.keep=0",
        "--optimizer.skip_grad_norm_above=0.8",
    )  # fmt: skip
    assert train(config) == "finished"
    output = "".join(capfd.readouterr())
    meta = lambda step: json.loads((run_dir / "checkpoints" / str(step) / "meta" / "metadata").read_text())
    digests = {step: meta(step)["digests"] for step in range(1, 9)}
    total = {line["step"]: line["skipped_updates"] for line in metrics(run_dir)}
    skipped = [step for step in range(2, 9) if total[step] > total[step - 1]]
    assert 0 < len(skipped) < 7
    for step in range(2, 9):
        assert (digests[step]["params"] == digests[step - 1]["params"]) == (step in skipped)
        assert (digests[step]["optimizer"] == digests[step - 1]["optimizer"]) == (step in skipped)
    for step in skipped:
        samples = f"samples {8 * (step - 1)} to {8 * step - 1}"
        assert f"step {step}: update skipped" in output and samples in output


@pytest.mark.fault
@pytest.mark.parametrize("failures", [1, 2])
def test_the_last_save_of_a_run_is_tried_twice(tmp_path, monkeypatch, caplog, failures):
    run_dir, attempts = tmp_path / "run", []
    write = Checkpointer.write

    def fail_at_first(self, step, trees, meta):
        attempts.append(step)
        if step == 3 and attempts.count(3) <= failures:
            raise OSError("no space left on device")
        write(self, step, trees, meta)

    monkeypatch.setattr(Checkpointer, "write", fail_at_first)
    config = tiny_config(run_dir, "--training.steps=3", "--checkpoint.every_steps=2", "--training.eval_every_steps=2")
    if failures == 1:
        assert train(config) == "finished"
        meta = json.loads((run_dir / "checkpoints" / "3" / "meta" / "metadata").read_text())
        assert meta["eval_loss"] == pytest.approx(evaluations(run_dir)[3])
    else:
        with pytest.raises(RuntimeError, match="step 3 could not be saved"):
            train(config)
    assert attempts == [2, 3, 3]
    assert saved_steps(run_dir) == ([2, 3] if failures == 1 else [2])
    assert "the checkpoint of step 3 could not be saved" in caplog.text and "trying again" in caplog.text
