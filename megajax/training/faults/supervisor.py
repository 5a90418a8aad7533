"""Restarts a run that crashed or hung; runs as the parent of the training process.

It is for machines without a scheduler that restarts jobs. With several processes, each has its own supervisor. If one
process dies, the others end too: at once if it was process 0, to which the others are connected; otherwise when its
supervisor restarts it and it reconnects, when JAX notices its absence (100 s), or when their watchdogs do. Then all
restart and wait for each other for up to 5 minutes; a supervisor gives up after three attempts without the others.
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
# Exit status of train.py for bad input, which a restart would not change.
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
    """Runs the command until it succeeds, max_restarts are used up, or it crashes without progress -> exit status.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP are forwarded to the child, which is then not restarted. The pause between two
    starts doubles after each crash without progress. A child that is stopped (SIGSTOP) for hang_minutes, while its own
    watchdog cannot run, is killed; 0: never. sleep: replaces the pause.
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
    """Forwards signals to the child, if there is one; a context manager that restores the handlers."""

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
    last_running = time.monotonic()
    # In a new session, or ctrl-C would reach it twice.
    child = subprocess.Popen(command, start_new_session=True)
    signals.child = child
    if signals.asked.is_set():  # before the child started
        child.terminate()
    while child.poll() is None:  # a signal received by another thread does not interrupt a wait
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        if not _is_stopped(child.pid):
            last_running = time.monotonic()
        elif longest_stop_seconds and time.monotonic() - last_running > longest_stop_seconds:
            logger.error("the run was stopped (SIGSTOP) for %.0f s: killed", longest_stop_seconds)
            child.kill()
    signals.child = None
    if child.returncode:
        _end_group(child.pid)
    return child.returncode


def _end_group(leader: int) -> None:
    """Ends processes that a dead child had started, such as data workers, even if they are stopped. Not with SIGKILL:
    the process that cleans up shared memory must survive, and ignores SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)


def _is_stopped(pid: int) -> bool:
    """Whether the process is in state T (proc(5)); False without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _last_step(run_dir: Path) -> int:
    """The highest step in metrics.jsonl, or 0; the last line may be incomplete."""
    try:
        return max((record["step"] for _, record in read_metrics(run_dir / "metrics.jsonl") if record), default=0)
    except OSError as error:
        logger.warning("the last step of the run is not known: %s", error)
        return 0
