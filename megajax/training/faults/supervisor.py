"""Starts a run again that crashed or hung: the parent of the process that trains.

A scheduler that restarts jobs does the same; this is for machines without one. With several processes each has its own
supervisor. Where one dies the others end too: all at once if it was process 0, which the others are connected to; else
as soon as its supervisor starts it again and it connects anew, or JAX misses it (100 s), or their watchdogs do. Then
all start again and wait for each other, up to 5 minutes; a supervisor whose run never meets the others gives up after
three of these.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megajax.training.faults.signals import stop_signals
from megajax.training.reporting.metrics import read_metrics

logger = logging.getLogger("megajax")
# Of train.py for input that no restart makes better.
BAD_INPUT = 2
# This many consecutive crashes without a new step are a crash loop.
MOST_WITHOUT_PROGRESS = 3
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0


def supervise(
    command: Sequence[str],
    run_dir: Path,
    max_restarts: int,
    hang_minutes: float,
    *,
    sleep: Callable[[float], object] | None = None,
) -> int:
    """Runs the command until it ends well, max_restarts are used up, or it crashes without progress -> exit status.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP go on to the child, and then there is no restart. Between two starts it waits,
    twice as long after each crash without progress. A child that was stopped (SIGSTOP) for hang_minutes, in which its
    own watchdog cannot run, is killed; 0: never. sleep: instead of the pause.
    """
    with _Signals() as signals:
        crashes = 0
        reached = _last_step(run_dir)
        wait = FIRST_WAIT_SECONDS
        for restarts in range(max_restarts + 1):
            status = _run(command, 60 * hang_minutes, signals)
            if status in (0, BAD_INPUT) or signals.asked.is_set():
                return status
            step = _last_step(run_dir)
            crashes, wait = (1, FIRST_WAIT_SECONDS) if step > reached else (crashes + 1, wait)
            reached = max(reached, step)
            reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            logger.error("the run ended with %s after step %d", reason, step)
            if crashes >= MOST_WITHOUT_PROGRESS:
                logger.error("%d consecutive crashes without a new step: not restarted", crashes)
                return 1
            if restarts < max_restarts:
                logger.warning("restart %d of %d in %.0f s", restarts + 1, max_restarts, wait)
                (sleep or signals.asked.wait)(wait)
                if signals.asked.is_set():
                    return status
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        logger.error("launch.max_restarts=%d reached: not restarted", max_restarts)
        return 1


class _Signals:
    """Passes them on to the child, if there is one; a context manager that gives them back."""

    def __init__(self):
        self.asked = threading.Event()
        self.child = None
        self._before = {number: signal.signal(number, self._received) for number in stop_signals()}

    def _received(self, number: int, _frame) -> None:
        self.asked.set()
        if self.child is not None:
            self.child.send_signal(number)

    def __enter__(self) -> "_Signals":
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _run(command: Sequence[str], longest_stop_seconds: float, signals: _Signals) -> int:
    """-> exit status."""
    went_on = time.monotonic()
    # A session of its own, or ctrl-C would reach it twice.
    child = subprocess.Popen(command, start_new_session=True)
    signals.child = child
    if signals.asked.is_set():  # before there was a child
        child.terminate()
    while child.poll() is None:  # a signal that reaches another thread does not interrupt a wait
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        if not _is_stopped(child.pid):
            went_on = time.monotonic()
        elif longest_stop_seconds and time.monotonic() - went_on > longest_stop_seconds:
            logger.error("the run was stopped (SIGSTOP) for %.0f s: killed", longest_stop_seconds)
            child.kill()
    signals.child = None
    if child.returncode:
        _end_group(child.pid)
    return child.returncode


def _end_group(leader: int) -> None:
    """Ends what a dead child had started, as processes that read data; those that were stopped too. Not by SIGKILL:
    the one that cleans up shared memory must live on for that, and ignores SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)


def _is_stopped(pid: int) -> bool:
    """Whether the process is in state T (proc(5)); never where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _last_step(run_dir: Path) -> int:
    """The highest step in metrics.jsonl, 0 without one; one line may be half written."""
    try:
        return max((record["step"] for _, record in read_metrics(run_dir / "metrics.jsonl") if record), default=0)
    except OSError as error:
        logger.warning("the last step of the run is not known: %s", error)
        return 0
