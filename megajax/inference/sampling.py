"""Samples the next token: temperature, top-k and nucleus sampling, with separate settings for each row.

Dimensions: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    max_tokens: int = 128
    """Maximum number of tokens to generate."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 0
    """Sample only from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens that together have this probability; 1: all."""
    seed: int = 0
    """The same seed, prompt and settings give the same text, alone or in a batch."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the result."""

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (the most likely token) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative; 0 allows all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 allows all tokens")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        if "" in self.stop:
            raise ValueError("stop='' would end every text immediately; give a text of at least one character")


class RowSampling(NamedTuple):
    """The settings of each row as arrays, so that new values need no recompilation."""

    temperature_B: jax.Array | np.ndarray
    top_k_B: jax.Array | np.ndarray
    top_p_B: jax.Array | np.ndarray
    seed_B: jax.Array | np.ndarray

    @staticmethod
    def of(rows: Sequence[Sampling]) -> "RowSampling":
        return RowSampling(
            np.array([row.temperature for row in rows], np.float32),
            np.array([min(row.top_k, 2**31 - 1) for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float32),
            np.array([row.seed for row in rows], np.uint32),
        )

    def sample(self, logits_BV: jax.Array, position_B: jax.Array) -> jax.Array:
        """Samples the tokens int32 [B] at int32 position_B; random numbers depend only on (seed, position)."""
        keys_B = jax.vmap(_key)(self.seed_B, position_B)
        return sample(logits_BV, self.temperature_B, self.top_k_B, self.top_p_B, keys_B)


def sample(
    logits_BV: jax.Array, temperature_B: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, keys_B: jax.Array
) -> jax.Array:
    """Samples one token per row -> int32 [B].

    softmax(logits / temperature), cut to the top_k_B most likely tokens, then to the nucleus of top_p_B (Holtzman et
    al. 2020, https://arxiv.org/abs/1904.09751): the smallest set of most likely tokens whose probability, among those
    that top-k keeps, reaches p. Among equal logits the lower token id counts as more likely. Sampled as argmax(logits +
    Gumbel noise), with one noise value per token from the row's key.

    logits_BV: float32, minus infinity for tokens that must not be sampled. temperature_B, top_p_B: float32; temperature
    0 is the argmax. top_k_B: int32, 0 is all. keys_B: typed random keys.
    """
    greedy_B = jnp.argmax(logits_BV, -1).astype(jnp.int32)
    # The largest logit becomes 0, so that a tiny temperature cannot overflow.
    shifted_BV = logits_BV - jnp.max(logits_BV, -1, keepdims=True)
    scaled_BV = shifted_BV / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32))(keys_B)
    is_cut_B = (temperature_B > 0) & ((top_k_B > 0) | (top_p_B < 1))
    drawn_B = jax.lax.cond(jnp.any(is_cut_B), _draw_sorted, _draw, scaled_BV, noise_BV, top_k_B, top_p_B)
    return jnp.where(temperature_B > 0, drawn_B, greedy_B)


def _key(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), position)


def _draw(scaled_BV, noise_BV, top_k_B, top_p_B):
    return jnp.argmax(scaled_BV + noise_BV, -1).astype(jnp.int32)


def _draw_sorted(scaled_BV, noise_BV, top_k_B, top_p_B):
    """Equal to _draw for rows without top-k and top-p, because each token keeps its noise."""
    tokens_BV = jnp.broadcast_to(jnp.arange(scaled_BV.shape[1], dtype=jnp.int32), scaled_BV.shape)
    sorted_BV, tokens_BV = jax.lax.sort((-scaled_BV, tokens_BV), num_keys=1, is_stable=True)
    sorted_BV = -sorted_BV
    rank_V = jnp.arange(scaled_BV.shape[1], dtype=jnp.int32)
    sorted_BV = jnp.where((rank_V < top_k_B[:, None]) | (top_k_B[:, None] == 0), sorted_BV, -jnp.inf)
    probs_BV = jax.nn.softmax(sorted_BV, -1)
    before_BV = jnp.cumsum(probs_BV, -1) - probs_BV
    # Rounding may raise the sum to 1 before the last token, so p = 1 is a case of its own.
    in_nucleus_BV = (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    kept_BV = jnp.where(in_nucleus_BV, sorted_BV, -jnp.inf)
    choice_B1 = jnp.argmax(kept_BV + jnp.take_along_axis(noise_BV, tokens_BV, 1), -1, keepdims=True)
    return jnp.take_along_axis(tokens_BV, choice_B1, 1)[:, 0]
