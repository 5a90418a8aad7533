"""Messages in one line.

A save that fails appears as dozens of tracebacks in the logs of Orbax and TensorStore; and names of files, classes and
models come from strangers, who may put a line break, a colour or a cursor movement into them.
"""

import logging
import math
import sys
import time

SAME_ERROR_SECONDS = 60.0
MOST_CHARACTERS = 500


def in_one_line(error: BaseException) -> str:
    """Its type, and the first line of its message, of MOST_CHARACTERS at most."""
    return _cut(f"{type(error).__name__}: {str(error).strip()}")


def printable(text: str) -> str:
    r"""The text with escapes such as \n and \x1b for what a terminal would not show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(text: str) -> str:
    (line, *_) = text.splitlines() or [""]
    return line[:MOST_CHARACTERS] + "..." * (len(line) > MOST_CHARACTERS)


def shorten_library_errors() -> None:
    """From now on libraries log an error in one line, without its traceback, and one from the same place in the code
    not again within SAME_ERROR_SECONDS. What they raise is not affected."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_SHORTENED)
    sys.unraisablehook = _log_unraisable


class _Shortened(logging.Filter):
    def __init__(self):
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        place = record.pathname, record.lineno
        if now - self._last.get(place, -math.inf) < SAME_ERROR_SECONDS:
            return False
        self._last[place] = now
        record.msg = _cut(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            record.msg += f" ({in_one_line(record.exc_info[1])})"
        record.args = ()
        record.exc_info = None
        return True


_SHORTENED = _Shortened()


def _log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """A sys.unraisablehook: TensorStore calls it for each array that it fails to write."""
    error = unraisable.exc_value or unraisable.exc_type()
    logging.getLogger("absl").error("an error that nothing can catch", exc_info=(type(error), error, None))
