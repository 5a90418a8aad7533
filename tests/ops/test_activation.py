"""Each activation equals its formula, value and gradient, and keeps nothing but the products for the backward pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.mesh import compat
from megajax.ops.activation import GATED, OF_KERNEL, Activation, activate
from pallas_kernels import gated as kernel

SHAPE = 4, 6, 32
FORMULAS = {
    "gelu": lambda x: x * (1 + compat.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "swiglu": lambda x: x / (1 + jnp.exp(-x)),
    "geglu": lambda x: x * (1 + compat.erf(x / math.sqrt(2))) / 2,
    "geglu_tanh": lambda x: x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
    "relu": lambda x: jnp.where(x > 0, x, 0),
    "squared_relu": lambda x: jnp.where(x > 0, x**2, 0),
}


def test_error_function_has_the_gradient_of_jax():
    x = jnp.linspace(-4, 4, 101)
    ours, wanted = (jax.vmap(jax.value_and_grad(erf))(x) for erf in (compat.erf, jax.lax.erf))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-12)


def formula(wide_WF, name):
    hidden_F = FORMULAS[name](wide_WF[..., 0, :])
    return hidden_F * wide_WF[..., 1, :] if name in GATED else hidden_F


def arguments(name, dtype):
    """The products and the gradient of the result."""
    rng = np.random.default_rng(0)
    batch, length, width = SHAPE
    wide = 3 * rng.standard_normal((batch, length, 2 if name in GATED else 1, width))
    return wide.astype(dtype), rng.standard_normal(SHAPE).astype(dtype)


def value_and_gradient(op, name, wide_WF, d_hidden_F):
    hidden_F, vjp = jax.vjp(lambda wide_WF: op(wide_WF, name), wide_WF)
    return hidden_F, *vjp(d_hidden_F)


def test_every_activation_has_a_formula():
    assert FORMULAS.keys() == set(Activation.__args__)


# A few roundings of 2^-53 and of 2^-24, but XLA may compute tanh in float32 by a fraction that is off by 5e-6.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-15), ("float32", 1e-5)])
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_equal_the_formula(name, dtype, tolerance):
    with jax.enable_x64(True):
        inputs = [jnp.asarray(a) for a in arguments(name, dtype)]
        results = jax.tree.map(np.asarray, value_and_gradient(activate, name, *inputs))
        truth = jax.tree.map(np.asarray, value_and_gradient(formula, name, *(a.astype(jnp.float64) for a in inputs)))
    for got, want in zip(results, truth, strict=True):
        assert got.dtype == dtype
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < tolerance


def test_float16_has_finite_gradients_wherever_the_result_is_finite():
    """The square in the derivative of gelu_tanh is beyond float16 from 148 on."""
    wide = jnp.float16([[[-300.0, -160, -20, 20, 160, 300]]])
    got, d_got = value_and_gradient(activate, "gelu_tanh", wide, jnp.ones((1, 6), jnp.float16))
    np.testing.assert_array_equal(got, [[0, 0, 0, 20, 160, 300]])
    np.testing.assert_array_equal(d_got, [[[0, 0, 0, 1, 1, 1]]])


@pytest.mark.parametrize("name", FORMULAS)
def test_backward_pass_keeps_the_products_alone(name):
    wide, _ = arguments(name, np.float32)
    kept = lambda op: jax.eval_shape(lambda wide: jax.vjp(lambda wide: op(wide, name), wide)[1], wide)
    assert [leaf.shape for leaf in jax.tree.leaves(kept(activate))] == [wide.shape]
    assert sum(leaf.size for leaf in jax.tree.leaves(kept(formula))) >= 2 * wide.size  # what autodiff keeps


@pytest.mark.parametrize("name", OF_KERNEL)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_gradients_of_batches_and_of_a_bias_on_every_mesh(name, by_kernel, mesh, monkeypatch):
    """The kernel needs a Hopper GPU: here something with the same results stands for it."""
    given_rows = []

    def unweighted_backward(wide_RWF, d_hidden_RF, *, function, with_sums):
        given_rows.append((wide_RWF.shape, function))
        d_wide_RWF = value_and_gradient(formula, name, wide_RWF, d_hidden_RF)[1]
        return d_wide_RWF, d_wide_RWF.sum(0) if with_sums else None

    if by_kernel:
        monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
        monkeypatch.setattr(kernel, "problem", lambda *_: "")
        monkeypatch.setattr(kernel, "unweighted_backward", unweighted_backward)
    parts = 2 if name in GATED else 1
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16, parts, 4), (parts, 4), (8, 16, 4))]

    def run(op, wide, bias, d_hidden):
        hidden, vjp = jax.vjp(op, wide, bias)
        return hidden, *vjp(d_hidden)

    def with_bias(wide, bias):
        return activate(wide + jax.lax.stop_gradient(bias), name, bias)

    results = jax.jit(lambda *given: run(with_bias, *given))(*given)
    wanted = run(lambda wide, bias: formula(wide + bias, name), *given)
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)  # float32
    tensor = mesh.shape["tensor"]
    rows = 8 * 16 * tensor * mesh.shape["pipeline"] // mesh.size
    assert given_rows == [((rows, parts, 4 // tensor), OF_KERNEL[name])] * by_kernel
