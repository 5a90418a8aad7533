"""Dropout (Srivastava et al. 2014). The mask depends on key, sample and position, not on sharding or microbatches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.mesh import compat


class DropoutKey(NamedTuple):
    """Key for the rows of a batch, which are consecutive samples of a step."""

    key: jax.Array
    """Key of the step; after `fold`, of a layer."""
    first_sample: jax.Array
    """int32: index within the step of the sample in row 0."""

    def fold(self, number) -> "DropoutKey":
        return self._replace(key=jax.random.fold_in(self.key, number))

    def split(self, count: int) -> list["DropoutKey"]:
        return [self._replace(key=key) for key in jax.random.split(self.key, count)]


def dropout(x_BTD: jax.Array, rate: float, key: DropoutKey | None, order_T: np.ndarray | None) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the others by 1 / (1 - rate); without a key or with rate 0
    returns x.

    order_T: position in the sequence of each index of dim 1 (parallel/context.py); not read without a key.
    """
    if key is None or rate == 0.0:
        return x_BTD
    batch, length, width = x_BTD.shape
    samples_B = (key.first_sample + jnp.arange(batch, dtype=jnp.int32)).astype(jnp.uint32)
    tokens_BT = samples_B[:, None] * np.uint32(length) + jnp.asarray(order_T, jnp.uint32)  # below 2^32 in a step
    channels_D = jnp.arange(width, dtype=jnp.uint32)
    keep = compat.counter_bits(key.key, tokens_BT[..., None], channels_D) >= np.uint32(rate * 2**32)
    return jnp.where(keep, x_BTD / (1.0 - rate), 0.0).astype(x_BTD.dtype)
