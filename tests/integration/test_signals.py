"""Whatever ends a run early leaves a checkpoint at a step boundary, exit code 0, and a run that can go on."""

import signal
import time

import pytest

from launch import ENDLESS, losses, metrics, run, saved_steps, started, tiny_config
from megajax.checkpoint.steps import newest_meta
from megajax.run import train

pytestmark = pytest.mark.fault


@pytest.mark.usefixtures("terminal")
def test_signals_and_the_end_of_the_time_save_and_the_same_command_goes_on(tmp_path, capfd):
    run_dir, stops = tmp_path / "run", []

    def check_stopped(output, reason):
        assert output.count("resuming from step") == (1 if stops else 0)
        assert not stops or f"resuming from step {stops[-1]} of 100000" in output
        stops.append(saved_steps(run_dir)[-1])
        assert saved_steps(run_dir) == stops[-3:]  # checkpoint.keep
        assert f"stopping after step {stops[-1]}: {reason}" in output
        assert f"interrupted: {run_dir}, step {stops[-1]} of 100000" in output
        assert "Traceback" not in output
        assert sorted(losses(run_dir)) == list(range(1, stops[-1] + 1))

    for number in (signal.SIGTERM, signal.SIGINT):
        with started(run_dir, *ENDLESS) as (process,):
            process.wait_for_step(run_dir, 3 + (stops[-1] if stops else 0))
            process.popen.send_signal(number)
            if number == signal.SIGINT:  # a launcher sends what the terminal has sent already
                time.sleep(0.01)
                process.popen.send_signal(number)
            assert process.wait() == 0, process.output
        check_stopped(process.output, f"received {number.name}")
    output = run(run_dir, *ENDLESS, "--launch.exit_after_minutes=0.01")
    check_stopped(output, "launch.exit_after_minutes=0.01")
    before = metrics(run_dir)
    train(tiny_config(run_dir, *ENDLESS, f"--launch.exit_at_step={stops[-1]}"))
    assert f"nothing to do: launch.exit_at_step={stops[-1]}" in "".join(capfd.readouterr())
    assert saved_steps(run_dir) == stops[-3:] and metrics(run_dir) == before


@pytest.mark.slow
@pytest.mark.usefixtures("terminal")
def test_signals_while_a_checkpoint_is_being_written_leave_whole_ones(tmp_path):
    """Every step is saved, and the signal comes when the temporary directory of a save has just appeared."""
    run_dir, last = tmp_path / "run", 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        with started(run_dir, *ENDLESS, "--checkpoint.every_steps=1") as (process,):
            process.wait_for_step(run_dir, last + 3)
            while not list((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp")):
                assert process.popen.poll() is None, process.output
            process.popen.send_signal(number)
            assert process.wait() == (-number if number == signal.SIGKILL else 0), process.output
        steps = [int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
        unfinished = list((run_dir / "checkpoints").glob("*tmp"))
        assert number == signal.SIGKILL or max(losses(run_dir)) == max(steps) and not unfinished
        last = max(steps)
        assert newest_meta(run_dir)[0] == last
    run(run_dir, *ENDLESS, f"--launch.exit_at_step={last + 3}")
    undisturbed = tmp_path / "undisturbed"
    run(undisturbed, *ENDLESS, f"--launch.exit_at_step={last + 3}")
    assert losses(run_dir) == losses(undisturbed) and saved_steps(run_dir)[-1] == last + 3


def test_exit_at_step_profile_and_rampup_in_one_run(tmp_path):
    """A batch of 4 for 12 samples, then of 8; what the first run profiles is compiled before."""
    run_dir = tmp_path / "run"
    arguments = ["--training.steps=10", "--training.batch_size_rampup=4,4,12", "--training.log_every_steps=2"]
    profile = "--launch.profile_steps=6,9"
    output = run(run_dir, *arguments, profile, "--launch.exit_at_step=7")
    assert "stopping after step 7: launch.exit_at_step=7" in output and saved_steps(run_dir) == [7]
    # The run ends in the middle of the profile: what there is of it is written, and the next run does the rest.
    assert "profile written" in output
    traces = lambda: {path for path in (run_dir / "profile").rglob("*.xplane.pb") if path.stat().st_size > 0}
    before = traces()
    assert before
    output = run(run_dir, *arguments, profile)
    assert "finished" in output and "profile written" in output and traces() > before
    sizes = [4, 4, 4, 8, 8, 8, 8, 8, 8, 8]
    lines = metrics(run_dir)
    # Every second step, and the first of each launch.
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 10]
    for line in lines:
        assert line["consumed_tokens"] == 32 * sum(sizes[: line["step"]])
