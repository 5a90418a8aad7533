"""Temporary files and folders, next to their final path, to be renamed when complete.

The writer holds a lock on them, which the system releases when the process ends. A process that can lock a temporary
file of another one knows that its writer is gone, and removes it. Names contain the host name, because some file
systems
do not share locks: those of other hosts are left alone.
"""

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Generator
from typing import BinaryIO

from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")


def open_temporary(path: str) -> BinaryIO:
    """A new, empty file next to `path`, open for reading and writing; pass it to `rename` or remove it by its `name`
    before closing it. Removes leftovers of killed writers of `path`."""
    _remove_abandoned(path)
    while True:
        file = open(_new_name(path), "x+b")  # noqa: SIM115, the caller closes
        if _claim(file.fileno(), file.name):
            return file
        file.close()


def rename(file: BinaryIO, path: str) -> None:
    """Syncs a file of open_temporary and renames it to `path`; raises OSError if that fails."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)


@contextlib.contextmanager
def temporary_folder(path: str) -> Generator[str]:
    """A new, empty folder next to `path`; removed at the end unless it was renamed. Removes leftovers of killed writers
    of `path`."""
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


def build_once(folder: str, build: Callable[[str], None], what: str) -> None:
    """Makes `folder` with `build(temporary folder)` unless it exists. A second process on the machine waits for the
    first. what: is prepared, for messages."""
    if os.path.isdir(folder):
        return
    os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        with announced(f"waiting for another process that prepares {what}"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system if this process dies
        if os.path.isdir(folder):
            return
        with temporary_folder(folder) as temporary:
            build(temporary)
            try:
                os.rename(temporary, folder)
            except OSError:
                # another machine on the same file system was faster
                if not os.path.isdir(folder):
                    raise


def _new_name(path: str) -> str:
    return f"{path}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


def _claim(descriptor: int, name: str) -> bool:
    """Locks a new file or folder; False if another process removed it before it was locked."""
    with contextlib.suppress(OSError):  # no locks here: then nobody removes it either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.path.exists(name)


def _remove_abandoned(path: str) -> None:
    for found in glob.glob(f"{glob.escape(path)}.{glob.escape(socket.gethostname())}-*.tmp"):
        with contextlib.suppress(OSError):  # its writer is alive, or has just finished
            is_folder = os.path.isdir(found)
            descriptor = os.open(found, os.O_RDONLY if is_folder else os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found) if is_folder else os.remove(found)
                logger.info("removed %s, left by a process that was killed", found)
            finally:
                os.close(descriptor)
