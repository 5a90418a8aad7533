"""Ends a run that hangs: all Python stacks on stderr, exit status 1; a supervisor or scheduler starts it again."""

import faulthandler


class Watchdog:
    """A context manager. `alive()` restarts the timer of `minutes`, which its first call starts; 0 disables it.

    There is one timer in a process: of two watchdogs, one inside the other, the last `alive` counts. It is a thread of
    faulthandler's that needs no Python to run, so a collective that never returns is no obstacle.
    """

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes

    def alive(self) -> None:
        if self._seconds:
            # 2 and not sys.stderr, which may be no file, as in a notebook
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=2)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_) -> None:
        faulthandler.cancel_dump_traceback_later()
