"""The chunked gated delta rule against its definition, one token at a time, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.gated_delta import gated_delta, gated_delta_step

B, T, H, P, N = 2, 24, 4, 3, 5
# Documents that end inside a chunk, at its border, and after one token.
STARTS = np.zeros((B, T), bool)
STARTS[0, [3, 8, 9, 20]] = True
STARTS[1, [16]] = True


def arguments(groups: int, dtype) -> dict:
    rng = np.random.default_rng(0)
    arrays = dict(
        q=rng.normal(size=(B, T, groups, N)),
        k=rng.normal(size=(B, T, groups, N)),
        v=rng.normal(size=(B, T, H, P)),
        log_decay=-np.logaddexp(0, rng.normal(size=(B, T, H))),
        beta=rng.random((B, T, H)),
        state=rng.normal(size=(B, H, P, N)),
    )
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}


def recurrence(q, k, v, log_decay, beta, state, starts):
    """S_t = a_t S_(t-1) + beta_t (v_t - a_t S_(t-1) k_t) k_t^T, y_t = S_t q_t, with q and k of length 1."""
    q, k = (jnp.repeat(m / jnp.sqrt(jnp.sum(m * m, -1, keepdims=True) + 1e-6), H // m.shape[2], 2) for m in (q, k))

    def step(S, token):
        q, k, v, log_decay, beta, start = token
        S = jnp.where(start[:, None, None, None], 0, S) * jnp.exp(log_decay)[..., None, None]
        error = v - jnp.einsum("bhpn,bhn->bhp", S, k)
        S = S + jnp.einsum("bh,bhp,bhn->bhpn", beta, error, k)
        return S, jnp.einsum("bhpn,bhn->bhp", S, q) / N**0.5

    tokens = tuple(jnp.moveaxis(m, 1, 0) for m in (q, k, v, log_decay, beta, jnp.asarray(starts)))
    S, y = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(y, 0, 1), S


def chunked(q, k, v, log_decay, beta, state, starts, *, chunk, pieces=(0,)):
    starts = None if starts is None else jnp.asarray(starts)
    return gated_delta(q, k, v, log_decay, beta, chunk=chunk, starts_BT=starts, state_BHPN=state, pieces=pieces)


def with_gradients(function, arrays: dict, starts):
    """Jitted results, and gradients of a function of all of them."""

    def loss(arrays):
        results = function(**arrays, starts=starts)
        return sum(jnp.sum(jnp.sin(result.astype(results[1].dtype))) for result in results), results

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return {"y": results[0], "last": results[1]} | gradients


def in_pieces(*, starts, **arrays):
    """As stored over `context`: the pieces of a device are the first and the last of those left."""
    pieces = (0, 3, 1, 2)
    order = np.arange(T).reshape(4, -1)[list(pieces)].ravel()
    state = arrays.pop("state")
    arrays = {name: array[:, order] for name, array in arrays.items()}
    y, last = chunked(**arrays, state=state, starts=starts[:, order], chunk=4, pieces=pieces)
    return y[:, order.argsort()], last


@pytest.mark.parametrize("groups, run", [(2, functools.partial(chunked, chunk=7)), (1, in_pieces)], ids=["one", "many"])
def test_chunks_equal_the_recurrence(groups, run):
    """chunk=7 does not divide T, and chunk=4 not the 6 tokens of a piece: last chunks are padded."""
    with jax.enable_x64(True):
        arrays = arguments(groups, jnp.float64)
        found = with_gradients(run, arrays, STARTS)
        wanted = with_gradients(recurrence, arrays, STARTS)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_a_step_is_one_token_of_the_sequence_and_bfloat16_is_close():
    arrays = arguments(2, jnp.float32)
    run = jax.jit(functools.partial(chunked, starts=None, chunk=8))
    y, last = run(**arrays)
    rounded, last_rounded = run(**{name: a.astype(jnp.bfloat16) if name in "qkv" else a for name, a in arrays.items()})
    assert rounded.dtype == jnp.bfloat16 and last_rounded.dtype == jnp.float32
    assert np.abs(rounded.astype(jnp.float32) - y).max() < 3 * 2**-8 * np.abs(y).max()  # a few roundings to 8 bits
    state = arrays.pop("state")
    step = jax.jit(gated_delta_step)
    for t in range(T):
        y_t, state = step(*(array[:, t] for array in arrays.values()), state)
        np.testing.assert_allclose(y_t, y[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_gradients_in_bfloat16_are_close():
    arrays = arguments(2, jnp.float32)
    rounded = {name: a.astype(jnp.bfloat16) if name in "qkv" else a for name, a in arrays.items()}
    arrays = {name: a.astype(jnp.float32) for name, a in rounded.items()}
    run = functools.partial(chunked, chunk=8)
    wanted = with_gradients(run, arrays, STARTS)
    for name, array in with_gradients(run, rounded, STARTS).items():
        error = np.linalg.norm(array.astype(jnp.float32) - wanted[name])
        assert error < 3 * 2**-8 * np.linalg.norm(wanted[name]), name


def test_repeated_keys_stay_accurate():
    """The inverse of the system is exact here, but its powers have entries of 1e17: a text that repeats one token."""
    length = 64
    ones = jnp.ones((1, length, 1, 1), jnp.float32)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(1, length, 1, 1)), jnp.float32)
    run = jax.jit(functools.partial(gated_delta, chunk=length))
    y, _ = run(ones, ones, v, jnp.zeros((1, length, 1)), jnp.ones((1, length, 1)))
    np.testing.assert_allclose(y, v, rtol=1e-4, atol=1e-4)  # the state holds the newest value, to EPSILON per token
