"""Turns text files and records (JSON, rows, samples of a tar) into the texts and media of documents."""

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megajax.data.blend_file import is_dataset
from megajax.data.indexed.images import ImagePlace
from megajax.data.prepare.conversation_records import MEDIA_FIELDS, messages_of, recognised, shortened
from megajax.data.prepare.image_records import MediaSource, conversation, find_file, place_of
from megajax.data.prepare.sentences import split_sentences
from megajax.data.prepare.tar_samples import TarSample
from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.media.kinds import IMAGE, KINDS, Kind

FORMS = "documents", "sentences", "conversations"
MESSAGES = "messages"  # the key of conversations whose form is recognised by their fields
# Limit of a document: a line of .jsonl or a text file, decompressed. Encoding takes about ten times as much memory.
MAX_DOCUMENT_BYTES = 1 << 27


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
class Reader:
    """Text files and records -> documents.

    Conversations have media of the kinds of which the template has a token. image_folder: of the paths in records;
    None: the folder of the record's file. record_forms: path of a file -> the form of its conversations; records of a
    file in another form are refused (conversation_records.py).
    """

    json_keys: tuple[str, ...] = ("text",)
    form: str = "documents"
    template: ChatTemplate | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    image_folder: str | None = None
    record_forms: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def media_tokens(self) -> dict[Kind, str]:
        found = self.template.media_tokens if self.template else {}
        return {kind: found[kind.name] for kind in KINDS if kind.name in found}

    @property
    def recognises_forms(self) -> bool:
        """Whether the fields of a record say what its conversation is, without media."""
        return self.form == "conversations" and self.json_keys == (MESSAGES,) and not self.media_tokens

    def kind_of(self, path: str) -> str:
        """dataset, jsonl, json, parquet, tar or text."""
        if is_dataset(path):
            return "dataset"
        name = path.removesuffix(".gz").removesuffix(".zst")
        if name.endswith(".json") and self.form == "conversations":
            return "json"
        if path.endswith(".tar") and self.media_tokens:
            return "tar"
        return "jsonl" if name.endswith(".jsonl") else "parquet" if path.endswith(".parquet") else "text"

    def may_be_cut(self, path: str) -> bool:
        """Whether the file can be read from the middle."""
        return self.kind_of(path) == "parquet" or (self.kind_of(path) == "jsonl" and path.endswith(".jsonl"))

    def word(self, path: str) -> str:
        """What a document of the file is called in messages."""
        return {"dataset": "row", "parquet": "row", "json": "record"}.get(self.kind_of(path), "line")

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

    def documents(
        self, path: str, records: Records, first: int, begin: int = 0
    ) -> Iterator[tuple[Callable[[], Document], str]]:
        """(function that returns the document or raises ValueError, location) of each of some records of a file. first:
        number of the first of them, counted from byte `begin` of the file."""
        word = self.word(path)
        after = f" after byte {begin}" if begin else ""
        for i, record in enumerate(records, first):
            if not isinstance(record, bytes) or record.strip():
                where = f"{path} sample {record.key}" if isinstance(record, TarSample) else f"{path} {word} {i}{after}"
                yield lambda record=record, where=where: self._document(record, path, where), where

    def first_form(self, records: Records) -> str | None:
        """The form of the first of some records that is a conversation."""
        for record in records:
            with contextlib.suppress(ValueError):
                return recognised(_parsed(record, "")).name
        return None

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
        record = _parsed(record, where)
        if self.media_tokens:
            return self._with_media(record, path, where)
        if self.form == "conversations":
            messages = self._messages(record, path, where)
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

    def _messages(self, record: Any, path: str, where: str) -> list[dict]:
        (key,) = self.json_keys
        if key != MESSAGES:
            _field(record, key, where)
        try:
            if key != MESSAGES:
                return messages_of(record, key)
            form = recognised(record, self.record_forms.get(path))
            if media := [name for name in MEDIA_FIELDS if record.get(name)]:
                raise ValueError(f"it has {media[0]!r}, of which text holds nothing; preprocess it with --image_token")
            return form.messages(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _spans(self, messages: list[dict], tools: Any, where: str) -> list[str]:
        if self.template is None:
            raise ValueError("form=conversations needs a chat template")
        try:
            spans = self.template.spans(messages, tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return [_checked(span, where) for span in spans]


def _parsed(record: Any, where: str) -> Any:
    if not isinstance(record, bytes):
        return record
    text = _decode(record, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _field(record: Any, key: str, where: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object with the field {key!r}")
    if key not in record:
        raise ValueError(f"{where}: no field {key!r} among {shortened(list(record))}; use --json_keys")
    return record[key]


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
