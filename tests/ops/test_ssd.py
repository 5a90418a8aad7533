"""The chunked state space against its definition, one token at a time, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.ssd import ssd, ssd_step, time_steps

B, T, H, P, N, W = 2, 24, 4, 3, 5, 4
# Documents that end inside a chunk, at its border, and after one token.
STARTS = np.zeros((B, T), bool)
STARTS[0, [3, 8, 9, 20]] = True
STARTS[1, [16]] = True


def arguments(groups: int, dtype) -> dict:
    rng = np.random.default_rng(0)
    arrays = dict(
        x=rng.normal(size=(B, T, H, P)),
        dt=np.logaddexp(0, rng.normal(size=(B, T, H))),
        a=-np.exp(rng.normal(size=H)),
        b=rng.normal(size=(B, T, groups, N)),
        c=rng.normal(size=(B, T, groups, N)),
        skip=rng.normal(size=H),
        state=rng.normal(size=(B, H, P, N)),
    )
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}


def recurrence(x, dt, a, b, c, skip, state, starts):
    """S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + D x_t."""
    b, c = (jnp.repeat(m, H // m.shape[2], 2) for m in (b, c))

    def step(S, token):
        x, dt, b, c, start = token
        S = jnp.where(start[:, None, None, None], 0, S)
        S = S * jnp.exp(dt * a)[..., None, None] + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, b)
        return S, jnp.einsum("bhpn,bhn->bhp", S, c) + skip[:, None] * x

    tokens = tuple(jnp.moveaxis(m, 1, 0) for m in (x, dt, b, c, jnp.asarray(starts)))
    S, y = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(y, 0, 1), S


def chunked(x, dt, a, b, c, skip, state, starts, *, chunk, pieces=(0,)):
    starts = None if starts is None else jnp.asarray(starts)
    return ssd(x, dt, a, b, c, skip, chunk=chunk, starts_BT=starts, state_BHPN=state, pieces=pieces)


def with_gradients(function, arrays: dict, starts):
    def loss(arrays):
        results = function(**arrays, starts=starts)
        return sum(jnp.sum(jnp.sin(result.astype(arrays["dt"].dtype))) for result in results), results

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return {"y": results[0], "last": results[1]} | gradients


@functools.cache
def exact():
    """Of two groups with documents, in float64."""
    with jax.enable_x64(True):
        found = with_gradients(functools.partial(chunked, chunk=8), arguments(2, jnp.float64), STARTS)
    return {name: np.asarray(array) for name, array in found.items()}


@pytest.mark.parametrize("groups, chunk, starts", [(2, 8, STARTS), (1, 7, None)], ids=["packed", "ragged"])
def test_chunks_equal_the_recurrence(groups, chunk, starts):
    """chunk=7 does not divide T: the last chunk is padded."""
    with jax.enable_x64(True):
        arrays = arguments(groups, jnp.float64)
        found = exact() if groups == 2 else with_gradients(functools.partial(chunked, chunk=chunk), arrays, starts)
        wanted = with_gradients(recurrence, arrays, np.zeros((B, T), bool) if starts is None else starts)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_pieces_in_any_order_equal_the_sequence():
    """As stored over `context`: the pieces of a device are the first and the last of those left."""
    pieces = (0, 3, 1, 2)
    order = np.arange(T).reshape(4, -1)[list(pieces)].ravel()

    def permuted(x, dt, b, c, starts, **rest):
        x, dt, b, c = (m[:, order] for m in (x, dt, b, c))
        y, last = chunked(x, dt, b=b, c=c, starts=starts[:, order], chunk=4, pieces=pieces, **rest)
        return y[:, order.argsort()], last

    with jax.enable_x64(True):
        found = with_gradients(permuted, arguments(2, jnp.float64), STARTS)
    for name, array in exact().items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_float32_and_bfloat16_are_close_to_float64():
    run = functools.partial(with_gradients, functools.partial(chunked, chunk=8), starts=STARTS)
    single = arguments(2, jnp.float32)
    rounded = {name: a.astype(jnp.bfloat16) if name in ("x", "b", "c") else a for name, a in single.items()}
    found = run(single), run(rounded)
    for name, wanted in exact().items():
        errors = [np.abs(np.asarray(f[name], np.float64) - wanted).max() / np.abs(wanted).max() for f in found]
        # Sums in float32. A few roundings to 8 bits; gradients are sums of few terms here, which cancel.
        assert errors[0] < 1e-5 and errors[1] < (3 if name in ("y", "last") else 20) * 2**-8, (name, errors)
    dtypes = {name: found[1][name].dtype for name in ("y", "b", "last")}
    assert dtypes == {"y": jnp.bfloat16, "b": jnp.bfloat16, "last": jnp.float32}


def test_large_products_and_their_gradients_are_in_the_dtype_of_x():
    """A product with a float32 operand takes twice the memory traffic, and the slow units of a GPU."""
    arrays = arguments(1, jnp.float32)
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("x", "b", "c")}

    def loss(arrays):
        return jnp.sum(chunked(**arrays, starts=STARTS, chunk=8)[0].astype(jnp.float32))

    def operands(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield from (variable.aval for variable in equation.invars)
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from operands(inner)

    found = [a for a in operands(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr) if a.size >= arrays["x"].size]
    assert len(found) > 10 and {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}, found


def test_a_step_is_one_token_of_the_sequence():
    arrays = arguments(2, jnp.float32)
    y, last = jax.jit(functools.partial(chunked, starts=None, chunk=8))(**arrays)
    state = arrays.pop("state")
    a, skip = arrays.pop("a"), arrays.pop("skip")
    step = jax.jit(ssd_step)
    for t in range(T):
        x, dt, b, c = (arrays[name][:, t] for name in ("x", "dt", "b", "c"))
        y_t, state = step(x, dt, a, b, c, skip, state)
        np.testing.assert_allclose(y_t, y[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_large_decays_have_finite_gradients():
    """Above the diagonal the exponent is positive and overflows."""
    arrays = arguments(1, jnp.float32) | {"a": jnp.full(H, -1e3, jnp.float32)}
    found = with_gradients(functools.partial(chunked, chunk=8), arrays, None)
    assert all(np.isfinite(a).all() for a in found.values())


def test_time_steps_are_limited():
    dt = jnp.asarray([[-20.0, 0.0, 20.0]])
    np.testing.assert_allclose(time_steps(dt, jnp.zeros(3), (0.0, None)), np.logaddexp(0, dt), rtol=1e-6)
    np.testing.assert_allclose(time_steps(dt, jnp.ones(3), (0.1, 5.0)), [[0.1, np.log1p(np.e), 5.0]], rtol=1e-6)
