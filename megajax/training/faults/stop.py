"""When to stop a run before its last step, agreed by all processes."""

import os
import signal
import time

import jax
from jax.experimental import multihost_utils

from megajax.training.faults.signals import stop_signals

# A terminal and the launcher under it may both send the SIGINT of one ctrl-C: two sooner than this are one.
SAME_SIGINT_SECONDS = 2.0


class StopRequest:
    """Signals, exit_at_step and exit_after_minutes; a context manager that gives the signals back.

    A second SIGINT, SAME_SIGINT_SECONDS or more after the request to stop, ends the run at once, without saving.
    With several processes JAX's preemption service sees the SIGTERM of any of them and names one step for all; whoever
    wants to stop for another reason sends itself that signal.
    """

    def __init__(self, at_step: int | None, after_minutes: float | None):
        self._at_step = at_step
        self._after_minutes = after_minutes
        self._started = time.monotonic()
        self._reason = ""
        self._asked_at = self._started
        self._alone = jax.process_count() == 1
        numbers = [number for number in stop_signals() if self._alone or number != signal.SIGTERM]
        self._handlers = {number: signal.signal(number, self._received) for number in numbers}

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame) -> None:
        since_asked = time.monotonic() - self._asked_at
        if self._reason and number == signal.SIGINT and since_asked >= SAME_SIGINT_SECONDS:
            raise KeyboardInterrupt
        self._ask(f"received {signal.Signals(number).name}")

    def _ask(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._asked_at = time.monotonic()
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> str:
        """Why to stop after this step, or an empty string."""
        limit = self._after_minutes
        if limit is not None and not self._reason and time.monotonic() - self._started >= 60 * limit:
            self._ask(f"launch.exit_after_minutes={limit}")
        if self._at_step is not None and step >= self._at_step:
            return f"launch.exit_at_step={self._at_step}"
        if self._alone:
            return self._reason
        agreed = multihost_utils.reached_preemption_sync_point(step)
        return (self._reason or "a process of the run was asked to stop") if agreed else ""
