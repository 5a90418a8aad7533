"""Packs whole conversations into samples of at most T + 1 tokens, and orders the samples. T = sequence_length.

Two arrays determine the order:
- document index int32 [C]: conversations in the order of the samples, each once per epoch;
- sample index int64 [N + 1]: sample i holds document_index[sample_index[i] : sample_index[i + 1]].
An epoch is shuffled, packed, and its samples are shuffled, with random numbers from (seed, epoch): a longer run begins
like a shorter one.

Packing is best fit, longest first (Johnson 1974, https://doi.org/10.1137/0203025), within windows of the shuffled
order. Of lengths drawn from a lognormal distribution (sigma 1, T = 4096) it fills 99.7 % of the tokens of all samples
at median 100, 99.9 % at median 400. Of conversations with media it fills the patches and frames of a sample too.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from megajax.media.rows import MediaInputs

# Number of conversations packed together: with 1,024 the two examples fill 98.8 % and 99.6 %.
WINDOW = 4096

Views = tuple[list[int], ...]
"""Positions of each view of a conversation or a sample, by kind."""


@dataclasses.dataclass(frozen=True)
class PackedMedia:
    """Of items that are packed."""

    views: Sequence[Views]
    """Of each item."""
    inputs: tuple[MediaInputs, ...]

    def part(self, numbers: Sequence[int]) -> "PackedMedia":
        return PackedMedia([self.views[number] for number in numbers], self.inputs)


def build_indices(
    documents: np.ndarray,
    sizes: np.ndarray,
    num_samples: int | None,
    capacity: int,
    seed: int,
    media: PackedMedia | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(document index, sample index) of conversations with `sizes` tokens, 1 to capacity each."""
    index = []
    counts = [np.zeros(1, np.int64)]
    total = 0
    epoch = 0
    while epoch == 0 or (num_samples is not None and total < num_samples):
        rng = np.random.default_rng((seed, epoch))
        permutation = rng.permutation(len(sizes))
        packed = pack(sizes[permutation], capacity, media and media.part(permutation.tolist()))
        samples = rng.permutation(packed.max() + 1)[packed]
        index.append(documents[permutation[np.argsort(samples, kind="stable")]].astype(np.int32))
        counts.append(np.bincount(samples))
        total += len(counts[-1])
        epoch += 1
    return np.concatenate(index), np.cumsum(np.concatenate(counts))


def pack(sizes: np.ndarray, capacity: int, media: PackedMedia | None = None) -> np.ndarray:
    """Bin number of each item, int64 [items]; bins 0, 1, ... hold at most `capacity` each, and media that fit.

    Best fit, largest first, in windows: 1 million items take 0.3 s, with images 40 s.
    """
    bins = np.empty(len(sizes), np.int64)
    count = 0
    for begin in range(0, len(sizes), WINDOW):
        window = sizes[begin : begin + WINDOW]
        if media is None:
            found = _best_fit(window, capacity)
        else:
            found = _best_fit_with_media(window, capacity, media.part(range(begin, begin + len(window))))
        bins[begin : begin + WINDOW] = count + found
        count += int(found.max()) + 1
    return bins


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    bins = np.empty(len(sizes), np.int64)
    smallest = int(sizes.min())
    count = 0
    # remaining capacities, ascending, and their bins
    remaining = []
    open_bins = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        position = bisect.bisect_left(remaining, size)
        if position < len(remaining):
            left = remaining.pop(position) - size
            bins[item] = open_bins.pop(position)
        else:
            left = capacity - size
            bins[item] = count
            count += 1
        if left >= smallest:
            position = bisect.bisect_left(remaining, left)
            remaining.insert(position, left)
            open_bins.insert(position, int(bins[item]))
    return bins


def _best_fit_with_media(sizes: np.ndarray, capacity: int, media: PackedMedia) -> np.ndarray:
    """In several dimensions, tokens and positions of each kind: the largest first in its scarcest one, into the bin
    that has the least of all left, as shares of a whole bin."""
    inputs = media.inputs
    # tokens, positions of each kind; positions of the emptiest block of each kind
    whole = np.array([capacity, *(of.blocks * of.block_size for of in inputs), *(of.block_size for of in inputs)])
    totals = 1 + len(inputs)
    needs = np.array([[size, *map(sum, of_item), *(max(of_kind, default=0) for of_kind in of_item)]
                      for size, of_item in zip(sizes.tolist(), media.views, strict=True)])  # fmt: skip
    left = np.tile(whole, (len(sizes), 1))
    held: list[Views] = []
    bins = np.empty(len(sizes), np.int64)
    for item in np.argsort(-(needs / whole)[:, :totals].max(1), kind="stable").tolist():
        candidates = np.flatnonzero((left[: len(held)] >= needs[item]).all(1))
        by_room = np.argsort((left[candidates] / whole)[:, :totals].sum(1), kind="stable")
        for number in [*candidates[by_room].tolist(), len(held)]:
            before = held[number] if number < len(held) else ([],) * len(inputs)
            views = tuple([*old, *new] for old, new in zip(before, media.views[item], strict=True))
            gaps = [of.widest_gap(of_kind) for of, of_kind in zip(inputs, views, strict=True)]
            if None not in gaps:
                break
        if number == len(held):
            held.append(())
        held[number] = views
        bins[item] = number
        left[number, :totals] -= needs[item, :totals]
        left[number, totals:] = gaps
    return bins
