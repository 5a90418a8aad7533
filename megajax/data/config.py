"""The section `data` of a configuration, and its checks."""

import dataclasses
import functools
import logging
import os
from typing import Annotated, Literal, get_args

from megajax.data.blend_file import is_blend_file, prefixes, read_blend
from megajax.data.meta import read_meta
from megajax.data.tokenizers.masking_tokens import SPELLINGS, masking_tokens
from megajax.data.tokenizers.span_tokens import NUM_ADDED, SpanTokens
from megajax.data.tokenizers.tokenizer import FILE_TOKENIZERS, check_tokenizer_spec, load_tokenizer
from megajax.ranges import NonNegativeFloat, PositiveFloat, Probability, Range

logger = logging.getLogger("megajax")

NumReaders = Annotated[int, Range(at_least=0, at_most=1024)]
SourceKind = Literal["indexed", "text", "mock"]
MaskedKind = Literal["masked", "masked_nsp", "masked_sop"]
DataKind = Literal["documents", "conversations", MaskedKind, "classification", "spans"]
MASKED_KINDS = get_args(MaskedKind)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: SourceKind = "mock"
    """indexed: .bin/.idx files in `paths`; text: text files in `text`; mock: Megatron's mock documents. Follows from
    `paths` or `text` if these are given and it is not."""
    paths: tuple[str, ...] = ()
    """Prefixes of Megatron .bin/.idx files, blended; or FILE.json with a (nested) blend (data/blend_file.py)."""
    weights: tuple[PositiveFloat, ...] = ()
    """One per path, on any positive scale; empty: by the number of tokens."""
    blend_changes: tuple[str, ...] = ()
    """Entries STEP:FILE.json: from this step on, train on the blend in this file."""
    eval_paths: tuple[str, ...] = ()
    """Prefixes or blend files to evaluate on; empty: documents of `paths`, by `split`."""
    eval_weights: tuple[PositiveFloat, ...] = ()
    """One per evaluation path; empty: by the number of tokens."""
    kind: DataKind = "documents"
    """documents: pretraining. conversations: supervised fine-tuning with a loss on the answers only, on files written
    by preprocess --conversations. masked: masked tokens of one text (BERT); masked_nsp and masked_sop: of two texts, of
    which the second follows, is of another document (nsp) or precedes (sop), on files written with --split_sentences.
    classification: labelled texts or words in .jsonl or .csv files (docs/bert.md). spans: a text without some spans,
    and these spans, for an encoder-decoder (docs/t5.md)."""
    mask_probability: Annotated[float, Range(above=0, below=1)] = 0.15
    """With the masked kinds and spans: fraction of the tokens that are predicted."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (969, 30, 1)
    """Relative shares of training, evaluation and test documents in `paths` and in the mock documents."""
    text: tuple[str, ...] = ()
    """Folders or patterns of text files; "stdlib" is the source code of Python's standard library."""
    tokenizer: str = ""
    """bytes | null:VOCAB | sentencepiece:VOCAB (trained on `text`) | X.model | X/tokenizer.json | X.tiktoken; empty:
    the tokenizer of `paths` recorded in P.meta.json, or null:VOCAB with the vocabulary of the model."""
    cache_dir: str = ".cache/megajax"
    """Directory for sample indices and tokenized text."""
    cross_document_attention: bool = False
    """Let documents packed into one sample attend to each other (Megatron's default)."""
    reset_positions: bool = False
    """Restart positions at 0 with each document."""
    mask_document_end: bool = False
    """No loss on predicting the end-of-document token."""
    fim_rate: Probability = 0.0
    """Probability that a training document is rearranged for fill-in-the-middle (data/samples/fim.py)."""
    fim_spm_rate: Probability = 0.5
    """Probability that such a document starts with its suffix (SPM)."""
    fim_tokens: tuple[str, str, str] = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    """Special tokens before the three parts, as spelled in the tokenizer."""
    on_misfit: Literal["raise", "skip", "truncate"] = "raise"
    """What to do with a conversation longer than a sample: raise an error, skip it or truncate it. One without an
    answer is an error with raise, and skipped otherwise."""
    allow_change: bool = False
    """Let a run resume with data different from what it began with."""
    num_threads: NumReaders = 4
    """Threads that prefetch batches; 0: none."""
    num_workers: NumReaders = 0
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
        self._check_kind()
        self._check_paths()

    @property
    def is_masked(self) -> bool:
        return self.kind in MASKED_KINDS

    @property
    def next_sentence(self) -> Literal["none", "nsp", "sop"]:
        """With the masked kinds: the task on the order of the two texts (data/samples/bert.py)."""
        return self.kind.removeprefix("masked").removeprefix("_") or "none"

    def _check_kind(self) -> None:
        for name, kinds in {"mask_probability": (*MASKED_KINDS, "spans"), "on_misfit": ("conversations",)}.items():
            default = getattr(DataConfig, name)
            if self.kind not in kinds and getattr(self, name) != default:
                raise ValueError(
                    f"data.{name}={getattr(self, name)} has no effect with data.kind={self.kind}, only with "
                    f"{', '.join(kinds)}; use --data.{name}={default}"
                )
        if self.kind == "documents":
            return
        for name in ("cross_document_attention", "reset_positions", "mask_document_end", "fim_rate"):
            if getattr(self, name) and (self.kind, name) != ("conversations", "reset_positions"):
                raise ValueError(f"data.{name}={getattr(self, name)} is not supported with data.kind={self.kind}")
        needed = {"conversations": "indexed", "classification": "text"}.get(self.kind, self.source)
        if self.source != needed:
            raise ValueError(f"data.kind={self.kind} needs data.source={needed}, not {self.source}")
        if self.source == "mock" and self.next_sentence != "none" and self.is_masked:
            raise ValueError(f"data.kind={self.kind} needs sentences, which mock documents do not have; use "
                             "--data.kind=masked")  # fmt: skip
        if self.kind == "classification" and self.tokenizer.startswith("sentencepiece:"):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} is not trained on labelled texts; name that of the model to start "
                "from, such as runs/NAME/tokenizer.model"
            )

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
                            f"data.{field}: file {path} does not exist; build it with python -m megajax.data.preprocess"
                        )

    def of_source(self, source: SourceKind) -> "DataConfig":
        """The same with another source, and without the files and the tokenizer of this one. Only text keeps the
        tokenizer, that of a Hugging Face folder for example: other files record theirs."""
        names = ["paths", "weights", "blend_changes", "eval_paths", "eval_weights", "text"]
        if source != "text" or not self._reads_text:
            names.append("tokenizer")
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in names}
        return dataclasses.replace(self, source=source, **defaults)

    @property
    def _reads_text(self) -> bool:
        return self.tokenizer != "" and not self.tokenizer.startswith("null:")

    def with_tokenizer(self, vocab_size: int) -> "DataConfig":
        """The same with an empty `tokenizer` resolved. vocab_size: of the model.

        Raises ValueError if the file of the recorded tokenizer does not exist.
        """
        if self.tokenizer or self.source == "text":
            return self
        spec = f"null:{vocab_size - self._num_added_ids}"
        if self.source == "indexed":
            prefix = prefixes(read_blend(self.paths))[0]
            meta = read_meta(prefix)
            if meta is None:
                _warn_of_unknown_tokenizer(prefix, vocab_size)
            else:
                spec = _found_tokenizer(meta["tokenizer"], prefix)
        return dataclasses.replace(self, tokenizer=spec)

    def num_token_ids(self, vocab_size: int) -> int:
        """Number of ids of the tokenizer, and of special tokens that it lacks. vocab_size: of the model. Raises
        ValueError if it cannot be read."""
        spec = self.with_tokenizer(vocab_size).tokenizer
        if spec.startswith("sentencepiece:"):  # not trained yet
            return int(spec.removeprefix("sentencepiece:")) + self._num_added_ids
        if self.kind == "spans":
            return SpanTokens.of(load_tokenizer(spec)).vocab_size
        if self.is_masked or self.kind == "classification":
            return masking_tokens(load_tokenizer(spec)).vocab_size
        return load_tokenizer(spec).vocab_size

    @property
    def _num_added_ids(self) -> int:
        """Special tokens of the kind, for a tokenizer that has none of them."""
        return len(SPELLINGS) if self.is_masked else NUM_ADDED if self.kind == "spans" else 0

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
