"""The datasets of a run: opens, checks and blends what the configuration names, and counts epochs."""

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from megajax.data.blend import BlendedDataset, plan_phases
from megajax.data.blend_file import (
    Entry,
    holds_conversations,
    is_dataset,
    phase_weights,
    prefixes,
    read_blend,
    renamed,
    shares,
)
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.indexed.meta import read_meta
from megajax.data.prepare.drawn_images import prepare_drawn
from megajax.data.prepare.record_files import prepare_records
from megajax.data.prepare.text_corpus import TextForm, prepare_text
from megajax.data.samples.dataset import Part, TokenSource
from megajax.data.samples.gpt import split_ranges
from megajax.data.samples.mock import MockIndexedDataset
from megajax.data.samples.sft import SftFormat
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("megajax")


Split = tuple[float, ...]
"""Shares of training, evaluation and test."""


class Dataset(Protocol):
    """Random access to samples: dicts of arrays, with the same names, shapes and dtypes for all samples. A model reads
    those in ModelConfig.inputs; GptDataset lists those for a decoder."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


class SampleFormat(Protocol):
    """How samples are made from the sequences or documents of a source: a dataclass, whose fields are recorded."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int | None:
        """Ids of the tokenizer, and of special tokens that it lacks."""

    of_documents: ClassVar[bool]
    """Whether parts of a source are counted in documents, or in sequences."""
    is_plain_text: ClassVar[bool]
    """Whether the labels are all tokens of the text, so that their loss has a value in bits per byte."""

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> Dataset: ...


class Formats(NamedTuple):
    train: SampleFormat
    eval: SampleFormat


class Amounts(NamedTuple):
    """How much data a run reads."""

    sequence_length: int
    seed: int
    num_train_samples: int
    num_eval_samples: int
    first_sample: Callable[[int], int] = int
    """Step -> its first sample, for data.blend_changes."""


@dataclasses.dataclass(frozen=True)
class Source:
    """How much of one dataset a run trains on."""

    name: str
    tokens_per_epoch: int
    num_samples: int
    samples_per_epoch: float

    @property
    def epochs(self) -> float:
        return self.num_samples / self.samples_per_epoch


@dataclasses.dataclass(frozen=True)
class Datasets:
    """eval is None if no evaluation samples were requested; eval_bytes_per_token is None if the text is unknown.

    record: JSON values that determine the samples of the run and their order; compared on resume.
    """

    train: Dataset
    eval: Dataset | None
    tokenizer: Tokenizer
    train_tokens_per_epoch: int
    eval_bytes_per_token: float | None
    sources: tuple[Source, ...]
    record: dict[str, Any]
    is_mock: bool
    num_token_ids: int
    """Ids of the tokenizer, and of special tokens that it lacks."""


def build_datasets(
    config: DataConfig, amounts: Amounts, formats_of: Callable[[Tokenizer], Formats], text_form: TextForm
) -> Datasets:
    """Training and evaluation data of a run: at least the given numbers of samples, over as many epochs as needed. The
    tokenizer of the config must be resolved (Config.check_on).

    text_form: how `config.text` and datasets of Hugging Face are tokenized. Raises ValueError if files are missing or
    damaged, a split is too small, or the tokenizer did not write the data.
    """
    config.check()
    if config.source == "text":
        train_prefix, eval_prefix, spec = prepare_text(config, text_form)
        train_paths = (train_prefix,)
        eval_paths = (eval_prefix,)
    elif config.source == "drawn":
        train_prefix, eval_prefix, spec = prepare_drawn(config)
        train_paths = (train_prefix,)
        eval_paths = (eval_prefix,)
    else:
        train_paths = config.paths
        eval_paths = config.eval_paths
        spec = config.tokenizer
    tokenizer = load_tokenizer(spec)
    formats = formats_of(tokenizer)
    form = formats.train
    build = functools.partial(
        _build, sequence_length=amounts.sequence_length, seed=amounts.seed, cache_dir=config.cache_dir
    )
    if config.source == "mock":
        is_chat = isinstance(form, SftFormat)
        mock = form.mock(tokenizer) if is_chat else MockIndexedDataset(tokenizer.vocab_size, tokenizer.eod_id)
        opened = {mock.prefix: mock}
        blends = [Entry(mock.prefix)]
        held_out = Entry(mock.prefix)
    else:
        prepared = functools.partial(_prepared, config=config, form=text_form)
        paths_of_phases = (train_paths, *((file,) for _, file in config.changes()))
        blends = [renamed(read_blend(paths), prepared) for paths in paths_of_phases]
        held_out = renamed(read_blend(eval_paths, "data.eval_paths"), prepared) if eval_paths else blends[0]
        names = [name for blend in (*blends, held_out) for name in prefixes(blend)]
        opened = {name: _open(name, tokenizer) for name in dict.fromkeys(names)}
    split: Split = (1, 0, 0) if eval_paths else config.split
    splits: dict[str, Split] = dict.fromkeys(opened, split)
    if amounts.num_eval_samples and not eval_paths:
        splits |= {name: _split(opened[name], _count(form, opened[name]), split) for name in prefixes(held_out)}
    cuts = [*(amounts.first_sample(step) for step, _ in config.changes()), amounts.num_train_samples]
    if any(size <= 0 for size in np.diff([0, *cuts])):
        raise ValueError(
            f"data.blend_changes={config.blend_changes}: the run ends before the last change; use more --training.steps"
        )
    train = build(blends, opened, splits, 0, np.diff([0, *cuts]).tolist(), form=form)
    evaluation = None
    if amounts.num_eval_samples:
        which = 0 if eval_paths else 1
        evaluation = build([held_out], opened, splits, which, [amounts.num_eval_samples], form=formats.eval)
    return Datasets(
        train=train,
        eval=evaluation,
        tokenizer=tokenizer,
        train_tokens_per_epoch=sum(part.tokens_per_epoch for part in _parts(train)),
        eval_bytes_per_token=_bytes_per_token(evaluation, formats.eval),
        sources=_sources(train, cuts[-1]),
        record=_record(train, tokenizer, form, split, splits, amounts, cuts),
        is_mock=config.source == "mock",
        num_token_ids=form.vocab_size or tokenizer.vocab_size,
    )


def _prepared(path: str, config: DataConfig, form: TextForm) -> str:
    """The prefix of what an entry of a blend names."""
    return prepare_records(path, config, form) if is_dataset(path) or holds_conversations(path) else path


def _open(prefix: str, tokenizer: Tokenizer) -> IndexedDataset:
    """Opens a dataset, after comparing the tokenizer with the one in P.meta.json, if it exists."""
    meta = read_meta(prefix)
    null = tokenizer.identity.startswith("null:")
    if meta and (
        meta["vocab_size"] > tokenizer.vocab_size if null else meta["tokenizer_identity"] != tokenizer.identity
    ):
        raise ValueError(
            f"data.tokenizer: {prefix}.bin was written with {meta['tokenizer']} ({meta['tokenizer_identity']}, "
            f"{meta['vocab_size']} ids), not with {tokenizer.identity}; name that tokenizer"
        )
    return IndexedDataset(prefix)


def _count(form: SampleFormat, source: Any) -> int:
    """Documents or sequences of a source, whichever the samples are made of."""
    return len(source.document_indices) - 1 if form.of_documents else len(source)


def _num_tokens(form: SampleFormat, source: Any, part: tuple[int, int]) -> int:
    """part: (begin, end), documents or sequences."""
    begin, end = source.document_indices[list(part)].tolist() if form.of_documents else part
    return int(source.lengths[begin:end].sum(dtype=np.int64))


def _split(source, count: int, split: Split) -> Split:
    """The split; if rounding leaves no evaluation documents, one that holds out the last document."""
    _, evaluation, _ = split_ranges(split, count)
    if evaluation is None or evaluation[0] < evaluation[1] or count < 2:
        return split
    logger.info(
        "data.split=%s leaves no evaluation documents of the %d in %s: the last one is held out", split, count,
        source.prefix,
    )  # fmt: skip
    return count - 1, 1, 0


def _range(source, count: int, split: Split, which: int) -> tuple[int, int]:
    part = split_ranges(split, count)[which]
    if part is None or part[0] == part[1]:
        raise ValueError(
            f"data.split={tuple(split)} leaves no {('training', 'evaluation', 'test')[which]} documents of the "
            f"{count} in {source.prefix}; give it a larger share, set --data.eval_paths, or do not evaluate "
            "(--training.eval_every_steps=0)"
        )
    return part


def _build(
    blends: list[Entry],
    opened: dict[str, Any],
    splits: dict[str, Split],
    which: int,
    sizes: list[int],
    *,
    sequence_length: int,
    seed: int,
    form: SampleFormat,
    cache_dir: str,
) -> Dataset:
    """blends, sizes: of the phases; splits: by prefix."""
    build = functools.partial(form.build, sequence_length=sequence_length, seed=seed, cache_dir=cache_dir)
    used = dict.fromkeys(name for blend in blends for name in prefixes(blend))
    ranges = {name: _range(opened[name], _count(form, opened[name]), splits[name], which) for name in used}
    # As in Megatron, one path is a blend only if it has a weight; it is then built 0.5 % larger.
    alone, *others = ranges
    weighted = blends[0].entries and blends[0].entries[0].weight is not None
    if not others and not weighted and len(blends) == 1:
        return build(opened[alone], ranges[alone], sizes[0])

    def num_tokens(name: str) -> int:
        return _num_tokens(form, opened[name], ranges[name])

    names, weights = phase_weights(shares(blend, num_tokens) for blend in blends)
    phases, built = plan_phases(weights, sizes)
    datasets = [build(opened[name], ranges[name], size) for name, size in zip(names, built, strict=True)]
    return BlendedDataset(datasets, phases, cache_dir)


def _parts(dataset: Dataset) -> list[Any]:
    return getattr(dataset, "datasets", [dataset])


def _sources(dataset: Dataset, num_samples: int) -> tuple[Source, ...]:
    parts = _parts(dataset)
    picks = getattr(dataset, "dataset_index", np.zeros(num_samples, np.int16))
    counts = np.bincount(picks[:num_samples], minlength=len(parts)).tolist()
    return tuple(
        Source(part.indexed.prefix, part.tokens_per_epoch, count, part.samples_per_epoch)
        for part, count in zip(parts, counts, strict=True)
    )


def _record(
    dataset: Dataset,
    tokenizer: Tokenizer,
    form: SampleFormat,
    split: Split,
    splits: dict[str, Split],
    amounts: Amounts,
    cuts: list[int],
) -> dict[str, Any]:
    phases = getattr(dataset, "phases", ())
    files = [
        {
            "prefix": part.indexed.prefix,
            "sequences": len(part.indexed),
            "tokens": int(part.indexed.lengths.sum(dtype=np.int64)),
            "sha256": (read_meta(part.indexed.prefix) or {}).get("sha256"),
            "fingerprint": part.indexed.fingerprint(),
            **_of_tables(part),
            "holds_out_last": splits[part.indexed.prefix] != split,
        }
        for part in _parts(dataset)
    ]
    return {
        "tokenizer": tokenizer.identity,
        "sequence_length": amounts.sequence_length,
        "seed": amounts.seed,
        "format": {"kind": type(form).__name__, **json.loads(json.dumps(dataclasses.asdict(form)))},
        "files": files,
        "split": list(split),
        "weights": [list(phase.weights) for phase in phases],
        "changes": cuts[:-1],
        "num_samples": cuts[-1],
    }


def _of_tables(part: Any) -> dict[str, str]:
    """The fingerprints of what is read beside the tokens: tables of images, of neighbours."""
    tables = {name: getattr(part, name, None) for name in ("images", "neighbours")}
    return {name: table.fingerprint() for name, table in tables.items() if table is not None}


def check_same_data(old: dict[str, Any], new: dict[str, Any], where: str) -> None:
    """Raises ValueError if a run would resume with other samples than it began with.

    old: JSON values of an earlier `Datasets.record`, possibly incomplete; new: those of the run, compared as far as its
    task records them; where: the file the old ones come from.
    """
    names = {key: name for key, name in _FIELDS.items() if key in new}
    changed = [_change(name, old.get(key), new[key]) for key, name in names.items() if old.get(key) != new[key]]
    changed += _changed_format(old.get("format"), new["format"]) if "format" in new else []
    changed += _changed_files(old.get("files"), new["files"]) if "files" in new else []
    if changed:
        raise ValueError(
            f"data: the run began with other data, as {where} says ({'; '.join(changed)}); use the data it began "
            "with, another --run_dir, or --data.allow_change=True"
        )
    if old.get("num_samples") != new.get("num_samples"):
        logger.warning(
            "data: the run was planned for %s samples and now has %s: epochs are shuffled together, so the order of "
            "the samples changes from here on",
            old.get("num_samples"),
            new.get("num_samples"),
        )


# Key of a record -> what determines it.
_FIELDS = {
    "tokenizer": "data.tokenizer",
    "sequence_length": "training.sequence_length",
    "seed": "training.seed",
    "split": "data.split",
    "weights": "data.paths",
    "changes": "data.blend_changes",
    "batches": "train(batches=...)",
}


def _change(name: str, old: Any, new: Any) -> str:
    """In one line; only the beginnings of hashes."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1", f"{name}: {old} -> {new}")


def _changed_format(old: Any, new: dict[str, Any]) -> list[str]:
    if not isinstance(old, dict):
        return [_change("the format of samples", old, new)]
    return [_change(f"task.{key}", old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]


def _changed_files(old: Any, new: list[dict[str, Any]]) -> list[str]:
    """Prefixes are not compared, because the files may have moved."""
    if not isinstance(old, list) or not all(isinstance(file, dict) for file in old):
        return ["the files it began with are not recorded"]
    if len(old) != len(new):
        names = (", ".join(str(file.get("prefix", "unknown")) for file in files) for files in (old, new))
        return [f"data.paths, {len(old)} -> {len(new)} files: {' -> '.join(names)}"]
    changed = []
    for before, now in zip(old, new, strict=True):
        compared = (
            "sequences",
            "tokens",
            "sha256",
            "fingerprint",
            "images",
            "neighbours",
            "holds_out_last",
        )  # of the last see _split
        different = [key for key in compared if before.get(key) != now.get(key)]
        counts = [f"{before.get(key)} -> {now[key]} {key}" for key in different if key in ("sequences", "tokens")]
        if "holds_out_last" in different:
            counts.append("another part held out for evaluation (training.eval_every_steps)")
        if different:
            moved = "" if before.get("prefix") in (None, now["prefix"]) else f", in place of {before['prefix']},"
            changed.append(f"{now['prefix']}{moved} has {', '.join(counts) or 'the same size but other content'}")
    return changed


def _bytes_per_token(dataset: Dataset | None, form: SampleFormat) -> float | None:
    """Bytes of text per token, counting end-of-document tokens; None unless samples are the plain text of a single file
    with meta.json."""
    parts = _parts(dataset) if dataset is not None and form.is_plain_text else []
    meta = read_meta(parts[0].indexed.prefix) if len(parts) == 1 else None
    return meta["num_bytes"] / meta["num_tokens"] if meta and meta["num_tokens"] else None


def check_vocab_size(num_token_ids: int, vocab_size: int) -> None:
    """Raises ValueError if the data has ids without an embedding in the model."""
    if num_token_ids > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {num_token_ids} ids of data.tokenizer; "
            f"use --model.vocab_size={num_token_ids}"
        )
