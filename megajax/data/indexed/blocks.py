"""A matrix on disk that is computed block by block, with a digest of each block: a build that was killed goes on.

| bytes | content |
|---|---|
| a multiple of 4096 | JSON in one padded line: `rows`, `columns`, `dtype`, `block_rows`; `facts` of the writer |
| 32 a block | SHA-256 of the rows of the block; zeros: not computed yet |
| the rest | the rows, little-endian |
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")
PAGE = 4096
DIGEST_BYTES = 32
REBUILD = "build it again with megajax retrieve build"


class BlockFile:
    """Memory-mapped reader. A block is compared with its digest when one of its rows is first read.

    Attributes: `facts`, JSON values of the writer; `rows`, their number. Raises ValueError, naming the file, if it does
    not exist or is damaged.
    """

    def __init__(self, path: str):
        self.path = path
        if not os.path.isfile(path):
            raise ValueError(f"retrieval: file {path} does not exist; {REBUILD}")
        header, begin = _read_header(path)
        if header is None:
            self._refuse("it has no header")
        self.facts: dict[str, Any] = header["facts"]
        self.rows: int = header["rows"]
        self._block_rows: int = header["block_rows"]
        shape = self.rows, header["columns"]
        data = begin + DIGEST_BYTES * _num_blocks(header)
        expected = data + shape[0] * shape[1] * np.dtype(header["dtype"]).itemsize
        if os.path.getsize(path) != expected:
            self._refuse(f"it has {os.path.getsize(path)} bytes, its header expects {expected}")
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._digests = content[begin:data].reshape(-1, DIGEST_BYTES)
        self._array = content[data:].view(header["dtype"]).reshape(shape)
        self._intact: set[int] = set()

    def fingerprint(self) -> str:
        """SHA-256 of header and digests, which determine the rows."""
        return hashlib.sha256(json.dumps(self.facts).encode() + self._digests.tobytes()).hexdigest()

    def read(self, rows: np.ndarray) -> np.ndarray:
        """rows: int [n] -> [n, columns]."""
        for block in set(np.unique(rows // self._block_rows).tolist()) - self._intact:
            self._check(block)
        return self._array[rows]

    def array(self, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end), as a view."""
        for block in set(range(begin // self._block_rows, -(-end // self._block_rows))) - self._intact:
            self._check(block)
        return self._array[begin:end]

    def _check(self, block: int) -> None:
        begin = block * self._block_rows
        end = min(begin + self._block_rows, self.rows)
        if _digest(self._array[begin:end]) != self._digests[block].tobytes():
            self._refuse(f"rows {begin} to {end} do not match their digest")
        self._intact.add(block)

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"retrieval: {self.path} is damaged: {what}; {REBUILD}")


def write_blocks(
    path: str,
    facts: dict[str, Any],
    shape: tuple[int, int],
    dtype: str,
    compute: Callable[[int, int], np.ndarray],
    block_rows: int,
) -> None:
    """Writes `path`, unless it is there with the same facts and all its blocks are intact.

    compute: (begin, end) -> rows [end - begin, columns]. A build that is killed leaves `path.partial`; the next one
    with the same facts computes the blocks that it lacks. A second process on the machine waits for the first.
    """
    header = {"rows": shape[0], "columns": shape[1], "dtype": dtype, "block_rows": block_rows, "facts": facts}
    if _is_intact(path, header):
        return
    partial = path + ".partial"
    with open(path + ".lock", "w") as lock:
        with announced(f"waiting for another process that builds {path}"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system if this process dies
        if _is_intact(path, header):
            return
        if os.path.isfile(path) and _read_header(path)[0] == header:
            os.replace(path, partial)  # its damaged blocks are computed again
        with _open_partial(partial, header) as file:
            _fill(file, header, compute)
            os.fsync(file.fileno())
        os.replace(partial, path)


def _is_intact(path: str, header: dict[str, Any]) -> bool:
    if not os.path.isfile(path) or _read_header(path)[0] != header:
        return False
    try:
        BlockFile(path).array(0, header["rows"])
    except ValueError:
        return False
    return True


def _fill(file, header: dict[str, Any], compute: Callable[[int, int], np.ndarray]) -> None:
    _, digests_at = _read_header(file.name)
    row_bytes = header["columns"] * np.dtype(header["dtype"]).itemsize
    rows_at = digests_at + DIGEST_BYTES * _num_blocks(header)
    file.truncate(rows_at + header["rows"] * row_bytes)
    for block in range(_num_blocks(header)):
        begin = block * header["block_rows"]
        end = min(begin + header["block_rows"], header["rows"])
        file.seek(digests_at + DIGEST_BYTES * block)
        digest = file.read(DIGEST_BYTES)
        file.seek(rows_at + begin * row_bytes)
        if hashlib.sha256(file.read((end - begin) * row_bytes)).digest() == digest:
            continue
        rows = np.ascontiguousarray(compute(begin, end), header["dtype"])
        file.seek(rows_at + begin * row_bytes)
        file.write(rows.data)
        file.seek(digests_at + DIGEST_BYTES * block)
        file.write(_digest(rows))
        file.flush()
        logger.info("%s: block %d of %d", file.name.removesuffix(".partial"), block + 1, _num_blocks(header))


def _open_partial(path: str, header: dict[str, Any]):
    """Keeps what a killed build of the same file has written."""
    if os.path.isfile(path) and _read_header(path)[0] == header:
        return open(path, "r+b")  # noqa: SIM115  the caller closes
    file = open(path, "w+b")  # noqa: SIM115
    text = json.dumps(header).encode()
    file.write(text.ljust(-(-(len(text) + 1) // PAGE) * PAGE - 1) + b"\n")
    file.flush()
    return file


def _read_header(path: str) -> tuple[dict[str, Any] | None, int]:
    """-> (the header, or None if there is none; bytes up to its end)."""
    with open(path, "rb") as file:
        line = file.readline(PAGE * PAGE)
    try:
        header = json.loads(line)
    except ValueError:
        return None, 0
    known = isinstance(header, dict) and {"rows", "columns", "dtype", "block_rows", "facts"} <= header.keys()
    return (header if known else None), len(line)


def _num_blocks(header: dict[str, Any]) -> int:
    return -(-header["rows"] // header["block_rows"])


def _digest(rows: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(rows).data).digest()
