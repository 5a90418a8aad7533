"""The datasets of a run: opens, checks and blends what the configuration names, and counts epochs."""

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from megajax.announce import announced
from megajax.data.blend import BlendedDataset, plan_phases
from megajax.data.blend_file import Entry, phase_weights, prefixes, read_blend, shares
from megajax.data.config import DataConfig
from megajax.data.indexed_dataset import IndexedDataset
from megajax.data.meta import read_meta
from megajax.data.prepare.text_corpus import find_files, prepare_text
from megajax.data.samples.bert import BertDataset, BertFormat
from megajax.data.samples.classification import ClassificationDataset, Labels, read_labelled
from megajax.data.samples.fim import FillInTheMiddle
from megajax.data.samples.gpt import GptDataset, SampleFormat, split_ranges
from megajax.data.samples.masking import Masking
from megajax.data.samples.mock import MockIndexedDataset
from megajax.data.samples.sft import SftDataset, SftFormat
from megajax.data.samples.t5 import T5Dataset, T5Format
from megajax.data.tokenizers.masking_tokens import masking_tokens
from megajax.data.tokenizers.span_tokens import SpanTokens
from megajax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("megajax")


class Dataset(Protocol):
    """Random access to samples: dicts of arrays, with the same names, shapes and dtypes for all samples. A model reads
    those in ModelConfig.batch; GptDataset lists those for a decoder."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """How much of one dataset a run trains on."""

    name: str
    tokens_per_epoch: int
    num_samples: int
    epochs: float


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
    labels: Labels | None = None
    """Of labelled texts."""


def build_datasets(
    config: DataConfig,
    *,
    sequence_length: int,
    seed: int,
    num_train_samples: int,
    num_eval_samples: int,
    first_sample: Callable[[int], int] = int,
    label_length: int | None = None,
) -> Datasets:
    """Training and evaluation data of a run: at least the given numbers of samples, over as many epochs as needed. The
    tokenizer of the config must be resolved (Config.check_on).

    first_sample: step -> its first sample, for `blend_changes`. label_length: labels of a sample of kind=spans; None:
    sequence_length. Raises ValueError if files are missing or damaged, a split is too small, or the tokenizer did not
    write the data.
    """
    config.check()
    if config.kind == "classification":
        return _labelled(config, sequence_length, seed, num_train_samples, num_eval_samples)
    if config.source == "text":
        train_prefix, eval_prefix, spec = prepare_text(config)
        train_paths = (train_prefix,)
        eval_paths = (eval_prefix,)
    else:
        train_paths = config.paths
        eval_paths = config.eval_paths
        spec = config.tokenizer
    tokenizer = load_tokenizer(spec)
    form = _sample_format(config, tokenizer, label_length or sequence_length)
    build = functools.partial(_build, sequence_length=sequence_length, seed=seed, cache_dir=config.cache_dir)
    if config.source == "mock":
        mock = MockIndexedDataset(tokenizer.vocab_size, tokenizer.eod_id)
        opened = {mock.prefix: mock}
        blends = [Entry(mock.prefix)]
        held_out = Entry(mock.prefix)
    else:
        files = [(train_paths, config.weights), *(((file,), ()) for _, file in config.changes())]
        blends = [read_blend(*arguments) for arguments in files]
        held_out = read_blend(eval_paths, config.eval_weights) if eval_paths else blends[0]
        names = [name for blend in (*blends, held_out) for name in prefixes(blend)]
        opened = {name: _open(name, tokenizer, config.kind) for name in dict.fromkeys(names)}
    split = (1, 0, 0) if eval_paths else config.split
    splits = dict.fromkeys(opened, split)
    if num_eval_samples and not eval_paths:
        count = _KINDS[type(form)].count
        splits |= {name: _split(opened[name], count(opened[name]), split) for name in prefixes(held_out)}
    cuts = [*(first_sample(step) for step, _ in config.changes()), num_train_samples]
    if any(size <= 0 for size in np.diff([0, *cuts])):
        raise ValueError(
            f"data.blend_changes={config.blend_changes}: the run ends before the last change; use more --training.steps"
        )
    train = build(blends, opened, splits, 0, np.diff([0, *cuts]).tolist(), sample_format=form)
    evaluation = None
    if num_eval_samples:
        which = 0 if eval_paths else 1
        plain = _sample_format(dataclasses.replace(config, fim_rate=0.0), tokenizer, label_length or sequence_length)
        evaluation = build([held_out], opened, splits, which, [num_eval_samples], sample_format=plain)
    return Datasets(
        train=train,
        eval=evaluation,
        tokenizer=tokenizer,
        train_tokens_per_epoch=sum(part.tokens_per_epoch for part in _parts(train)),
        eval_bytes_per_token=_bytes_per_token(evaluation, config.kind),
        sources=_sources(train, sequence_length, cuts[-1]),
        record=_record(train, tokenizer, form, split, splits, sequence_length, seed, cuts),
        is_mock=config.source == "mock",
        num_token_ids=form.vocab_size,
    )


def _labelled(
    config: DataConfig, sequence_length: int, seed: int, num_train_samples: int, num_eval_samples: int
) -> Datasets:
    """As build_datasets, of labelled texts. Which examples are held out depends on data.split only, not on their order,
    which often goes by label."""
    tokenizer = load_tokenizer(config.tokenizer)
    special = masking_tokens(tokenizer)
    with announced("reading labelled texts"):
        files, labels = read_labelled([path for _, path in find_files(config.text)], tokenizer)
    examples = [example for file in files for example in file.examples]
    order = np.random.default_rng(0).permutation(len(examples))

    def part(which: int, num_samples: int) -> ClassificationDataset:
        begin, end = split_ranges(config.split, len(examples))[which] or (0, 0)
        if begin == end:
            raise ValueError(
                f"data.split={config.split} leaves no {('training', 'evaluation')[which]} examples of the "
                f"{len(examples)} in data.text; give it a larger share"
            )
        chosen = [examples[i] for i in order[begin:end]]
        return ClassificationDataset(chosen, num_samples, sequence_length, seed, special)

    train = part(0, num_train_samples)
    per_epoch = len(train.examples)
    record = {
        "tokenizer": tokenizer.identity,
        "sequence_length": sequence_length,
        "seed": seed,
        "format": {"kind": "classification", "classes": list(labels.classes), "of_words": labels.of_words},
        "files": [
            {
                "prefix": file.path,
                "sequences": len(file.examples),
                "tokens": file.num_tokens,
                "sha256": file.sha256,
                "fingerprint": file.sha256,
                "holds_out_last": False,
            }
            for file in files
        ],
        "split": list(config.split),
        "weights": [],
        "changes": [],
        "num_samples": num_train_samples,
    }
    return Datasets(
        train=train,
        eval=part(1, num_eval_samples) if num_eval_samples else None,
        tokenizer=tokenizer,
        train_tokens_per_epoch=train.tokens_per_epoch,
        eval_bytes_per_token=None,
        sources=(Source("data.text", train.tokens_per_epoch, num_train_samples, num_train_samples / per_epoch),),
        record=record,
        is_mock=False,
        num_token_ids=special.vocab_size,
        labels=labels,
    )


def _sample_format(
    config: DataConfig, tokenizer: Tokenizer, label_length: int
) -> SampleFormat | SftFormat | BertFormat | T5Format:
    if config.kind == "spans":
        special = SpanTokens.of(tokenizer)
        return T5Format(
            bos_id=special.pad_id,
            eos_id=special.eos_id,
            pad_id=special.pad_id,
            sentinel_ids=special.sentinel_ids,
            vocab_size=special.vocab_size,
            decoder_length=label_length,
            masking=Masking(probability=config.mask_probability, max_ngram=10),
        )
    if config.is_masked:
        masking = Masking(probability=config.mask_probability)
        special = masking_tokens(tokenizer)._asdict()
        return BertFormat(**special, next_sentence=config.next_sentence, masking=masking)
    if config.kind == "conversations":
        return SftFormat(on_misfit=config.on_misfit, vocab_size=tokenizer.vocab_size)
    fill = None
    if config.fim_rate:
        ids = {name: tokenizer.token_id(name) for name in config.fim_tokens}
        missing = [name for name, number in ids.items() if number is None]
        if missing:
            raise ValueError(
                f"data.fim_tokens: {', '.join(missing)} are not tokens of {tokenizer.identity}; name tokens of it"
            )
        fill = FillInTheMiddle(config.fim_rate, config.fim_spm_rate, *ids.values())
    return SampleFormat(
        cross_document_attention=config.cross_document_attention,
        reset_positions=config.reset_positions,
        mask_document_end=config.mask_document_end,
        eod_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
        fill_in_the_middle=fill,
    )


def _open(prefix: str, tokenizer: Tokenizer, kind: str) -> IndexedDataset:
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


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What samples are made of: sequences of an indexed dataset, or its documents."""

    dataset: type
    count: Callable[[Any], int]
    num_tokens: Callable[[Any, tuple[int, int]], int]


def _tokens(source, begin: int, end: int) -> int:
    return int(source.lengths[begin:end].sum(dtype=np.int64))


def _of_documents(dataset: type) -> _Kind:
    return _Kind(
        dataset,
        lambda source: len(source.document_indices) - 1,
        lambda source, part: _tokens(source, *source.document_indices[list(part)].tolist()),
    )


_KINDS = {
    SampleFormat: _Kind(GptDataset, len, lambda source, part: _tokens(source, *part)),
    SftFormat: _of_documents(SftDataset),
    BertFormat: _of_documents(BertDataset),
    T5Format: _of_documents(T5Dataset),
}


def _split(source, count: int, split: tuple[float, ...]) -> tuple[float, ...]:
    """The split; if rounding leaves no evaluation documents, one that holds out the last document."""
    _, evaluation, _ = split_ranges(split, count)
    if evaluation is None or evaluation[0] < evaluation[1] or count < 2:
        return split
    logger.info(
        "data.split=%s leaves no evaluation documents of the %d in %s: the last one is held out", split, count,
        source.prefix,
    )  # fmt: skip
    return count - 1, 1, 0


def _range(source, count: int, split: tuple[float, ...], which: int) -> tuple[int, int]:
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
    splits: dict[str, tuple[float, ...]],
    which: int,
    sizes: list[int],
    *,
    sequence_length: int,
    seed: int,
    sample_format: SampleFormat | SftFormat,
    cache_dir: str,
) -> Dataset:
    """blends, sizes: of the phases; splits: by prefix."""
    kind = _KINDS[type(sample_format)]
    build = functools.partial(
        kind.dataset, sequence_length=sequence_length, seed=seed, sample_format=sample_format, cache_dir=cache_dir
    )
    used = dict.fromkeys(name for blend in blends for name in prefixes(blend))
    ranges = {name: _range(opened[name], kind.count(opened[name]), splits[name], which) for name in used}
    # As in Megatron, one path is a blend only if it has a weight; it is then built 0.5 % larger.
    alone, *others = ranges
    weighted = blends[0].entries and blends[0].entries[0].weight is not None
    if not others and not weighted and len(blends) == 1:
        return build(opened[alone], ranges[alone], sizes[0])

    def num_tokens(name: str) -> int:
        return kind.num_tokens(opened[name], ranges[name])

    names, weights = phase_weights(shares(blend, num_tokens) for blend in blends)
    phases, built = plan_phases(weights, sizes)
    datasets = [build(opened[name], ranges[name], size) for name, size in zip(names, built, strict=True)]
    return BlendedDataset(datasets, phases, cache_dir)


def _parts(dataset: GptDataset | SftDataset | BlendedDataset) -> list[GptDataset | SftDataset]:
    return getattr(dataset, "datasets", [dataset])


def _sources(dataset: GptDataset | SftDataset | BlendedDataset, length: int, num_samples: int) -> tuple[Source, ...]:
    parts = _parts(dataset)
    picks = getattr(dataset, "dataset_index", np.zeros(num_samples, np.int16))
    counts = np.bincount(picks[:num_samples], minlength=len(parts)).tolist()
    return tuple(
        Source(part.indexed.prefix, part.tokens_per_epoch, count, count * length / part.tokens_per_epoch)
        for part, count in zip(parts, counts, strict=True)
    )


def _record(
    dataset: GptDataset | SftDataset | BlendedDataset,
    tokenizer: Tokenizer,
    form: SampleFormat | SftFormat,
    split: tuple[float, ...],
    splits: dict[str, tuple[float, ...]],
    sequence_length: int,
    seed: int,
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
            "holds_out_last": splits[part.indexed.prefix] != split,
        }
        for part in _parts(dataset)
    ]
    return {
        "tokenizer": tokenizer.identity,
        "sequence_length": sequence_length,
        "seed": seed,
        "format": {"kind": type(form).__name__, **json.loads(json.dumps(dataclasses.asdict(form)))},
        "files": files,
        "split": list(split),
        "weights": [list(phase.weights) for phase in phases],
        "changes": cuts[:-1],
        "num_samples": cuts[-1],
    }


def check_same_data(old: dict[str, Any], new: dict[str, Any], where: str) -> None:
    """Raises ValueError if a run would resume with other samples than it began with.

    old: JSON values of an earlier `Datasets.record`, possibly incomplete; where: the file they come from.
    """
    changed = [_change(name, old.get(key), new[key]) for key, name in _FIELDS.items() if old.get(key) != new[key]]
    changed += _changed_format(old.get("format"), new["format"])
    changed += _changed_files(old.get("files"), new["files"])
    if changed:
        raise ValueError(
            f"data: the run began with other data, as {where} says ({'; '.join(changed)}); use the data it began "
            "with, another --run_dir, or --data.allow_change=True"
        )
    if old.get("num_samples") != new["num_samples"]:
        logger.warning(
            "data: the run was planned for %s samples and now has %d: epochs are shuffled together, so the order of "
            "the samples changes from here on",
            old.get("num_samples"),
            new["num_samples"],
        )


# Key of a record -> what determines it.
_FIELDS = {
    "tokenizer": "data.tokenizer",
    "sequence_length": "training.sequence_length",
    "seed": "training.seed",
    "split": "data.split",
    "weights": "data.weights",
    "changes": "data.blend_changes",
}


def _change(name: str, old: Any, new: Any) -> str:
    """In one line; only the beginnings of hashes."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1", f"{name}: {old} -> {new}")


def _changed_format(old: Any, new: dict[str, Any]) -> list[str]:
    if not isinstance(old, dict):
        return [_change("the format of samples", old, new)]
    return [_change(f"data.{key}", old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]


def _changed_files(old: Any, new: list[dict[str, Any]]) -> list[str]:
    """Prefixes are not compared, because the files may have moved."""
    if not isinstance(old, list) or not all(isinstance(file, dict) for file in old):
        return ["the files it began with are not recorded"]
    if len(old) != len(new):
        names = (", ".join(str(file.get("prefix", "unknown")) for file in files) for files in (old, new))
        return [f"data.paths, {len(old)} -> {len(new)} files: {' -> '.join(names)}"]
    changed = []
    for before, now in zip(old, new, strict=True):
        compared = ["sequences", "tokens", "sha256", "fingerprint"]
        if "fingerprint" not in before:  # an older run
            logger.warning(
                "data: %s: the run recorded no fingerprint of its content, which is therefore not compared",
                now["prefix"],
            )
            compared.remove("fingerprint")
        different = [key for key in compared if before.get(key) != now[key]]
        if before.get("holds_out_last", False) != now["holds_out_last"]:  # see _split
            different.append("holds_out_last")
        counts = [f"{before.get(key)} -> {now[key]} {key}" for key in different if key in ("sequences", "tokens")]
        if "holds_out_last" in different:
            counts.append("another part held out for evaluation (training.eval_every_steps)")
        if different:
            moved = "" if before.get("prefix") in (None, now["prefix"]) else f", in place of {before['prefix']},"
            changed.append(f"{now['prefix']}{moved} has {', '.join(counts) or 'the same size but other content'}")
    return changed


def _bytes_per_token(dataset: Dataset | None, kind: str) -> float | None:
    """Bytes of text per token, counting end-of-document tokens; None unless it is a single file with meta.json."""
    parts = _parts(dataset) if dataset is not None and kind == "documents" else []
    meta = read_meta(parts[0].indexed.prefix) if len(parts) == 1 else None
    return meta["num_bytes"] / meta["num_tokens"] if meta and meta["num_tokens"] else None


def check_vocab_size(num_token_ids: int, vocab_size: int) -> None:
    """Raises ValueError if the data has ids without an embedding in the model."""
    if num_token_ids > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {num_token_ids} ids of data.tokenizer; "
            f"use --model.vocab_size={num_token_ids}"
        )
