"""A progress bar for work that is counted in bytes."""

import contextlib
from collections.abc import Callable, Generator


@contextlib.contextmanager
def progress_bar(what: str) -> Generator[Callable[[int, int], None]]:
    """advance(bytes that are done, bytes in all), shown on a terminal alone."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, advance=done, total=total)

        yield advance
