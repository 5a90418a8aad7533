"""The experts of a few tokens on Hopper against the formula in float32, by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.few_tokens import MAX_BY_CHOICE, few_tokens, problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

E, K = 32, 4


@pytest.mark.parametrize(("D", "F"), [(2048, 768), (512, 1536)])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 32, 64])
def test_kernel_matches_the_formula(num_tokens, D, F):
    keys = jax.random.split(jax.random.key(num_tokens), 6)
    x = jax.random.normal(keys[0], (num_tokens, D), jnp.bfloat16)
    gate, up = (jax.random.normal(key, (E, D, F), jnp.bfloat16) * D**-0.5 for key in keys[1:3])
    down = jax.random.normal(keys[3], (E, F, D), jnp.bfloat16)
    weights, experts = jax.lax.top_k(jax.random.uniform(keys[4], (num_tokens, E)), K)
    is_slower = MAX_BY_CHOICE < num_tokens < E // K  # it computes them all the same
    assert bool(problem(experts, [gate, up, down], x.dtype, "swiglu")) == is_slower
    found = np.asarray(
        jax.jit(few_tokens, static_argnums=5)(x, experts, weights, [gate, up], down, "swiglu"), np.float32
    )
    x, gate, up, down, weights = (np.asarray(a, np.float32) for a in (x, gate, up, down, weights))
    wanted = np.zeros((num_tokens, D), np.float32)
    for token, (own, of_own) in enumerate(zip(np.asarray(experts), weights, strict=True)):
        for expert, weight in zip(own, of_own, strict=True):
            g, u = x[token] @ gate[expert], x[token] @ up[expert]
            wanted[token] += weight * (g / (1 + np.exp(-g)) * u) @ down[expert]
    # Two roundings to 8 bits (the hidden state, the result).
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 2**-8
