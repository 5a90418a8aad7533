"""Two real CPU processes, connected by gloo, are one run: they train, stop, save and resume together."""

import fcntl
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from launch import losses, metrics, run, saved_steps, started

STEPS = 12
MESH = ["--mesh.data=2", "--mesh.fsdp=2", "--training.eval_every_steps=4", "--training.eval_steps=2"]
LENGTH = [f"--training.steps={STEPS}"]
TOLERANCE = 1e-5  # float32 sums of the same numbers, added across processes in another order


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses by step and evaluation lines of one process with the same four devices, uninterrupted."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run(run_dir, *MESH, *LENGTH, devices_each=4)
    return losses(run_dir), evaluations(run_dir)


def evaluations(run_dir) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in metrics(run_dir) if "eval_loss" in line}


def assert_equal_to(alone, run_dir):
    for got, want in zip((losses(run_dir), evaluations(run_dir)), alone, strict=True):
        assert list(got) == list(want)
        np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=TOLERANCE)


def test_two_processes_train_save_and_resume_like_one(alone, tmp_path):
    run_dir = tmp_path / "run"
    output = run(run_dir, *MESH, *LENGTH, "--training.exit_at_step=5", num_processes=2, devices_each=2)
    assert "2 process(es)" in output and "interrupted" in output
    assert saved_steps(run_dir) == [5]
    output = run(run_dir, *MESH, *LENGTH, num_processes=2, devices_each=2)
    assert "resuming from step 5" in output and "finished" in output
    assert saved_steps(run_dir) == [5, STEPS]
    assert_equal_to(alone, run_dir)


@pytest.mark.parametrize(
    "mesh", ["--mesh.pipeline=2 --mesh.context=2 --training.microbatch_size=2", "--mesh.context=4"]
)
def test_a_pipeline_and_a_ring_between_processes_train_like_one_process(alone, mesh, tmp_path):
    run(tmp_path / "run", "--mesh.data=1", *mesh.split(), *LENGTH, num_processes=2, devices_each=2)
    got = losses(tmp_path / "run")
    assert list(got) == list(alone[0])
    np.testing.assert_allclose(list(got.values()), list(alone[0].values()), rtol=TOLERANCE)


@pytest.mark.fault
def test_what_one_process_cannot_read_is_not_used_by_any(alone, tmp_path):
    run_dir, often = tmp_path / "run", "--checkpoint.every_steps=3"
    run(run_dir, *MESH, *LENGTH, often, "--training.exit_at_step=5", num_processes=2, devices_each=2)
    assert saved_steps(run_dir) == [3, 5]
    lost = list((run_dir / "checkpoints" / "5" / "params" / "ocdbt.process_1" / "d").iterdir())
    assert lost
    for path in lost:
        path.unlink()
    output = run(run_dir, *MESH, *LENGTH, often, num_processes=2, devices_each=2)
    assert "checkpoint 5 is not used" in output and "resuming from step 3" in output
    assert (run_dir / "checkpoints" / "5.damaged").is_dir()
    assert_equal_to(alone, run_dir)


def test_sigterm_to_one_process_stops_both_after_the_same_step(tmp_path):
    run_dir = tmp_path / "run"
    # So long that it is never finished before the signal; the learning rate is the same whatever the length.
    arguments = ["--mesh.data=2", "--mesh.fsdp=2", "--optimizer.schedule=constant", "--checkpoint.every_steps=10"]
    endless = [*arguments, "--training.steps=100000"]
    with started(run_dir, *endless, num_processes=2, devices_each=2) as (first, second):
        first.wait_for_step(run_dir, 3)
        second.popen.send_signal(signal.SIGTERM)
        assert second.wait() == 0, second.output
        assert first.wait() == 0, first.output
    stopped = saved_steps(run_dir)[-1]
    assert f"stopping after step {stopped}: a process of the run was asked to stop" in first.output
    assert sorted(losses(run_dir)) == list(range(1, stopped + 1))
    output = run(run_dir, *endless, f"--training.exit_at_step={stopped + 2}", num_processes=2, devices_each=2)
    assert f"resuming from step {stopped}" in output
    assert saved_steps(run_dir)[-1] == stopped + 2
    assert sorted(losses(run_dir)) == list(range(1, stopped + 3))


def test_refusal_reaches_both_processes(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with started(run_dir, *MESH, *LENGTH, num_processes=2, devices_each=2) as (first, second):
            assert (first.wait(), second.wait()) == (2, 2)
    assert f"error: run_dir={run_dir} is in use by another process" in first.output
    assert "refused by process 0" in second.output


@pytest.mark.fault
def test_two_supervised_runs_of_which_one_is_killed_and_later_one_is_stopped_end_like_undisturbed_ones(tmp_path):
    """Each has its supervisor. The stopped one's own watchdog cannot run; that of the other one waits for it, less long
    than the 30 s after which gloo gives up."""
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    arguments = ["--mesh.data=2", "--mesh.fsdp=2", "--training.steps=60"]
    faults = ["--checkpoint.every_steps=5", "--training.max_restarts=9", "--training.hang_minutes=0.3"]
    with started(run_dir, *arguments, *faults, num_processes=2, devices_each=2) as (first, second):
        first.wait_for_step(run_dir, 8)
        os.kill(child_of(second), signal.SIGKILL)
        first.wait_for_step(run_dir, max(losses(run_dir)) + 8)  # both have started again
        os.kill(child_of(second), signal.SIGSTOP)
        # Waiting takes no processor: the run to compare with needs one.
        run(undisturbed, *arguments, num_processes=2, devices_each=2)
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
    for message in ("the run ended with signal SIGABRT", "Timeout (0:00:18)", "in _train", "ended with exit status 1"):
        assert message in first.output, first.output
    assert "the run was stopped (SIGSTOP) for 18 s: killed" in second.output
    assert second.output.count("the run ended with signal SIGKILL") == 2
    assert losses(run_dir) == losses(undisturbed)
    assert saved_steps(run_dir)[-1] == 60


def child_of(supervisor) -> int:
    pid = supervisor.popen.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
