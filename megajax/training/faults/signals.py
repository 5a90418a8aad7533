"""Which signals ask a run to stop, and what they do while there is nothing to save. Imports nothing that takes time."""

import contextlib
import os
import signal
from typing import NoReturn


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
        signal.signal(number, _nothing_to_save)


def is_program() -> bool:
    """Whether `leave_when_asked` was called: this is a command, and no notebook whose process has to live on."""
    return signal.getsignal(signal.SIGINT) is _nothing_to_save


def tell(text: str) -> None:
    """A line on stderr, in place of a bar that stands there; not by the logger, which a signal may have interrupted."""
    erased = "\r\x1b[K" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{erased}megajax: {text}\n".encode())


def leave(status: int, text: str) -> NoReturn:
    """Ends the program at once, with a line on stderr; the cursor, which a bar hides, is shown again."""
    tell(text)
    if os.isatty(1):
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?25h")
    # No exception: raised while JAX traces or compiles, it makes the interpreter crash on its way out.
    os._exit(status)


def _nothing_to_save(number: int, _frame) -> None:
    leave(0, f"received {signal.Signals(number).name}: there is nothing to save")
