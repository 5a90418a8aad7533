"""What a signal means, before, while and after steps are done; in this process."""

import os
import signal
import time

import pytest
from launch import TINY

import train
from megajax.training.faults import stop
from megajax.training.faults.stop import StopRequest, leave_when_asked, stop_signals

pytestmark = pytest.mark.fault
ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers():
    """Fails a test that does not give the signals back."""
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", ALL)
def test_each_signal_asks_a_run_to_stop_after_the_step(number):
    with StopRequest(None, None) as request:
        assert request.asked(1) == ""
        send(number)
        assert request.asked(2) == f"received {number.name}"


def test_the_sigint_of_a_terminal_and_of_its_launcher_are_one_and_a_later_one_ends_the_run_at_once(monkeypatch):
    with StopRequest(None, None) as request:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert request.asked(1) == "received SIGINT"
        monkeypatch.setattr(stop, "SAME_SIGINT_SECONDS", 0.01)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        with leave_when_asked(), StopRequest(None, None) as request:
            send(signal.SIGHUP)
            assert request.asked(1) == ""
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_no_step_is_under_way_leaves_with_exit_status_0(number, capfd):
    with pytest.raises(SystemExit) as left, leave_when_asked():
        send(number)
    assert left.value.code == 0 and f"received {number.name} while no step" in capfd.readouterr().err


def test_train_py_leaves_like_that_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_train", lambda *_: send(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        train.main([*TINY, f"--run_dir={tmp_path / 'run'}"])
    assert left.value.code == 0
