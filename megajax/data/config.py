"""What a configuration says of data, and what of it makes no sense."""

import dataclasses
import functools
import logging
import os
from typing import Annotated, Literal

from megajax.data.blend_file import is_blend_file, prefixes, read_blend
from megajax.data.meta import read_meta
from megajax.data.tokenizers.tokenizer import FILE_TOKENIZERS, check_tokenizer_spec, load_tokenizer
from megajax.ranges import NonNegativeFloat, PositiveFloat, Probability, Range

logger = logging.getLogger("megajax")

NumReaders = Annotated[int, Range(at_least=0, at_most=1024)]
SourceKind = Literal["indexed", "text", "mock"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: SourceKind = "mock"
    """indexed: .bin/.idx files named by `paths`; text: text files named by `text`; mock: Megatron's mock documents."""
    paths: tuple[str, ...] = ()
    """Prefixes of Megatron .bin/.idx files, blended; or FILE.json with a (nested) blend (data/blend_file.py)."""
    weights: tuple[PositiveFloat, ...] = ()
    """One per path, on any positive scale; empty: by the number of tokens."""
    blend_changes: tuple[str, ...] = ()
    """STEP:FILE.json each: from that step on, train on the blend in that file."""
    eval_paths: tuple[str, ...] = ()
    """Prefixes or blends to evaluate on; empty: documents of `paths`, by `split`."""
    eval_weights: tuple[PositiveFloat, ...] = ()
    """One per evaluation path; empty: by the number of tokens."""
    kind: Literal["documents", "conversations"] = "documents"
    """documents: pretraining. conversations: supervised fine-tuning with a loss on the answers only, on files that
    preprocess --conversations wrote."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (969, 30, 1)
    """Relative shares of training, evaluation and test documents in `paths` and in the mock documents."""
    text: tuple[str, ...] = ()
    """Patterns of text files; "stdlib" is the source code of Python's standard library."""
    tokenizer: str = ""
    """bytes | null:VOCAB | sentencepiece:VOCAB (trained on `text`) | X.model | X/tokenizer.json | X.tiktoken; empty:
    the one that wrote `paths`, as P.meta.json says, or null:VOCAB with the vocabulary of the model."""
    cache_dir: str = ".cache/megajax"
    """Directory for sample indices and tokenized text."""
    cross_document_attention: bool = False
    """Documents packed into one sample attend to each other (Megatron's default)."""
    reset_positions: bool = False
    """Positions restart at 0 with each document."""
    mask_document_end: bool = False
    """No loss on predicting the end-of-document token."""
    fim_rate: Probability = 0.0
    """Probability that a training document is rearranged for fill-in-the-middle (data/samples/fim.py)."""
    fim_spm_rate: Probability = 0.5
    """Probability that such a document starts with its suffix (SPM)."""
    fim_tokens: tuple[str, str, str] = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    """Special tokens before its three parts, as the tokenizer spells them."""
    on_misfit: Literal["raise", "skip", "truncate"] = "raise"
    """What to do with a conversation longer than a sample: refuse it, leave it out or cut it. One without an answer is
    refused or left out."""
    allow_change: bool = False
    """Let a run resume with other data than it began with."""
    num_threads: NumReaders = 4
    """Threads that prefetch batches; 0: none."""
    num_workers: NumReaders = 0
    """Processes that prefetch batches, for samples that cost much Python time; 0: threads only."""

    def check(self) -> None:
        """Raises ValueError with the way out; opens no file."""
        if self.tokenizer:
            check_tokenizer_spec(self.tokenizer)
        if self.split[0] == 0:
            raise ValueError(f"data.split={self.split} leaves nothing to train on; use --data.split=969,30,1")
        if self.tokenizer.endswith(tuple(FILE_TOKENIZERS)) and not os.path.isfile(self.tokenizer):
            raise ValueError(f"data.tokenizer={self.tokenizer}: the file does not exist")
        self._check_source()
        self._check_kind()
        self._check_paths()

    def _check_kind(self) -> None:
        if self.kind == "conversations":
            wrong = [
                name for name in ("cross_document_attention", "mask_document_end", "fim_rate") if getattr(self, name)
            ]
            if self.source != "indexed":
                raise ValueError(f"data.kind=conversations is read with data.source=indexed, not {self.source}")
            if wrong:
                raise ValueError(f"data.{wrong[0]}={getattr(self, wrong[0])} is not for data.kind=conversations")

    def _check_source(self) -> None:
        needed = {"indexed": "paths", "text": "text", "mock": None}[self.source]
        for field in ("paths", "weights", "blend_changes", "eval_paths", "eval_weights", "text"):
            used = field == needed or (self.source == "indexed" and field != "text")
            if getattr(self, field) and not used:
                raise ValueError(
                    f"data.{field}={getattr(self, field)} is not read with data.source={self.source}; "
                    f"use --data.source={'text' if field == 'text' else 'indexed'}"
                )
        if needed and not getattr(self, needed):
            raise ValueError(f"data.source={self.source} needs --data.{needed}")
        if self.source == "text" and (self.tokenizer.startswith("null:") or not self.tokenizer):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} cannot read text; use --data.tokenizer=sentencepiece:2048 or bytes"
            )
        if self.source != "text" and self.tokenizer.startswith("sentencepiece:"):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} is trained on data.text and needs --data.source=text; "
                "name a trained model, PATH.model"
            )

    def _check_paths(self) -> None:
        for weights, paths in (("weights", "paths"), ("eval_weights", "eval_paths")):
            values = getattr(self, weights)
            count = len(getattr(self, paths))
            if values and len(values) != count:
                raise ValueError(
                    f"data.{weights} has {len(values)} entries and data.{paths} has {count}; give one weight per path"
                )
        changes = tuple(file for _, file in self.changes())
        for field, entries in (("paths", self.paths), ("blend_changes", changes), ("eval_paths", self.eval_paths)):
            for prefix in prefixes(read_blend(entries)):
                for path in (prefix + ".bin", prefix + ".idx"):
                    if not os.path.isfile(path):
                        raise ValueError(
                            f"data.{field}: file {path} does not exist; build it with "
                            "python -m megajax.data.preprocess (give the prefix, without .bin)"
                        )

    def of_source(self, source: SourceKind) -> "DataConfig":
        """The same with another source, without the names of files and tokenizer, which were those of this one."""
        names = ("paths", "weights", "blend_changes", "eval_paths", "eval_weights", "text", "tokenizer")
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in names}
        return dataclasses.replace(self, source=source, **defaults)

    def with_tokenizer(self, vocab_size: int) -> "DataConfig":
        """The same with the tokenizer that an empty `tokenizer` means. vocab_size: of the model.

        Raises ValueError if the file of the tokenizer that wrote the data is not there.
        """
        if self.tokenizer or self.source == "text":
            return self
        spec = f"null:{vocab_size}"
        if self.source == "indexed":
            prefix = prefixes(read_blend(self.paths))[0]
            meta = read_meta(prefix)
            if meta is None:
                _warn_of_unknown_tokenizer(prefix, vocab_size)
            else:
                spec = _found_tokenizer(meta["tokenizer"], prefix)
        return dataclasses.replace(self, tokenizer=spec)

    def num_token_ids(self, vocab_size: int) -> int:
        """Of the tokenizer. vocab_size: of the model. Raises ValueError if it cannot be read."""
        spec = self.with_tokenizer(vocab_size).tokenizer
        if spec.startswith("sentencepiece:"):  # not trained yet
            return int(spec.removeprefix("sentencepiece:"))
        return load_tokenizer(spec).vocab_size

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


@functools.cache  # once a process, however often the config is looked at
def _warn_of_unknown_tokenizer(prefix: str, vocab_size: int) -> None:
    logger.warning(
        "data.tokenizer: %s.meta.json does not exist, so the tokenizer that wrote the tokens is not known; any id "
        "below model.vocab_size=%d is accepted, and nothing can be decoded",
        prefix,
        vocab_size,
    )


def _found_tokenizer(spec: str, prefix: str) -> str:
    """The tokenizer that wrote a dataset: its file is where it was, or beside the data."""
    if not spec.endswith(tuple(FILE_TOKENIZERS)):
        return spec
    paths = [spec, os.path.join(os.path.dirname(prefix), os.path.basename(spec))]
    found = [path for path in paths if os.path.isfile(path)]
    if not found:
        raise ValueError(
            f"data.tokenizer: {prefix}.bin was written with {spec}, which does not exist here; name its file with "
            "--data.tokenizer"
        )
    return found[0]
