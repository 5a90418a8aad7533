"""GPT samples: every sample is `sequence_length + 1` consecutive tokens of the shuffled, concatenated sequences.

Three arrays determine the order, identical to those of Megatron's GPTDataset:
- document index int32 [D]: shuffled sequence numbers, each once per epoch;
- sample index int32 or int64 [N + 1, 2]: where sample n starts (position in the document index, token offset);
- shuffle index uint32 or int64 [N]: sample i of the dataset is row shuffle_index[i].
Consecutive samples share one token: the last label of one is the first input of the next.

Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp. T = sequence_length below.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megajax.data.indexed.index_cache import content_hash, load_or_build
from megajax.data.samples.dataset import Part, SampleDataset, TokenSource
from megajax.data.samples.fim import FillInTheMiddle, rearrange

# Megatron's rule: if less than this fraction of the last epoch is used, it is shuffled separately.
SEPARATE_EPOCH_BELOW = 0.80


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

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> SampleDataset:
        return GptDataset(indexed, part, num_samples, sequence_length, seed, self, cache_dir)

    def arrays(self, text: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays [T] of a sample, GptDataset's. text: [T + 1]; lengths: of its documents, whose sum may be
        larger."""
        text = text.astype(np.int32)
        tokens = text[:-1]
        labels = text[1:].copy()
        segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[: len(tokens)]
        positions = np.arange(len(tokens), dtype=np.int32)
        if self.reset_positions:
            positions -= (np.cumsum(lengths) - lengths).astype(np.int32)[segments - 1]
        if self.cross_document_attention:
            segments = np.ones_like(segments)
        loss_mask = np.ones(len(tokens), np.float32)
        if self.mask_document_end:
            loss_mask[labels == self.eod_id] = 0
        if self.pad_id is not None:
            loss_mask[labels == self.pad_id] = 0
            tokens[tokens == self.pad_id] = 0
            labels[labels == self.pad_id] = 0
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "positions": positions,
            "segment_ids": segments,
        }


class GptDataset(SampleDataset[GptFormat]):
    """A part is sequences. `dataset[i]` is a dict of arrays [T]: tokens int32, labels int32, loss_mask float32 (0 or
    1), positions int32, segment_ids int32 (1, 2, ...: documents by the boundaries of the index, regardless of the
    tokens).
    """

    def prepare(self) -> None:
        form = self.sample_format
        length = self.sequence_length
        if form.mask_document_end and form.eod_id is None:
            raise ValueError("task.mask_document_end=True needs a tokenizer with an end-of-document token")
        if form.fill_in_the_middle is not None:
            form.fill_in_the_middle.check()
        begin, end = self.part
        lengths = np.asarray(self.indexed.lengths[begin:end])
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch <= length and (self.num_samples is None or self.tokens_per_epoch == 0):
            raise ValueError(
                f"data.split: sequences {begin} to {end} of {self.indexed.prefix} hold {self.tokens_per_epoch} tokens, "
                f"too few for one sample of {length} + 1; give the split a larger share, use a shorter sequence, or "
                "more data"
            )
        arrays = load_or_build(
            self.cache_dir,
            "gpt",
            {
                "lengths": content_hash(lengths),
                "range": [begin, end],
                "num_samples": self.num_samples,
                "sequence_length": length,
                "seed": self.seed,
            },
            lambda: build_indices(lengths, begin, self.num_samples, length, self.seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def sample(self, i: int) -> dict[str, np.ndarray]:
        form = self.sample_format
        sequences, documents = self._read(i)
        if form.fill_in_the_middle is not None:
            documents = rearrange(documents, form.fill_in_the_middle, form.eod_id, (self.seed, i))
        lengths = np.array([len(document) for document in documents])
        # Tokens added by fill in the middle are cut off at the end.
        text = np.concatenate(documents)[: self.sequence_length + 1]
        self.check_ids(text, form.vocab_size, sequences)
        return form.arrays(text, lengths)

    def spans(self, i: int) -> list[tuple[int, int, int]]:
        """(sequence, begin, end) of the parts of sample i, T + 1 tokens in total; a part may be empty."""
        row = int(self.shuffle_index[i])
        (first, first_offset), (last, last_offset) = self.sample_index[row : row + 2].tolist()
        spans = []
        for position, sequence in enumerate(self.document_index[first : last + 1].tolist(), first):
            begin = first_offset if position == first else 0
            end = last_offset + 1 if position == last else int(self.indexed.lengths[sequence])
            spans.append((sequence, begin, end))
        return spans

    def _read(self, i: int) -> tuple[list[int], list[np.ndarray]]:
        """-> (the sequences of a sample, their non-empty parts [length], T + 1 tokens in total)."""
        spans = self.spans(i)
        parts = [self.indexed.read(sequence, begin, end - begin) for sequence, begin, end in spans if begin < end]
        return [sequence for sequence, _, _ in spans], parts


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
