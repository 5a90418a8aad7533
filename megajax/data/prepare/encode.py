"""Encodes batches of documents as blocks of tokens, in this process or in several, preserving their order."""

import collections
import dataclasses
import multiprocessing
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from megajax.data.indexed.dataset import token_dtype
from megajax.data.prepare.read_input import Batch, Reader, read_file
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.data.worker_process import end_with_parent

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
    """The result of a batch for one file: one block per key. skipped: a message per document that could not be read."""

    file: int
    blocks: list[Block]
    skipped: list[str]
    sha256: str | None = None


class Encoder:
    """Batch -> Encoded, one per file; runs in the worker processes."""

    def __init__(self, tokenizer: Tokenizer, reader: Reader, append_eod: bool):
        if append_eod and tokenizer.eod_id is None:
            raise ValueError("--append_eod: this tokenizer has no end-of-document token; use --no-append_eod")
        self.tokenizer = tokenizer
        self.reader = reader
        self.end = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, batch: Batch) -> list[Encoded]:
        if batch.records is None:
            return [self._encode_file(number, path) for number, path in batch.files]
        encoded = []
        skipped = []
        for read, where in self.reader.documents(batch.files[0][1], batch.records, batch.first):
            try:
                encoded.append(self._encode(read(), where))
            except ValueError as error:  # from JSON, UTF-8, the template or the tokenizer
                skipped.append(str(error))
        skipped += [batch.problem] if batch.problem else []
        return [Encoded(batch.files[0][0], self._blocks(encoded), skipped)]

    def _encode_file(self, number: int, path: str) -> Encoded:
        encoded = []
        skipped = []
        digest = None
        try:
            content, digest = read_file(path, self.reader)
            encoded.append(self._encode(self.reader.file_texts(content, path), path))
        except ValueError as error:
            skipped.append(str(error))
        return Encoded(number, self._blocks(encoded), skipped, digest)

    def _encode(self, texts: list[list[str]], where: str) -> list[tuple[list[list[int]], int]]:
        """For each key: the sequences of tokens, and the number of bytes of text."""
        is_conversation = self.reader.form == "conversations"
        encode = self.tokenizer.encode_template if is_conversation else self.tokenizer.encode
        keys = []
        for parts in texts:
            try:
                sequences = [encode(part) for part in parts]
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if not is_conversation:
                sequences = [ids for ids in sequences if ids]
            # a template may have written the end itself
            if sequences and not (is_conversation and sequences[-1][-1:] == self.end):
                sequences = [*sequences[:-1], [*sequences[-1], *self.end]]
            keys.append((sequences, sum(len(part.encode()) for part in parts)))
        return keys

    def _blocks(self, documents: list[list[tuple[list[list[int]], int]]]) -> list[Block]:
        # a record is kept if one of its keys has text, so that document i of all keys comes from the same record
        kept = [document for document in documents if any(sequences for sequences, _ in document)]
        return [
            self._block([document[key][0] for document in kept], sum(document[key][1] for document in documents))
            for key in range(len(self.reader.json_keys))
        ]

    def _block(self, documents: list[list[list[int]]], num_text_bytes: int) -> Block:
        parts = [np.array(ids, self.dtype) for document in documents for ids in document]
        return Block(
            np.concatenate(parts) if parts else np.zeros(0, self.dtype),
            np.array([len(part) for part in parts], np.int32),
            np.array([len(document) for document in documents], np.int64),
            num_text_bytes,
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
