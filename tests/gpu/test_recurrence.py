"""The states of gated delta nets between chunks on Hopper against a loop in float32, and the whole rule with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.gated_delta import gated_delta
from pallas_kernels import recurrence as kernel
from pallas_kernels import triangular

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(32, 24, 128, 128, 64), (3, 5, 64, 64, 32), (1, 300, 128, 128, 64)])
def test_kernel_matches_a_loop(shape, reverse):
    num_chunks, num_heads, rows, width, chunk = shape
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (num_chunks, num_heads, rows, chunk), jnp.bfloat16)
    first, second = (
        jax.random.normal(key, (num_chunks, num_heads, width, chunk), jnp.bfloat16) / width**0.5 for key in keys[1:3]
    )
    decay = jax.random.uniform(keys[3], (num_chunks, num_heads), maxval=0.5)
    added = jax.random.normal(keys[4], (num_chunks, num_heads, rows, width), jnp.bfloat16) if reverse else None
    start = jax.random.normal(keys[5], (num_heads, rows, width))

    def step(state, of_chunk):
        x, first, second, decay, added = (None if a is None else a.astype(jnp.float32) for a in of_chunk)
        before = state.astype(jnp.bfloat16)
        written = x + jnp.einsum("mpn,mnq->mpq", before.astype(jnp.float32), first, precision="highest")
        written = written.astype(jnp.bfloat16)
        state = state * decay[:, None, None] + (0 if added is None else added)
        state += jnp.einsum("mpq,mnq->mpn", written.astype(jnp.float32), second, precision="highest")
        return state, (written, before)

    last, (written, before) = jax.lax.scan(step, start, (x, first, second, decay, added), reverse=reverse)
    found = kernel.recurrence(x, first, second, decay, added, start, reverse=reverse)
    for got, want in zip(found, (written, before, last), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 2**-8 * np.linalg.norm(want)  # roundings of sums in another order


def test_gated_delta_and_its_gradients_are_close_to_float32():
    B, T, H, G, N = 2, 1000, 4, 2, 128
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (B, T, G, N), jnp.bfloat16) for key in keys[:2])
    v, d_y = (jax.random.normal(key, (B, T, H, N), jnp.bfloat16) for key in keys[2:4])
    log_decay = -0.1 * jax.nn.softplus(jax.random.normal(keys[4], (B, T, H)))
    beta = jax.random.uniform(keys[5], (B, T, H))

    def run(*arrays):
        y, vjp = jax.vjp(lambda *arrays: gated_delta(*arrays, chunk=64)[0], *arrays)
        return y, *vjp(d_y.astype(y.dtype))

    wanted = jax.jit(run)(*(array.astype(jnp.float32) for array in (q, k, v)), log_decay, beta)
    for got, want in zip(jax.jit(run)(q, k, v, log_decay, beta), wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 3 * 2**-8 * np.linalg.norm(want)


def test_inverses_match_numpy():
    rng = np.random.default_rng(0)
    systems = rng.uniform(-1, 1, (500, 64, 64)) / 4
    systems[0] = 1  # of a text that repeats one token
    wanted = np.linalg.inv(np.eye(64) + np.tril(systems, -1))
    found = np.asarray(triangular.inverse(jnp.asarray(systems, jnp.float32)), np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1.01 * 2**-8, atol=2**-14)
