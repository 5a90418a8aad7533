"""Files and folders that are being written, beside what they become by rename.

Their writer holds a lock on them, which the system frees with the process however it ends: who gets the lock of one
that another process has made knows that its writer is gone, and removes it. The names carry the machine, as some file
systems share no locks: those of other machines are left alone.
"""

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from typing import BinaryIO

logger = logging.getLogger("megajax")


def open_temporary(path: str) -> BinaryIO:
    """A new, empty file beside `path`, open for reading and writing: to be passed to `rename`, or removed by its
    `name`, before it is closed. Removes what writers of `path` have left that were killed."""
    _remove_abandoned(path)
    while True:
        file = open(_new_name(path), "x+b")  # noqa: SIM115, the caller closes
        if _claim(file.fileno(), file.name):
            return file
        file.close()


def rename(file: BinaryIO, path: str) -> None:
    """Makes a file of open_temporary the new `path`, when all of it is stored; raises OSError if it cannot be."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)


@contextlib.contextmanager
def temporary_folder(path: str) -> Iterator[str]:
    """A new, empty folder beside `path`; removed at the end unless it was renamed. Removes what writers of `path` have
    left that were killed."""
    _remove_abandoned(path)
    while True:
        name = _new_name(path)
        os.makedirs(name)
        descriptor = os.open(name, os.O_RDONLY)
        if _claim(descriptor, name):
            break
        os.close(descriptor)
    try:
        yield name
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(descriptor)


def _new_name(path: str) -> str:
    return f"{path}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


def _claim(descriptor: int, name: str) -> bool:
    """Locks what was just made; False if another process has removed it before it was locked."""
    with contextlib.suppress(OSError):  # no locks here: then nobody removes it either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.path.exists(name)


def _remove_abandoned(path: str) -> None:
    for found in glob.glob(f"{glob.escape(path)}.{glob.escape(socket.gethostname())}-*.tmp"):
        with contextlib.suppress(OSError):  # its writer lives, or has just finished
            is_folder = os.path.isdir(found)
            descriptor = os.open(found, os.O_RDONLY if is_folder else os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found) if is_folder else os.remove(found)
                logger.info("removed %s, left by a process that was killed", found)
            finally:
                os.close(descriptor)
