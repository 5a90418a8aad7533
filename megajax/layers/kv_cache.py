"""Keys and values of the tokens seen so far: contiguous, allocated once for a whole generation.

Dimensions: B rows, T new tokens, S slots in the cache, N heads, K key-value heads, H head dim.
An attention layer calls `attend(q, k, v, ...) -> (out, cache)`, whatever the kind of cache; only latent attention asks
first whether it `is_empty`, because it then computes in another form. Generation starts with one
EmptyCache per layer; the prefill turns it into a LayerCache, and each decoding step writes to it. Slot s of a row holds
token s of that row, so the causal mask alone hides the slots beyond a row's length: the padding of a short prompt, then
zeros.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.current_mesh import axis_size, manual
from megajax.parallel.context import AXIS, attention
from megajax.sharding import activation_spec, constrain

_AXES = ("batch", None, "kv_heads", None)  # not split over `context`: a new token may attend to any slot


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class LayerCache:
    keys: jax.Array
    """[B, S, K, H] in the compute dtype, after the rotary embedding."""
    values: jax.Array | None
    """[B, S, K, H] in the compute dtype; None: the keys are the values too (latent attention)."""
    places: jax.Array | None = None
    """int32 [B, T]: slots of the next T tokens, distinct within a row; S and above: not stored. Set by `at`."""

    is_empty = False

    def at(self, places_BT: jax.Array) -> "LayerCache":
        """The same cache, with the slots of the next tokens set."""
        return dataclasses.replace(self, places=places_BT)

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array | None, **options
    ) -> tuple[jax.Array, "LayerCache"]:
        """-> (attention of the new tokens to all tokens of their row [B, T, N, H], the updated cache).

        v: None if the keys are the values too. options: keyword arguments of parallel/context.py's `attention`.
        """
        keys = _write(self.keys, k_BTKH, self.places)
        values = None if v_BTKH is None else _write(self.values, v_BTKH, self.places)
        places_BS = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2])
        indices = (self.places, places_BS)
        out_BTNH = attention(q_BTNH, keys, keys if values is None else values, indices=indices, **options)
        return out_BTNH, LayerCache(keys, values)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyCache:
    """A cache of S = `length` slots before the first token."""

    length: int

    is_empty = True

    def at(self, places_BT: jax.Array) -> "EmptyCache":
        """The prompt and its padding take the first slots; nothing attends to the padding."""
        return self

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, stored: tuple | None = None, **options
    ) -> tuple[jax.Array, "LayerCache"]:
        """Stores the whole prompt, T <= S. Attention runs over the prompt alone, as in training. Only where `context`
        splits the prompt does it need indices, because the prompt is not in the token order of training.

        stored: the (keys, values or None) to store if they are not k and v: those that later tokens attend to.
        """
        pad_width = ((0, 0), (0, self.length - k_BTKH.shape[1]), (0, 0), (0, 0))
        new = (k_BTKH, v_BTKH) if stored is None else stored
        keys, values = jax.tree.map(lambda a: constrain(jnp.pad(a, pad_width), *_AXES), new)
        places_BT = jnp.broadcast_to(jnp.arange(k_BTKH.shape[1], dtype=jnp.int32), k_BTKH.shape[:2])
        indices = (places_BT, places_BT) if axis_size(AXIS) > 1 else None
        return attention(q_BTNH, k_BTKH, v_BTKH, indices=indices, **options), LayerCache(keys, values)


def _write(cache_BSKH: jax.Array, new_BTKH: jax.Array, places_BT: jax.Array) -> jax.Array:
    """Updates in place if the cache is donated; every device writes its own rows and heads."""
    spec = activation_spec(cache_BSKH.shape, _AXES)

    @jax.vmap
    def write(row_SKH, new_TKH, places_T):
        return row_SKH.at[places_T].set(new_TKH, mode="drop", unique_indices=True)

    return manual(write, (spec, spec, P(spec[0], None)), spec)(cache_BSKH, new_BTKH, places_BT)
