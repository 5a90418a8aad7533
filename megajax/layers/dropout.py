"""Dropout (Srivastava et al. 2014) whose mask depends on the key and the global shape only, never on the layout."""

import jax
import jax.numpy as jnp
import numpy as np


def dropout(x: jax.Array, rate: float, key: jax.Array | None, order_T: np.ndarray | None = None) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the others by 1 / (1 - rate); no key or rate 0: x itself.

    order: place in the sequence of each index of dim 1, where it is not 0, 1, 2, ... (parallel/context.py).
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    if order_T is not None and not np.array_equal(order_T, np.arange(len(order_T))):
        keep = keep[:, order_T]
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)
