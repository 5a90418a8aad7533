"""Reads the input of preprocess, text files and records, compressed or not, as batches of documents.

A batch is read by one process and encoded by another. Every file is hashed as it is read, and never held in memory as a
whole, unless it is a single document. Documents have a maximum size and files are decompressed in pieces: a small file
that decompresses to gigabytes takes no more memory than others.
"""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from megajax.data.indexed.images import ImagePlace
from megajax.data.prepare.image_records import MediaSource, conversation, find_file, place_of
from megajax.data.prepare.json_array import JsonArray
from megajax.data.prepare.sentences import split_sentences
from megajax.data.prepare.tar_samples import TarSample, tar_samples
from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.media.kinds import IMAGE, KINDS, Kind

# Size of a batch, the unit of work of a worker: this many bytes of lines, or of whole files.
BATCH_BYTES = 1 << 20
# The same where the images of every conversation are decoded, which takes far longer than its text.
IMAGE_BATCH_BYTES = 1 << 14
IMAGE_BATCH_SAMPLES = 32  # of a tar
FORMS = "documents", "sentences", "conversations"
# Limit of a document: a line of .jsonl or a text file, decompressed. Encoding takes about ten times as much memory.
MAX_DOCUMENT_BYTES = 1 << 27
# Bytes decompressed at a time: zstd expands them at most 32,768 times.
PACKED_BYTES = 1 << 10
MOST_NAMES = 20  # of fields or columns in a message


Record = bytes | dict | TarSample | None
Records = tuple[Record, ...]


class Document(NamedTuple):
    texts: list[list[str]]
    """For each key: the sequences."""
    images: tuple[ImagePlace, ...] = ()
    """Its media, of all kinds."""
    kinds: tuple[Kind, ...] = ()
    """Of each of them."""


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


@dataclasses.dataclass(frozen=True)
class Reader:
    """Batch -> its documents.

    Conversations have media of the kinds of which the template has a token. image_folder: of the paths in records;
    None: the folder of the record's file.
    """

    json_keys: tuple[str, ...] = ("text",)
    form: str = "documents"
    template: ChatTemplate | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    image_folder: str | None = None

    @property
    def media_tokens(self) -> dict[Kind, str]:
        found = self.template.media_tokens if self.template else {}
        return {kind: found[kind.name] for kind in KINDS if kind.name in found}

    @property
    def batch_bytes(self) -> int:
        return IMAGE_BATCH_BYTES if self.media_tokens else BATCH_BYTES

    def kind_of(self, path: str) -> str:
        """jsonl, json, parquet, tar or text."""
        name = path.removesuffix(".gz").removesuffix(".zst")
        if name.endswith(".json") and self.form == "conversations":
            return "json"
        if path.endswith(".tar") and self.media_tokens:
            return "tar"
        return "jsonl" if name.endswith(".jsonl") else "parquet" if path.endswith(".parquet") else "text"

    def word(self, path: str) -> str:
        """What a document of the file is called in messages."""
        return {"parquet": "row", "json": "record"}.get(self.kind_of(path), "line")

    def check(self, files: Sequence[str]) -> None:
        """Raises ValueError if this form cannot be read from one of the files."""
        if self.form not in FORMS:
            raise ValueError(f"form={self.form} is not known; use one of {FORMS}")
        if self.max_document_bytes < 1:
            raise ValueError(f"--max_document_bytes={self.max_document_bytes} must be at least 1")
        if len(set(self.json_keys)) != len(self.json_keys) or not self.json_keys:
            raise ValueError(f"--json_keys={list(self.json_keys)} must be distinct names, at least one")
        if self.form == "conversations" and len(self.json_keys) > 1:
            raise ValueError(f"--json_keys={list(self.json_keys)}: --conversations reads one key; name one")
        if self.media_tokens:
            self._check_media(files)
        plain = [path for path in files if self.kind_of(path) == "text"]
        if plain and (self.form == "conversations" or len(self.json_keys) > 1):
            what = "--conversations" if self.form == "conversations" else "--json_keys with several names"
            raise ValueError(f"{what} needs records, and {plain[0]} is plain text; name .jsonl or .parquet files")
        for suffix, package in ((".zst", "zstandard"), (".parquet", "pyarrow")):
            named = [path for path in files if path.endswith(suffix)]
            if named and importlib.util.find_spec(package) is None:
                raise ValueError(f"{named[0]} needs the package {package}; pip install 'megajax[data]'")

    def _check_media(self, files: Sequence[str]) -> None:
        wrong = [path for path in files if self.kind_of(path) in ("text", "parquet")]
        if wrong:
            raise ValueError(
                f"--{next(iter(self.media_tokens)).token}: {wrong[0]} is no .jsonl, .json or .tar; decompress a .tar "
                "first, whose images are read in place"
            )
        if IMAGE in self.media_tokens and importlib.util.find_spec("PIL") is None:
            raise ValueError("--image_token needs the package Pillow; pip install 'megajax[images]'")

    def documents(self, path: str, records: Records, first: int) -> Iterator[tuple[Callable[[], Document], str]]:
        """(function that returns the document or raises ValueError, location) of each of some records of a file. first:
        number of the first of them."""
        word = self.word(path)
        for i, record in enumerate(records, first):
            if not isinstance(record, bytes) or record.strip():
                where = f"{path} sample {record.key}" if isinstance(record, TarSample) else f"{path} {word} {i}"
                yield lambda record=record, where=where: self._document(record, path, where), where

    def file_texts(self, content: bytearray, path: str) -> list[list[str]]:
        return [self._sequences(_decode(content, path))]

    def too_long(self, where: str) -> ValueError:
        return ValueError(
            f"{where}: a document of more than {self.max_document_bytes:,} bytes; split it, or allow it "
            "with --max_document_bytes"
        )

    def _document(self, record: Any, path: str, where: str) -> Document:
        if record is None:
            raise self.too_long(where)
        if isinstance(record, bytes):
            text = _decode(record, where)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error})") from None
        if self.media_tokens:
            return self._with_media(record, path, where)
        if self.form == "conversations":
            messages = self._messages(record, where)
            return Document([self._spans(messages, record.get("tools"), where)])
        texts = []
        for key in self.json_keys:
            value = _field(record, key, where)
            if not isinstance(value, str):
                raise ValueError(f"{where}: the field {key!r} is no text; name another with --json_keys")
            text = _checked(value, where)
            if len(text) > self.max_document_bytes:  # of a row; lines are limited earlier
                raise self.too_long(where)
            texts.append(self._sequences(text))
        return Document(texts)

    def _sequences(self, text: str) -> list[str]:
        return split_sentences(text) if self.form == "sentences" else [text]

    def _with_media(self, record: Any, path: str, where: str) -> Document:
        try:
            kinds = tuple(self.media_tokens)
            beside: dict[Kind, list[MediaSource]] = {}
            if isinstance(record, TarSample):
                beside = {kind: record.media(kind) for kind in kinds}
                record = record.record(self.max_document_bytes)
            counts = {kind: len(sources) for kind, sources in beside.items()}
            messages, media = conversation(record, kinds, counts if any(counts.values()) else None)
            folder = os.path.dirname(path) if self.image_folder is None else self.image_folder
            following = {kind: iter(sources) for kind, sources in beside.items()}
            places = []
            for kind, name in media:
                source = next(following[kind]) if name is None else MediaSource(find_file(folder, name, kind))
                places.append(place_of(source, self.max_document_bytes, kind))
        except (ValueError, OSError) as error:
            raise ValueError(f"{where}: {error}") from None
        return Document(
            [self._spans(messages, record.get("tools"), where)], tuple(places), tuple(kind for kind, _ in media)
        )

    def _messages(self, record: Any, where: str) -> list[dict]:
        messages = _field(record, self.json_keys[0], where)
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        ):
            raise ValueError(
                f"{where}: the field {self.json_keys[0]!r} is no list of messages with roles; name another with "
                "--json_keys"
            )
        # a column has every field in every row, and null where a message has none
        return [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]

    def _spans(self, messages: list[dict], tools: Any, where: str) -> list[str]:
        if self.template is None:
            raise ValueError("form=conversations needs a chat template")
        try:
            spans = self.template.spans(messages, tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return [_checked(span, where) for span in spans]


def _field(record: Any, key: str, where: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object with the field {key!r}")
    if key not in record:
        raise ValueError(f"{where}: no field {key!r} among {shortened(list(record))}; use --json_keys")
    return record[key]


def shortened(names: Sequence[str]) -> str:
    """For a message: the first names of many."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(repr, names[:MOST_NAMES])) + more


def _decode(content: bytes | bytearray, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        location = where if " line " in where or " row " in where else f"{where} line {line}"
        raise ValueError(f"{location}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _checked(text: str, where: str) -> str:
    # JSON can spell half of a surrogate pair, which no encoding can store
    return _decode(text.encode("utf-8", "surrogatepass"), where)


class HashedFile(io.RawIOBase):
    """A file read from front to back that counts and hashes its bytes."""

    def __init__(self, path: str):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115, close() closes
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        self.num_bytes += count
        return count

    def finish(self) -> str:
        """Reads the rest of the file -> sha256 of the whole file."""
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
    with contextlib.closing(HashedFile(path)) as raw:
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


def expand(entries: Sequence[str], suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Files in the folders, with one of the suffixes, and files that match the patterns (including `**`), sorted per
    entry. Raises ValueError if there is none."""
    files = []
    for entry in entries:
        found = sorted(path for path in glob.glob(as_pattern(entry), recursive=True) if os.path.isfile(path))
        found = [path for path in found if path.endswith(suffixes)] if os.path.isdir(entry) else found
        if not found:
            raise ValueError(f"--input: no file {'in' if os.path.isdir(entry) else 'matches'} {entry}")
        files += found
    return files


def read_batches(files: Sequence[str], reader: Reader, digests: dict[int, str]) -> Generator[Batch]:
    """Batches of about BATCH_BYTES in the order of the documents. digests: filled with the sha256 of record files."""
    pending = []
    size = 0
    for number, path in enumerate(files):
        kind = reader.kind_of(path)
        if pending and (kind != "text" or size >= BATCH_BYTES):
            yield Batch(tuple(pending), num_bytes=size)
            pending = []
            size = 0
        if kind == "text":
            pending.append((number, path))
            size += os.path.getsize(path)
        else:
            batches = {"parquet": _row_batches, "tar": _tar_batches}.get(kind, _line_batches)
            yield from batches(number, path, reader, digests)
    if pending:
        yield Batch(tuple(pending), num_bytes=size)


def _line_batches(number: int, path: str, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    files = ((number, path),)
    problem = None
    lines = []
    size = 0
    first = 1
    reported = 0
    with contextlib.closing(HashedFile(path)) as raw:
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
            if not line or size >= reader.batch_bytes:
                yield Batch(files, tuple(lines), first, raw.num_bytes - reported, problem)
                first += len(lines)
                lines = []
                size = 0
                reported = raw.num_bytes
            if not line:
                break
            lines.append(line if is_whole else None)
            size += len(line)
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


def _tar_batches(number: int, path: str, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    """Without a hash: a tar is mostly images, and not read as a whole."""
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


def _row_batches(number: int, path: str, reader: Reader, digests: dict[int, str]) -> Iterator[Batch]:
    import pyarrow.parquet

    files = ((number, path),)
    first = 1
    size = os.path.getsize(path)
    try:
        # so that a column of a row group, which can be the whole file, is read in pieces without read-ahead
        with pyarrow.parquet.ParquetFile(path, buffer_size=BATCH_BYTES, pre_buffer=False) as file:
            wanted = (*reader.json_keys, *(("tools",) if reader.form == "conversations" else ()))
            columns = [name for name in wanted if name in file.schema_arrow.names]
            if missing := [key for key in reader.json_keys if key not in columns]:
                found = shortened(file.schema_arrow.names)
                raise ValueError(f"no column {missing[0]!r} among {found}; use --json_keys")
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                rows = max(1, min(1 << 16, facts.num_rows * BATCH_BYTES // max(1, facts.total_byte_size)))
                for block in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    share = size * block.num_rows // file.metadata.num_rows
                    yield Batch(files, tuple(block.to_pylist()), first, share)
                    first += block.num_rows
    except Exception as error:  # pyarrow raises many types
        location = path if first == 1 else f"{path} after row {first - 1}"
        yield Batch(files, (), first, problem=f"{location}: cannot be read ({error})")
    with contextlib.closing(HashedFile(path)) as raw:
        digests[number] = raw.finish()
