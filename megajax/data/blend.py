"""Blends: sample i comes from the dataset that is furthest behind its weight, bit for bit as in Megatron.

Megatron's rule (megatron/core/datasets/helpers.cpp, build_blending_indices): with c_d samples taken so far, sample i
comes from the d with the largest w_d * max(i, 1) - c_d in float64, the lowest d on ties.
"""

import math
from collections.abc import Sequence

import numpy as np

from megajax.data.index_cache import load_or_build

# Megatron builds every dataset this much larger than its share (mid_level_dataset_surplus).
SURPLUS = 0.005
# Blends shorter than this many chunks are not worth more of them.
CHUNKS = 4096
MIN_CHUNK = 64


class BlendedDataset:
    """Random access to `size` samples drawn from several datasets by weight.

    dataset_index int16 [size] and dataset_sample_index int64 [size] say where sample i comes from.
    Raises ValueError if a dataset is shorter than its share.
    """

    def __init__(self, datasets: Sequence, weights: Sequence[float], size: int, cache_dir: str | None):
        self._arguments = datasets, weights, size, cache_dir
        self.datasets = list(datasets)
        if len(datasets) != len(weights) or len(datasets) >= np.iinfo(np.int16).max:
            raise ValueError(f"data.weights: {len(weights)} weights for {len(datasets)} datasets; give one each")
        weights = normalize_weights(weights)
        arrays = load_or_build(
            cache_dir, "blend", {"weights": weights, "size": size}, lambda: _named(*blending_indices(weights, size))
        )
        self.dataset_index, self.dataset_sample_index = arrays["dataset_index"], arrays["dataset_sample_index"]
        needed = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for number, dataset in enumerate(self.datasets):
            if len(dataset) < needed[number]:
                raise ValueError(
                    f"data.weights: dataset {number} of the blend has {len(dataset)} samples, "
                    f"the blend needs {needed[number]}"
                )

    def __reduce__(self):
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)} samples")
        return self.datasets[int(self.dataset_index[i])][int(self.dataset_sample_index[i])]


def normalize_weights(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    if array.min() <= 0 or not np.isfinite(array).all():
        raise ValueError(f"data.weights={tuple(weights)} must all be positive")
    return (array / array.sum()).tolist()


def dataset_sizes(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """(samples the blend takes, samples to build) of each dataset; the blend's own size is the sum of the first.

    weights: normalised. size: samples asked of the blend.
    """
    taken = [math.ceil(size * weight) for weight in weights]
    return taken, [int(math.ceil(count * (1 + SURPLUS))) for count in taken]


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset_index int16 [size], dataset_sample_index int64 [size]) by the rule above, exactly.

    The rule is sequential, so it is solved parallel in time: the run is cut into chunks, all chunks step together as
    numpy rows from a guess of the counts at their start, then every chunk whose guess differs from the true end of
    the chunk before it runs again. The fixed point is the sequential result; the greedy rule forgets a wrong start
    quickly, so two or three rounds do. 10 million samples: 0.6 s for 2 or 5 datasets, 1 s for 10; 1 million: 0.3 s
    for 100, 4 s for 1,000 (one core).
    """
    weights = np.array(weights, np.float64)
    length = max(MIN_CHUNK, -(-size // CHUNKS))
    starts = np.arange(0, size, length)
    counts = _guess_counts(weights, starts)
    picks = np.zeros((len(starts), length), np.int16)
    samples = np.zeros((len(starts), length), np.int64)
    ends = np.zeros_like(counts)
    wrong = np.arange(len(starts))
    while len(wrong):
        picks[wrong], samples[wrong], ends[wrong] = _run_chunks(weights, starts[wrong], counts[wrong], length)
        wrong = 1 + np.flatnonzero((ends[:-1] != counts[1:]).any(axis=1))
        counts[wrong] = ends[wrong - 1]
    return picks.reshape(-1)[:size], samples.reshape(-1)[:size]


def _run_chunks(
    weights: np.ndarray, starts: np.ndarray, counts: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`length` steps of the rule for C chunks at once: picks and samples [C, length], counts after them [C, D]."""
    counts = counts.astype(np.float64)  # exact up to 2**53
    rows = np.arange(len(starts))
    picks, samples = np.empty((length, len(starts)), np.int16), np.empty((length, len(starts)), np.int64)
    for step in range(length):
        behind = weights * np.maximum(starts + step, 1).astype(np.float64)[:, None] - counts
        pick = behind.argmax(axis=1)
        picks[step], samples[step] = pick, counts[rows, pick]
        counts[rows, pick] += 1
    return picks.T, samples.T, counts.astype(np.int64)


def _guess_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Counts int64 [C, D] near weights * start that sum to start: the rule keeps the sum, so it must be right."""
    exact = starts[:, None] * weights
    # a product just above an integer may be a rounding error, and counts above the start could not be taken back
    counts = np.floor(np.maximum(exact - 1e-6, 0)).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank < (starts - counts.sum(axis=1))[:, None])


def _named(dataset_index: np.ndarray, dataset_sample_index: np.ndarray) -> dict[str, np.ndarray]:
    return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}
