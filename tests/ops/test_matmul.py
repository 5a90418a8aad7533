"""The dense contraction, alone and side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import matmul as module
from megajax.ops.matmul import matmul, matmul_side_by_side


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def test_matmul_contracts_several_dims():
    x, w = normal(0, 2, 3, 4, 5), normal(1, 4, 5, 6)
    np.testing.assert_allclose(matmul(x, w, num_contracted=2), np.einsum("abcd,cde->abe", x, w), rtol=1e-5, atol=1e-5)


def test_result_has_the_dtype_of_x_and_weights_are_cast():
    assert matmul(normal(0, 2, 4, dtype=jnp.bfloat16), normal(1, 4, 3)).dtype == jnp.bfloat16


def test_parts_are_as_exact_as_float32():
    x, w = normal(0, 3, 40, 512, dtype=jnp.bfloat16), normal(1, 512, 24)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))

    def error(function) -> float:
        return np.max(np.abs(np.asarray(jax.jit(function)(x, w)) - exact) / size)

    assert error(module.matmul_in_parts) < 2e-7
    assert error(lambda x, w: matmul(x.astype(jnp.float32), w)) < 2e-7
    assert error(lambda x, w: matmul(x, w)) > 1e-4  # what one part gives


def test_gradients_in_parts_are_as_exact_as_float32():
    x, w, d_out = normal(0, 3, 40, 24, dtype=jnp.bfloat16), normal(1, 24, 16), normal(2, 3, 40, 16)
    d_x, d_w = jax.jit(lambda *arrays: jax.vjp(module.matmul_in_parts, *arrays[:2])[1](arrays[2]))(x, w, d_out)
    x64, w64, d64 = (np.asarray(array, np.float64) for array in (x, w, d_out))
    exact = np.einsum("btk,btn->kn", x64, d64)
    assert np.max(np.abs(d_w - exact)) < 1e-6 * np.max(np.einsum("btk,btn->kn", np.abs(x64), np.abs(d64)))
    in_float32 = jnp.asarray(d64 @ w64.T, jnp.float32)
    assert d_x.dtype == jnp.bfloat16
    different = np.asarray(d_x) != np.asarray(in_float32.astype(jnp.bfloat16))
    assert np.mean(different) < 0.01  # rounded the other way, where the two are about as near
    np.testing.assert_allclose(np.asarray(d_x, np.float64), in_float32, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("min_rows", [1, 10**9], ids=["joined", "apart"])
def test_side_by_side_equals_one_by_one(min_rows, monkeypatch):
    monkeypatch.setattr(module, "MIN_JOINED_ROWS", min_rows)
    x = normal(0, 2, 3, 8)
    weights = [normal(1, 8, 2, 3, 4), normal(2, 8, 2, 1, 4), normal(3, 8, 2, 1, 4)]

    def loss(together, x, weights):
        apart = lambda: jnp.concatenate([matmul(x, w) for w in weights], axis=3)
        many = matmul_side_by_side(x, weights, axis=2) if together else apart()
        assert many.shape == (2, 3, 2, 5, 4)
        return jnp.sum(jnp.sin(many) * jnp.arange(1.0, 6.0)[:, None])

    got, want = (jax.value_and_grad(loss, (1, 2))(together, x, weights) for together in (True, False))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
