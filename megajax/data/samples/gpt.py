"""GPT samples: every sample is `sequence_length + 1` consecutive tokens of the shuffled, concatenated sequences.

Three arrays determine the order, identical to those of Megatron's GPTDataset:
- document index int32 [D]: shuffled sequence numbers, each once per epoch;
- sample index int32 or int64 [N + 1, 2]: where sample n starts (position in the document index, token offset);
- shuffle index uint32 or int64 [N]: sample i of the dataset is row shuffle_index[i].
Consecutive samples share one token: the last label of one is the first input of the next.

Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp. T = sequence_length below.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from megajax.data.indexed.index_cache import content_hash, load_or_build
from megajax.data.samples.fim import FillInTheMiddle, rearrange

# Megatron's rule: if less than this fraction of the last epoch is used, it is shuffled separately.
SEPARATE_EPOCH_BELOW = 0.80


class TokenSource(Protocol):
    """What samples are read from: IndexedDataset, MockIndexedDataset.

    `document_indices` int64 [documents + 1] are the boundaries of the documents, in sequences.
    """

    prefix: str
    lengths: np.ndarray
    document_indices: np.ndarray
    dtype: np.dtype

    def __len__(self) -> int: ...
    def fingerprint(self) -> str: ...
    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class GptFormat:
    """The content of a sample besides its tokens."""

    cross_document_attention: bool = False
    """One segment for the whole sample, so that documents attend to each other (Megatron's default)."""
    reset_positions: bool = False
    """Positions restart at 0 with each document (Megatron's --reset-position-ids)."""
    mask_document_end: bool = False
    """No loss where the label is `eod_id`. (Megatron's --eod-mask-loss masks where the *input* is the
    end-of-document token.)"""
    eod_id: int | None = None
    """End-of-document token; needed by mask_document_end."""
    pad_id: int | None = None
    """Megatron's pad: no loss where the label is pad, then pad becomes 0 in tokens and labels. None: no pad token."""
    vocab_size: int | None = None
    """Token ids must be below this; None: not checked."""
    fill_in_the_middle: FillInTheMiddle | None = None
    """Rearranges some documents; None: none."""

    of_documents: ClassVar[bool] = False
    is_plain_text: ClassVar[bool] = True

    def build(self, *arguments: Any, **options: Any) -> "GptDataset":
        return GptDataset(*arguments, sample_format=self, **options)


class GptDataset:
    """Random access: sample i is a pure function of (sequences, num_samples, sequence_length, seed, i).

    indexed: where the sequences are read from.
    sequence_range: (begin, end), the sequences of this split.
    num_samples: at least this many, in whole epochs; None is one epoch.
    cache_dir: where the three arrays are kept; None keeps them in memory.

    `dataset[i]` is a dict of arrays [T]: tokens int32, labels int32, loss_mask float32 (0 or 1), positions int32,
    segment_ids int32 (1, 2, ...: documents by the boundaries of the index, regardless of the tokens).
    Pickles as its arguments: a worker process maps the cached arrays again instead of receiving them.
    """

    def __init__(
        self,
        indexed: TokenSource,
        sequence_range: tuple[int, int],
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        *,
        sample_format: GptFormat,
        cache_dir: str | None,
    ):
        self._arguments = (indexed, sequence_range, num_samples, sequence_length, seed), sample_format, cache_dir
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.seed = seed
        self.sample_format = sample_format
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"data.paths: {indexed.prefix}.bin holds {indexed.dtype}, not token ids")
        if sample_format.mask_document_end and sample_format.eod_id is None:
            raise ValueError("task.mask_document_end=True needs a tokenizer with an end-of-document token")
        if sample_format.fill_in_the_middle is not None:
            sample_format.fill_in_the_middle.check(sample_format.vocab_size)
        lengths = np.asarray(indexed.lengths[slice(*sequence_range)])
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch <= sequence_length and (num_samples is None or self.tokens_per_epoch == 0):
            raise ValueError(
                f"data.split: sequences {sequence_range[0]} to {sequence_range[1]} of {indexed.prefix} hold "
                f"{self.tokens_per_epoch} tokens, too few for one sample of {sequence_length} + 1; "
                "give the split a larger share, use a shorter sequence, or more data"
            )
        arrays = load_or_build(
            cache_dir,
            "gpt",
            {
                "lengths": content_hash(lengths),
                "range": list(sequence_range),
                "num_samples": num_samples,
                "sequence_length": sequence_length,
                "seed": seed,
            },
            lambda: build_indices(lengths, sequence_range[0], num_samples, sequence_length, seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __reduce__(self):
        return _rebuild, self._arguments

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        form = self.sample_format
        sequences, documents = self._read(int(i))
        if form.fill_in_the_middle is not None:
            documents = rearrange(documents, form.fill_in_the_middle, form.eod_id, (self.seed, int(i)))
        lengths = np.array([len(document) for document in documents])
        # Tokens added by fill in the middle are cut off at the end.
        text = np.concatenate(documents)[: self.sequence_length + 1]
        if form.vocab_size is not None:
            check_token_ids(text, form.vocab_size, self.indexed, sequences)
        text = text.astype(np.int32)
        tokens = text[:-1]
        labels = text[1:].copy()
        segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[: len(tokens)]
        positions = np.arange(len(tokens), dtype=np.int32)
        if form.reset_positions:
            positions -= (np.cumsum(lengths) - lengths).astype(np.int32)[segments - 1]
        if form.cross_document_attention:
            segments = np.ones_like(segments)
        loss_mask = np.ones(len(tokens), np.float32)
        if form.mask_document_end:
            loss_mask[labels == form.eod_id] = 0
        if form.pad_id is not None:
            loss_mask[labels == form.pad_id] = 0
            tokens[tokens == form.pad_id] = 0
            labels[labels == form.pad_id] = 0
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "positions": positions,
            "segment_ids": segments,
        }

    def _read(self, i: int) -> tuple[list[int], list[np.ndarray]]:
        """-> (the sequences of a sample, their non-empty parts [length], T + 1 tokens in total)."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        row = int(self.shuffle_index[i])
        (first, first_offset), (last, last_offset) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1].tolist()
        parts = []
        for position, sequence in enumerate(sequences, first):
            begin = first_offset if position == first else 0
            part = self.indexed.read(sequence, begin, last_offset + 1 - begin if position == last else None)
            if len(part):
                parts.append(part)
        return sequences, parts


def _rebuild(positional: tuple, sample_format: GptFormat, cache_dir: str | None) -> GptDataset:
    return GptDataset(*positional, sample_format=sample_format, cache_dir=cache_dir)


def check_token_ids(tokens: np.ndarray, vocab_size: int, indexed: TokenSource, sequences: Iterable[int]) -> None:
    """Raises ValueError, with the document, if a token of a sample is not an id of the vocabulary.

    sequences: what the sample was read from.
    """
    if tokens.max() < vocab_size and tokens.min() >= 0:
        return
    where = f"{indexed.prefix}.bin"
    for sequence in sequences:
        wrong = np.flatnonzero(~np.isin(indexed.read(sequence), np.arange(vocab_size)))
        if len(wrong):
            document = np.searchsorted(indexed.document_indices, sequence, side="right") - 1
            where += f", document {document}, token {wrong[0]} of sequence {sequence}"
            break
    raise ValueError(
        f"data.paths: {where}: token ids {tokens.min()} to {tokens.max()} do not fit data.tokenizer's {vocab_size} "
        "ids; name the tokenizer that wrote the file"
    )


def build_indices(
    lengths: np.ndarray, first_sequence: int, num_samples: int | None, sequence_length: int, seed: int
) -> dict[str, np.ndarray]:
    """The three arrays of a split whose sequences have `lengths` int32 and are numbered from `first_sequence`.

    Vectorised: 10 million documents take about 2 s, most of it the shuffles.
    """
    tokens_per_epoch = int(lengths.sum(dtype=np.int64))
    num_epochs, separate = _epochs(tokens_per_epoch, num_samples, sequence_length)
    rng = np.random.RandomState(seed)
    sequences = np.arange(first_sequence, first_sequence + len(lengths), dtype=np.int32)
    blocks = [np.tile(sequences, num_epochs - 1), sequences.copy()] if separate else [np.tile(sequences, num_epochs)]
    for block in blocks:
        rng.shuffle(block)
    document_index = np.concatenate(blocks)
    sample_index = _sample_index(lengths[document_index - first_sequence], sequence_length)
    total = len(sample_index) - 1
    cut = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length if separate else total
    shuffle_index = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    for part in (shuffle_index[:cut], shuffle_index[cut:]):
        rng.shuffle(part)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def _epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int) -> tuple[int, bool]:
    """(smallest number of whole epochs that contain the samples, whether the last is shuffled separately)."""
    if num_samples is None:
        return 1, False
    num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    if num_epochs == 1:
        return 1, False
    samples_before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
    samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
    return num_epochs, num_samples - samples_before_last < int(SEPARATE_EPOCH_BELOW * samples_per_epoch)


def _sample_index(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """[N + 1, 2]; row n: (position, offset) of token n * T in the concatenation of sequences of `lengths` [D]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    starts = np.arange((total - 1) // sequence_length + 1, dtype=np.int64) * sequence_length
    positions = np.searchsorted(ends, starts, side="right")
    # Megatron starts at position 0 even where that sequence is empty.
    positions[0] = 0
    offsets = starts - (ends[positions] - lengths[positions])
    wide = max(len(lengths), int(lengths.max())) > np.iinfo(np.int32).max
    return np.stack([positions, offsets], axis=1).astype(np.int64 if wide else np.int32)


def split_ranges(split: Sequence[float], num_sequences: int) -> list[tuple[int, int] | None]:
    """Sequence range of each split, Megatron's rounding; None for a split of weight 0.

    split: relative weights, e.g. (969, 30, 1) for train, validation, test.
    """
    weights = np.array(split, np.float64)
    fractions = (weights / weights.sum()).tolist()
    bounds = [0.0]
    for fraction in fractions:
        bounds.append(bounds[-1] + fraction)
    return [
        (int(round(low * float(num_sequences))), int(round(high * float(num_sequences)))) if high > low else None
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]
