"""infer.py fill, embed and classify: a line of JSON for each text."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.cli.options import OfModel, check_is_new, read_lines
from megajax.fields.ranges import PositiveInt
from megajax.inference.config import Pooling

if TYPE_CHECKING:
    from megajax.inference.text_encoder import TextEncoder

FIELDS = ("text", "text_pair", "words")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfTexts(OfModel):
    text: tuple[str, ...] = ()
    """A text; may be repeated."""
    texts: str | None = None
    """File with a text per line; .jsonl: objects with text, text_pair or words."""
    output: str | None = None
    """New file for a line of JSON per text; default: standard output."""

    def __call__(self) -> None:
        from megajax.inference.text_encoder import TextEncoder

        if (self.texts is None) == (not self.text):
            raise ValueError("give --text, which may be repeated, or --texts=FILE")
        check_is_new(self.output)
        records = read_texts(self.texts) if self.texts else [{"text": text} for text in self.text]
        found = self.found(TextEncoder(self.open()), records)
        lines = [json.dumps(record, ensure_ascii=False) for record in found]
        if self.output is None:
            print("\n".join(lines))
        else:
            Path(self.output).write_text("\n".join(lines) + "\n")

    def found(self, encoder: "TextEncoder", records: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """What to write of each text."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill(_OfTexts):
    """Fill masks."""

    top_k: PositiveInt = 5
    """Tokens to show for each mask."""

    def found(self, encoder: "TextEncoder", records: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        return filled(encoder, records, self.top_k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed(_OfTexts):
    """Embed texts."""

    pooling: Pooling = "mean"
    """Of the last hidden states."""

    def found(self, encoder: "TextEncoder", records: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        return embedded(encoder, records, self.pooling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classify(_OfTexts):
    """Classify texts or words."""

    def found(self, encoder: "TextEncoder", records: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        return classified(encoder, records)


def read_texts(path: str) -> list[dict[str, Any]]:
    """A text per line; in a .jsonl file each line is an object with text, with text and text_pair, or with words.
    Raises ValueError."""
    lines = read_lines(path, "texts", "text")
    if not path.endswith(".jsonl"):
        return [{"text": line} for line in lines]
    return [_record(line, f"texts={path} line {number}") for number, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    kept = {name: found[name] for name in FIELDS if name in found} if isinstance(found, dict) else {}
    words = kept.get("words")
    texts = [kept[name] for name in ("text", "text_pair") if name in kept]
    is_text = "text" in kept and all(isinstance(text, str) for text in texts) and words is None
    is_words = isinstance(words, list) and words and all(isinstance(word, str) for word in words) and not texts
    if not (is_text or is_words):
        raise ValueError(f"{where} is not an object with text, with text and text_pair, or with words")
    return kept


def filled(encoder: "TextEncoder", records: Sequence[dict[str, Any]], top_k: int) -> Iterator[dict[str, Any]]:
    """Each text with the most likely tokens of each of its masks."""
    found = encoder.fill(_plain(records), top_k)
    for record, masks in zip(records, found, strict=True):
        yield record | {"masks": [[candidate._asdict() for candidate in mask] for mask in masks]}


def embedded(encoder: "TextEncoder", records: Sequence[dict[str, Any]], pooling: Pooling) -> Iterator[dict[str, Any]]:
    """Each text with its embedding."""
    for record, vector in zip(records, encoder.embed(_plain(records), pooling), strict=True):
        yield record | {"embedding": [float(f"{value:.7g}") for value in vector.tolist()]}


def classified(encoder: "TextEncoder", records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each text with its class, or each word with its own."""
    if encoder.head == "token_classification":
        texts = [record.get("words") or record["text"].split() for record in records]
        for record, words, found in zip(records, texts, encoder.classify_words(texts), strict=True):
            yield record | {"words": words, "labels": [word.label for word in found]}
        return
    if wrong := next((record for record in records if "words" in record), None):
        raise ValueError(f"words={wrong['words']}: this model classifies texts; give the field text")
    texts = [tuple(record[name] for name in ("text", "text_pair") if name in record) for record in records]
    for record, found in zip(records, encoder.classify(texts), strict=True):
        yield record | found._asdict()


def _plain(records: Sequence[dict[str, Any]]) -> list[str]:
    for record in records:
        if set(record) != {"text"}:
            raise ValueError(
                f"{', '.join(record)}: give the field text alone; pairs and words are for infer.py classify"
            )
    return [record["text"] for record in records]
