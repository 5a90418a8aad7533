"""What a training step reads: datasets from the configuration, and an iterator over steps.

The order is an index computation. Step s covers the samples [first(s), first(s) + global batch) of one list that
does not depend on the number of hosts or workers; a process reads only its rows. The state is the step: one integer.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np

from megajax.data.blend import BlendedDataset, dataset_sizes, normalize_weights
from megajax.data.gpt import GptDataset, SampleFormat, split_ranges
from megajax.data.indexed_dataset import IndexedDataset
from megajax.data.mock import MockIndexedDataset
from megajax.data.preprocess import read_meta
from megajax.data.text_corpus import prepare_text
from megajax.data.tokenizer import Tokenizer, check_tokenizer_spec, load_tokenizer


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: Literal["indexed", "text", "mock"] = "mock"
    """indexed: .bin/.idx files named by `paths`; text: text files named by `text`; mock: Megatron's mock documents."""
    paths: tuple[str, ...] = ()
    """Prefixes of Megatron .bin/.idx files, blended."""
    weights: tuple[float, ...] = ()
    """One a path, any positive scale; empty blends by the number of tokens."""
    eval_paths: tuple[str, ...] = ()
    """Prefixes to evaluate on, blended by the number of tokens; empty cuts the evaluation set from `paths`."""
    split: tuple[float, float, float] = (969, 30, 1)
    """Relative shares of training, evaluation and test documents in `paths` and in the mock documents."""
    text: tuple[str, ...] = ()
    """Patterns of text files; "stdlib" is the source code of Python's standard library."""
    tokenizer: str = "null:50257"
    """bytes | null:VOCAB | sentencepiece:VOCAB (trained on `text`) | PATH.model | PATH/tokenizer.json"""
    cache_dir: str = ".cache/megajax"
    """Where sample indices and tokenized text are kept."""
    cross_document_attention: bool = False
    """Documents packed into one sample attend across each other (Megatron's default)."""
    reset_positions: bool = False
    """Positions restart at 0 with each document."""
    mask_document_end: bool = False
    """No loss on predicting the end-of-document token."""
    num_threads: int = 4
    """Threads that read steps ahead; 0 reads when asked."""
    num_workers: int = 0
    """Processes that read steps ahead, for samples that cost much Python time; 0 uses threads only."""

    def check(self) -> None:
        """Raises ValueError with the way out; opens no file."""
        check_tokenizer_spec(self.tokenizer)
        for field in ("num_threads", "num_workers"):
            if getattr(self, field) < 0:
                raise ValueError(f"data.{field}={getattr(self, field)} must not be negative")
        if len(self.split) != 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"data.split={self.split} must be three shares, train evaluation test, none negative")
        if self.tokenizer.endswith((".model", ".json")) and not os.path.isfile(self.tokenizer):
            raise ValueError(f"data.tokenizer={self.tokenizer}: the file does not exist")
        self._check_source()
        self._check_paths()

    def _check_source(self) -> None:
        needed = {"indexed": "paths", "text": "text", "mock": None}[self.source]
        for field in ("paths", "eval_paths", "weights", "text"):
            used = field == needed or (self.source == "indexed" and field != "text")
            if getattr(self, field) and not used:
                raise ValueError(
                    f"data.{field}={getattr(self, field)} is not read with data.source={self.source}; "
                    f"use --data.source={'text' if field == 'text' else 'indexed'}"
                )
        if needed and not getattr(self, needed):
            raise ValueError(f"data.source={self.source} needs --data.{needed}")
        if self.source == "text" and self.tokenizer.startswith("null:"):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} cannot read text; use --data.tokenizer=sentencepiece:2048 or bytes"
            )
        if self.source != "text" and self.tokenizer.startswith("sentencepiece:"):
            raise ValueError(
                f"data.tokenizer={self.tokenizer} is trained on data.text and needs --data.source=text; "
                "name a trained model, PATH.model"
            )

    def _check_paths(self) -> None:
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"data.weights has {len(self.weights)} entries, data.paths {len(self.paths)}; give one each"
            )
        if self.weights and not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"data.weights={self.weights} must all be positive")
        for field in ("paths", "eval_paths"):
            for prefix in getattr(self, field):
                for path in (prefix + ".bin", prefix + ".idx"):
                    if not os.path.isfile(path):
                        raise ValueError(
                            f"data.{field}: file {path} does not exist; build it with "
                            "python -m megajax.data.preprocess (give the prefix, without .bin)"
                        )


class Dataset(Protocol):
    """Random access to samples: dicts of arrays [sequence_length] (GptDataset says which)."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Datasets:
    """eval is None if no evaluation samples were asked for; eval_bytes_per_token is None where the text is unknown."""

    train: Dataset
    eval: Dataset | None
    tokenizer: Tokenizer
    train_tokens_per_epoch: int
    eval_bytes_per_token: float | None


def build_datasets(
    config: DataConfig, *, sequence_length: int, seed: int, num_train_samples: int, num_eval_samples: int
) -> Datasets:
    """Training and evaluation data of a run: at least the numbers of samples asked for, over as many epochs as needed.

    Raises ValueError if files are missing or damaged, a split is too small, or the tokenizer did not write the data.
    """
    config.check()
    if config.source == "text":
        train_prefix, eval_prefix, spec = prepare_text(config)
        train_paths, eval_paths = (train_prefix,), (eval_prefix,)
    else:
        train_paths, eval_paths, spec = config.paths, config.eval_paths, config.tokenizer
    tokenizer = load_tokenizer(spec)
    form = SampleFormat(
        cross_document_attention=config.cross_document_attention,
        reset_positions=config.reset_positions,
        mask_document_end=config.mask_document_end,
        eod_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
    )
    build = functools.partial(
        _build, sequence_length=sequence_length, seed=seed, sample_format=form, cache_dir=config.cache_dir
    )
    if config.source == "mock":
        source = [MockIndexedDataset(tokenizer.vocab_size, tokenizer.eod_id)]
        train = build(source, (), _ranges(source, config.split, 0), num_train_samples)
        held_out = build(source, (), _ranges(source, config.split, 1), num_eval_samples) if num_eval_samples else None
        return Datasets(train, held_out, tokenizer, _tokens_per_epoch(train), None)
    sources = _open(train_paths, tokenizer)
    split = (1, 0, 0) if eval_paths else config.split
    train = build(sources, config.weights, _ranges(sources, split, 0), num_train_samples)
    held_out = bytes_per_token = None
    if num_eval_samples:
        eval_sources = _open(eval_paths, tokenizer) if eval_paths else sources
        ranges = _ranges(eval_sources, (1, 0, 0), 0) if eval_paths else _ranges(sources, split, 1)
        held_out = build(eval_sources, () if eval_paths else config.weights, ranges, num_eval_samples)
        bytes_per_token = _bytes_per_token(eval_sources)
    return Datasets(train, held_out, tokenizer, _tokens_per_epoch(train), bytes_per_token)


def _open(prefixes: tuple[str, ...], tokenizer: Tokenizer) -> list[IndexedDataset]:
    """The datasets, after checking that the tokenizer is the one that wrote them, where P.meta.json says so."""
    for prefix in prefixes:
        meta = read_meta(prefix)
        null = tokenizer.identity.startswith("null:")
        if meta and (
            meta["vocab_size"] > tokenizer.vocab_size if null else meta["tokenizer_identity"] != tokenizer.identity
        ):
            raise ValueError(
                f"data.tokenizer: {prefix}.bin was written with {meta['tokenizer']} ({meta['tokenizer_identity']}, "
                f"{meta['vocab_size']} ids), not with {tokenizer.identity}; name that tokenizer"
            )
    return [IndexedDataset(prefix) for prefix in prefixes]


def _ranges(sources: list, split: tuple[float, ...], which: int) -> list[tuple[int, int]]:
    ranges = [split_ranges(split, len(source))[which] for source in sources]
    for source, part in zip(sources, ranges, strict=True):
        if part is None or part[0] == part[1]:
            raise ValueError(
                f"data.split={tuple(split)} leaves no {('training', 'evaluation', 'test')[which]} documents of the "
                f"{len(source)} in {source.prefix}; give it a larger share, or name --data.eval_paths"
            )
    return ranges


def _build(
    sources: list,
    weights: tuple[float, ...],
    ranges: list[tuple[int, int]],
    num_samples: int,
    *,
    sequence_length: int,
    seed: int,
    sample_format: SampleFormat,
    cache_dir: str,
) -> Dataset:
    gpt = functools.partial(
        GptDataset, sequence_length=sequence_length, seed=seed, sample_format=sample_format, cache_dir=cache_dir
    )
    # As Megatron: one path without a weight is no blend, one with a weight is, and is then built 0.5 % larger.
    if len(sources) == 1 and not weights:
        return gpt(sources[0], ranges[0], num_samples)
    tokens = [
        int(source.lengths[slice(*part)].sum(dtype=np.int64)) for source, part in zip(sources, ranges, strict=True)
    ]
    shares = normalize_weights(weights or tokens)
    taken, built = dataset_sizes(shares, num_samples)
    datasets = [gpt(source, part, size) for source, part, size in zip(sources, ranges, built, strict=True)]
    return BlendedDataset(datasets, shares, sum(taken), cache_dir)


def _tokens_per_epoch(dataset: GptDataset | BlendedDataset) -> int:
    return sum(part.tokens_per_epoch for part in getattr(dataset, "datasets", [dataset]))


def _bytes_per_token(sources: list[IndexedDataset]) -> float | None:
    """Text bytes a token of the whole files, end-of-document tokens counted; None unless one file with a meta.json."""
    meta = read_meta(sources[0].prefix) if len(sources) == 1 else None
    return meta["num_bytes"] / meta["num_tokens"] if meta and meta["num_tokens"] else None


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer makes ids that the model has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of data.tokenizer; "
            f"use --model.vocab_size={-(-tokenizer.vocab_size // 128) * 128}"
        )


def step_batches(
    dataset: Dataset,
    schedule: Callable[[int], tuple[int, int, int]],
    rows_of: Callable[[int], np.ndarray],
    *,
    start_step: int,
    num_steps: int,
    config: DataConfig,
) -> Iterator[dict[str, np.ndarray]]:
    """Iterates over the batches of steps start_step, ..., num_steps - 1 of a run, as this process needs them.

    schedule: step -> (first sample, num_microbatches M, batch size B); samples must not decrease with the step.
    rows_of: B -> the rows b of the batch that this process needs, ascending; it may differ with B (a ramp-up).
    Yields dicts of arrays [M, len(rows), T]: entry [m, r] is sample first + m * B + rows[r].
    Raises ValueError at once if the last step needs more samples than the dataset has.
    """
    import grain

    if not 0 <= start_step <= num_steps:
        raise ValueError(f"data: cannot start at step {start_step} of a run of {num_steps} steps")
    if start_step < num_steps:
        first, num_microbatches, batch_size = schedule(num_steps - 1)
        if first + num_microbatches * batch_size > len(dataset):
            raise ValueError(
                f"data: step {num_steps - 1} needs samples up to {first + num_microbatches * batch_size}, the dataset "
                f"has {len(dataset)}; build it for all training.steps"
            )
    steps = grain.MapDataset.range(start_step, num_steps)
    steps = steps.map(functools.partial(_read_step, dataset, schedule, rows_of))
    steps = steps.to_iter_dataset(grain.ReadOptions(config.num_threads, prefetch_buffer_size=2 * config.num_threads))
    if config.num_workers:
        _let_grain_start_processes()
        steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=config.num_workers))
    return iter(steps)


def _read_step(dataset: Dataset, schedule: Callable, rows_of: Callable, step: int) -> dict[str, Any]:
    first, num_microbatches, batch_size = schedule(int(step))
    rows = np.asarray(rows_of(batch_size))
    samples = (first + np.arange(num_microbatches)[:, None] * batch_size + rows).reshape(-1)
    batch = {}
    for position, i in enumerate(samples.tolist()):
        for key, value in dataset[i].items():
            if key not in batch:
                batch[key] = np.empty((len(samples), *value.shape), value.dtype)
            batch[key][position] = value
    return {key: value.reshape(num_microbatches, len(rows), *value.shape[1:]) for key, value in batch.items()}


@functools.cache
def _let_grain_start_processes() -> None:
    # Grain's workers read absl flags, which nobody parses in a program that is not an absl app.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
