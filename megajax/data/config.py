"""The section `data` of a configuration, and its checks."""

import dataclasses
import functools
import glob
import importlib.util
import logging
import os
from typing import Annotated, Literal

from megajax.data.blend_file import holds_conversations, is_blend_file, is_dataset, prefixes, read_blend
from megajax.data.indexed.meta import read_meta
from megajax.data.tokenizers.load import FILE_TOKENIZERS, check_tokenizer_spec, tokenizer_file
from megajax.fields.ranges import NonNegativeFloat, Range

logger = logging.getLogger("megajax")

SourceKind = Literal["indexed", "text", "drawn", "mock"]
READ = {"indexed": "paths", "text": "text", "drawn": None, "mock": None}
"""The field that names what a source reads."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: SourceKind = "mock"
    """indexed: .bin/.idx files, or conversations, in `paths`; text: text files in `text`; drawn: conversations about
    bar charts and digits that are drawn when the run starts, and with tokenizer=bytes:<image>,<audio> about sound
    (data/prepare/drawn_images.py); mock: Megatron's mock documents, or random conversations. Follows from `paths` or
    `text` if these are given and it is not."""
    paths: tuple[str, ...] = ()
    """Prefixes of Megatron .bin/.idx files; or what is tokenized once: files and folders of conversations (.jsonl,
    .json, .parquet), and hugging_face:NAME[:CONFIG[:SPLIT]], a dataset of the hub or of a folder. Blended by their
    tokens, or with a weight before each, on any scale (0.7,web,0.3,code); or FILE.json with a (nested) blend
    (data/blend_file.py)."""
    blend_changes: tuple[str, ...] = ()
    """Entries STEP:FILE.json: from this step on, train on the blend in this file."""
    eval_paths: tuple[str, ...] = ()
    """The same to evaluate on; empty: documents of `paths`, by `split`."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (969, 30, 1)
    """Relative shares of training, evaluation and test documents in `paths` and in the mock documents."""
    text: tuple[str, ...] = ()
    """Folders or patterns of text files; "stdlib" is the source code of Python's standard library."""
    tokenizer: str = ""
    """bytes | bytes:NAME,... (with special tokens) | null:VOCAB | sentencepiece:VOCAB (trained on `text`) | X.model |
    X/tokenizer.json | X.tiktoken | a folder with one of them; empty: the tokenizer of `paths` recorded in P.meta.json,
    or null:VOCAB with the vocabulary of the model."""
    cache_dir: str = ".cache/megajax"
    """Directory for sample indices and tokenized text."""
    allow_change: bool = False
    """Let a run resume with data different from what it began with."""
    num_workers: Annotated[int, Range(at_least=0, at_most=1024)] = 0
    """Processes that prefetch batches, for samples that are slow in Python; 0: threads only."""

    def check(self) -> None:
        """Raises ValueError with the way out; opens no file."""
        if self.tokenizer:
            check_tokenizer_spec(self.tokenizer)
        if self.split[0] == 0:
            raise ValueError(f"data.split={self.split} leaves nothing to train on; use --data.split=969,30,1")
        if self.tokenizer.endswith(tuple(FILE_TOKENIZERS)) and not os.path.isfile(self.tokenizer):
            raise ValueError(f"data.tokenizer={self.tokenizer}: the file does not exist")
        self._check_source()
        self._check_paths()

    def for_plan(self) -> "DataConfig":
        """A plan reads no data: mock documents if none are named."""
        needed = READ[self.source]
        return self if not needed or getattr(self, needed) else dataclasses.replace(self, source="mock")

    def _check_source(self) -> None:
        needed = READ[self.source]
        for field in ("paths", "blend_changes", "eval_paths", "text"):
            used = field == needed or (self.source == "indexed" and field != "text")
            if getattr(self, field) and not used:
                raise ValueError(
                    f"data.{field}={getattr(self, field)} is not read with data.source={self.source}; "
                    f"use --data.source={'text' if field == 'text' else 'indexed'}"
                )
        if needed and not getattr(self, needed):
            raise ValueError(f"data.source={self.source} needs --data.{needed}")
        if self.source == "text" and not self._reads_text:
            raise ValueError(
                f"data.tokenizer={self.tokenizer} cannot read text; use --data.tokenizer=sentencepiece:2048 or bytes"
            )
        if self.source != "text" and self.tokenizer.startswith("sentencepiece:"):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} is trained on data.text and needs --data.source=text; "
                "name a trained model, PATH.model"
            )

    def _check_paths(self) -> None:
        changes = tuple(file for _, file in self.changes())
        for field, entries in (("paths", self.paths), ("blend_changes", changes), ("eval_paths", self.eval_paths)):
            for prefix in prefixes(read_blend(entries, f"data.{field}")):
                if is_dataset(prefix) or holds_conversations(prefix):
                    self._check_records(prefix, field)
                    continue
                for path in (prefix + ".bin", prefix + ".idx"):
                    if not os.path.isfile(path):
                        raise ValueError(
                            f"data.{field}: file {path} does not exist; build it with python -m megajax.data.preprocess"
                        )

    def _check_records(self, path: str, field: str) -> None:
        if is_dataset(path) and importlib.util.find_spec("datasets") is None:
            raise ValueError(f"data.{field}: {path} needs the package datasets; pip install 'megajax[datasets]'")
        if not is_dataset(path) and not glob.glob(path):
            raise ValueError(f"data.{field}: no file is called {path}, or matches it")
        if self.tokenizer and not self._reads_text:
            raise ValueError(
                f"data.tokenizer={self.tokenizer} cannot read text, and {path} is not tokenized yet; name the "
                "tokenizer of the model, such as --data.tokenizer=DIR"
            )

    def of_source(self, source: SourceKind) -> "DataConfig":
        """The same with another source, and without the files and the tokenizer of this one. Only text keeps the
        tokenizer, that of a Hugging Face folder for example: other files record theirs."""
        names = ["paths", "blend_changes", "eval_paths", "text"]
        if source != "text" or not self._reads_text:
            names.append("tokenizer")
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in names}
        return dataclasses.replace(self, source=source, **defaults)

    @property
    def _names(self) -> list[str]:
        blends = read_blend(self.paths), read_blend(self.eval_paths, "data.eval_paths")
        return [name for blend in blends for name in prefixes(blend)]

    @property
    def conversations(self) -> list[str]:
        """The files and folders of conversations in `paths` and `eval_paths`, which are tokenized when the run
        starts."""
        return [name for name in self._names if holds_conversations(name)]

    @property
    def datasets(self) -> list[str]:
        """The same of datasets of Hugging Face, whose columns say what they hold."""
        return [name for name in self._names if is_dataset(name)]

    @property
    def _reads_text(self) -> bool:
        return self.tokenizer != "" and not self.tokenizer.startswith("null:")

    def with_tokenizer(self, vocab_size: int, num_added_ids: int = 0) -> "DataConfig":
        """The same with an empty `tokenizer` resolved. vocab_size: of the model; num_added_ids: those of them that the
        task adds to the tokenizer.

        Raises ValueError if the file of the recorded tokenizer does not exist.
        """
        if self.tokenizer or self.source == "text":
            return dataclasses.replace(self, tokenizer=tokenizer_file(self.tokenizer))
        if self.source == "drawn":
            return dataclasses.replace(self, tokenizer="bytes:<image>")
        spec = f"null:{vocab_size - num_added_ids}"
        if self.source == "indexed":
            records = self.conversations + self.datasets
            tokenized = [name for name in prefixes(read_blend(self.paths)) if name not in records]
            if not tokenized:
                raise ValueError(
                    f"data.tokenizer is empty, and {records[0]} is not tokenized yet; name the tokenizer of the "
                    "model, such as --data.tokenizer=DIR, or bytes to try it"
                )
            prefix = tokenized[0]
            meta = read_meta(prefix)
            if meta is None:
                _warn_of_unknown_tokenizer(prefix, vocab_size)
            else:
                spec = _found_tokenizer(meta["tokenizer"], prefix)
        return dataclasses.replace(self, tokenizer=spec)

    def changes(self) -> list[tuple[int, str]]:
        """(step, blend file) of `blend_changes`. Raises ValueError unless the steps ascend from 1."""
        found = [(step, file) for step, _, file in (change.partition(":") for change in self.blend_changes)]
        if any(not step.isdecimal() or not is_blend_file(file) for step, file in found):
            raise ValueError(
                f"data.blend_changes={self.blend_changes}: write STEP:FILE.json, for example 5000:late.json"
            )
        steps = [int(step) for step, _ in found]
        if any(later <= earlier for earlier, later in zip([0, *steps], steps, strict=False)):
            raise ValueError(f"data.blend_changes={self.blend_changes}: the steps must ascend, from 1 on")
        return [(step, file) for step, (_, file) in zip(steps, found, strict=True)]


@functools.cache  # only once per process
def _warn_of_unknown_tokenizer(prefix: str, vocab_size: int) -> None:
    logger.warning(
        "data.tokenizer: %s.meta.json does not exist, so the tokenizer of the data is unknown; any id "
        "below model.vocab_size=%d is accepted, and nothing can be decoded",
        prefix,
        vocab_size,
    )


def _found_tokenizer(spec: str, prefix: str) -> str:
    """The recorded tokenizer of a dataset; its file is at the recorded path or next to the data."""
    if not spec.endswith(tuple(FILE_TOKENIZERS)):
        return spec
    paths = [spec, os.path.join(os.path.dirname(prefix), os.path.basename(spec))]
    found = [path for path in paths if os.path.isfile(path)]
    if not found:
        raise ValueError(
            f"data.tokenizer: {prefix}.bin was written with {spec}, which does not exist; name its file with "
            "--data.tokenizer"
        )
    return found[0]
