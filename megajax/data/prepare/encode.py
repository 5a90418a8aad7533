"""Encodes batches of documents as blocks of tokens, in this process or in several, preserving their order."""

import collections
import dataclasses
import multiprocessing
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from megajax.data.indexed.dataset import token_dtype
from megajax.data.indexed.images import ImagePlace
from megajax.data.prepare.documents import Document, Reader
from megajax.data.prepare.read_input import Batch, read_file
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.data.worker_process import end_with_parent
from megajax.media.kinds import Kind

BATCHES_PER_WORKER = 4


@dataclasses.dataclass(frozen=True)
class Block:
    """Encoded documents of one key: tokens [sum(lengths)], lengths int32 of the sequences, sequences per document."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    num_text_bytes: int


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The result of a batch for one file: one block per key. skipped: a message per document that could not be read;
    images: of each document, if the reader reads them."""

    file: int
    blocks: list[Block]
    skipped: list[str]
    images: list[tuple[ImagePlace, ...]] = dataclasses.field(default_factory=list)
    sha256: str | None = None


class EncodedDocument(NamedTuple):
    keys: list[tuple[list[list[int]], int]]
    """For each key: the sequences of tokens, and the number of bytes of text."""
    images: tuple[ImagePlace, ...]


class Encoder:
    """Batch -> Encoded, one per file; runs in the worker processes."""

    def __init__(self, tokenizer: Tokenizer, reader: Reader, append_eod: bool):
        if append_eod and tokenizer.eod_id is None:
            raise ValueError("--append_eod: this tokenizer has no end-of-document token; use --no-append_eod")
        self.tokenizer = tokenizer
        self.reader = reader
        self.end = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.media_ids = {kind: media_id(tokenizer, kind, token) for kind, token in reader.media_tokens.items()}

    def __call__(self, batch: Batch) -> list[Encoded]:
        if batch.records is None:
            return [self._encode_file(number, path) for number, path in batch.files]
        encoded = []
        skipped = []
        for read, where in self.reader.documents(batch.files[0][1], batch.records, batch.first, batch.begin):
            try:
                encoded.append(self._encode(read(), where))
            except ValueError as error:  # from JSON, UTF-8, the template or the tokenizer
                skipped.append(str(error))
        skipped += [batch.problem] if batch.problem else []
        return [self._encoded(batch.files[0][0], encoded, skipped)]

    def _encode_file(self, number: int, path: str) -> Encoded:
        encoded = []
        skipped = []
        digest = None
        try:
            content, digest = read_file(path, self.reader)
            encoded.append(self._encode(Document(self.reader.file_texts(content, path)), path))
        except ValueError as error:
            skipped.append(str(error))
        return self._encoded(number, encoded, skipped, digest)

    def _encode(self, document: Document, where: str) -> EncodedDocument:
        is_conversation = self.reader.form == "conversations"
        encode = self.tokenizer.encode_template if is_conversation else self.tokenizer.encode
        keys = []
        for parts in document.texts:
            try:
                sequences = [encode(part) for part in parts]
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if not is_conversation:
                sequences = [ids for ids in sequences if ids]
            for kind, token in self.media_ids.items():
                _check_media(sequences, kind, token, document.kinds.count(kind), where)
            # a template may have written the end itself
            if sequences and not (is_conversation and sequences[-1][-1:] == self.end):
                sequences = [*sequences[:-1], [*sequences[-1], *self.end]]
            keys.append((sequences, sum(len(part.encode()) for part in parts)))
        return EncodedDocument(keys, document.images)

    def _encoded(
        self, file: int, documents: Sequence[EncodedDocument], skipped: list[str], digest: str | None = None
    ) -> Encoded:
        # a record is kept if one of its keys has text, so that document i of all keys comes from the same record
        kept = [document for document in documents if any(sequences for sequences, _ in document.keys)]
        blocks = [
            self._block(
                [document.keys[key][0] for document in kept], sum(document.keys[key][1] for document in documents)
            )
            for key in range(len(self.reader.json_keys))
        ]
        return Encoded(file, blocks, skipped, [document.images for document in kept], digest)

    def _block(self, documents: list[list[list[int]]], num_text_bytes: int) -> Block:
        parts = [np.array(ids, self.dtype) for document in documents for ids in document]
        return Block(
            np.concatenate(parts) if parts else np.zeros(0, self.dtype),
            np.array([len(part) for part in parts], np.int32),
            np.array([len(document) for document in documents], np.int64),
            num_text_bytes,
        )


def media_id(tokenizer: Tokenizer, kind: Kind, token: str) -> int:
    """Raises ValueError if the tokenizer does not write exactly one id for the token of a kind of media."""
    ids = tokenizer.encode_template(token)
    if len(ids) != 1:
        raise ValueError(
            f"--{kind.token}={token} is {len(ids)} tokens of this tokenizer; name one of its special tokens, such "
            "as <image> or <|image_pad|>"
        )
    return ids[0]


def _check_media(sequences: list[list[int]], kind: Kind, token: int, count: int, where: str) -> None:
    found = sum(ids.count(token) for ids in sequences)
    if found != count:
        raise ValueError(
            f"{where}: the chat template wrote {found} {kind.name} tokens for {count} {kind.plural}; use one that "
            f"writes the token once for each part of type {kind.name}"
        )


_of_worker: list[Encoder] = []  # the one of this worker process


def _start_worker(encoder: Encoder) -> None:
    end_with_parent()
    _of_worker.append(encoder)


def _run_worker(batch: Batch) -> list[Encoded]:
    return _of_worker[0](batch)


def encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, num_workers: int
) -> Generator[tuple[Batch, list[Encoded]]]:
    """Yields each batch with its result, in the order of the batches; with one worker, encodes in this process."""
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
