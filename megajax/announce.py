"""Reports what the program is doing while it takes long: a spinner in a terminal, elsewhere one line in the log."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger("megajax")
PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """what: the block does, such as "tokenizing 700 files". A block that ends within PATIENCE_SECONDS logs nothing."""
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
    """With the seconds so far; below the bar of a run if there is one, since both are on rich's own console."""
    import rich
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # A log that stderr is redirected to keeps its lines.
    options = {"transient": True, "redirect_stderr": sys.stderr.isatty()}
    progress = Progress(*columns, console=rich.get_console(), **options)
    progress.add_task(what, total=None)
    return progress
