"""The kernels for gated activations on Hopper against the formula in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "count", "width"), [(3000, 3000, 768), (2048, 1500, 14336), (100, 0, 1024)])
def test_kernel_matches_the_formula(rows, count, width, function):
    keys = jax.random.split(jax.random.key(0), 3)
    wide = jax.random.normal(keys[0], (rows, 2, width), jnp.bfloat16)
    weights = jax.random.uniform(keys[1], (rows,))
    d_hidden = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)

    def formula(wide, weights):
        hidden = FUNCTIONS[function](wide[:, 0]) * wide[:, 1] * weights[:, None]
        return jnp.where(jnp.arange(rows)[:, None] < count, hidden, 0)

    exact, vjp = jax.vjp(formula, wide.astype(jnp.float32), weights)
    hidden = kernel.forward(wide, weights, jnp.int32(count), function=function)
    gradients = kernel.backward(wide, weights, jnp.int32(count), d_hidden, function=function)
    for got, want in zip((hidden, *gradients), (exact, *vjp(d_hidden.astype(jnp.float32))), strict=True):
        check(got, want)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "parts", "width"), [(3000, 2, 768), (2048, 1, 14336), (1100, 2, 27648)])
def test_gradient_without_weights_matches_the_formula(rows, parts, width, function):
    keys = jax.random.split(jax.random.key(0), 2)
    wide = jax.random.normal(keys[0], (rows, parts, width), jnp.bfloat16)
    d_hidden = jax.random.normal(keys[1], (rows, width), jnp.bfloat16)

    def formula(wide):
        activated = FUNCTIONS[function](wide[:, 0])
        return activated * wide[:, 1] if parts == 2 else activated

    _, vjp = jax.vjp(formula, wide.astype(jnp.float32))
    (want,) = vjp(d_hidden.astype(jnp.float32))
    for with_sums in (False, True):
        d_wide, sums = kernel.unweighted_backward(wide, d_hidden, function=function, with_sums=with_sums)
        check(d_wide, want)
    check(sums, want.sum(0))


def check(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    # A value rounded to 8 bits is off by 0.9 * 2^-9 in the mean square.
    assert np.linalg.norm(got - want) <= 1.1 * 2**-9 * np.linalg.norm(want)
