"""Arrays are joined as by a concatenation, and split again, with gradients that are the opposite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.joining import MAX_CHOSEN, join, split


# Chosen by selects: places of one each before the last axis; more or others are concatenated.
@pytest.mark.parametrize(
    ("axis", "sizes"),
    [(1, (1, 1)), (2, (1, 1, 1)), (0, (1,)), (1, (4, 1, 1)), (3, (1, 1)), (1, (2, 2)), (1, (1,) * (MAX_CHOSEN + 1))],
)
def test_join_is_the_concatenation_and_split_its_inverse(axis, sizes):
    rng = np.random.default_rng(0)
    shape = [2, 3, 4, 5]
    parts = [rng.standard_normal((*shape[:axis], size, *shape[axis + 1 :])).astype(np.float32) for size in sizes]
    joined, of_join = jax.vjp(lambda parts: join(parts, axis), parts)
    np.testing.assert_array_equal(joined, np.concatenate(parts, axis))
    again, of_split = jax.vjp(lambda joined: split(joined, axis, sizes), joined)
    for one, other in zip(again, parts, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(of_join(joined)[0], parts, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(of_split(tuple(map(jnp.asarray, parts)))[0], joined)


def test_stages_of_a_pipeline_have_no_selects(make_test_mesh):
    """XLA would exchange parts of what is selected by a permutation, in which devices of other stages have no part."""

    def kinds(**sizes):
        with jax.set_mesh(make_test_mesh(**sizes)):
            return str(jax.make_jaxpr(lambda *parts: join(parts, 1))(*[jnp.ones((2, 1, 4))] * 2))

    assert "concatenate" not in kinds(tensor=2) and "select" in kinds(tensor=2)
    assert "concatenate" in kinds(pipeline=2) and "select" not in kinds(pipeline=2)
