"""What attention reads of a cache, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.attention import kv_cache
from megajax.layers.attention.kv_cache import EmptyCache, PagedCache, Places, PoolSizes
from megajax.ops import attention_mask as masks

B, S, K, H = 4, 8, 2, 3


def new_tokens(seed, length):
    keys = jax.random.normal(jax.random.key(seed), (B, length, K, H))
    return keys, -keys


@pytest.mark.parametrize("sizes", [dict(), dict(data=2, tensor=2), dict(fsdp=2, context=2)])
def test_each_row_is_written_at_its_own_place(make_test_mesh, sizes, monkeypatch):
    prompt, one, two = new_tokens(0, 4), new_tokens(1, 1), new_tokens(2, 2)
    first = np.array([[4], [1], [3], [2]], np.int32)
    later = np.array([[5, 6], [2, 3], [7, 8], [3, 4]], np.int32)  # place 8 is outside

    def attention(q, k, v, *, indices, **how):
        """Stands for the attention of the layer: what it would read."""
        return k, v, indices

    def run():
        (k, v, indices), cache = EmptyCache(S).attend(None, *prompt)
        assert (indices is None) == ("context" not in sizes) and k is prompt[0] and v is prompt[1]
        _, cache = cache.at(jnp.asarray(first)).attend(None, *one)
        return cache.at(jnp.asarray(later)).attend(None, *two)[0]

    monkeypatch.setattr(kv_cache, "attention", attention)
    with jax.set_mesh(make_test_mesh(**sizes)):
        keys, values, (q_index, k_index) = jax.jit(run)()
    expected = np.zeros((B, S + 1, K, H), np.float32)
    expected[:, :4] = prompt[0]
    for row in range(B):
        expected[row, first[row]] = one[0][row]
        expected[row, later[row]] = two[0][row]
    np.testing.assert_array_equal(keys, expected[:, :S])
    np.testing.assert_array_equal(values, -expected[:, :S])
    np.testing.assert_array_equal(q_index, later)
    np.testing.assert_array_equal(k_index, np.tile(np.arange(S), (B, 1)))


def test_float8_pages_saturate():
    """A cast would give NaN beyond 448, which keys of some models reach."""
    cache = PagedCache.zeros(PoolSizes(1, 8, 1, jnp.dtype(jnp.float8_e4m3fn)), 1, 4)
    one = jnp.zeros((1, 1), jnp.int32)
    k_BTKH = jnp.array([-1e4, 500, 448, 1]).reshape(1, 1, 1, 4)
    options = dict(mask=masks.CAUSAL, method="ring", deterministic=False, scale=1.0)
    out, cache = cache.at(Places(one, one, one, one, None, one + 1)).attend(k_BTKH, k_BTKH, k_BTKH, **options)
    assert cache.pages[0, 0, 0, 0].tolist() == out.ravel().tolist() == [-448, 448, 448, 1]
