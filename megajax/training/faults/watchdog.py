"""Aborts a run that hangs, with all Python stacks on stderr and exit status 1; a supervisor or scheduler restarts
it."""

import faulthandler


class Watchdog:
    """A context manager. `alive()` starts or restarts a timer of `minutes`; 0 disables it.

    A process has one timer: with nested watchdogs the last `alive` counts. It is a faulthandler thread, which runs no
    Python, so it works even while a collective never returns.
    """

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes

    def alive(self) -> None:
        if self._seconds:
            # not sys.stderr, which need not be a file, as in a notebook
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=2)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_) -> None:
        faulthandler.cancel_dump_traceback_later()
