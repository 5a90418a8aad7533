"""Text to tokens: python -m megajax.data.preprocess --input FILES --output_prefix P --tokenizer T

Reads .jsonl (a document a line, fields --json_keys), .parquet (a document a row, columns --json_keys) and any other
file as one document; .jsonl and text may be .gz or .zst. Writes P.bin and P.idx (Megatron's indexed dataset) and
P.meta.json: tokenizer, counts, sha256 of P.bin and of every input file as it lies on disk. Several keys make a dataset
each, P_KEY. --tokenizer=sentencepiece:VOCAB trains on the input first and keeps the model as P.tokenizer.model.

--split_sentences: a document has one sequence a sentence (for BERT). --conversations: a document is a conversation
(`messages`: [{"role", "content"}, ...]) whose sequences are by turns context (no loss) and answer (loss), a context
first; one may be empty. --append_eod (the default) ends the last sequence of a document with the tokenizer's
end-of-document token, unless the template has written it.

The output does not depend on --workers: batches of documents go out in order, come back in order, and at most a few a
worker are under way, so memory is constant. `merge`, `verify` and `inspect` in front of the arguments do that instead.
"""

import argparse
import collections
import contextlib
import dataclasses
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

from megajax.data.chat_template import ChatTemplate, load_chat_template
from megajax.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megajax.data.read_input import Batch, Reader, expand, read_batches, read_file
from megajax.data.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer
from megajax.data.train_tokenizer import train_tokenizer

logger = logging.getLogger("megajax")
BATCHES_PER_WORKER = 4
COUNTS = "num_documents", "num_sequences", "num_tokens", "num_bytes", "num_skipped"


@dataclasses.dataclass(frozen=True)
class Block:
    """Encoded documents of one key: tokens [sum(lengths)], lengths int32 of the sequences, sequences a document."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    num_text_bytes: int


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What one batch gives of one file; a block a key. skipped: one message a document that could not be read."""

    file: int
    blocks: list[Block]
    skipped: list[str]
    sha256: str | None = None


class Encoder:
    """Batch -> Encoded, one a file; what a worker process runs."""

    def __init__(self, tokenizer: Tokenizer, reader: Reader, append_eod: bool):
        if append_eod and tokenizer.eod_id is None:
            raise ValueError("--append_eod: this tokenizer has no end-of-document token; use --no-append_eod")
        self.tokenizer, self.reader = tokenizer, reader
        self.end = [tokenizer.eod_id] if append_eod else []
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, batch: Batch) -> list[Encoded]:
        if batch.records is None:
            return [self._encode_file(number, path) for number, path in batch.files]
        encoded, skipped = [], []
        for read, where in self.reader.documents(batch):
            try:
                encoded.append(self._encode(read(), where))
            except ValueError as error:  # of JSON, of UTF-8, of the template, of the tokenizer
                skipped.append(str(error))
        skipped += [batch.problem] if batch.problem else []
        return [Encoded(batch.files[0][0], self._blocks(encoded), skipped)]

    def _encode_file(self, number: int, path: str) -> Encoded:
        encoded, skipped, digest = [], [], None
        try:
            content, digest = read_file(path)
            encoded.append(self._encode(self.reader.file_texts(content, path), path))
        except ValueError as error:
            skipped.append(str(error))
        return Encoded(number, self._blocks(encoded), skipped, digest)

    def _encode(self, texts: list[list[str]], where: str) -> list[tuple[list[list[int]], int]]:
        """For each key the sequences of tokens, and the bytes of text."""
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
                sequences[-1] = sequences[-1] + self.end
            keys.append((sequences, sum(len(part.encode()) for part in parts)))
        return keys

    def _blocks(self, documents: list[list[tuple[list[list[int]], int]]]) -> list[Block]:
        # a record counts if one of its keys has text, so that document i of every key is of the same record
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


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _run_worker(batch: Batch) -> list[Encoded]:
    return _worker_encoder(batch)


def _encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, num_workers: int
) -> Iterator[tuple[Batch, list[Encoded]]]:
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


class BlockWriter(IndexedDatasetWriter):
    """An IndexedDatasetWriter that takes many documents at once, and the sha256 of the .bin so far."""

    def __init__(self, prefix: str, dtype: np.dtype):
        super().__init__(prefix, dtype)
        self.digest, self._num_bounded = hashlib.sha256(), 0

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Tokens of the file's dtype that follow in the .bin; `add_index` says of which sequences they are."""
        self._files["bin"].write(tokens.data)
        self.digest.update(tokens.data)
        self.num_tokens += len(tokens)

    def add_index(self, lengths: np.ndarray, sequences: np.ndarray) -> None:
        """lengths: tokens of each sequence that follows; sequences: of each document that follows, in sequences.
        The two need not be of the same documents, as long as all of them have come at the end."""
        self._files["lengths"].write(lengths.astype(np.int32).tobytes())
        self.num_sequences += len(lengths)
        ends = self._num_bounded + np.cumsum(sequences, dtype=np.int64)
        self._files["documents"].write(ends.tobytes())
        self._num_bounded = int(ends[-1]) if len(ends) else self._num_bounded
        self.num_documents += len(sequences)


def preprocess(
    files: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    tokenizer_spec: str,
    *,
    json_keys: Sequence[str] = ("text",),
    form: str = "documents",
    template: ChatTemplate | None = None,
    append_eod: bool = True,
    num_workers: int = 1,
    on_error: str = "raise",
    progress: Callable[[int], None] | None = None,
) -> dict[str, dict]:
    """Encodes `files` in the order given into an indexed dataset, or one a key; returns prefix -> its meta.json.

    form: "documents", "sentences" or "conversations"; template: of conversations, by default the tokenizer's.
    on_error: "raise" stops at the first document that cannot be read (ValueError with file and line); "skip" leaves
    such documents out, logs and counts them. Empty documents are left out; with several keys a record of which one
    text is empty gives a document of no sequences there. progress: called with bytes of input done.
    """
    if form == "conversations":
        template = template or load_chat_template(tokenizer)
    reader = Reader(tuple(json_keys), form, template)
    reader.check(files)
    encoder = Encoder(tokenizer, reader, append_eod)
    prefixes = [output_prefix] if len(json_keys) == 1 else [f"{output_prefix}_{key}" for key in json_keys]
    counts = [[collections.Counter() for _ in files] for _ in prefixes]
    digests: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(BlockWriter(prefix, encoder.dtype)) for prefix in prefixes]
        batches = read_batches(files, reader, digests)
        results = stack.enter_context(contextlib.closing(_encode_in_order(batches, encoder, num_workers)))
        for batch, encoded in results:
            for part in encoded:
                _report(part.skipped, on_error)
                for writer, count, block in zip(writers, counts, part.blocks, strict=True):
                    writer.add_tokens(block.tokens)
                    writer.add_index(block.lengths, block.sequences)
                    count[part.file].update(_count(block), num_skipped=len(part.skipped))
                if part.sha256:
                    digests[part.file] = part.sha256
            if progress is not None:
                progress(batch.num_bytes)
    facts = {
        "tokenizer": tokenizer_spec,
        "tokenizer_identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "append_eod": append_eod,
        "form": form,
        "chat_template": template.identity if template else None,
    }
    metas = {}
    for prefix, key, writer, count in zip(prefixes, json_keys, writers, counts, strict=True):
        inputs = [
            {"path": path, "sha256": digests.get(number)} | {name: count[number][name] for name in COUNTS}
            for number, path in enumerate(files)
        ]
        metas[prefix] = make_meta(facts | {"json_key": key}, inputs, str(encoder.dtype), writer.digest.hexdigest())
        write_meta(prefix, metas[prefix])
    return metas


def _count(block: Block) -> dict[str, int]:
    return {
        "num_documents": len(block.sequences),
        "num_sequences": len(block.lengths),
        "num_tokens": len(block.tokens),
        "num_bytes": block.num_text_bytes,
    }


def _report(skipped: list[str], on_error: str) -> None:
    for message in skipped:
        if on_error == "raise":
            raise ValueError(f"{message}; repair it or pass --on_error=skip")
        logger.warning("skipped: %s", message)


def make_meta(facts: dict, inputs: list[dict], dtype: str, sha256: str) -> dict:
    """P.meta.json: facts of the tokenizer, sums of the counts of all input files, these one by one."""
    sums = {name: sum(file[name] for file in inputs) for name in COUNTS}
    return facts | sums | {"dtype": dtype, "sha256": sha256, "inputs": inputs}


def write_meta(prefix: str, meta: dict) -> None:
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
    parser = argparse.ArgumentParser(
        prog="python -m megajax.data.preprocess",
        description=__doc__.partition("\n")[0],
        epilog="Other commands: merge, verify, inspect; each has its --help.",
    )
    parser.add_argument("--input", nargs="+", required=True, help="files or patterns: .jsonl, .parquet or text files")
    parser.add_argument("--output_prefix", required=True, help="P of P.bin, P.idx, P.meta.json")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="bytes, null:VOCAB, PATH.model, PATH/tokenizer.json, PATH.tiktoken, or sentencepiece:VOCAB to train one",
    )
    parser.add_argument(
        "--json_keys", nargs="+", help="fields of .jsonl, columns of .parquet (default: text; messages); P_KEY each"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--split_sentences", action="store_true", help="one sequence a sentence, for BERT")
    form.add_argument("--conversations", action="store_true", help="chat messages, for supervised fine-tuning")
    parser.add_argument("--chat_template", help="jinja file (default: the tokenizer's, else ChatML)")
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
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in ("merge", "verify"):
        from megajax.data import merge

        return getattr(merge, f"main_{arguments[0]}")(arguments[1:])
    if arguments and arguments[0] == "inspect":
        from megajax.data import inspect

        return inspect.main(arguments[1:])
    flags = _parse(arguments)
    try:
        metas = _run(flags)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for prefix, meta in metas.items():
        print(
            f"{prefix}: {meta['num_documents']:,} documents, {meta['num_tokens']:,} tokens ({meta['dtype']}), "
            f"{meta['num_bytes']:,} bytes of text, {meta['num_skipped']} skipped"
        )


def _run(flags: argparse.Namespace) -> dict[str, dict]:
    form = "conversations" if flags.conversations else "sentences" if flags.split_sentences else "documents"
    if flags.chat_template and form != "conversations":
        raise ValueError("--chat_template is read with --conversations only")
    json_keys = tuple(flags.json_keys or (("messages",) if form == "conversations" else ("text",)))
    files, spec, template = expand(flags.input), flags.tokenizer, None
    if spec.startswith("sentencepiece:"):
        if form == "conversations":
            template = load_chat_template(BytesTokenizer(), flags.chat_template)
        spec = train_tokenizer(files, spec, flags.output_prefix, Reader(json_keys, form, template), flags.on_error)
    tokenizer = load_tokenizer(spec)
    if form == "conversations":
        template = load_chat_template(tokenizer, flags.chat_template)
    with ProgressBar(sum(os.path.getsize(path) for path in files)) as advance:
        return preprocess(
            files,
            flags.output_prefix,
            tokenizer,
            spec,
            json_keys=json_keys,
            form=form,
            template=template,
            append_eod=flags.append_eod,
            num_workers=flags.workers,
            on_error=flags.on_error,
            progress=advance,
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
