"""Announces slow phases: a spinner in a terminal, elsewhere one line in the log."""

import contextlib
import logging
import sys
import threading
from collections.abc import Generator

logger = logging.getLogger("megajax")
PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def announced(what: str) -> Generator[None]:
    """what: describes the block, such as "tokenizing 700 files". A block shorter than PATIENCE_SECONDS logs nothing."""
    if sys.stdout.isatty():
        with _spinner(what):
            yield
        return
    timer = threading.Timer(PATIENCE_SECONDS, logger.info, ["%s ...", what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _spinner(what: str):
    """A spinner with elapsed time, below the progress bar of a run: both use rich's global console."""
    import rich
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # If stderr is redirected to a file, its lines must go there.
    options = {"transient": True, "redirect_stderr": sys.stderr.isatty()}
    progress = Progress(*columns, console=rich.get_console(), **options)
    progress.add_task(what, total=None)
    return progress
