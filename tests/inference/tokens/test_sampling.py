"""The choice of a token, against distributions computed by hand in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.inference.tokens.sampling import PROMPT_TOKEN, Logprobs, RowSampling, Sampling, sample, unpacked

LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 2.9, -np.inf, 1.5], np.float32)
NUM_DRAWS = 20_000
jitted = jax.jit(sample)


def draw(logits_BV, temperature, top_k, top_p, min_p=0.0, seed=0):
    """One token a row, each row with its own key."""
    batch = logits_BV.shape[0]
    settings = (
        jnp.full(batch, temperature), jnp.full(batch, top_k, jnp.int32), jnp.full(batch, top_p), jnp.full(batch, min_p)
    )  # fmt: skip
    return np.asarray(jitted(jnp.asarray(logits_BV), *settings, jax.random.split(jax.random.key(seed), batch)))


def expected_probabilities(logits, temperature, top_k, top_p, min_p):
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.zeros(len(logits))
    kept = order[: top_k or None]
    probs[kept] = np.exp(scaled[kept] - scaled.max())
    probs /= probs.sum()
    nucleus, total = [], 0.0
    for token in kept:
        if total >= top_p:
            break
        nucleus.append(token)
        total += probs[token]
    result = np.zeros(len(logits))
    result[nucleus] = probs[nucleus] * (probs[nucleus] >= min_p * probs.max())
    return result / result.sum()


@pytest.mark.parametrize(
    "settings",
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 0.05, 0.0),
     (1.5, 4, 0.8, 0.0), (1.0, 100, 0.999, 0.0), (0.5, 0, 1.0, 0.3), (1.5, 5, 0.95, 0.5), (1.0, 0, 1.0, 1.0)],
)  # fmt: skip
def test_draws_follow_the_distribution(settings):
    expected = expected_probabilities(LOGITS, *settings)
    tokens = draw(np.tile(LOGITS, (NUM_DRAWS, 1)), *settings)
    frequency = np.bincount(tokens, minlength=len(LOGITS)) / NUM_DRAWS
    assert np.all(frequency[expected == 0] == 0)
    # 5 standard deviations of a binomial frequency, at most 0.5 / sqrt(20000) each
    np.testing.assert_allclose(frequency, expected, atol=5 * 0.5 / np.sqrt(NUM_DRAWS))


def test_each_row_has_its_own_settings():
    rows = [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-6), (1e-30, 0, 1.0), (1.0, 2, 1.0), (5.0, 0, 1.0)]
    repeat = 200
    arrays = np.array(rows * repeat)
    keys = jax.random.split(jax.random.key(1), len(arrays))
    tokens = jitted(
        jnp.tile(LOGITS, (len(arrays), 1)),
        jnp.asarray(arrays[:, 0], jnp.float32),
        jnp.asarray(arrays[:, 1], jnp.int32),
        jnp.asarray(arrays[:, 2], jnp.float32),
        jnp.zeros(len(arrays)),
        keys,
    )
    drawn = np.asarray(tokens).reshape(repeat, len(rows)).T
    assert [set(row) for row in drawn[:5].tolist()] == [{1}, {1}, {1}, {1}, {1, 5}]
    assert set(drawn[5].tolist()) == {0, 1, 2, 3, 4, 5, 7}  # never the one at minus infinity


def test_equal_logits_keep_exactly_top_k_tokens():
    tokens = draw(np.zeros((2000, 8), np.float32), 1.0, 3, 1.0)
    assert set(tokens.tolist()) == {0, 1, 2}
    tokens = draw(np.zeros((2000, 8), np.float32), 1.0, 0, 0.5)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_a_row_does_not_depend_on_what_the_others_ask():
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    plain, cut = Sampling(seed=7), Sampling(seed=3, top_k=2)
    step = jax.jit(lambda logits, rows, position: rows.sample(logits, position))
    for position in range(20):
        alone = step(logits, RowSampling.of([plain]), jnp.full(1, position, jnp.int32))
        rows = RowSampling.of([cut, plain, cut])
        beside = step(np.tile(logits, (3, 1)), rows, jnp.full(3, position, jnp.int32))
        assert int(alone[0]) == int(beside[1])


def test_penalties_and_bias_change_the_logits_of_their_row_alone():
    logits = np.array([2.0, -1.0, 0.5, 3.0], np.float32)
    counts = np.array([PROMPT_TOKEN, 2, PROMPT_TOKEN + 1, 0], np.int32)
    bias = np.array([0.0, 0.0, 0.25, -5.0], np.float32)
    asking = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={3: -5.0})
    rows = RowSampling.of([asking, Sampling()])
    found = jax.jit(RowSampling.adjusted)(rows, *(np.tile(a, (2, 1)) for a in (logits, counts, bias)))
    # Repeated: in the prompt or generated. Presence and frequency: generated alone.
    wanted = [2.0 / 2, -1.0 * 2 - 2 * 0.25 - 0.5, 0.75 / 2 - 0.25 - 0.5, -2.0]
    np.testing.assert_allclose(found, [wanted, logits], rtol=1e-6)


def test_masks_name_tokens_by_bits():
    mask = np.array([[0b1001, 0b10]], np.uint32)
    assert np.flatnonzero(unpacked(jnp.asarray(mask), 40)[0]).tolist() == [0, 3, 33]


@pytest.mark.parametrize("vocab_size", [100, 7])
def test_most_likely_tokens_are_those_of_top_k(vocab_size):
    logits = np.random.default_rng(0).integers(-9, 9, (5, vocab_size)).astype(np.float32)  # many are equal
    found = jax.jit(Logprobs.of)(logits, np.zeros(5, np.int32), True)
    top, ids = jax.lax.top_k(logits, min(20, vocab_size))
    np.testing.assert_array_equal(found.top_ids_BK, ids)
    np.testing.assert_allclose(found.top_BK, top - jax.nn.logsumexp(logits, -1, keepdims=True), rtol=1e-6)


def test_new_values_need_no_new_program(compiled):
    draw(np.tile(LOGITS, (4, 1)), 1.0, 0, 1.0)
    compiled.clear()
    for settings in [(0.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.2)]:
        draw(np.tile(LOGITS, (4, 1)), *settings)
    assert not any("sample" in name for name in compiled), compiled


@pytest.mark.parametrize(
    "field, value",
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
     ("top_p", 1.5), ("seed", -1), ("stop", ("",)), ("min_p", -0.1), ("n", 0), ("logprobs", 21),
     ("prompt_logprobs", -1), ("presence_penalty", float("inf")), ("repetition_penalty", 0.0),
     ("logit_bias", {3: float("nan")})],
)  # fmt: skip
def test_settings_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        Sampling(**{field: value}).check()
