"""Whatever ends a run early leaves a checkpoint at a step boundary, exit code 0, and a run that can go on."""

import signal

import pytest
from launch import losses, metrics, run, saved_steps, started

ENDLESS = ["--training.steps=100000", "--optimizer.schedule=constant"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_saves_and_the_same_command_goes_on(number, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *ENDLESS) as (process,):
        process.wait_for_step(run_dir, 3)
        process.popen.send_signal(number)
        assert process.wait() == 0, process.output
    (stopped,) = saved_steps(run_dir)
    assert f"stopping after step {stopped}: received {number.name}" in process.output
    assert f"interrupted: {run_dir}, step {stopped} of 100000" in process.output
    assert "Traceback" not in process.output
    output = run(run_dir, *ENDLESS, f"--training.exit_at_step={stopped + 3}")
    assert f"resuming from step {stopped} of 100000" in output
    assert saved_steps(run_dir) == [stopped, stopped + 3]
    assert sorted(losses(run_dir)) == list(range(1, stopped + 4))


def test_exit_at_step_profile_and_rampup_in_one_run(tmp_path):
    """Batches of 2, 4, 6 for 6 samples each, then 8: 2 2 2 4 4 6 8 8 ..."""
    run_dir = tmp_path / "run"
    arguments = ["--training.steps=14", "--training.batch_size_rampup=2,2,18", "--training.log_every_steps=2"]
    profile = "--training.profile_steps=6,9"
    output = run(run_dir, *arguments, profile, "--training.exit_at_step=7")
    assert "stopping after step 7: training.exit_at_step=7" in output and saved_steps(run_dir) == [7]
    # The run ends in the middle of the profile: what there is of it is written, and the next run does the rest.
    assert "profile written" in output
    traces = lambda: {path for path in (run_dir / "profile").rglob("*.xplane.pb") if path.stat().st_size > 0}
    before = traces()
    assert before
    output = run(run_dir, *arguments, profile)
    assert "finished" in output and "profile written" in output and traces() > before
    sizes = [2, 2, 2, 4, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8]
    lines = metrics(run_dir)
    # Every second step, and the first of each launch.
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 10, 12, 14]
    for line in lines:
        assert line["consumed_tokens"] == 32 * sum(sizes[: line["step"]])
    output = run(run_dir, *arguments)
    assert "already finished" in output and metrics(run_dir) == lines


def test_exit_after_minutes_and_a_step_to_exit_at_that_is_done_already(tmp_path):
    run_dir = tmp_path / "run"
    output = run(run_dir, *ENDLESS, "--training.exit_after_minutes=0.01")
    (stopped,) = saved_steps(run_dir)
    assert f"stopping after step {stopped}: training.exit_after_minutes=0.01" in output
    before = metrics(run_dir)
    output = run(run_dir, *ENDLESS, f"--training.exit_at_step={stopped}")
    assert f"nothing to do: step {stopped} is done" in output
    assert saved_steps(run_dir) == [stopped] and metrics(run_dir) == before
