"""Masking: chooses n-grams in random order until a fraction of the text is masked.

Source: Megatron-LM, megatron/core/datasets/masked_dataset.py.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Masking:
    """What fraction of a text is masked, and in which spans."""

    probability: float = 0.15
    """Fraction of the tokens that are masked, above 0 and below 1."""
    max_ngram: int = 3
    """Longest span, in tokens; a span of n tokens has a probability proportional to 1 / n (Megatron)."""


def choose_spans(protected: np.ndarray, masking: Masking, rng: np.random.Generator, *, apart: bool) -> np.ndarray:
    """Spans of tokens to mask, int64 [spans, 2]: begin and end, disjoint, in random order.

    protected: bool [n], tokens that no span may contain. apart: leave an unmasked token between two spans.
    Together they have at most round(probability * unprotected tokens) tokens, but at least one; a span that would be
    too long is shortened, one that would overlap is skipped.
    """
    candidates = rng.permutation(np.flatnonzero(~protected))
    if not len(candidates):
        return np.zeros((0, 2), np.int64)
    left = max(round(masking.probability * int(len(protected) - protected.sum())), 1)
    weights = np.cumsum(1 / np.arange(1, masking.max_ngram + 1))
    walls = np.append(np.flatnonzero(protected), len(protected))
    longest = np.minimum(masking.max_ngram, walls[np.searchsorted(walls, candidates)] - candidates)
    draws = rng.random(len(candidates)) * weights[longest - 1]
    # a product can round up to the last weight itself
    sizes = np.minimum(np.searchsorted(weights, draws, side="right") + 1, longest)

    blocked = bytearray(protected.tobytes())
    spans = []
    for begin, size in zip(candidates.tolist(), sizes.tolist(), strict=True):
        end = begin + min(size, left)
        if 1 in blocked[begin:end]:
            continue
        spans.append((begin, end))
        low, high = (max(begin - 1, 0), min(end + 1, len(blocked))) if apart else (begin, end)
        blocked[low:high] = b"\1" * (high - low)
        left -= end - begin
        if not left:
            break
    return np.array(spans, np.int64)


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
