"""Two real CPU processes, connected by gloo, are one run: they train, stop, save and resume together."""

import fcntl
import os
import signal

import pytest

from launch import (
    END,
    ENDLESS,
    EVALUATE,
    MESH,
    STEPS,
    TWO,
    assert_close,
    evaluations,
    losses,
    run,
    saved_steps,
    started,
)


@pytest.mark.fault
@pytest.mark.slow
def test_two_processes_train_save_and_resume_like_one(alone, begun_run):
    output = run(begun_run, *MESH, *ENDLESS, *EVALUATE, END, **TWO)
    assert "resuming from step 5" in output and saved_steps(begun_run) == [3, 5, STEPS]
    assert_close(losses(begun_run), alone[0])
    assert_close(evaluations(begun_run), alone[1])


@pytest.mark.parametrize(
    "mesh",
    [
        "--mesh.pipeline=2 --mesh.context=2 --training.microbatch_size=2",
        pytest.param("--mesh.context=4", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_and_a_ring_between_processes_train_like_one_process(alone, mesh, tmp_path):
    run(tmp_path / "run", "--mesh.data=1", *mesh.split(), *ENDLESS, END, **TWO)
    assert_close(losses(tmp_path / "run"), alone[0])


@pytest.mark.fault
def test_what_one_process_cannot_read_is_not_used_by_any(alone, begun_run):
    lost = list((begun_run / "checkpoints" / "5" / "params" / "ocdbt.process_1" / "d").iterdir())
    assert lost
    for path in lost:
        path.unlink()
    output = run(begun_run, *MESH, *ENDLESS, *EVALUATE, END, **TWO)
    assert "checkpoint 5 is not used" in output and "resuming from step 3" in output
    assert (begun_run / "checkpoints" / "5.damaged").is_dir()
    assert_close(losses(begun_run), alone[0])
    assert_close(evaluations(begun_run), alone[1])


@pytest.mark.fault
def test_sigterm_to_one_process_stops_both_after_the_same_step(tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *MESH, *ENDLESS, "--checkpoint.every_steps=10", **TWO) as (first, second):
        first.wait_for_step(run_dir, 3)
        second.popen.send_signal(signal.SIGTERM)
        assert second.wait() == 0, second.output
        assert first.wait() == 0, first.output
    stopped = saved_steps(run_dir)[-1]
    assert f"stopping after step {stopped}: a process of the run was asked to stop" in first.output
    assert sorted(losses(run_dir)) == list(range(1, stopped + 1))


@pytest.mark.fault
def test_refusal_reaches_both_processes(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with started(run_dir, *MESH, *ENDLESS, **TWO) as (first, second):
            assert (first.wait(), second.wait()) == (2, 2)
    assert f"error: run_dir={run_dir} is in use by another process" in first.output
    assert "refused by process 0" in second.output


# Experts on two axes, and the states of Mamba-2.
HYBRID = [
    "--model.kind=hybrid", "--model.num_layers=3", "--model.pattern=ME*", "--model.moe.num_experts=4",
    "--model.moe.expert_dim=32", "--model.mamba.head_dim=8", "--model.mamba.num_groups=2", "--model.mamba.state_dim=8",
    "--mesh.expert=2", "--mesh.fsdp=2",
]  # fmt: skip


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("model", [MESH, HYBRID], ids=["dense", "experts and Mamba-2"])
def test_two_supervised_runs_of_which_one_is_killed_and_later_one_is_stopped_end_like_undisturbed_ones(model, tmp_path):
    """Each has its supervisor. The stopped one's own watchdog cannot run, but its supervisor kills it; the watchdog of
    the other one waits for it, less long than the 30 s after which gloo gives up."""
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    arguments = [*model, "--training.steps=60"]
    faults = ["--checkpoint.every_steps=5", "--launch.max_restarts=9", "--launch.hang_minutes=0.3"]
    with started(run_dir, *arguments, *faults, **TWO) as (first, second):
        first.wait_for_step(run_dir, 8)
        os.kill(second.child, signal.SIGKILL)
        first.wait_for_step(run_dir, max(losses(run_dir)) + 8)  # both have started again
        os.kill(second.child, signal.SIGSTOP)
        # Waiting takes no processor: the run to compare with needs one.
        run(undisturbed, *arguments, **TWO)
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
    assert "the run ended with signal SIGABRT" in first.output and "restart 2 of 9" in first.output, first.output
    # Its watchdog was first, or the supervisor that kills the stopped one ("closed by peer", or "reset by peer" where
    # bytes were left unread); both wait for the same time.
    assert "Timeout (0:00:18)" in first.output or " by peer" in first.output, first.output
    assert "the run was stopped (SIGSTOP) for 18 s: killed" in second.output
    assert second.output.count("the run ended with signal SIGKILL") == 2
    assert losses(run_dir) == losses(undisturbed)
    assert saved_steps(run_dir)[-1] == 60
