"""Log-probabilities of given tokens: whole sequences in one forward pass, the computation of an evaluation in training.

A sequence is read without a cache, so it may be split over `context`, and a row needs no more memory than in training.
Dimensions: B rows, T tokens read per row. T is rounded up to a few lengths, and B follows from T, so that a few
programs score everything.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.mesh.sharding import BATCH_AXES, constrain
from megajax.models.model import Model
from megajax.ops.cross_entropy import TokenScores
from megajax.parallel.context import sequence_order

MIN_LENGTH = 32  # smallest T
BATCH_TOKENS = 16_384  # B * T of a batch, over all devices


class Scores(NamedTuple):
    log_probs: np.ndarray
    """float32 [n - 1]: log-probability of each token of a sequence after its first, given those before it."""
    is_top: np.ndarray
    """bool [n - 1]: whether it was the most likely token."""


class Scorer:
    def __init__(self, model: Model, params: dict, mesh: Mesh, *, batch_tokens: int = BATCH_TOKENS):
        """params: sharded over `mesh`, which has no pipeline; they may be replaced. batch_tokens: tokens read at a
        time, over all devices; a sequence that is longer is read alone."""
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens={batch_tokens} must be at least 1")
        self.model = model
        self.params = params
        self.mesh = mesh
        self.batch_tokens = batch_tokens
        self._score = jax.jit(lambda params, batch: _scores(model, params, batch))

    @property
    def max_tokens(self) -> int | None:
        """Maximum length of a sequence, one more than the model reads; None: unlimited."""
        longest = self.model.config.max_length
        return None if longest is None else longest + 1

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        """The scores of each sequence of tokens, in their order. What is scored with a sequence changes its scores by
        rounding only (and where a router drops tokens beyond a capacity).

        Raises ValueError for a sequence of fewer than 2 tokens, with unknown token ids, or longer than `max_tokens`.
        """
        sequences = [np.asarray(sequence, np.int32) for sequence in sequences]
        for number, sequence in enumerate(sequences):
            self._check(number, sequence)
        results: list[Scores | None] = [None] * len(sequences)
        running: list[tuple[list[int], TokenScores, np.ndarray]] = []

        def finish():
            rows, scores, order = running.pop()
            scores = jax.device_get(scores)
            for row, number in enumerate(rows):
                labels = sequences[number][1:]
                found = (array[row, order][: len(labels)] for array in (scores.log_probs, scores.top))
                results[number] = Scores(next(found), next(found) == labels)

        with jax.set_mesh(self.mesh):
            for rows, shape in self._batches([len(sequence) - 1 for sequence in sequences]):
                batch, order = self._batch([sequences[number] for number in rows], shape)
                dispatched = self._score(self.params, batch)  # runs while the host reads the previous batch
                if running:
                    finish()
                running.append((rows, dispatched, order))
            if running:
                finish()
        return results

    def _check(self, number: int, sequence: np.ndarray) -> None:
        vocab_size = self.model.config.vocab_size
        if len(sequence) < 2:
            raise ValueError(f"sequence {number} has {len(sequence)} tokens; a score needs a token and one before it")
        if sequence.min() < 0 or sequence.max() >= vocab_size:
            raise ValueError(
                f"sequence {number} has token ids {sequence.min()} to {sequence.max()}; they must be below "
                f"model.vocab_size={vocab_size}; use the tokenizer of the model"
            )
        if self.max_tokens is not None and len(sequence) > self.max_tokens:
            raise ValueError(
                f"sequence {number} has {len(sequence)} tokens; the model supports {self.max_tokens}: split it"
            )

    def _batches(self, lengths: list[int]) -> list[tuple[list[int], tuple[int, int]]]:
        """(numbers of the sequences, (B, T)) of each batch; the longest first, so that memory runs out early if it
        does."""
        by_length: dict[int, list[int]] = {}
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            by_length.setdefault(self._rounded(lengths[number]), []).append(number)
        batches = []
        for length, numbers in by_length.items():
            num_rows = self._num_rows(length, len(numbers))
            for start in range(0, len(numbers), num_rows):
                batches.append((numbers[start : start + num_rows], (num_rows, length)))
        return batches

    def _rounded(self, length: int) -> int:
        """The smallest T for `length` tokens: a power of two times what the mesh divides, or the maximum length."""
        unit = 2 * self.mesh.shape["context"] * self.mesh.shape["tensor"]
        smallest = -(-MIN_LENGTH // unit) * unit
        rounded = smallest
        while rounded < length:
            rounded *= 2
        longest = self.model.config.max_length
        return rounded if longest is None else min(rounded, max(-(-longest // unit) * unit, smallest))

    def _num_rows(self, length: int, count: int) -> int:
        """B for `count` sequences: batch_tokens in all; if there are fewer sequences, a power of two, per shard."""
        shards = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        wanted = 1 << (-(-count // shards) - 1).bit_length()
        return max(1, min(wanted, self.batch_tokens // (length * shards))) * shards

    def _batch(self, sequences: list[np.ndarray], shape: tuple[int, int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """-> (arrays [B, T], index in T of each token of a row)."""
        length = shape[1]
        tokens_BT = np.zeros(shape, np.int32)
        labels_BT = np.zeros(shape, np.int32)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, : len(sequence) - 1] = sequence[:-1]
            labels_BT[row, : len(sequence) - 1] = sequence[1:]
        longest = self.model.config.max_length or length
        positions_BT = np.broadcast_to(np.minimum(np.arange(length, dtype=np.int32), longest - 1), shape)
        order = sequence_order(length, self.mesh.shape["context"], self.model.execution.context_attention)
        batch = {"tokens": tokens_BT, "labels": labels_BT, "positions": positions_BT}
        return {name: array[:, order] for name, array in batch.items()}, np.argsort(order)


def _scores(model: Model, params: dict, batch: dict) -> TokenScores:
    """Replicated, so that every process can read them."""
    batch = {name: constrain(array, "batch", "time") for name, array in batch.items()}
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, P()), model.scores(params, batch))
