"""Signals that ask a run to stop, and their handling while there is nothing to save. Has no slow imports."""

import contextlib
import os
import signal
from typing import NoReturn

from megajax.terminal.one_line import terminal_width, wrapped


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a run to stop; SIGHUP (lost terminal) only if it is not ignored, as under nohup."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return numbers if is_ignored else [*numbers, signal.SIGHUP]


def leave_when_asked() -> None:
    """From now on a stop signal ends the program at once with exit status 0, unless another handler replaces this one.

    Other handlers: StopRequest during training, a supervisor, and JAX, which handles SIGTERM with several processes.
    """
    for number in stop_signals():
        signal.signal(number, _nothing_to_save)


def leave_when_interrupted() -> None:
    """From now on ctrl-C ends the program at once with exit status 130, unless another handler replaces this one.

    KeyboardInterrupt would not: JAX drops it, or crashes, if it is raised while a function is traced or compiled.
    """
    signal.signal(signal.SIGINT, _interrupted)


def is_program() -> bool:
    """Whether `leave_when_asked` was called: this is a command, not a notebook whose process must survive."""
    return signal.getsignal(signal.SIGINT) is _nothing_to_save


def tell(text: str) -> None:
    """Prints a message on stderr, overwriting a progress bar; without the logger, which a signal may interrupt."""
    text = f"megajax: {text}"
    if os.isatty(2):
        text = "\r\x1b[K" + wrapped(text, terminal_width())
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def leave(status: int, text: str) -> NoReturn:
    """Ends the program at once with a line on stderr, and shows the cursor that a progress bar has hidden."""
    tell(text)
    if os.isatty(1):
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?25h")
    # Not an exception: raised while JAX traces or compiles, it crashes the interpreter at exit.
    os._exit(status)


def _interrupted(_number: int, _frame) -> None:
    leave(130, "interrupted")


def _nothing_to_save(number: int, _frame) -> None:
    leave(0, f"received {signal.Signals(number).name}: there is nothing to save")
