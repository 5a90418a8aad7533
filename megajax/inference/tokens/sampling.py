"""Samples the next token, with separate settings for each row: temperature, top-k, top-p, min-p, penalties, bias.

Dimensions: B rows, V vocabulary, K most likely tokens that are reported, W words of 32 tokens in a mask.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from megajax.data.tokenizers.tokenizer import read_json
from megajax.inference.config import MAX_LOGPROBS, Sampling

PROMPT_TOKEN = 1 << 30  # bit of a count: the token occurs in the prompt
RECOMMENDED = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"  # fields of generation_config.json
DIGIT_BITS = 2  # of a threshold, found per pass over the vocabulary; divides 32


def recommended_sampling(folder: str | Path) -> dict[str, float]:
    """Values of Sampling that the generation_config.json of a Hugging Face folder, or of a run that began with one,
    recommends; {} without the file. Raises ValueError for a value that Sampling does not allow."""
    file = Path(folder) / "generation_config.json"
    found = {name: value for name, value in read_json(str(file)).items() if name in RECOMMENDED and value is not None}
    for name, value in found.items():
        if type(value) not in (int, float):
            raise ValueError(f"{file}: {name}={value!r} must be a number")
    try:
        Sampling(**found).check()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return found


A = TypeVar("A", jax.Array, np.ndarray)
"""Arrays on the devices, or on the host."""


class TokenLogprobs(NamedTuple):
    token: int
    logprob: float
    """Natural logarithm of the probability that the model gives the token, before penalties and temperature."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, most likely first."""


class RowSampling(NamedTuple, Generic[A]):
    """The settings of each row as arrays, so that new values need no recompilation."""

    temperature_B: A
    top_k_B: A
    top_p_B: A
    min_p_B: A
    seed_B: A
    presence_B: A
    frequency_B: A
    repetition_B: A
    is_adjusted_B: A
    has_logprobs_B: A

    @staticmethod
    def of(rows: Sequence[Sampling], indices: Sequence[int] | None = None) -> "RowSampling[np.ndarray]":
        """indices: which of its n samples each row is; None: the first."""
        indices = indices or [0] * len(rows)

        def floats(name: str) -> np.ndarray:
            return np.array([getattr(row, name) for row in rows], np.float32)

        return RowSampling(
            floats("temperature"),
            np.array([min(row.top_k, 2**31 - 1) for row in rows], np.int32),
            floats("top_p"),
            floats("min_p"),
            np.array([(row.seed + index) % 2**32 for row, index in zip(rows, indices, strict=True)], np.uint32),
            floats("presence_penalty"),
            floats("frequency_penalty"),
            floats("repetition_penalty"),
            np.array([row.has_adjusted_logits for row in rows]),
            np.array([row.logprobs is not None for row in rows]),
        )

    def sample(self: "RowSampling[jax.Array]", logits_BV: jax.Array, position_B: jax.Array) -> jax.Array:
        """Samples the tokens int32 [B] at int32 position_B; random numbers depend only on (seed, position)."""
        keys_B = jax.vmap(_key)(self.seed_B, position_B)
        return sample(logits_BV, self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B, keys_B)

    def adjusted(
        self: "RowSampling[jax.Array]", logits_BV: jax.Array, counts_BV: jax.Array, bias_BV: jax.Array
    ) -> jax.Array:
        """The logits with bias and penalties. counts: int32, how often each token has been generated, plus
        PROMPT_TOKEN if it is in the prompt."""

        generated_BV = counts_BV % PROMPT_TOKEN
        biased_BV = logits_BV + bias_BV
        factor_B1 = self.repetition_B[:, None]
        repeated_BV = jnp.where(biased_BV > 0, biased_BV / factor_B1, biased_BV * factor_B1)
        adjusted_BV = jnp.where(counts_BV > 0, repeated_BV, biased_BV)
        adjusted_BV -= self.frequency_B[:, None] * generated_BV.astype(jnp.float32)
        adjusted_BV -= jnp.where(generated_BV > 0, self.presence_B[:, None], 0.0)
        return jnp.where(self.is_adjusted_B[:, None], adjusted_BV, logits_BV)


def sample(
    logits_BV: jax.Array, temperature_B: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array,
    keys_B: jax.Array
) -> jax.Array:  # fmt: skip
    """Samples one token per row -> int32 [B].

    softmax(logits / temperature), cut to the top_k_B most likely tokens, then to the nucleus of top_p_B (Holtzman et
    al. 2020, https://arxiv.org/abs/1904.09751): the smallest set of most likely tokens whose probability, among those
    that top-k keeps, reaches p; then to tokens of at least min_p_B times the highest probability (Nguyen et al. 2024,
    https://arxiv.org/abs/2407.01082). Among equal logits the lower token id counts as more likely. Sampled as
    argmax(logits + Gumbel noise), with one noise value per token from the row's key.

    logits_BV: float32, minus infinity for tokens that must not be sampled. temperature_B, top_p_B, min_p_B: float32;
    temperature 0 is the argmax. top_k_B: int32, 0 is all. keys_B: typed random keys. What no row asks for is skipped.
    """
    greedy_B = jnp.argmax(logits_BV, -1).astype(jnp.int32)

    def draw() -> jax.Array:
        # The largest logit becomes 0, so that a tiny temperature cannot overflow.
        shifted_BV = logits_BV - jnp.max(logits_BV, -1, keepdims=True)
        scaled_BV = shifted_BV / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32))(keys_B)
        noise_BV = jnp.where(scaled_BV >= jnp.log(min_p_B)[:, None], noise_BV, -jnp.inf)
        is_cut_B = (temperature_B > 0) & ((top_k_B > 0) | (top_p_B < 1))
        return jax.lax.cond(jnp.any(is_cut_B), _draw_cut, _draw, scaled_BV, noise_BV, top_k_B, top_p_B)

    drawn_B = jax.lax.cond(jnp.any(temperature_B > 0), draw, lambda: greedy_B)
    return jnp.where(temperature_B > 0, drawn_B, greedy_B)


def _key(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), position)


def _draw(scaled_BV, noise_BV, top_k_B, top_p_B):
    return jnp.argmax(scaled_BV + noise_BV, -1).astype(jnp.int32)


def _draw_cut(scaled_BV, noise_BV, top_k_B, top_p_B):
    """Equal to _draw for rows without top-k and top-p, because each token keeps its noise."""
    key_BV = _ordered(scaled_BV)
    beyond = 2.0 * scaled_BV.shape[1]  # more than all weights together: no cut

    def keep(has_cut_B, weight_BV, target_B):
        target_B = jnp.where(has_cut_B, target_B, beyond)
        everything = jnp.ones(scaled_BV.shape, bool)
        return jax.lax.cond(jnp.any(has_cut_B), _most_likely, lambda *_: everything, key_BV, weight_BV, target_B)

    in_top_k_BV = keep(top_k_B > 0, jnp.ones_like(scaled_BV), top_k_B.astype(jnp.float32))
    top_k_BV = jnp.where(in_top_k_BV, scaled_BV, -jnp.inf)
    in_nucleus_BV = keep(top_p_B < 1, jax.nn.softmax(top_k_BV, -1), top_p_B)
    return _draw(jnp.where(in_nucleus_BV, top_k_BV, -jnp.inf), noise_BV, top_k_B, top_p_B)


def _most_likely(key_BV: jax.Array, weight_BV: jax.Array, target_B: jax.Array) -> jax.Array:
    """bool [B, V]: the tokens with the largest keys, as few as have `target` weight together, lower ids first among
    equal keys. Found digit by digit: a few passes over the vocabulary take less time than sorting it."""

    def has_weight_from(key_BD: jax.Array) -> jax.Array:
        is_from_BDV = key_BV[:, None] >= key_BD[..., None]
        return jnp.sum(jnp.where(is_from_BDV, weight_BV[:, None], 0), -1) >= target_B[:, None]

    smallest_B = jnp.full(target_B.shape, jnp.iinfo(jnp.int32).min)
    threshold_B = _largest(has_weight_from, smallest_B, num_bits=32)
    is_above_BV = key_BV > threshold_B[:, None]
    is_equal_BV = key_BV == threshold_B[:, None]
    missing_B = target_B - jnp.sum(jnp.where(is_above_BV, weight_BV, 0), -1)
    weight_B = jnp.max(jnp.where(is_equal_BV, weight_BV, 0), -1)
    needed_B = jnp.ceil(missing_B / jnp.where(weight_B > 0, weight_B, 1))
    num_ids = key_BV.shape[1]
    id_V = jnp.arange(num_ids, dtype=jnp.int32)

    def is_before_last(id_BD: jax.Array) -> jax.Array:
        is_before_BDV = is_equal_BV[:, None] & (id_V < id_BD[..., None])
        return jnp.sum(is_before_BDV, -1, dtype=jnp.float32) < needed_B[:, None]

    some_are_left_out = jnp.any(jnp.sum(is_equal_BV, -1, dtype=jnp.float32) > needed_B)
    last_B = jax.lax.cond(
        some_are_left_out,
        lambda: _largest(is_before_last, jnp.zeros(target_B.shape, jnp.int32), num_ids.bit_length()),
        lambda: jnp.full(target_B.shape, num_ids, jnp.int32),
    )
    return is_above_BV | is_equal_BV & (id_V <= last_B[:, None])


def _largest(holds: Callable[[jax.Array], jax.Array], smallest_B: jax.Array, num_bits: int) -> jax.Array:
    """The largest of the 2^num_bits int32 from smallest_B on for which `holds`, which is true up to some number;
    smallest_B if it never is. holds: [B, D] numbers -> bool [B, D]."""
    num_digits = -(-num_bits // DIGIT_BITS)
    digit_D = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32)

    def find_digit(number, found_B):
        unit = 1 << DIGIT_BITS * (num_digits - 1 - number)
        candidate_BD = found_B[:, None] + digit_D * unit  # a product that overflows wraps, and so does the sum
        digit_B = jnp.sum(holds(candidate_BD), -1, dtype=jnp.int32)
        return found_B + digit_B * unit

    return jax.lax.fori_loop(0, num_digits, find_digit, smallest_B)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x: the bits, with those after the sign inverted in negative numbers."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


class Logprobs(NamedTuple):
    """Of one token per row, float32 [B], and of the K most likely ones, int32 and float32 [B, K]."""

    chosen_B: jax.Array
    top_ids_BK: jax.Array
    top_BK: jax.Array

    @staticmethod
    def of(logits_BV: jax.Array, tokens_B: jax.Array, wanted: jax.Array) -> "Logprobs":
        """wanted: bool scalar; False: zeros, at no cost."""
        batch, vocab = logits_BV.shape
        K = min(MAX_LOGPROBS, vocab)

        def compute():
            top_BK, ids_BK = _largest_logits(logits_BV, K)
            lse_B1 = jax.nn.logsumexp(logits_BV, -1, keepdims=True)
            chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], 1)
            return Logprobs((chosen_B1 - lse_B1)[:, 0], ids_BK, top_BK - lse_B1)

        return jax.lax.cond(wanted, compute, lambda: Logprobs.zeros(batch, vocab))

    @staticmethod
    def zeros(batch: int, vocab: int) -> "Logprobs":
        shape = (batch, min(MAX_LOGPROBS, vocab))
        return Logprobs(jnp.zeros(batch, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def _largest_logits(logits_BV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits, [B, count], and their int32 ids, lower ids first among equal ones, as jax.lax.top_k.

    One after the other: XLA sorts the whole vocabulary for top_k, and with many rows on a GPU takes CUB's sort, which a
    CUDA graph cannot hold (jaxlib 0.11.2).
    """
    rows_B = jnp.arange(len(logits_BV))

    def take_largest(number, found):
        rest_BV, largest_BK, ids_BK = found
        id_B = jnp.argmax(rest_BV, -1).astype(jnp.int32)
        is_here_K = jnp.arange(count) == number
        largest_BK = jnp.where(is_here_K, rest_BV[rows_B, id_B][:, None], largest_BK)
        ids_BK = jnp.where(is_here_K, id_B[:, None], ids_BK)
        return rest_BV.at[rows_B, id_B].set(-jnp.inf), largest_BK, ids_BK

    shape = (len(logits_BV), count)
    found = (logits_BV, jnp.zeros(shape, logits_BV.dtype), jnp.zeros(shape, jnp.int32))
    return jax.lax.fori_loop(0, count, take_largest, found)[1:]


def unpacked(mask_BW: jax.Array, vocab_size: int) -> jax.Array:
    """uint32 words, bit i of word w for token 32 w + i -> bool [B, V]."""
    bits_BW32 = (mask_BW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits_BW32.reshape(mask_BW.shape[0], -1)[:, :vocab_size].astype(bool)
