"""Vectors of chunks without a model: a random projection of their tokens and pairs of tokens, weighted by rarity.

Each token and each pair of consecutive tokens is hashed to one of NUM_FEATURES features. A feature adds its inverse
document frequency, with random signs, to NUM_PLACES of the coordinates of a chunk (sparse random projection, Achlioptas
2003; Kane and Nelson 2014), so that the inner product of two chunks is that of their features, up to noise of about
1 / sqrt(WIDTH). Nearness is lexical.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megajax.retrieval.inputs import NO_TOKEN

WIDTH = 384
NUM_FEATURES = 1 << 20
NUM_PLACES = 8
ROWS = 1024


class HashEmbedder:
    """parts: gives the chunks of the database, int32 [n, chunk_length] each, which are counted for the weights when
    these are first needed; database: JSON values that determine them."""

    width = WIDTH

    def __init__(self, parts: Callable[[], Iterable[np.ndarray]], database: dict[str, Any]):
        self._parts = parts
        self.facts = {"kind": "hash", "width": WIDTH, **database}

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        """float64 [NUM_FEATURES + 1], of no feature 0."""
        counts = np.zeros(NUM_FEATURES + 1, np.int64)
        total = 0
        for chunks in self._parts():
            counts += np.bincount(_features(chunks).ravel(), minlength=NUM_FEATURES + 1)
            total += len(chunks)
        weights = np.log((total + 1) / (counts + 1))
        weights[NUM_FEATURES] = 0
        return weights

    def embed(self, chunks: np.ndarray) -> np.ndarray:
        """int32 [n, chunk_length] -> float16 [n, WIDTH] of length 1; 0 for a chunk without tokens."""
        parts = [self._embed(chunks[begin : begin + ROWS]) for begin in range(0, len(chunks), ROWS)]
        return np.concatenate(parts) if parts else np.zeros((0, WIDTH), np.float16)

    def _embed(self, chunks: np.ndarray) -> np.ndarray:
        features = _features(chunks)
        draws = _mixed(features[..., None].astype(np.uint64) * NUM_PLACES + np.arange(NUM_PLACES, dtype=np.uint64))
        signs = 1 - 2 * (draws >> np.uint64(63)).astype(np.float64)
        places = (draws % np.uint64(WIDTH)).astype(np.int64) + np.arange(len(chunks))[:, None, None] * WIDTH
        values = signs * self._weights[features][..., None]
        total = np.bincount(places.ravel(), values.ravel(), minlength=len(chunks) * WIDTH)
        return normalised(total.reshape(len(chunks), WIDTH))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """[n, W] -> float16 [n, W] of length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float16)


def _features(chunks: np.ndarray) -> np.ndarray:
    """int32 [n, length] -> int64 [n, 2 * length - 1]: the features of each chunk, once each; NUM_FEATURES: none."""
    ids = chunks.astype(np.uint64) + np.uint64(1)
    pairs = ids[:, :-1] << np.uint64(32) | ids[:, 1:]
    exists = chunks != NO_TOKEN
    hashed = _mixed(np.concatenate([ids, pairs], axis=1)) % np.uint64(NUM_FEATURES)
    features = np.where(np.concatenate([exists, exists[:, 1:]], axis=1), hashed.astype(np.int64), NUM_FEATURES)
    features.sort(axis=1)
    repeated = features[:, 1:] == features[:, :-1]
    features[:, 1:][repeated] = NUM_FEATURES
    return features


def _mixed(x: np.ndarray) -> np.ndarray:
    """Pseudo-random uint64 of uint64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
