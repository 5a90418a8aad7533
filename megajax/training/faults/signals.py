"""Which signals ask a run to stop, and what they do while there is nothing to save. Imports nothing that takes time."""

import contextlib
import os
import signal


def stop_signals() -> list[signal.Signals]:
    """Those that ask a run to stop; SIGHUP, of a terminal that is lost, unless it is ignored, as under nohup."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return numbers if is_ignored else [*numbers, signal.SIGHUP]


def leave_when_asked() -> None:
    """From here on a stop signal ends the program at once with exit status 0, unless another handler replaces this one.

    Other handlers: a StopRequest while steps are done, a supervisor, and JAX, which takes SIGTERM where there are
    several processes.
    """
    for number in stop_signals():
        signal.signal(number, _leave)


def _leave(number: int, _frame) -> None:
    with contextlib.suppress(OSError):  # not by the logger, which this may have interrupted
        os.write(2, f"megajax: received {signal.Signals(number).name}: there is nothing to save\n".encode())
    # No exception: raised while JAX traces or compiles, it makes the interpreter crash on its way out.
    os._exit(0)
