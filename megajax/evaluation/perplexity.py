"""Perplexity and bits per byte of texts.

Each document begins after the token that documents begin after (`TextModel.prefix`), so that its first token is scored
too; the token that ends a document is not. Bits per byte, sum(-log2 p) / bytes of UTF-8, compare models with different
tokenizers, and .bin files with the text that they were made of.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.indexed.meta import read_meta
from megajax.data.prepare.documents import Reader
from megajax.data.prepare.read_input import read_batches, read_file
from megajax.evaluation.text_model import TextModel, TokenText


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over documents."""

    documents: int = 0
    tokens: int = 0
    """Scored tokens."""
    bytes: int = 0
    """Bytes of UTF-8 of the text of these tokens."""
    nats: float = 0.0
    """-log p of these tokens."""

    def __add__(self, other: "Totals") -> "Totals":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Totals(*[mine + theirs for mine, theirs in pairs])

    def metrics(self) -> dict[str, float]:
        """The sums, and: loss, nats per token; perplexity, exp(loss); bits_per_byte. NaN if nothing was scored."""
        loss = self.nats / self.tokens if self.tokens else math.nan
        bits_per_byte = self.nats / math.log(2) / self.bytes if self.bytes else math.nan
        return dataclasses.asdict(self) | dict(loss=loss, perplexity=exp(loss), bits_per_byte=bits_per_byte)


class Document(NamedTuple):
    text: TokenText
    num_bytes: int
    """Of its scored tokens."""


def perplexity(
    model: TextModel,
    texts: Sequence[str] = (),
    prefixes: Sequence[str] = (),
    *,
    overlap: int | None = None,
    limit: int | None = None,
) -> dict[str, Totals]:
    """Totals of each file, by name.

    texts: files: plain text, one document per file; .jsonl or .parquet, one per record, in its field `text`; also
    compressed (.gz, .zst). prefixes: of .bin and .idx files. Documents longer than model.max_length are read in windows
    of that length, of which `overlap` tokens (default: half) were also in the window before (windows.py). limit: reads
    only this many documents of each file.

    Raises ValueError for a file that does not exist or cannot be read, and for tokens of another tokenizer.
    """
    check_files(texts, prefixes)
    overlap = check_overlap(model.max_length // 2 if overlap is None else overlap, model.max_length)
    sources = {file: text_documents(model, file) for file in texts}
    sources |= {prefix: indexed_documents(model, prefix) for prefix in prefixes}
    return {name: _totals(model, itertools.islice(found, limit), overlap) for name, found in sources.items()}


def perplexity_of(model: TextModel, texts: Iterable[str]) -> Totals:
    """Of texts in memory, each a document; empty ones are left out."""
    encoded = ((text, model.tokenizer.encode(text)) for text in texts)
    documents = (_document(model, tokens, len(text.encode())) for text, tokens in encoded if tokens)
    return _totals(model, documents, model.max_length // 2)


def check_files(texts: Sequence[str], prefixes: Sequence[str] = ()) -> None:
    """Raises ValueError for a file that does not exist or has an unknown format; reads no text."""
    if missing := [path for path in texts if not os.path.isfile(path)]:
        raise ValueError(f"text={missing[0]}: the file does not exist")
    Reader().check(texts)
    for prefix in prefixes:
        IndexedDataset(prefix)


def check_overlap(overlap: int, length: int) -> int:
    """The overlap of windows of this length, if it is valid."""
    if not 0 <= overlap < length:
        raise ValueError(f"overlap={overlap} must be at least 0 and less than max_length={length}")
    return overlap


def exp(loss: float) -> float:
    """exp(loss), infinite where a float64 overflows."""
    return math.exp(loss) if loss < 709.0 else math.inf


def _totals(model: TextModel, documents: Iterable[Document], overlap: int) -> Totals:
    documents, again = itertools.tee(documents)
    log_probs = model.log_probs((document.text for document in again), model.max_length, overlap)
    totals = Totals()
    for document, log_prob in zip(documents, log_probs, strict=True):
        num_scored = len(document.text.tokens) - document.text.num_context
        totals += Totals(1, num_scored, document.num_bytes, -log_prob)
    return totals


def text_documents(model: TextModel, path: str) -> Iterator[Document]:
    """The documents of a text file; empty ones are left out."""
    for text in _texts(path):
        tokens = model.tokenizer.encode(text)
        if tokens:
            yield _document(model, tokens, len(text.encode()))


def indexed_documents(model: TextModel, prefix: str) -> Iterator[Document]:
    """The documents of PREFIX.bin without the token that ends each; their bytes are those of the decoded tokens."""
    tokenizer = model.tokenizer
    dataset = IndexedDataset(prefix)
    meta = read_meta(prefix)
    if meta is not None and meta["tokenizer_identity"] != tokenizer.identity:
        raise ValueError(
            f"tokens={prefix} was written with the tokenizer {meta['tokenizer']}, which is not the model's (its "
            "identity differs); preprocess the text with the tokenizer of the model, or evaluate it with --text"
        )
    for begin, end in itertools.pairwise(dataset.document_indices.tolist()):
        tokens = [token for sequence in range(begin, end) for token in dataset.read(sequence).tolist()]
        if tokens and tokens[-1] == tokenizer.eod_id:
            tokens.pop()
        if tokens:
            yield _document(model, tokens, len(tokenizer.decode(tokens).encode()))


def _document(model: TextModel, tokens: list[int], num_bytes: int) -> Document:
    """num_bytes: of the whole text. Without a prefix its first token is not scored."""
    unscored = 0 if model.prefix else len(model.tokenizer.decode(tokens[:1]).encode())
    return Document(model.document_of(tokens), num_bytes - unscored)


def _texts(path: str) -> Iterator[str]:
    reader = Reader()
    reader.check([path])
    for batch in read_batches([path], reader, {}):
        if batch.problem:
            raise ValueError(batch.problem)
        if batch.records is None:
            content, _ = read_file(path, reader)
            yield reader.file_texts(content, path)[0][0]
            continue
        for read, _ in reader.documents(path, batch.records, batch.first):
            yield read().texts[0][0]
