"""Arrays that were packed are unpacked as they were, and begin at multiples of 256 bytes."""

import jax
import numpy as np

from megajax.inference.device.packing import ALIGNED, num_words, packed, unpacked


def test_trees_come_back_with_their_dtypes():
    rng = np.random.default_rng(0)
    tree = {
        "integers": rng.integers(-5, 5, (3, 30)).astype(np.int32),
        "floats": (rng.standard_normal(5).astype(np.float32), np.array([np.nan, -np.inf], np.float32)),
        "bools": np.array([True, False, True]),
        "words": np.array([2**32 - 1], np.uint32),
        "none": None,
        "empty": np.zeros(0, np.uint32),
        "scalars": (np.int32(-7), np.bool_(True)),
    }
    words = packed(tree)
    assert words.size == num_words(tree) and words.size % ALIGNED == 0
    found = jax.jit(lambda words: unpacked(words, tree))(words)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
