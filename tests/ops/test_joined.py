"""Arrays side by side and apart equal jnp.concatenate and jnp.split, and so do their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.joined import joined, separated


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((3, extent, 2)), jnp.float32) for extent in (2, 1, 4)]


@pytest.mark.parametrize("axis", [1, -2])
def test_joined_equals_concatenation(arrays, axis):
    np.testing.assert_array_equal(joined(arrays, axis), jnp.concatenate(arrays, axis))
    found, wanted = (
        jax.grad(lambda given, f=f: jnp.sum(jnp.sin(f(given, axis))))(arrays) for f in (joined, jnp.concatenate)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_separated_equals_a_split(arrays):
    def gradient(split):
        weighed = lambda whole: sum(n * jnp.sum(jnp.sin(part)) for n, part in enumerate(split(whole, (2, 3), 1), 1))
        return jax.grad(weighed)(jnp.concatenate(arrays, 1))

    np.testing.assert_array_equal(gradient(separated), gradient(jnp.split))


def test_one_array_stays_as_it_is(arrays):
    np.testing.assert_array_equal(joined(arrays[:1], 1), arrays[0])
