"""Inspect indexed data: python -m megajax.data.inspect --prefix P [P ...]

Prints documents, tokens, lengths and the recorded tokenizer; --show N also prints the text of the first N documents
and, for conversations, which parts have a loss. With --output FILE.npz it builds the samples of a run and saves their
indices and first samples under the keys of tests/oracles/gpt_dataset.npz, to compare the order with Megatron's:
`single/SPLIT/...` for one prefix, `blend/SPLIT/...` for several.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megajax.audio import wav
from megajax.data.blend import BlendedDataset, normalize_weights, plan_phases
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDataset, prefix_of
from megajax.data.indexed.images import ImageTable, image_table_path
from megajax.data.indexed.meta import read_meta
from megajax.data.samples.gpt import GptDataset, GptFormat, split_ranges
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.terminal.command_line import errors_in_one_line, parse

SPLITS = "train", "valid", "test"
# Numbers of samples in the oracle file.
SINGLE_SAMPLES = 40
BLEND_SAMPLES = 60
SHOWN_TOKENS = 500  # of a sequence


def describe(dataset: IndexedDataset) -> str:
    """Statistics of a dataset as text."""
    lengths = np.asarray(dataset.lengths)
    meta = read_meta(dataset.prefix)
    num_tokens = int(lengths.sum(dtype=np.int64))
    lines = [
        dataset.prefix,
        f"  documents {len(dataset.document_indices) - 1:,}, sequences {len(dataset):,}, tokens {num_tokens:,} "
        f"({dataset.dtype}, {num_tokens * dataset.dtype.itemsize:,} bytes)",
    ]
    if len(dataset):
        low, median, high = np.percentile(lengths, [5, 50, 95])
        lines.append(
            f"  tokens per sequence: min {lengths.min():,}, 5 % {low:,.0f}, median {median:,.0f}, "
            f"mean {lengths.mean():,.1f}, 95 % {high:,.0f}, max {lengths.max():,}"
        )
    if meta is None:
        lines.append("  no meta.json: the tokenizer is not recorded")
    else:
        ratio = f"{meta['num_bytes'] / meta['num_tokens']:.3f} bytes per token, " if meta["num_tokens"] else ""
        lines.append(f"  tokenizer {meta['tokenizer']} ({meta['vocab_size']:,} ids), {ratio}sha256 {meta['sha256']}")
    if os.path.exists(image_table_path(dataset.prefix)):
        table = ImageTable(dataset.prefix)
        num_documents = max(1, len(table.first) - 1)
        images = table.sizes[table.sizes[:, 1] > 0]
        if len(images) or not len(table):
            height, width = np.median(images, axis=0).astype(int) if len(images) else (0, 0)
            lines.append(
                f"  images {len(images):,}, {len(images) / num_documents:.2f} per document, median height {height:,} "
                f"and width {width:,}"
            )
        clips = table.sizes[table.sizes[:, 1] == 0, 0]
        if len(clips):
            lines.append(
                f"  clips of sound {len(clips):,}, {len(clips) / num_documents:.2f} per document, median "
                f"{np.median(clips) / wav.RATE:.2f} s"
            )
    return "\n".join(lines)


def load_tokenizer_of(prefix: str) -> Tokenizer:
    """The recorded tokenizer of a dataset. Raises ValueError if none is recorded, or if its file is missing."""
    if read_meta(prefix) is None:
        raise ValueError(f"--show: {prefix}.meta.json does not exist; name the tokenizer with --tokenizer")
    return load_tokenizer(DataConfig("indexed", (prefix,)).with_tokenizer(vocab_size=0).tokenizer)


def show(dataset: IndexedDataset, tokenizer: Tokenizer, num_documents: int) -> str:
    """The text of the first documents; each sequence of a conversation is prefixed with [loss] or [no loss]."""
    is_conversation = (read_meta(dataset.prefix) or {}).get("form") == "conversations"
    bounds = dataset.document_indices[: num_documents + 1].tolist()
    lines = []
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        num_tokens = int(dataset.lengths[begin:end].sum(dtype=np.int64))
        lines.append(f"--- {dataset.prefix}, document {number}, {num_tokens:,} tokens")
        for position, sequence in enumerate(range(begin, end)):
            tokens = dataset.read(sequence)
            mark = ("[no loss] ", "[loss] ")[position % 2] if is_conversation else ""
            more = f" ... {len(tokens) - SHOWN_TOKENS:,} more tokens" if len(tokens) > SHOWN_TOKENS else ""
            if len(tokens):
                lines.append(mark + tokenizer.decode(tokens[:SHOWN_TOKENS].tolist()) + more)
    return "\n".join(lines)


def sample_indices(
    datasets: Sequence[IndexedDataset],
    weights: Sequence[float] | None,
    *,
    sequence_length: int,
    seed: int,
    split: Sequence[float],
    num_samples: Sequence[int],
    pad_id: int | None,
) -> dict[str, Any]:
    """The oracle's arrays; splits without documents or samples are left out. weights None: by tokens."""
    out = {}
    for number, (name, size) in enumerate(zip(SPLITS, num_samples, strict=False)):
        parts = [split_ranges(split, len(dataset))[number] for dataset in datasets]
        ranges = [part for part in parts if part is not None and part[0] < part[1]]
        if not size or len(ranges) < len(datasets):
            continue

        def gpt(dataset, part, count):
            form = GptFormat(pad_id=pad_id)
            return GptDataset(dataset, part, count, sequence_length, seed, form, None)

        if len(datasets) == 1 and not weights:
            found = _single(gpt(datasets[0], ranges[0], size))
            kind = "single"
        else:
            tokens = [dataset.lengths[slice(*part)].sum() for dataset, part in zip(datasets, ranges, strict=True)]
            shares = normalize_weights(weights or tokens)
            phases, built = plan_phases([shares], [size])
            blended = [gpt(*arguments) for arguments in zip(datasets, ranges, built, strict=True)]
            found = _blend(BlendedDataset(blended, phases, None))
            kind = "blend"
        out |= {f"{kind}/{name}/{key}": value for key, value in found.items()}
    return out


def _single(dataset: GptDataset) -> dict[str, np.ndarray]:
    samples = [dataset[i] for i in range(min(len(dataset), SINGLE_SAMPLES))]
    return {
        "document_index": dataset.document_index,
        "sample_index": dataset.sample_index,
        "shuffle_index": dataset.shuffle_index,
        "tokens": np.stack([sample["tokens"] for sample in samples]).astype(np.int64),
        "labels": np.stack([sample["labels"] for sample in samples]).astype(np.int64),
        "len": np.array(len(dataset), np.int64),
    }


def _blend(dataset: BlendedDataset) -> dict[str, np.ndarray]:
    samples = [dataset[i] for i in range(min(len(dataset), BLEND_SAMPLES))]
    return {
        "dataset_index": dataset.dataset_index,
        "dataset_sample_index": dataset.dataset_sample_index,
        "tokens": np.stack([sample["tokens"] for sample in samples]).astype(np.int64),
        "len": np.array(len(dataset), np.int64),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prefix: tuple[str, ...]
    """Prefixes of .bin/.idx files."""
    show: int = 0
    """Print the text of the first N documents."""
    tokenizer: str | None = None
    """Tokenizer to decode them with; default: the recorded one."""
    weights: tuple[float, ...] | None = None
    """One per prefix; default: by tokens."""
    sequence_length: int = 1024
    """Tokens of a sample."""
    seed: int = 1234
    """Of the order of the samples."""
    split: tuple[float, float, float] = (969, 30, 1)
    """Shares of train,valid,test, such as 90,10,0."""
    num_samples: tuple[int, int, int] = (100, 10, 0)
    """Samples of train,valid,test."""
    pad_id: int | None = None
    """Megatron's pad token: it becomes 0 in the samples."""
    output: str | None = None
    """FILE.npz to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    with errors_in_one_line():
        flags = parse(Options, arguments, "python -m megajax.data.inspect", __doc__.partition("\n")[0])
        prefixes = [prefix_of(path) for path in flags.prefix]
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        if flags.weights and len(flags.weights) != len(datasets):
            raise ValueError(
                f"--weights: {len(flags.weights)} weights for {len(datasets)} prefixes; give one per prefix"
            )
        if flags.output is None:
            for prefix, dataset in zip(prefixes, datasets, strict=True):
                print(describe(dataset))
                if flags.show:
                    tokenizer = load_tokenizer(flags.tokenizer) if flags.tokenizer else load_tokenizer_of(prefix)
                    print(show(dataset, tokenizer, flags.show))
            return
        arrays = sample_indices(
            datasets,
            flags.weights,
            sequence_length=flags.sequence_length,
            seed=flags.seed,
            split=flags.split,
            num_samples=flags.num_samples,
            pad_id=flags.pad_id,
        )
    np.savez(flags.output, **arrays)
    print(f"{flags.output}: " + ", ".join(f"{key} {value.shape}" for key, value in arrays.items()))


if __name__ == "__main__":
    main()
