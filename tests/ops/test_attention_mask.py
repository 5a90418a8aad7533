"""Masks combine as sets of keys do, and what they say of themselves is what they show."""

import itertools

import numpy as np
import pytest

from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.ops.attention_mask import CAUSAL, FULL, first, window

T = 12
ATOMS = {"full": FULL, "causal": CAUSAL, "window": window(4), "first": first(3), "more": first(7), "wider": window(9)}
PREFIX = CAUSAL | first(3)
WITH_FIRST = CAUSAL & (window(4) | first(3))


def seen(mask):
    index = np.arange(T)
    return np.asarray(mask.visible(index[:, None] - index, index[None]))


def test_and_and_or_are_those_of_the_keys():
    for one, two, three in itertools.product(ATOMS.values(), repeat=3):
        np.testing.assert_array_equal(seen((one & two) | three), (seen(one) & seen(two)) | seen(three))
        np.testing.assert_array_equal(seen((one | two) & three), (seen(one) | seen(two)) & seen(three))


def test_equal_masks_are_equal_and_say_their_name():
    assert CAUSAL & window(None) == CAUSAL == CAUSAL & FULL == CAUSAL | (CAUSAL & window(3))
    assert hash(window(4) & CAUSAL) == hash(CAUSAL & window(4) & window(9)) and CAUSAL | FULL == FULL
    assert [str(mask) for mask in (FULL, CAUSAL, CAUSAL & window(4), PREFIX, WITH_FIRST)] == [
        "full", "causal", "causal and window 4", "causal or first 3", "causal and window 4 or causal and first 3",
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(4), CAUSAL & window(4), PREFIX, WITH_FIRST], ids=str)
def test_what_it_says_of_itself_is_what_it_shows(mask):
    keys = seen(mask)
    assert mask.mean_keys(T) == keys.sum() / T
    assert mask.is_causal == (not np.triu(keys, 1).any())
    assert mask.is_interval == (np.abs(np.diff(np.pad(keys, ((0, 0), (1, 1))), axis=1)).sum(1) <= 2).all()
    assert (mask.reach or T) == max(query - np.argmax(row) + 1 for query, row in enumerate(keys))
    index = np.arange(T)
    lower, upper = mask.lower(index), mask.upper(index)
    for number, row in enumerate(keys):
        assert lower is None or not row[: max(lower[number], 0)].any()
        assert upper is None or not row[upper[number] :].any()


def test_a_cache_takes_what_it_can_hold_and_refuses_the_rest():
    def config(mask):
        return AttentionConfig(embed_dim=8, num_heads=2, head_dim=4, init_std=0.1, out_init_std=0.1, mask=mask)

    sizes = PoolSizes(2, 8, 1, np.dtype(np.float32))
    for mask in (CAUSAL, CAUSAL & window(4)):
        config(mask).new_pages(sizes)
    with pytest.raises(ValueError, match="mask 'causal and window 4 or causal and first 3' cannot read pages"):
        config(WITH_FIRST).new_pages(sizes)
    for mask in (PREFIX, FULL):
        with pytest.raises(ValueError, match="cannot read pages.* use a causal mask"):
            config(mask).new_pages(sizes)
