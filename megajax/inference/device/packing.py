"""The small arrays of a call as one, which the host sends in place of 17.

Numbers of 32 bits are themselves, a bool is a word. Each array begins at a multiple of 256 bytes: XLA passes parts of
an array to kernels where they are, and those of Mosaic ask for that.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ALIGNED = 64  # words


def packed(tree: Any) -> np.ndarray:
    """uint32: the NumPy arrays and scalars of a tree, one after the other."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    starts, size = _places(leaves)
    words = np.zeros(size, np.uint32)
    for start, leaf in zip(starts, leaves, strict=True):
        flat = leaf.ravel()
        words[start : start + flat.size] = flat if flat.dtype == np.bool_ else flat.view(np.uint32)
    return words


def num_words(like: Any) -> int:
    """Of a tree with these shapes."""
    return _places(jax.tree.leaves(like))[1]


def unpacked(words: jax.Array, like: Any) -> Any:
    """The tree that was packed. like: one with its shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    found = []
    for start, leaf in zip(_places(leaves)[0], leaves, strict=True):
        part = words[start : start + math.prod(leaf.shape)].reshape(leaf.shape)
        is_bool = leaf.dtype == jnp.bool_
        found.append(part != 0 if is_bool else jax.lax.bitcast_convert_type(part, leaf.dtype))
    return jax.tree.unflatten(structure, found)


def _places(leaves: list) -> tuple[list[int], int]:
    """-> (where each begins, the size of all)."""
    sizes = [-(-math.prod(leaf.shape) // ALIGNED) * ALIGNED for leaf in leaves]
    ends = list(itertools.accumulate(sizes))
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1]
