"""What the commands of this package have in common."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """A ValueError ends the process with status 2 and its message; libraries log only errors."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        yield
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
