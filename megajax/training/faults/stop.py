"""When to stop a run before its last step, agreed by all processes."""

import _thread
import os
import signal
import socket
import threading
import time

import jax
from jax.experimental import multihost_utils

from megajax.training.faults.signals import is_program, leave, stop_signals, tell

# A terminal and a launcher may both send SIGINT for one ctrl-C: signals closer together than this count as one.
SAME_SIGINT_SECONDS = 1.0


class StopRequest:
    """Handles signals, exit_at_step and exit_after_minutes; a context manager that restores the signal handlers.

    A thread answers a signal at once, because Python's handlers wait until the main thread returns from the device or
    the compiler. A second SIGINT, SAME_SIGINT_SECONDS or more after the request to stop, ends the program without
    saving, with exit status 130; in a notebook it raises KeyboardInterrupt.
    With several processes, JAX's preemption service sees the SIGTERM of any of them and chooses one step for all; a
    process that stops for another reason sends itself that signal.
    """

    def __init__(self, at_step: int | None, after_minutes: float | None):
        self._at_step = at_step
        self._after_minutes = after_minutes
        self._started = time.monotonic()
        self._reason = ""
        self._asked_at = self._started
        self._is_interrupted = False
        self._is_program = is_program()
        self._alone = jax.process_count() == 1
        numbers = [number for number in stop_signals() if self._alone or number != signal.SIGTERM]
        # The interpreter writes the number of each signal into the socket as soon as it arrives.
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._in_main_thread) for number in numbers}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._written.close()
        self._thread.join()
        self._signals.close()

    def _in_main_thread(self, _number: int, _frame) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while received := self._signals.recv(1):
            if received[0] in self._handlers:
                self._received(signal.Signals(received[0]))

    def _received(self, number: signal.Signals) -> None:
        if not self._reason:
            hint = "; press ctrl-C again to stop now without saving" if number == signal.SIGINT else ""
            tell(f"received {number.name}: saving and stopping after this step{hint}")
            self._ask(f"received {number.name}")
        elif number == signal.SIGINT and time.monotonic() - self._asked_at >= SAME_SIGINT_SECONDS:
            if self._is_program:
                leave(
                    130,
                    "received SIGINT again: stopped without saving",
                )
            if not self._is_interrupted:
                self._is_interrupted = True
                _thread.interrupt_main()

    def _ask(self, reason: str) -> None:
        if not self._reason:
            self._asked_at = time.monotonic()
            self._reason = reason
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int, problem: str = "") -> str:
        """The reason to stop after this step, or an empty string. problem: a reason that this process has found."""
        if problem and not self._reason:
            self._ask(problem)
        limit = self._after_minutes
        if limit is not None and not self._reason and time.monotonic() - self._started >= 60 * limit:
            self._ask(f"launch.exit_after_minutes={limit}")
        if self._at_step is not None and step >= self._at_step:
            return f"launch.exit_at_step={self._at_step}"
        if self._alone:
            return self._reason
        agreed = multihost_utils.reached_preemption_sync_point(step)
        return (self._reason or "a process of the run was asked to stop") if agreed else ""
