"""Writes reports of a run without ever ending or blocking the run."""

import io
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("megajax")
# Limit of the buffer while the disk is full; one line may exceed it, and later lines are lost.
MOST_WAITING_BYTES = 1 << 20


class BestEffort:
    """A context manager around a write: suppresses errors, and logs the first one until a write succeeds again."""

    def __init__(self, what: str):
        self._what = what
        self._failing = False

    def __enter__(self) -> "BestEffort":
        return self

    def __exit__(self, _, error: BaseException | None, __) -> bool:
        if error is None:
            if self._failing:
                logger.info("%s can be written again", self._what)
            self._failing = False
            return False
        if not isinstance(error, Exception):
            return False
        if not self._failing:
            logger.warning("%s cannot be written (%s); the run continues and retries", self._what, error)
        self._failing = True
        return True


class Appender:
    """Appends to a file; what cannot be written is kept for the next call, so that no line is truncated.

    path: opened for each call, so that nothing has to be closed and the file may be replaced; its folder is created if
    necessary. first: the beginning of the file.
    """

    def __init__(self, path: Path, first: bytes = b""):
        self._path = path
        self._waiting = first

    def append(self, piece: bytes) -> None:
        """Raises OSError if the file cannot be written; the piece is kept, up to MOST_WAITING_BYTES of them."""
        if len(self._waiting) < MOST_WAITING_BYTES:
            self._waiting += piece
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]


class _LossyStream(io.FileIO):
    """A file descriptor whose writes never raise. report: log failures."""

    def __init__(self, descriptor: int, name: str, report: bool):
        super().__init__(descriptor, "w", closefd=False)
        self._name = name
        self._report = report
        self._failing = False

    def write(self, data) -> int:
        try:
            written = super().write(data)
            self._failing = False
            return written
        except OSError as error:
            is_new = not self._failing
            self._failing = True
            if is_new and self._report:
                logger.warning("%s cannot be written (%s): output is lost, the run continues", self._name, error)
            return len(data)


def print_what_can_be_printed() -> None:
    """From now on a full disk or a closed pipe or terminal behind stdout or stderr neither ends the program nor changes
    its exit status. A failing stdout is reported on stderr; its output is lost."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is None:  # it was closed before the program started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it lives as long as the program
            continue
        buffer = io.BufferedWriter(_LossyStream(descriptor, name, report=name == "stdout"))
        options = {"encoding": old.encoding, "errors": old.errors, "line_buffering": old.line_buffering}
        setattr(sys, name, io.TextIOWrapper(buffer, **options))
