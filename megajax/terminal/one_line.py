"""Messages in one line, and how a terminal shows them.

A save that fails appears as dozens of tracebacks in the logs of Orbax and TensorStore; and names of files, classes and
models come from strangers, who may put a line break, a colour or a cursor movement into them.
"""

import logging
import math
import re
import shutil
import sys
import time
from typing import TextIO

SAME_ERROR_SECONDS = 60.0
MOST_CHARACTERS = 500
LINE_LENGTH = 120  # of our source
# A command with its options and files, which is not broken, so that it can be copied.
_COMMAND = re.compile(r"\b(?:python|pip|megajax) \S+(?: \S*[=\[./-]\S*)*")
_GLUE = "\0"  # in place of its spaces


def in_one_line(error: BaseException) -> str:
    """Its type, and the first line of its message, of MOST_CHARACTERS at most."""
    return _cut(f"{type(error).__name__}: {str(error).strip()}")


def printable(text: str) -> str:
    r"""The text with escapes such as \n and \x1b for what a terminal would not show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_error(error: BaseException) -> None:
    """Its message as a line on stderr."""
    print(for_terminal(f"error: {printable(str(error))}", sys.stderr), file=sys.stderr)


def for_terminal(text: str, stream: TextIO, indent: int = 0) -> str:
    """The text with line breaks between words, if the stream is a terminal that is too narrow for it; commands stay
    whole. indent: of all lines but the first."""
    return wrapped(text, terminal_width(), indent) if stream.isatty() else text


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """As `for_terminal`, for a terminal of this width."""
    if len(text) <= width:
        return text
    commands = _COMMAND if max(map(len, _COMMAND.findall(text)), default=0) <= width - indent else None
    lines = []
    line = ""
    for piece in re.split(r"( +)", commands.sub(_glued, text) if commands else text):
        if line.strip() and piece.strip() and len(line) + len(piece) > width:
            lines.append(line.rstrip(" "))
            line = " " * indent
        line += piece
    return "\n".join([*lines, line]).replace(_GLUE, " ")


def _glued(command: re.Match) -> str:
    return command[0].replace(" ", _GLUE)


def reflowed(text: str, width: int) -> str:
    """A docstring for a terminal of this width: what was broken at LINE_LENGTH is broken there instead."""
    lines: list[str] = []
    previous = ""
    for line in text.splitlines():
        is_same_item = line.startswith(" ") == previous.startswith(" ") or line.startswith(" " * 8)
        if line.strip() and is_same_item and len(previous) + 1 + len(line.split()[0]) > LINE_LENGTH:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
        previous = line
    return "\n".join(wrapped(line, width, _column(line)) for line in lines)


def _column(line: str) -> int:
    """Where the explanation in a line such as "  chat  a conversation" begins; otherwise where the line does."""
    found = re.match(r" +\S+  +(?=\S)| *", line)
    return found.end() if found else 0


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
