"""Text to tokens: python -m megajax.data.preprocess --input FILES --output_prefix P --tokenizer T

Reads .jsonl (one document a line, field --json_key) and any other file as one document; either may be .gz.
Writes P.bin and P.idx (Megatron's indexed dataset) and P.meta.json: tokenizer, counts, sha256 of P.bin.

The output does not depend on --workers: batches of documents go out in order, come back in order, and at most
a few a worker are under way, so memory is constant.
"""

import argparse
import collections
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from megajax.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megajax.data.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("megajax")
# A batch is what one worker gets at once: this many bytes of lines, or of whole files.
BATCH_BYTES = 1 << 20
BATCHES_PER_WORKER = 4


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents to encode: whole files, or lines of one .jsonl file."""

    files: tuple[str, ...]
    lines: tuple[bytes, ...] | None = None
    first_line: int = 0
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Encoded:
    """tokens of all documents [sum(lengths)]; skipped: one message a document that could not be read."""

    tokens: np.ndarray
    lengths: list[int]
    num_text_bytes: int
    skipped: list[str]


class Encoder:
    """Batch -> Encoded; what a worker process runs."""

    def __init__(self, tokenizer: Tokenizer, json_key: str, append_eod: bool):
        if append_eod and tokenizer.eod_id is None:
            raise ValueError("--append_eod: this tokenizer has no end-of-document token; use --no-append_eod")
        self.tokenizer, self.json_key = tokenizer, json_key
        self.end = [tokenizer.eod_id] if append_eod else []
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, batch: Batch) -> Encoded:
        parts, lengths, skipped, num_text_bytes = [], [], [], 0
        for read in self._documents(batch):
            try:
                text = read()
                ids = self.tokenizer.encode(text)
            except ValueError as error:  # of JSON, of UTF-8, of the tokenizer
                skipped.append(str(error))
                continue
            if ids:
                parts.append(np.array(ids + self.end, self.dtype))
                lengths.append(len(ids) + len(self.end))
            num_text_bytes += len(text.encode())
        return Encoded(np.concatenate(parts) if parts else np.zeros(0, self.dtype), lengths, num_text_bytes, skipped)

    def _documents(self, batch: Batch) -> Iterator[Callable[[], str]]:
        if batch.lines is None:
            for path in batch.files:
                yield lambda path=path: _decode(_read_file(path), path)
            return
        for number, line in enumerate(batch.lines, batch.first_line):
            if line.strip():
                yield lambda line=line, where=f"{batch.files[0]} line {number}": self._json_text(line, where)

    def _json_text(self, line: bytes, where: str) -> str:
        text = _decode(line, where)
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(self.json_key), str):
            raise ValueError(f"{where}: no text field {self.json_key!r}; name it with --json_key")
        # JSON can spell half of a surrogate pair, which no encoding can store
        return _decode(record[self.json_key].encode("utf-8", "surrogatepass"), where)


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = where if " line " in where else f"{where} line {line}"
        raise ValueError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _open(path: str):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _read_file(path: str) -> bytes:
    with _open(path) as file:
        return file.read()


def expand(patterns: Sequence[str]) -> list[str]:
    """Files that the patterns name (`**` too), each pattern's sorted; ValueError if one matches none."""
    files = []
    for pattern in patterns:
        found = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        if not found:
            raise ValueError(f"--input: no file matches {pattern}")
        files += found
    return files


def _batches(files: Sequence[str]) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES in the order of the documents."""
    pending, size = [], 0
    for path in files:
        if path.endswith((".jsonl", ".jsonl.gz")):
            if pending:
                yield Batch(tuple(pending), num_bytes=size)
                pending, size = [], 0
            yield from _line_batches(path)
            continue
        pending.append(path)
        size += os.path.getsize(path)
        if size >= BATCH_BYTES:
            yield Batch(tuple(pending), num_bytes=size)
            pending, size = [], 0
    if pending:
        yield Batch(tuple(pending), num_bytes=size)


def _line_batches(path: str) -> Iterator[Batch]:
    # progress counts bytes of the file as it lies on disk; the compressed position is not worth the trouble
    scale = 0 if path.endswith(".gz") else 1
    lines, size, first = [], 0, 1
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            lines.append(line)
            size += len(line)
            if size >= BATCH_BYTES:
                yield Batch((path,), tuple(lines), first, size * scale)
                lines, size, first = [], 0, number + 1
    if lines:
        yield Batch((path,), tuple(lines), first, size * scale)


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _run_worker(batch: Batch) -> Encoded:
    return _worker_encoder(batch)


def _encode_in_order(batches: Iterable[Batch], encoder: Encoder, num_workers: int) -> Iterator[tuple[Batch, Encoded]]:
    if num_workers <= 1:
        for batch in batches:
            yield batch, encoder(batch)
        return
    # spawn: the caller may hold threads (JAX, Grain) that a fork would break
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (encoder,)) as pool:
        pending = collections.deque()
        try:
            for batch in batches:
                pending.append((batch, pool.submit(_run_worker, batch)))
                if len(pending) >= BATCHES_PER_WORKER * num_workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def preprocess(
    files: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    tokenizer_spec: str,
    *,
    json_key: str = "text",
    append_eod: bool = True,
    num_workers: int = 1,
    on_error: str = "raise",
    progress: Callable[[int], None] | None = None,
) -> dict:
    """Encodes `files` in the order given into an indexed dataset; returns what P.meta.json holds.

    on_error: "raise" stops at the first document that cannot be read (ValueError with file and line); "skip" leaves
    such documents out, logs and counts them. Empty documents are left out. progress: called with bytes of input done.
    """
    encoder = Encoder(tokenizer, json_key, append_eod)
    num_text_bytes = num_skipped = 0
    digest = hashlib.sha256()
    with (
        IndexedDatasetWriter(output_prefix, encoder.dtype) as writer,
        contextlib.closing(_encode_in_order(_batches(files), encoder, num_workers)) as results,
    ):
        for batch, encoded in results:
            for message in encoded.skipped:
                if on_error == "raise":
                    raise ValueError(f"{message}; repair it or pass --on_error=skip")
                logger.warning("skipped: %s", message)
            num_skipped += len(encoded.skipped)
            num_text_bytes += encoded.num_text_bytes
            digest.update(encoded.tokens.tobytes())
            for tokens in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]) if encoded.lengths else ():
                writer.add_document([tokens])
            if progress is not None:
                progress(batch.num_bytes)
    meta = {
        "tokenizer": tokenizer_spec,
        "tokenizer_identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "append_eod": append_eod,
        "num_documents": writer.num_documents,
        "num_tokens": writer.num_tokens,
        "num_bytes": num_text_bytes,
        "num_skipped": num_skipped,
        "dtype": str(encoder.dtype),
        "sha256": digest.hexdigest(),
    }
    _write_meta(output_prefix, meta)
    return meta


def _write_meta(prefix: str, meta: dict) -> None:
    temporary = f"{prefix}.meta.json.{uuid.uuid4().hex[:8]}.tmp"
    with open(temporary, "w") as file:
        json.dump(meta, file, indent=1)
        file.write("\n")
    os.replace(temporary, prefix + ".meta.json")


def read_meta(prefix: str) -> dict | None:
    """P.meta.json, or None for data of other tools."""
    if not os.path.exists(prefix + ".meta.json"):
        return None
    with open(prefix + ".meta.json") as file:
        return json.load(file)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megajax.data.preprocess", description=__doc__.partition("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, help="files or patterns: .jsonl, or text files")
    parser.add_argument("--output_prefix", required=True, help="P of P.bin, P.idx, P.meta.json")
    parser.add_argument("--tokenizer", required=True, help="bytes, null:VOCAB, PATH.model or PATH/tokenizer.json")
    parser.add_argument("--json_key", default="text", help="field of a .jsonl line that holds the text")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument(
        "--append_eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the end-of-document token (default: yes)",
    )
    parser.add_argument("--on_error", choices=("raise", "skip"), default="raise", help="documents that are unreadable")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = _parse(arguments)
    try:
        files = expand(flags.input)
        tokenizer = load_tokenizer(flags.tokenizer)
        with ProgressBar(sum(os.path.getsize(path) for path in files)) as advance:
            meta = preprocess(
                files,
                flags.output_prefix,
                tokenizer,
                flags.tokenizer,
                json_key=flags.json_key,
                append_eod=flags.append_eod,
                num_workers=flags.workers,
                on_error=flags.on_error,
                progress=advance,
            )
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(
        f"{flags.output_prefix}: {meta['num_documents']:,} documents, {meta['num_tokens']:,} tokens ({meta['dtype']}), "
        f"{meta['num_bytes']:,} bytes of text, {meta['num_skipped']} skipped"
    )


class ProgressBar:
    """Yields a function that takes bytes done; draws only on a terminal."""

    def __init__(self, total: int):
        self.total, self.bar = total, None

    def __enter__(self) -> Callable[[int], None] | None:
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task("tokens", total=self.total)
        return lambda num_bytes: self.bar.advance(task, num_bytes)

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()


if __name__ == "__main__":
    main()
