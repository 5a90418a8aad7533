"""What waits for ever is ended: a start without the other process or the data, a process that reads."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from launch import READER, ROOT, TIMEOUT_SECONDS, TINY, losses, started, tiny_config
from megajax.checkpoint.steps import newest_meta
from megajax.data.datasets import Amounts

MINUTES = "--launch.hang_minutes=0.1"
STOPS = (
    READER
    + """\
    import os, sys
    from megajax.training.faults.watchdog import Watchdog

    with Watchdog(float(sys.argv[2])) as watchdog:
        for step, _ in enumerate(batches):
            watchdog.alive()
            if step == 2:
                victim, other = multiprocessing.active_children()
                print(victim.pid, other.pid, flush=True)
                os.kill(victim.pid, int(sys.argv[1]))
"""
)


@pytest.mark.fault
def test_a_start_that_waits_for_a_process_or_for_data_ends_with_the_stacks(tmp_path):
    """Both at once: process 1 of 2 dies before it connects; another process builds the index and never ends."""
    config = tiny_config(tmp_path / "run")
    length, samples = config.training.sequence_length, config.training.steps * config.training.global_batch_size
    config.task.datasets(config.data, config.model, Amounts(length, config.training.seed, samples, 0))
    entries = list((tmp_path / "cache").glob("gpt-*.json"))
    assert entries
    with contextlib.ExitStack() as locks:
        for entry in entries:
            entry.unlink()
            fcntl.flock(locks.enter_context(entry.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        with (
            started(tmp_path / "run", MINUTES) as (waits_for_data,),
            started(tmp_path / "pair", MINUTES, num_processes=2) as (waits_for_process, dies),
        ):
            dies.popen.kill()
            assert waits_for_data.wait() == waits_for_process.wait() == 1
    assert "Timeout" in waits_for_data.output and "in build_datasets" in waits_for_data.output
    assert "Timeout" in waits_for_process.output and "in initialize_processes" in waits_for_process.output
    assert "process 0 of 2 waits for the others to connect" in waits_for_process.output


# train.py whose data cannot be read after some steps, as from a network disk that is gone.
NO_ANSWER = """
import sys, time
from megajax.cli import run_command
from megajax.cli.train import main
from megajax.data.samples.mock import MockIndexedDataset

read, calls = MockIndexedDataset.read, []

def wait(*arguments):
    calls.append(1)
    while len(calls) > 60:
        time.sleep(1)
    return read(*arguments)

if __name__ == "__main__":
    MockIndexedDataset.read = wait
    run_command(main, sys.argv[1:], trains=True)
"""


@pytest.mark.fault
@pytest.mark.slow
def test_a_run_whose_data_no_longer_answer_ends_with_the_stacks_and_keeps_its_checkpoints(tmp_path):
    length = ["--training.steps=100", "--checkpoint.every_steps=1", "--launch.hang_minutes=0.3"]
    arguments = [*TINY, *length, f"--run_dir={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", NO_ANSWER, *arguments, f"--data.cache_dir={tmp_path / 'cache'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 1 and "Timeout (0:00:18)" in done.stderr and "in wait" in done.stderr, done.stderr
    assert max(losses(tmp_path / "run")) >= newest_meta(tmp_path / "run")[0] > 0


@pytest.mark.fault
def test_a_reading_process_that_dies_raises_and_one_that_stalls_ends_the_run(tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(STOPS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    processes = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        minutes = "0.05" if number == signal.SIGSTOP else "1"
        command = [sys.executable, script, str(int(number)), minutes]
        with (tmp_path / number.name).open("w") as file:
            processes[number.name] = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        for name, words in (("SIGKILL", "terminated unexpectedly with exit code -9"), ("SIGSTOP", "Timeout (0:00:03)")):
            assert processes[name].wait(TIMEOUT_SECONDS) == 1
            assert words in (tmp_path / name).read_text()
    finally:
        for name, process in processes.items():
            process.kill()
            for pid in (tmp_path / name).read_text().splitlines()[0].split():
                with contextlib.suppress(ProcessLookupError):  # a supervisor would have ended those that are left
                    os.kill(int(pid), signal.SIGKILL)
