"""What a signal means, before, while and after steps are done."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import ROOT
from megajax.training.faults import stop
from megajax.training.faults.signals import leave_when_asked, stop_signals, tell
from megajax.training.faults.stop import StopRequest

pytestmark = pytest.mark.fault
ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers(terminal):
    """Fails a test that does not give the signals back."""
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("number", ALL)
def test_each_signal_asks_a_run_to_stop_after_the_step_and_is_answered_at_once(number, capfd):
    with StopRequest(None, None) as request:
        assert request.asked(1) == ""
        send(number)
        wait_until(lambda: request.asked(2) == f"received {number.name}")
    answer = capfd.readouterr().err
    assert answer.startswith(f"megajax: received {number.name}: saving and stopping after this step")
    assert ("press ctrl-C again to stop now without saving" in answer) == (number == signal.SIGINT)


def test_the_sigint_of_a_terminal_and_of_its_launcher_are_one_and_a_later_one_interrupts_a_notebook(monkeypatch):
    with StopRequest(None, None) as request:
        send(signal.SIGINT)
        send(signal.SIGINT)
        wait_until(lambda: request.asked(1) == "received SIGINT")
        time.sleep(0.1)
        monkeypatch.setattr(stop, "SAME_SIGINT_SECONDS", 0.01)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
            time.sleep(20)


# The main thread takes no signals, as while it waits for a device: no handler runs there.
BUSY = """
import signal, threading
from megajax.training.faults import stop
from megajax.training.faults.signals import leave_when_asked
leave_when_asked()
stop.SAME_SIGINT_SECONDS = 0.2
with stop.StopRequest(None, None) as request:
    lock = threading.Lock()
    lock.acquire()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    print("in a step", flush=True)
    lock.acquire()
print("not reached")
"""


def test_a_busy_program_answers_ctrl_c_at_once_and_the_second_one_ends_it_with_130_and_one_line():
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "in a step\n"
        process.send_signal(signal.SIGINT)
        assert "saving and stopping after this step; press ctrl-C again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)  # the launcher's
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stdout.read() == ""
        (line,) = process.stderr.read().splitlines()
        assert line.startswith("megajax: received SIGINT again: stopped without saving")


INTERRUPTED = """
import os, signal
from megajax.training.faults.signals import leave_when_interrupted
leave_when_interrupted()
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**9):
        pass
except BaseException:  # what JAX does to KeyboardInterrupt
    pass
"""


def test_ctrl_c_ends_a_command_with_130_whatever_code_it_is_in():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megajax: interrupted\n")


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        with StopRequest(None, None) as request:
            send(signal.SIGHUP)
            assert request.asked(1) == ""
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ALL)
def test_where_there_is_nothing_to_save_a_signal_ends_the_program_with_exit_status_0(number, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    before = {number: signal.getsignal(number) for number in ALL}
    leave_when_asked()
    with StopRequest(None, None):
        send(number)
    assert not left
    send(number)
    for other, handler in before.items():
        signal.signal(other, handler)
    assert left == [0] and f"received {number.name}: there is nothing to save" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_train_py_leaves_like_that_from_its_first_imports_on():
    command = [sys.executable, ROOT / "train.py", "--config=gpt_tiny"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not takes(process.pid, signal.SIGHUP):
        assert time.monotonic() < end
        time.sleep(0.001)
    process.terminate()
    assert process.wait() == 0 and "received SIGTERM" in process.stderr.read()


def takes(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    with open(f"/proc/{pid}/status") as file:
        (mask,) = (line.split()[1] for line in file if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> number - 1 & 1)


def test_a_notice_in_a_terminal_is_broken_between_words(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    tell("received SIGINT: saving and stopping after this step; press ctrl-C again to stop now without saving")
    lines = capfd.readouterr().err.removeprefix("\r\x1b[K").splitlines()
    assert len(lines) == 2 and lines[0].endswith(" ctrl-C") and lines[1].startswith("again to stop")
