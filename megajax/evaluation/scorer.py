"""Log-probabilities of given tokens: whole sequences in one forward pass, the computation of an evaluation in training.

A sequence is read without a cache, so it may be split over `context`, and a row needs no more memory than in training.
The engine reports log-probabilities too, of requests that run beside others (Sampling.prompt_logprobs): they come from
its pages, in the precision of those, with one program per chunk. This is what a server needs, and no way to read a
corpus.
Dimensions: B rows, T tokens read per row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.inference.shapes import BATCH_TOKENS, laid_out, text_batches
from megajax.mesh.sharding import constrain, replicated
from megajax.models.model import Model
from megajax.ops.token_scores import TokenScores


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
        tokens = [np.asarray(sequence, np.int32) for sequence in sequences]
        for number, sequence in enumerate(tokens):
            self._check(number, sequence)
        results: dict[int, Scores] = {}
        running: list[tuple[list[int], TokenScores, np.ndarray]] = []

        def finish():
            rows, scores, index_of = running.pop()
            scores = jax.device_get(scores)
            for row, number in enumerate(rows):
                labels = tokens[number][1:]
                found = (array[row, index_of][: len(labels)] for array in (scores.log_probs, scores.top))
                results[number] = Scores(next(found), next(found) == labels)

        longest = self.model.config.max_length
        lengths = [len(sequence) - 1 for sequence in tokens]
        with jax.set_mesh(self.mesh):
            for rows, shape in text_batches(lengths, self.mesh, longest, self.batch_tokens):
                batch, index_of = self._batch([tokens[number] for number in rows], shape)
                dispatched = self._score(self.params, batch)  # runs while the host reads the previous batch
                if running:
                    finish()
                running.append((rows, dispatched, index_of))
            if running:
                finish()
        return [results[number] for number in range(len(tokens))]

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

    def _batch(self, sequences: list[np.ndarray], shape: tuple[int, int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """-> (arrays [B, T], index in T of each token of a row)."""
        tokens_BT = np.zeros(shape, np.int32)
        labels_BT = np.zeros(shape, np.int32)
        for row, sequence in enumerate(sequences):
            tokens_BT[row, : len(sequence) - 1] = sequence[:-1]
            labels_BT[row, : len(sequence) - 1] = sequence[1:]
        return laid_out({"tokens": tokens_BT, "labels": labels_BT}, self.model, self.mesh)


def _scores(model: Model, params: dict, batch: dict) -> TokenScores:
    batch = {name: constrain(array, "batch", "time") for name, array in batch.items()}
    return replicated(model.scores(params, batch))
