"""Megatron's indexed dataset: `PREFIX.bin` holds the tokens, `PREFIX.idx` the offset and length of each sequence.

Layout of the .idx, little-endian, n sequences and m document boundaries (m = documents + 1):

| bytes | content |
|---|---|
| 9, 8, 1 | `MMIDIDX\\0\\0`, version 1 (uint64), dtype code of the .bin (uint8) |
| 8, 8 | n, m (uint64) |
| 4 n | sequence lengths in tokens (int32) |
| 8 n | byte offsets of the sequences in the .bin (int64) |
| 8 m | document boundaries, in sequences, starting with 0 (int64) |
| n, optional | modes of the sequences (int8), written by multimodal tools; ignored here |

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import os
import shutil
import struct
import time
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from megajax.data.temporary import open_temporary, rename

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Offsets are computed from lengths in blocks of this many sequences, to keep the writer's memory constant.
WRITE_BLOCK = 1 << 20
# Sequences checked at a time when an index is opened: 10 million take 0.03 s.
CHECK_BLOCK = 1 << 20
# Between looks at the size of the .bin while it is read: a look takes 1 us, a read without one 0.7.
CHECK_SECONDS = 0.1
# A fingerprint reads this many blocks of this size from the .bin, 16 MiB in total.
FINGERPRINT_BLOCKS = 256
FINGERPRINT_BYTES = 1 << 16


def token_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron stores tokens in: uint16 for vocabularies below 65500, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def prefix_of(path: str | os.PathLike) -> str:
    """PREFIX of PREFIX.bin or PREFIX.idx; a prefix is its own."""
    return os.fspath(path).removesuffix(".bin").removesuffix(".idx")


class IndexedDataset:
    """Memory-mapped reader of `PREFIX.bin` and `PREFIX.idx`, opened by the prefix or one of these names.

    Attributes: `lengths` int32 [num_sequences], tokens per sequence; `document_indices` int64 [num_documents + 1],
    boundaries in sequences; `dtype` of the stored tokens. Raises ValueError, naming the file, if one is missing, has
    another format, or a size that does not match the index; `read` does if the tokens were cut off since. Pickles as
    its prefix.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = prefix_of(prefix)
        index_path = self.prefix + ".idx"
        token_path = self.prefix + ".bin"
        for path in (index_path, token_path):
            if not os.path.isfile(path):
                raise ValueError(
                    f"indexed dataset: file {path} does not exist; build it with python -m megajax.data.preprocess"
                )
        self.dtype, num_sequences, num_boundaries = _read_header(index_path)
        # plain arrays over the map: indexing an np.memmap costs several times more
        self._index = index = np.memmap(index_path, np.uint8, "r").view(np.ndarray)
        ends = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_boundaries])
        self.lengths = index[ends[0] : ends[1]].view(np.int32)
        self._offsets = index[ends[1] : ends[2]].view(np.int64)
        self.document_indices = index[ends[2] : ends[3]].view(np.int64)
        self._check_index()
        self._check_token_file(token_path)
        self._file = open(token_path, "rb")  # noqa: SIM115  kept open for its size
        self._next_check = 0.0
        # numpy cannot map an empty file
        empty = os.path.getsize(token_path) == 0
        self._tokens = np.zeros(0, np.uint8) if empty else np.memmap(self._file, np.uint8, "r").view(np.ndarray)

    def _check_index(self) -> None:
        """Checks that sequences and documents are contiguous, so that no read exceeds the file."""
        begin = boundary = 0
        for start in range(0, len(self), CHECK_BLOCK):
            lengths = self.lengths[start : start + CHECK_BLOCK]
            offsets = self._offsets[start : start + CHECK_BLOCK]
            ends = begin + np.cumsum(lengths.astype(np.int64) * self.dtype.itemsize)
            wrong = np.flatnonzero((lengths < 0) | (offsets != np.concatenate([[begin], ends[:-1]])))
            if len(wrong):
                self._refuse(f"sequence {start + wrong[0]} does not begin where the one before it ends")
            begin = int(ends[-1])
        for start in range(0, len(self.document_indices), CHECK_BLOCK):
            block = self.document_indices[start : start + CHECK_BLOCK]
            if block[0] < boundary or (np.diff(block) < 0).any() or (start == 0 and block[0] != 0):
                self._refuse("the document boundaries do not ascend from 0")
            boundary = int(block[-1])
        if boundary != len(self):
            self._refuse(f"it has {len(self)} sequences but its last document boundary is {boundary}")

    def _refuse(self, what: str) -> None:
        raise ValueError(f"indexed dataset: {self.prefix}.idx is damaged: {what}; copy or build it again")

    def _check_token_file(self, path: str) -> None:
        size = os.path.getsize(path)
        expected = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0
        if size != expected:
            raise ValueError(
                f"indexed dataset: {path} has {size} bytes, its index {self.prefix}.idx expects {expected}; "
                "the two belong to different builds or a copy was cut short: build or copy them again"
            )

    def __len__(self) -> int:
        """Number of sequences (equal to the number of documents unless documents were split into sentences)."""
        return len(self.lengths)

    def __reduce__(self):
        return type(self), (self.prefix,)

    def fingerprint(self) -> str:
        """SHA-256 of the whole .idx and of FINGERPRINT_BLOCKS blocks of the .bin, evenly spaced from its first byte to
        its last; of a .bin of 16 MiB or less that is all of it.

        In a larger one it detects changes within these blocks: any changed region of 1/255 of the file or more, and
        reordered documents, but rarely a single changed document (`megajax.data.preprocess verify` reads everything).
        Takes 0.02 s for cached blocks and 0.15 s for the .idx of 10 million documents.
        """
        size = len(self._tokens)
        last = max(size - FINGERPRINT_BYTES, 0)
        starts = [last * number // (FINGERPRINT_BLOCKS - 1) for number in range(FINGERPRINT_BLOCKS)]
        found = hashlib.sha256(self._index.data)
        end = 0
        for start in starts:
            block = self._tokens[max(start, end) : start + FINGERPRINT_BYTES]  # those of a small file overlap
            found.update(block.data)
            end = start + FINGERPRINT_BYTES
        return found.hexdigest()

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one sequence, `dtype` [length], as a view; length None: to the end."""
        available = int(self.lengths[sequence]) - offset
        length = available if length is None else length
        if not 0 <= length <= available or offset < 0:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) of sequence {sequence} in {self.prefix}.bin: "
                f"it has {offset + available} tokens"
            )
        begin = int(self._offsets[sequence]) + offset * self.dtype.itemsize
        if time.monotonic() >= self._next_check:
            self._check_size()
        return self._tokens[begin : begin + length * self.dtype.itemsize].view(self.dtype)

    def flat(self) -> np.ndarray:
        """The tokens of all sequences, one after another, `dtype` [tokens], as a view."""
        self._check_size()
        return self._tokens.view(self.dtype)

    def _check_size(self) -> None:
        """Raises ValueError if the tokens were cut off: reading beyond the end of a mapped file is a bus error."""
        size = os.fstat(self._file.fileno()).st_size
        if size < len(self._tokens):
            raise ValueError(
                f"data.paths: {self.prefix}.bin was cut to {size} of {len(self._tokens)} bytes while it was read; copy "
                "it again, as a new file"
            )
        self._next_check = time.monotonic() + CHECK_SECONDS


def _read_header(path: str) -> tuple[np.dtype, int, int]:
    """(token dtype, number of sequences, number of document boundaries), after checking the size of the file."""
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"indexed dataset: {path} is not a Megatron index (it does not start with MMIDIDX)")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"indexed dataset: {path} has version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise ValueError(f"indexed dataset: {path} has dtype code {code}; known codes are {sorted(DTYPES)}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    size = os.path.getsize(path)
    if num_boundaries < 1 or size not in (expected, expected + num_sequences):
        raise ValueError(
            f"indexed dataset: {path} has {size} bytes, its header ({num_sequences} sequences, {num_boundaries} "
            f"document boundaries) expects {expected}; a copy was cut short: copy or build it again"
        )
    return DTYPES[code], num_sequences, num_boundaries


class IndexedDatasetWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, byte for byte as Megatron does, in constant memory.

    A context manager: the two files appear, by rename, when the block ends without an exception. Lengths and
    boundaries are streamed to temporary files next to the result (12 bytes per sequence), not kept in lists.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"indexed dataset: dtype {self.dtype} cannot be stored; use one of {list(DTYPE_CODES)}")
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self.digest = hashlib.sha256()
        """Of the .bin."""
        self._num_bounded = 0

    def __enter__(self) -> "IndexedDatasetWriter":
        os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
        self._files = {part: open_temporary(f"{self.prefix}.{part}") for part in ("bin", "idx", "lengths", "documents")}
        self._files["documents"].write(struct.pack("<q", 0))
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self._write_index(self._files["idx"])
                for part in ("bin", "idx"):
                    rename(self._files[part], f"{self.prefix}.{part}")
        finally:
            for file in self._files.values():
                if os.path.exists(file.name):
                    os.remove(file.name)
                file.close()

    def add_document(self, sequences: Iterable[np.ndarray]) -> None:
        """Append one document of one or more sequences of tokens [length]; ids must fit the dtype."""
        lengths = []
        for sequence in sequences:
            self.add_tokens(_cast(np.asarray(sequence), self.dtype))
            lengths.append(len(sequence))
        self.add_index(np.array(lengths, np.int32), np.array([len(lengths)]))

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Appends tokens, of the file's dtype, to the .bin; `add_index` adds the sequences that they form."""
        content = tokens.tobytes()
        self._files["bin"].write(content)
        self.digest.update(content)
        self.num_tokens += len(tokens)

    def add_index(self, lengths: np.ndarray, sequences: np.ndarray) -> None:
        """Appends sequences and documents. lengths: tokens per sequence; sequences: sequences per document. One call
        need not give both for the same documents, as long as all have been given at the end."""
        self._files["lengths"].write(lengths.astype(np.int32).tobytes())
        self.num_sequences += len(lengths)
        ends = self._num_bounded + np.cumsum(sequences, dtype=np.int64)
        self._files["documents"].write(ends.tobytes())
        self._num_bounded = int(ends[-1]) if len(ends) else self._num_bounded
        self.num_documents += len(sequences)

    def _write_index(self, out: BinaryIO) -> None:
        lengths = self._files["lengths"]
        documents = self._files["documents"]
        out.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], self.num_sequences, self.num_documents + 1))
        lengths.seek(0)
        shutil.copyfileobj(lengths, out)
        lengths.seek(0)
        begin = 0
        while block := lengths.read(4 * WRITE_BLOCK):
            sizes = np.frombuffer(block, np.int32).astype(np.int64) * self.dtype.itemsize
            ends = begin + np.cumsum(sizes)
            out.write((ends - sizes).tobytes())
            begin = int(ends[-1])
        documents.seek(0)
        shutil.copyfileobj(documents, out)


def _cast(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if tokens.dtype == dtype or not tokens.size:
        return tokens.astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if tokens.min() < limits.min or tokens.max() > limits.max:
            raise ValueError(
                f"indexed dataset: token ids {tokens.min()} to {tokens.max()} do not fit {dtype}; "
                "use a wider dtype (token_dtype(vocab_size))"
            )
    return tokens.astype(dtype)
