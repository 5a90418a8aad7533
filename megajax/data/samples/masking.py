"""Masking: chooses n-grams of whole words in random order until a fraction of the text is masked.

Source: Megatron-LM, megatron/core/datasets/masked_dataset.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """What fraction of a text is masked, and in which spans."""

    probability: float = 0.15
    """Fraction of the tokens that are masked, above 0 and below 1."""
    max_ngram: int = 3
    """Longest span, in words."""
    geometric_p: float | None = None
    """None: a span of n words has a probability proportional to 1 / n (Megatron). Else to (1 - p)^(n - 1), SpanBERT's
    (Joshi et al. 2019, p = 0.2, max_ngram = 10: 3.8 words on average); spans drawn late have less room."""
    is_continuation: np.ndarray | None = None
    """bool [vocab_size]: ids that continue the word of the id before them (`continuation_pieces`). None: every token
    is a word."""

    def check(self, vocab_size: int) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"Masking.probability={self.probability} must lie between 0 and 1; the papers use 0.15")
        if self.max_ngram < 1:
            raise ValueError(f"Masking.max_ngram={self.max_ngram} must be at least 1 word")
        if self.geometric_p is not None and not 0 < self.geometric_p < 1:
            raise ValueError(
                f"Masking.geometric_p={self.geometric_p} must lie between 0 and 1; SpanBERT uses 0.2, None is 1 / n"
            )
        words = self.is_continuation
        if words is not None and (words.dtype != bool or words.shape != (vocab_size,)):
            raise ValueError(
                f"Masking.is_continuation is {words.dtype} {list(words.shape)}, not bool [{vocab_size}]: one entry for "
                "each id of the vocabulary"
            )

    def cumulative_weights(self) -> np.ndarray:
        """float64 [max_ngram]: entry n - 1 is proportional to the probability of at most n words."""
        n = np.arange(1, self.max_ngram + 1)
        return np.cumsum(1 / n if self.geometric_p is None else (1 - self.geometric_p) ** (n - 1.0))


def continuation_pieces(pieces: Sequence[str], mark: Literal["##", "▁", "Ġ"]) -> np.ndarray:
    """bool [len(pieces)]: the pieces of a vocabulary, in the order of their ids, that continue a word.

    mark: how the vocabulary writes words. "##" marks continuations (WordPiece), "▁" (SentencePiece) and "Ġ"
    (byte-level BPE) mark the start of a word.
    """
    if mark not in ("##", "▁", "Ġ"):
        raise ValueError(f"continuation_pieces: mark={mark!r} is not known; use '##', '▁' or 'Ġ'")
    return np.array([piece.startswith(mark) == (mark == "##") for piece in pieces], bool)


def choose_spans(
    tokens: np.ndarray, protected: np.ndarray, masking: Masking, rng: np.random.Generator, *, apart: bool
) -> np.ndarray:
    """Spans of tokens to mask, int64 [spans, 2]: begin and end, disjoint, in random order.

    tokens [n]; protected bool [n], tokens that no span may contain; apart: leave an unmasked token between two spans.
    Spans consist of whole words. Together they have at most round(probability * unprotected tokens) tokens, but at
    least one word; a span that would be too long is shortened, one that would overlap is skipped.
    """
    starts = _word_starts(tokens, protected, masking.is_continuation)
    blocked = protected[starts]
    candidates = rng.permutation(np.flatnonzero(~blocked))
    if not len(candidates):
        return np.zeros((0, 2), np.int64)
    bounds = np.append(starts, len(tokens))
    shortest = int(np.diff(bounds)[candidates].min())
    left = max(round(masking.probability * int(len(tokens) - protected.sum())), shortest)
    weights = masking.cumulative_weights()
    walls = np.append(np.flatnonzero(blocked), len(starts))
    longest = np.minimum(masking.max_ngram, walls[np.searchsorted(walls, candidates)] - candidates)
    draws = rng.random(len(candidates)) * weights[longest - 1]
    # a product can round up to the last weight itself
    sizes = np.minimum(np.searchsorted(weights, draws, side="right") + 1, longest)

    bounds = bounds.tolist()
    blocked = bytearray(blocked.tobytes())
    spans = []
    for word, size in zip(candidates.tolist(), sizes.tolist(), strict=True):
        begin = bounds[word]
        while size and bounds[word + size] - begin > left:
            size -= 1
        if not size or 1 in blocked[word : word + size]:
            continue
        spans.append((begin, bounds[word + size]))
        low, high = (max(word - 1, 0), min(word + size + 1, len(blocked))) if apart else (word, word + size)
        blocked[low:high] = b"\1" * (high - low)
        left -= bounds[word + size] - begin
        if left < shortest:
            break
    return np.array(spans, np.int64)


def _word_starts(tokens: np.ndarray, protected: np.ndarray, is_continuation: np.ndarray | None) -> np.ndarray:
    """Ascending positions at which words start; a protected token is a separate word."""
    if is_continuation is None:
        return np.arange(len(tokens))
    inside = is_continuation[tokens] & ~protected
    inside[1:] &= ~protected[:-1]
    # a trimmed text may start within a word
    inside[:1] = False
    return np.flatnonzero(~inside)


def span_mask(spans: np.ndarray, length: int) -> np.ndarray:
    """bool [length]: True within the disjoint spans [spans, 2]."""
    edges = np.zeros(length + 1, np.int8)
    edges[spans[:, 0]] += 1
    edges[spans[:, 1]] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def trim(text: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """At most `length` tokens of a text; each excess token is removed from the front or the back with equal
    probability."""
    excess = len(text) - length
    if excess <= 0:
        return text
    front = int(rng.binomial(excess, 0.5))
    return text[front : front + length]


def pad(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """[length]: the values, followed by `fill`."""
    out = np.full(length, fill, values.dtype)
    out[: len(values)] = values
    return out
