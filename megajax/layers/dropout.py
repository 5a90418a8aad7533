"""Dropout (Srivastava et al. 2014) whose mask depends on the key and the global shape only, never on the layout."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the others by 1 / (1 - rate); no key or rate 0: x itself."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)
