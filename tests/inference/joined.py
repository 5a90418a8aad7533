"""The weights of an engine as a model has them."""

import jax
import jax.numpy as jnp

from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model


def arrays_of(weights: dict, config: DecoderConfig) -> dict:
    """Stacked, with queries, keys and values, which an engine stores side by side, apart."""
    attention = dict(weights["layers"]["dense"]["attention"])
    assert not jax.tree.leaves((attention["key"], attention["value"]))
    joined_LDKNH = jnp.stack([layer.weight for layer in attention["query"].arrays])
    heads = config.num_heads // config.kv_heads
    query, key, value = jnp.split(joined_LDKNH, (heads, heads + 1), 3)
    attention["query"] = query.reshape(*query.shape[:2], config.num_heads, -1)
    attention["key"] = key.squeeze(3)
    attention["value"] = value.squeeze(3)
    return Model.stacked(weights | {"layers": {"dense": weights["layers"]["dense"] | {"attention": attention}}})
