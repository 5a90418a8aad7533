"""Keys and values of the tokens seen so far: contiguous, allocated once for a whole generation.

Dimensions: B rows, T new tokens, S places in the cache, N heads, K key-value heads, H head dim.
An attention layer makes one call, `attend(q, k, v, ...) -> (out, cache)`, whatever the cache is. A generation starts
with an EmptyCache a layer; the prefill turns it into a LayerCache, which each decoding step fills further. Place s of a
row holds its token number s, so causality alone hides what lies beyond a row's length: the padding of a short prompt,
then zeros.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.current_mesh import axis_size, manual
from megajax.parallel.context import AXIS, attention
from megajax.sharding import activation_spec, constrain

_AXES = ("batch", None, "kv_heads", None)  # every device of `context` has all places: a new token may see any of them


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class LayerCache:
    keys: jax.Array
    """[B, S, K, H] in the compute dtype, after the rotary embedding."""
    values: jax.Array
    """[B, S, K, H] in the compute dtype."""
    places: jax.Array | None = None
    """int32 [B, T]: where each row's next T tokens go, all different in a row; S and beyond: nowhere. Set by `at`."""

    def at(self, places_BT: jax.Array) -> "LayerCache":
        """The same cache, ready for tokens at these places."""
        return dataclasses.replace(self, places=places_BT)

    def attend(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **how) -> tuple[jax.Array, "LayerCache"]:
        """-> (attention of the new tokens to all tokens of their row [B, T, N, H], the cache with the new ones).

        how: as parallel/context.py's attention takes it.
        """
        keys = _write(self.keys, k_BTKH, self.places)
        values = _write(self.values, v_BTKH, self.places)
        places_BS = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2])
        return attention(q_BTNH, keys, values, indices=(self.places, places_BS), **how), LayerCache(keys, values)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyCache:
    """A cache of S = `length` places before the first token."""

    length: int

    def at(self, places_BT: jax.Array) -> "EmptyCache":
        """The prompt goes to the first places, its padding too: nothing sees it."""
        return self

    def attend(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **how) -> tuple[jax.Array, "LayerCache"]:
        """Stores the whole prompt, T <= S. Attention runs over the prompt alone, as in training: no indices, but where
        `context` splits it, as the prompt does not lie in the order of training."""
        room = ((0, 0), (0, self.length - k_BTKH.shape[1]), (0, 0), (0, 0))
        keys, values = (constrain(jnp.pad(new, room), *_AXES) for new in (k_BTKH, v_BTKH))
        places_BT = jnp.broadcast_to(jnp.arange(k_BTKH.shape[1], dtype=jnp.int32), k_BTKH.shape[:2])
        indices = (places_BT, places_BT) if axis_size(AXIS) > 1 else None
        return attention(q_BTNH, k_BTKH, v_BTKH, indices=indices, **how), LayerCache(keys, values)


def _write(cache_BSKH: jax.Array, new_BTKH: jax.Array, places_BT: jax.Array) -> jax.Array:
    """In place if the cache is donated; every device writes its own rows and heads."""
    spec = activation_spec(cache_BSKH.shape, _AXES)

    @jax.vmap
    def write(row_SKH, new_TKH, places_T):
        return row_SKH.at[places_T].set(new_TKH, mode="drop", unique_indices=True)

    return manual(write, (spec, spec, P(spec[0], None)), spec)(cache_BSKH, new_BTKH, places_BT)
