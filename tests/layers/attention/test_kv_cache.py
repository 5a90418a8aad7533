"""What attention reads of a cache."""

import jax.numpy as jnp

from megajax.layers.attention.kv_cache import PagedCache, Places, PoolSizes
from megajax.ops import attention_mask as masks


def test_float8_pages_saturate():
    """A cast would give NaN beyond 448, which keys of some models reach."""
    cache = PagedCache.zeros(PoolSizes(1, 8, 1, jnp.dtype(jnp.float8_e4m3fn)), 1, 4)
    one = jnp.zeros((1, 1), jnp.int32)
    k_BTKH = jnp.array([-1e4, 500, 448, 1]).reshape(1, 1, 1, 4)
    options = dict(mask=masks.CAUSAL, method="ring", deterministic=False, scale=1.0)
    out, cache = cache.at(Places(one, one, one, one, None, one + 1)).attend(k_BTKH, k_BTKH, k_BTKH, **options)
    assert cache.pages[0, 0, 0, 0].tolist() == out.ravel().tolist() == [-448, 448, 448, 1]
