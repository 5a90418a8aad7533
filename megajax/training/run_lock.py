"""One run at a time in a run directory."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import jax
import numpy as np
from jax.experimental import multihost_utils

logger = logging.getLogger("megajax")
LOCK = ".lock"


class RunLock:
    """The lock of a run directory, from `locked`."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._file: IO | None = None
        """On process 0."""

    def problem(self) -> str:
        """What has happened if the directory no longer holds the locked file, so that another run may be using it by
        now; empty on all processes but 0."""
        if self._file is None or _is_at(self._file, self._run_dir / LOCK):
            return ""
        return f"run_dir={self._run_dir} was removed, moved or replaced while this run trained in it"

    def check(self) -> None:
        """Raises ValueError, on all processes, if there is a problem. Every process must call it."""
        problem = self.problem()
        refusal = ValueError(
            f"{problem}, and may be that of another run by now: nothing more is written there, and the steps since the "
            "last checkpoint are lost"
        )
        raise_together(self._run_dir, refusal if problem else None)


@contextmanager
def locked(run_dir: Path) -> Generator[RunLock]:
    """Raises ValueError if another process is training in the run directory, or if it cannot be written.

    Process 0 locks for all processes. The system releases the lock when the process ends.
    """
    refusal = None
    lock = RunLock(run_dir)
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            try:
                lock._file = held.enter_context(_locked_file(run_dir))
            except ValueError as error:
                refusal = error
        raise_together(run_dir, refusal)
        yield lock


def raise_together(run_dir: Path, refusal: ValueError | None) -> None:
    """Raises on all processes if process 0 refuses the run, so that none waits for a process that has exited.

    refusal: None on all processes but 0.
    """
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(refusal is not None)):
        refusal = refusal or ValueError(f"run_dir={run_dir} was refused by process 0, which says why")
    if refusal is not None:
        raise refusal


def _is_at(file: IO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _locked_file(run_dir: Path) -> Generator[IO]:
    """Holds run_dir/.lock. Removes what it created if the run is refused before it writes its config."""
    path = run_dir / LOCK
    made = [file for file in (path, run_dir) if not file.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be written ({error.strerror}); use another --run_dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"run_dir={run_dir} is in use by another process; wait for it or use another --run_dir"
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): make sure that only one run uses it at a time", run_dir, error)
        try:
            yield file
        except ValueError:
            if _is_at(file, path) and not (run_dir / "config.json").exists():
                for leftover in made:
                    leftover.rmdir() if leftover == run_dir else leftover.unlink()
            raise
