"""Sample indices kept on disk: built once, then memory-mapped by every process and every later run.

The key is a hash of what the arrays depend on, so an entry is never stale. Files appear by rename, the description
last, and every process that builds an entry writes the same bytes: two builders at once are harmless, and no
process waits for another (Megatron builds inside a collective, and large builds run into its timeout).
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable

import numpy as np

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
        arrays = build()
        try:
            os.makedirs(cache_dir, exist_ok=True)
            for name, array in arrays.items():
                _write(f"{stem}-{name}.npy", lambda file, array=array: np.save(file, array, allow_pickle=False))
            record = json.dumps({"description": json.loads(text), "arrays": sorted(arrays)}, indent=1)
            _write(stem + ".json", lambda file: file.write(record.encode()))
        except OSError as error:
            logger.warning("data.cache_dir=%s cannot be written (%s): sample indices stay in memory", cache_dir, error)
            return arrays
    with open(stem + ".json") as file:
        names = json.load(file)["arrays"]
    return {name: np.load(f"{stem}-{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}


def content_hash(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes (about 1 GB/s)."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _write(path: str, write: Callable) -> None:
    temporary = f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    with open(temporary, "xb") as file:
        write(file)
    os.replace(temporary, path)
