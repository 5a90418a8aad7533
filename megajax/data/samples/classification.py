"""Labelled texts, pairs of texts and words: `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with a class for the text or
for each word. T = sequence_length below.

Files are .jsonl, an object a line, or .csv with a header:

| columns | what is labelled |
|---|---|
| text, label | a text |
| text, text_pair, label | a pair of texts |
| words, labels (lists; .jsonl only) | each word |

A label is a text or a whole number; the classes are all labels in order.
"""

import csv
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.data.samples.masking import pad
from megajax.data.tokenizers.masking_tokens import MaskingTokens
from megajax.data.tokenizers.tokenizer import Tokenizer


class Labels(NamedTuple):
    """What the labels of a dataset are."""

    classes: tuple[str, ...]
    of_words: bool
    """Whether each word has a label, or each text."""


class Example(NamedTuple):
    """A labelled text, pair of texts, or list of words, as tokens."""

    texts: tuple[list[int], ...]
    """Tokens of A, and of B if there is one."""
    labels: list[tuple[int, int]]
    """(token, class): of the first token of each word in A, or, of a text, (-1, class)."""


@dataclasses.dataclass(frozen=True)
class LabelledFile:
    """The examples of one file."""

    path: str
    examples: list[Example]
    sha256: str

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for example in self.examples for text in example.texts)


def read_labelled(paths: Sequence[str], tokenizer: Tokenizer) -> tuple[list[LabelledFile], Labels]:
    """Raises ValueError, with file and line, for a record that is not one of the table above, or unlike the others."""
    records = {path: _read(path) for path in paths}
    everything = [record for of_file, _ in records.values() for record in of_file]
    if not everything:
        raise ValueError(f"data.text: {', '.join(paths)} has no record")
    of_words = isinstance(everything[0].label, list)
    for record in everything:
        if isinstance(record.label, list) != of_words:
            raise ValueError(f"{record.where}: labels of texts and labels of words in one dataset; name files of one")
    names = {name for record in everything for name in (record.label if of_words else [record.label])}
    classes = sorted(names, key=lambda name: (isinstance(name, str), name))
    if len(classes) < 2:
        raise ValueError(f"data.text: all labels are {classes}; there must be at least 2 classes")
    number = {name: place for place, name in enumerate(classes)}
    files = [
        LabelledFile(path, [_encoded(record, tokenizer, number) for record in of_file], digest)
        for path, (of_file, digest) in records.items()
    ]
    return files, Labels(tuple(map(str, classes)), of_words)


class ClassificationDataset:
    """Random access: sample i is a pure function of (examples, sequence_length, seed, i). Each epoch has every example
    once, in a different order.

    `dataset[i]` is a dict of arrays [T] as of BertDataset: tokens, positions, segment_ids, token_types int32; labels
    int32, the class of a text at its first token [CLS], or that of a word at its first token; loss_mask float32, 1
    there. Of texts that are too long the ends are left out, the longer one's first.
    """

    def __init__(
        self, examples: Sequence[Example], num_samples: int, sequence_length: int, seed: int, tokens: MaskingTokens
    ):
        """num_samples: at least this many, in whole epochs."""
        self.examples = examples
        self.sequence_length = sequence_length
        self.special = tokens
        self.tokens_per_epoch = sum(len(text) for example in examples for text in example.texts)
        epochs = max(-(-num_samples // len(examples)), 1)
        orders = [np.random.default_rng([seed, epoch]).permutation(len(examples)) for epoch in range(epochs)]
        self.order = np.concatenate(orders)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        example = self.examples[self.order[i]]
        length = self.sequence_length
        tokens, types = joined(example.texts, self.special, length)
        positions = np.arange(length, dtype=np.int32)
        labels = np.zeros(length, np.int32)
        mask = np.zeros(length, np.float32)
        for place, label in example.labels:
            if 1 + place < len(tokens) - 1 or place < 0:
                labels[1 + place] = label
                mask[1 + place] = 1
        return {
            "tokens": pad(tokens, length, self.special.pad_id),
            "labels": labels,
            "loss_mask": mask,
            "positions": positions,
            "segment_ids": (positions < len(tokens)).astype(np.int32),
            "token_types": pad(types, length, 0),
        }


def joined(texts: Sequence[Sequence[int]], special: MaskingTokens, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, token types) int32 of `[CLS] A [SEP] (B [SEP])`, at most `length`."""
    room = length - 1 - len(texts)
    kept = [len(text) for text in texts]
    while sum(kept) > room:
        kept[int(np.argmax(kept))] -= 1
    parts = [[special.cls_id]]
    for text, count in zip(texts, kept, strict=True):
        parts.append([*text[:count], special.sep_id])
    second = sum(map(len, parts[:2]))
    tokens = np.concatenate(parts).astype(np.int32)
    return tokens, (np.arange(len(tokens)) >= second).astype(np.int32)


# ----------------------------------------------------------------------------- files


class _Record(NamedTuple):
    where: str
    texts: tuple[str, ...]
    """A and B, or the words of A."""
    label: Any
    """A text or a number, or of words a list of these."""


def _read(path: str) -> tuple[list[_Record], str]:
    """-> (records, sha256 of the file)."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        with open(path, encoding="utf-8", newline="") as file:
            if path.endswith(".csv"):
                return [_record(row, f"{path} row {i}") for i, row in enumerate(csv.DictReader(file), 1)], digest
            lines = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
            return [_record(_parsed(line, f"{path} line {i}"), f"{path} line {i}") for i, line in lines], digest
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"data.text: {path} cannot be read ({error})") from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _record(found: Any, where: str) -> _Record:
    found = found if isinstance(found, dict) else {}
    words = found.get("words")
    labels = found.get("labels")
    if isinstance(words, list) and isinstance(labels, list):
        if len(words) != len(labels) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{where}: words and labels must be lists of the same length, of at least one word")
        if not all(_is_label(label) for label in labels):
            raise ValueError(f"{where}: a label is a text or a whole number")
        return _Record(where, tuple(words), labels)
    given = [found[name] for name in ("text", "text_pair") if found.get(name) is not None]
    texts = [text for text in given if isinstance(text, str)]
    if not isinstance(found.get("text"), str) or len(texts) < len(given):
        raise ValueError(f"{where}: no text; give text and label, text, text_pair and label, or words and labels")
    if not _is_label(found.get("label")):
        raise ValueError(f"{where}: label={found.get('label')!r} must be a text or a whole number")
    return _Record(where, tuple(texts), found["label"])


def _is_label(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _encoded(record: _Record, tokenizer: Tokenizer, number: dict) -> Example:
    if not isinstance(record.label, list):
        return Example(tuple(tokenizer.encode(text) for text in record.texts), [(-1, number[record.label])])
    tokens: list[int] = []
    labels = []
    for word, label in zip(encode_words(record.texts, tokenizer), record.label, strict=True):
        labels.append((len(tokens), number[label]))
        tokens += word
    return Example((tokens,), labels)


def encode_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word, of all but the first with the space before it."""
    return [tokenizer.encode(word if place == 0 else f" {word}") for place, word in enumerate(words)]
