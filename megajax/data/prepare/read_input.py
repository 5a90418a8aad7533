"""Reads the input of preprocess, text files and files of records, compressed or not, as batches.

A batch is read by one process and encoded by another. Every file is hashed as it is read, and never held in memory as a
whole, unless it is a single document. Documents have a maximum size and files are decompressed in pieces: a small file
that decompresses to gigabytes takes no more memory than others.
"""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import os
import sys
from collections.abc import Generator, Iterator, Sequence

from megajax.data.prepare.conversation_records import FIELDS, MEDIA_FIELDS, recognised, shortened
from megajax.data.prepare.documents import Reader, Records
from megajax.data.prepare.hugging_face_rows import rows_of
from megajax.data.prepare.json_array import JsonArray
from megajax.data.prepare.parts import Piece
from megajax.data.prepare.tar_samples import tar_samples

# Size of a batch, the unit of work of a worker: this many bytes of lines, or of whole files.
BATCH_BYTES = 1 << 20
# The same where the images of every conversation are decoded, which takes far longer than its text.
IMAGE_BATCH_BYTES = 1 << 14
IMAGE_BATCH_SAMPLES = 32  # of a tar
# Bytes decompressed at a time: zstd expands them at most 32,768 times.
PACKED_BYTES = 1 << 10


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents to encode: lines (bytes), rows (dict) or samples of one file, or whole files. `files`: (number,
    path)."""

    files: tuple[tuple[int, str], ...]
    records: Records | None = None
    """None in place of a line that is too long."""
    first: int = 1
    num_bytes: int = 0
    """Bytes of the input as stored, for the progress bar."""
    problem: str | None = None
    """Why the rest of the file could not be read."""
    begin: int = 0
    """The byte of the file from which records are counted."""


class HashedFile(io.RawIOBase):
    """A file, or a piece of it, read from front to back, that counts and hashes its bytes."""

    def __init__(self, piece: Piece):
        self._file = open(piece.path, "rb", buffering=0)  # noqa: SIM115, close() closes
        self._file.seek(piece.begin)
        self._left = sys.maxsize if piece.end is None else piece.end - piece.begin
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(memoryview(buffer)[: self._left])
        self.digest.update(memoryview(buffer)[:count])
        self.num_bytes += count
        self._left -= count
        return count

    def finish(self) -> str:
        """Reads the rest of the file, also behind the piece -> sha256 of the whole file."""
        self._left = sys.maxsize
        while self.read(BATCH_BYTES):
            pass
        return self.digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class ZstdFile(io.RawIOBase):
    """The content of a .zst file. Unlike zstandard's own reader it raises an error for a truncated file."""

    def __init__(self, file: io.BufferedIOBase):
        import zstandard

        self._file = file
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = None
        self._remaining = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._remaining or self._file.read(PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._ready = memoryview(self._frame.decompress(packed))
            self._remaining = b""
            if self._frame.eof:
                self._remaining = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _unpacked(path: str, raw: HashedFile) -> io.BufferedIOBase:
    file = io.BufferedReader(raw, BATCH_BYTES)
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(ZstdFile(file), BATCH_BYTES) if path.endswith(".zst") else file


def _damaged(path: str, error: Exception, after: str = "") -> str:
    return f"{path}{after}: cannot be read, copy it again ({type(error).__name__}: {error})"


def read_file(path: str, reader: Reader) -> tuple[bytearray, str]:
    """(content, sha256 of the file as stored)."""
    content = bytearray()
    with contextlib.closing(HashedFile(Piece(path))) as raw:
        file = _unpacked(path, raw)
        try:
            while len(content) <= reader.max_document_bytes and (piece := file.read(BATCH_BYTES)):
                content += piece
            digest = raw.finish()
        except Exception as error:  # every file type has its own errors
            raise ValueError(_damaged(path, error)) from None
    if len(content) > reader.max_document_bytes:
        raise reader.too_long(path)
    return content, digest


def as_pattern(entry: str) -> str:
    """A folder becomes the pattern of all files in it, at any depth, except hidden ones; a pattern stays as it is."""
    return os.path.join(glob.escape(entry), "**", "*") if os.path.isdir(entry) else entry


def expand(entries: Sequence[str], suffixes: tuple[str, ...] = ("",), option: str = "--input") -> list[str]:
    """Files in the folders, with one of the suffixes, and files that match the patterns (including `**`), sorted per
    entry. Raises ValueError if there is none. option: that has them."""
    files = []
    for entry in entries:
        found = sorted(path for path in glob.glob(as_pattern(entry), recursive=True) if os.path.isfile(path))
        found = [path for path in found if path.endswith(suffixes)] if os.path.isdir(entry) else found
        if not found:
            raise ValueError(f"{option}: no file {'in' if os.path.isdir(entry) else 'matches'} {entry}")
        files += found
    return files


def read_batches(files: Sequence[str], reader: Reader, digests: dict[int, str]) -> Generator[Batch]:
    """`read_pieces` of whole files."""
    return read_pieces([Piece(path) for path in files], reader, digests)


def read_pieces(pieces: Sequence[Piece], reader: Reader, digests: dict[int, str]) -> Generator[Batch]:
    """Batches of about BATCH_BYTES in the order of the documents. digests: filled with the sha256 of record files of
    which a piece is the beginning."""
    pending = []
    size = 0
    for number, piece in enumerate(pieces):
        path = piece.path
        kind = reader.kind_of(path)
        if pending and (kind != "text" or size >= BATCH_BYTES):
            yield Batch(tuple(pending), num_bytes=size)
            pending = []
            size = 0
        if kind == "text":
            pending.append((number, path))
            size += os.path.getsize(path)
        else:
            readers = {"dataset": _dataset_batches, "parquet": _row_batches, "tar": _tar_batches}
            yield from readers.get(kind, _line_batches)(number, piece, reader, digests)
    if pending:
        yield Batch(tuple(pending), num_bytes=size)


def _line_batches(number: int, piece: Piece, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    path = piece.path
    files = ((number, path),)
    batch_bytes = IMAGE_BATCH_BYTES if reader.media_tokens else BATCH_BYTES
    problem = None
    lines = []
    size = 0
    first = 1
    reported = 0
    with contextlib.closing(HashedFile(piece)) as raw:
        file = _unpacked(path, raw)
        if reader.kind_of(path) == "json":
            file = JsonArray(file)
        while True:
            line = b""
            is_whole = True
            try:
                line, is_whole = _read_line(file, reader.max_document_bytes)
            except Exception as error:  # every kind of file has its own errors
                problem = _damaged(path, error, f" after {reader.word(path)} {first + len(lines) - 1}")
            if not line or size >= batch_bytes:
                yield Batch(files, tuple(lines), first, raw.num_bytes - reported, problem, piece.begin)
                first += len(lines)
                lines = []
                size = 0
                reported = raw.num_bytes
            if not line:
                break
            lines.append(line if is_whole else None)
            size += len(line)
        if piece.begin == 0:
            digests[number] = raw.finish()


def _read_line(file: io.BufferedIOBase | JsonArray, max_bytes: int) -> tuple[bytes, bool]:
    """(line, True); b"" at the end of the file. For a longer line: (its beginning, False), skipping the rest."""
    line = file.readline(max_bytes + 1)
    if len(line) <= max_bytes:
        return line, True
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(BATCH_BYTES)
    return line[:1], False


def _tar_batches(number: int, piece: Piece, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    """Without a hash: a tar is mostly images, and not read as a whole."""
    path = piece.path
    files = ((number, path),)
    samples = []
    first = 1
    done = 0
    problem = None
    try:
        for sample in tar_samples(path):
            samples.append(sample)
            if len(samples) == IMAGE_BATCH_SAMPLES:
                end = sample.members[-1].offset
                yield Batch(files, tuple(samples), first, end - done)
                first += len(samples)
                samples = []
                done = end
    except Exception as error:  # tarfile raises others than its own
        problem = _damaged(path, error)
    yield Batch(files, tuple(samples), first, os.path.getsize(path) - done, problem)


def _row_batches(number: int, piece: Piece, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    """A row group begins at the byte where it would if all rows had the same size."""
    import pyarrow.parquet

    path = piece.path
    files = ((number, path),)
    first = 1
    size = os.path.getsize(path)
    end = size if piece.end is None else piece.end
    try:
        # so that a column of a row group, which can be the whole file, is read in pieces without read-ahead
        with pyarrow.parquet.ParquetFile(path, buffer_size=BATCH_BYTES, pre_buffer=False) as file:
            columns = _columns(file.schema_arrow.names, reader)
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                if not piece.begin <= size * (first - 1) // max(1, file.metadata.num_rows) < end:
                    first += facts.num_rows
                    continue
                rows = max(1, min(1 << 16, facts.num_rows * BATCH_BYTES // max(1, facts.total_byte_size)))
                for block in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    share = size * block.num_rows // file.metadata.num_rows
                    yield Batch(files, tuple(block.to_pylist()), first, share)
                    first += block.num_rows
    except Exception as error:  # pyarrow raises many types
        location = path if first == 1 else f"{path} after row {first - 1}"
        yield Batch(files, (), first, problem=f"{location}: cannot be read ({error})")
    if piece.begin == 0:
        with contextlib.closing(HashedFile(piece)) as raw:
            digests[number] = raw.finish()


def _dataset_batches(number: int, piece: Piece, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    """Without a hash: the rows are those of a commit, or of many files."""
    path = piece.path
    files = ((number, path),)
    rows = rows_of(path)
    try:
        columns = _columns(rows.columns(), reader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    first = 1
    try:
        for records in rows.batches(columns):
            yield Batch(files, tuple(records), first)
            first += len(records)
    except Exception as error:  # of the network, and of every kind of file
        yield Batch(files, (), first, problem=f"{path} after row {first - 1}: cannot be read ({error})")


def _columns(names: list[str], reader: Reader) -> list[str]:
    """Those that are read, of a file with these. Raises ValueError if one is missing."""
    if reader.recognises_forms:
        recognised(dict.fromkeys(names, True))
        return [name for name in names if name in (*FIELDS, *MEDIA_FIELDS)]
    if missing := [key for key in reader.json_keys if key not in names]:
        raise ValueError(f"no column {missing[0]!r} among {shortened(names)}; use --json_keys")
    wanted = (*reader.json_keys, *(("tools",) if reader.form == "conversations" else ()))
    return [name for name in wanted if name in names]
