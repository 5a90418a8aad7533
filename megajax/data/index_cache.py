"""Sample indices kept on disk: built once, then memory-mapped by every process and every later run.

The key is a hash of what the arrays depend on, so an entry is never stale. One process builds, others that need the
same entry wait for it, and say so; no collective is under way meanwhile (Megatron builds inside one, and large builds
run into its timeout). Files appear by rename, the description last, and every builder writes the same bytes: where a
file system knows no locks two builders at once are harmless.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator

import numpy as np

from megajax.data.temporary import open_temporary, rename

logger = logging.getLogger("megajax")
# Raise when the meaning of a cached array changes.
FORMAT = 1


def load_or_build(
    cache_dir: str | None, kind: str, description: dict, build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of `build()`, memory-mapped from `CACHE_DIR/KIND-HASH-NAME.npy`; None builds in memory each time.

    description: JSON values that decide the arrays, and nothing else. An unwritable directory logs a warning and
    leaves the arrays in memory.
    """
    if cache_dir is None:
        return build()
    text = json.dumps({"format": FORMAT, "kind": kind, **description}, sort_keys=True)
    stem = os.path.join(cache_dir, f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}")
    if not os.path.exists(stem + ".json"):
        with _alone(stem):
            if not os.path.exists(stem + ".json"):
                arrays = build()
                try:
                    _store(arrays, stem, json.loads(text))
                except OSError as error:
                    logger.warning(
                        "data.cache_dir=%s cannot be written (%s): sample indices stay in memory", cache_dir, error
                    )
                    return arrays
    with open(stem + ".json") as file:
        names = json.load(file)["arrays"]
    return {name: np.load(f"{stem}-{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}


def content_hash(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes (about 1 GB/s)."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


@contextlib.contextmanager
def _alone(stem: str) -> Iterator[None]:
    """With the lock of an entry, which the system frees if its holder dies; without one where there are none."""
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
            logger.warning("%s.lock cannot be locked (%s): other processes may build the same", stem, error)
        yield


def _store(arrays: dict[str, np.ndarray], stem: str, description: dict) -> None:
    for name, array in arrays.items():
        _write(f"{stem}-{name}.npy", lambda file, array=array: np.save(file, array, allow_pickle=False))
    record = json.dumps({"description": description, "arrays": sorted(arrays)}, indent=1)
    _write(stem + ".json", lambda file: file.write(record.encode()))


def _write(path: str, write: Callable) -> None:
    with open_temporary(path) as file:
        write(file)
        rename(file, path)
