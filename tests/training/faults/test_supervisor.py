"""A run that dies is started again, until it does not get any further; a run that hangs ends with its stacks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megajax.training.faults.supervisor import supervise


def script(folder, statuses, *, steps):
    """A command that at its nth start logs the nth step and ends with the nth status."""
    counter = folder / "starts"
    code = f"""
import json, os, pathlib, sys
counter = pathlib.Path({str(counter)!r})
start = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(start + 1))
with open({str(folder / "metrics.jsonl")!r}, "a") as file:
    file.write(json.dumps({{"step": {list(steps)}[start]}}) + "\\n")
status = {list(statuses)}[start]
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
    return [sys.executable, "-c", code], lambda: int(counter.read_text())


@pytest.mark.fault
def test_a_crashed_run_is_started_again_until_it_ends_well(tmp_path, caplog):
    command, starts = script(tmp_path, [1, -9, 0], steps=[3, 5, 9])
    waits = []
    assert supervise(command, tmp_path, 5, 0, sleep=waits.append) == 0
    assert starts() == 3 and waits == [5.0, 5.0]
    assert "exit status 1 after step 3" in caplog.text and "signal SIGKILL after step 5" in caplog.text


@pytest.mark.fault
def test_damage_in_metrics_is_passed_over(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 2, "loss": \xff}\n[1]\nnull\n{"step": "8"}\n')
    command, starts = script(tmp_path, [1, 0], steps=[3, 5])
    assert supervise(command, tmp_path, 5, 0, sleep=lambda _: None) == 0
    assert starts() == 2 and "exit status 1 after step 3" in caplog.text
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert supervise([sys.executable, "-c", ""], tmp_path, 5, 0) == 0
    assert "the last step of the run is not known" in caplog.text


@pytest.mark.fault
def test_a_crash_loop_ends_after_waiting_longer_each_time(tmp_path, caplog):
    command, starts = script(tmp_path, [1] * 9, steps=[4, 2, 4] + [4] * 6)
    waits = []
    assert supervise(command, tmp_path, 8, 0, sleep=waits.append) == 1
    assert starts() == 3 and waits == [5.0, 10.0]
    assert "3 consecutive crashes without a new step" in caplog.text


def test_restarts_are_counted_and_bad_input_is_not_tried_again(tmp_path, caplog):
    command, starts = script(tmp_path, [1] * 9, steps=range(1, 10))
    assert supervise(command, tmp_path, 2, 0, sleep=lambda _: None) == 1
    assert starts() == 3 and "launch.max_restarts=2 reached" in caplog.text
    command, starts = script(tmp_path, [0] * 3 + [2], steps=range(10))
    assert supervise(command, tmp_path, 5, 0, sleep=lambda _: None) == 2 and starts() == 4


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_pause_between_two_starts(number, tmp_path):
    command, starts = script(tmp_path, [1, 0], steps=[3, 5])
    threading.Thread(target=lambda: (wait_for(starts, 1), time.sleep(1), os.kill(os.getpid(), number))).start()
    before, began = signal.getsignal(number), time.monotonic()
    assert supervise(command, tmp_path, 5, 0) == 1
    assert starts() == 1 and time.monotonic() - began < 4 and signal.getsignal(number) is before


def wait_for(starts, number):
    while True:
        try:
            if starts() == number:
                return
        except (FileNotFoundError, ValueError):
            pass
        time.sleep(0.05)


def test_a_signal_goes_on_to_the_run_and_ends_the_supervision(tmp_path):
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path({str(ready)!r}).touch()
time.sleep(30)
"""

    def send():
        while not ready.exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    assert supervise([sys.executable, "-c", code], tmp_path, 5, 0, sleep=lambda _: pytest.fail("started again")) == 7
    thread.join()


@pytest.mark.fault
def test_a_run_that_was_stopped_for_too_long_is_killed_with_what_it_started(tmp_path, caplog):
    """Its own watchdog cannot run. The second start ends well; the process that the first one started is gone."""
    pid = tmp_path / "pid"
    code = f"""
import os, pathlib, signal, subprocess, sys
pid = pathlib.Path({str(pid)!r})
if pid.exists():
    sys.exit(0)
sleeper = subprocess.Popen(["sleep", "60"])
sleeper.send_signal(signal.SIGSTOP)
pid.write_text(str(sleeper.pid))
os.kill(os.getpid(), signal.SIGSTOP)
"""
    assert supervise([sys.executable, "-c", code], tmp_path, 1, 0.5 / 60, sleep=lambda _: None) == 0
    assert "was stopped (SIGSTOP) for" in caplog.text and "signal SIGKILL after step 0" in caplog.text
    end = time.monotonic() + 120
    while _is_running(int(pid.read_text())):
        assert time.monotonic() < end
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """False for one that is dead and waits for its parent, process 1, to take notice."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.fault
def test_a_hang_ends_the_process_with_all_stacks():
    code = """
import threading, time
from megajax.training.faults.watchdog import Watchdog
def waits_for_ever():
    threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
with Watchdog(2 / 60) as watchdog:
    for _ in range(3):
        watchdog.alive()
        time.sleep(0.3)
    print("alive", flush=True)
    waits_for_ever()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "alive\n"
    assert done.stderr.count("waits_for_ever") == 2 and "Timeout" in done.stderr


def test_no_watchdog_at_0_minutes_and_none_after_it():
    code = """
import time
from megajax.training.faults.watchdog import Watchdog
with Watchdog(0) as never, Watchdog(0.2 / 60) as short:
    never.alive()
    short.alive()
time.sleep(0.5)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
