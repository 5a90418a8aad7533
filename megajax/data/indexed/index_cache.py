"""Sample indices cached on disk: built once, then memory-mapped by all processes and later runs.

The key is a hash of everything the arrays depend on, so an entry is never stale. Its description holds the SHA-256 of
its files, compared on each use (about 1.5 GB/s); an entry that does not match is rebuilt. One process builds while
others that need the same entry wait and log it; no collective is pending meanwhile (Megatron builds inside one, and
large builds exceed its timeout). Files are synced before they are renamed, the description last, and every builder
writes the same bytes: on a file system without locks two simultaneous builders are harmless.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable
from typing import BinaryIO

import numpy as np

from megajax.data.temporary import open_temporary, rename
from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")
# Increase when a description, the meaning of a cached array, or how one is computed (packing, say) changes.
FORMAT = 3


def load_or_build(
    cache_dir: str | None, kind: str, description: dict, build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of `build()`, memory-mapped from `CACHE_DIR/KIND-HASH-NAME.npy`; without a cache_dir, in memory.

    description: JSON values that determine the arrays. If the directory cannot be written, logs a warning and keeps the
    arrays in memory.
    """
    if cache_dir is None:
        return build()
    text = json.dumps({"format": FORMAT, "kind": kind, **description}, sort_keys=True)
    stem = os.path.join(cache_dir, f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}")
    found = _load(stem, text)
    if found is not None:
        return found
    with _alone(stem):
        found = _load(stem, text)  # another process may have built it meanwhile
        if found is not None:
            return found
        if os.path.exists(stem + ".json"):
            logger.warning("data.cache_dir: %s.json or its arrays are damaged: rebuilding them", stem)
        with announced("building sample indices"):
            arrays = build()
        try:
            _store(arrays, stem, text)
        except OSError as error:
            logger.warning("data.cache_dir=%s cannot be written (%s): sample indices stay in memory", cache_dir, error)
            return arrays
    return _map(stem, arrays)


def content_hash(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes (about 1 GB/s)."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


@contextlib.contextmanager
def _alone(stem: str) -> Generator[None]:
    """Holds the lock of an entry, which the system releases if this process dies; does nothing without locks."""
    try:
        os.makedirs(os.path.dirname(stem), exist_ok=True)
        lock = open(stem + ".lock", "w")  # noqa: SIM115, closed below
    except OSError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to build %s", stem)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s.lock cannot be locked (%s): other processes may build the same indices", stem, error)
        yield


def _load(stem: str, text: str) -> dict[str, np.ndarray] | None:
    """The arrays of an entry, or None if it is missing or damaged."""
    try:
        with open(stem + ".json") as file:
            record = json.load(file)
        if record["description"] != json.loads(text):
            return None
        for name, sha256 in record["arrays"].items():
            if _sha256(f"{stem}-{name}.npy") != sha256:
                return None
        return _map(stem, record["arrays"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _map(stem: str, names: Iterable[str]) -> dict[str, np.ndarray]:
    return {name: np.load(f"{stem}-{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}


def _store(arrays: dict[str, np.ndarray], stem: str, text: str) -> None:
    hashes = {}
    for name, array in arrays.items():
        save = functools.partial(np.save, arr=array, allow_pickle=False)
        hashes[name] = _write(f"{stem}-{name}.npy", save)
    record = json.dumps({"description": json.loads(text), "arrays": hashes}, indent=1)
    _write(stem + ".json", lambda file: file.write(record.encode()))


def _write(path: str, write: Callable[[BinaryIO], object]) -> str:
    """-> SHA-256 of the file."""
    with open_temporary(path) as file:
        write(file)
        rename(file, path)
    return _sha256(path)
