"""Packing of conversations: bins are filled, by tokens and by patches, and never beyond what they hold."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.samples.packing import PackedMedia, pack
from megajax.images.layout import ImageLayouts
from megajax.images.rules import ImageRule
from megajax.media.rows import MediaInputs, assigned

INPUTS = MediaInputs(ImageLayouts(ImageRule(resize="pixels", patch_size=2, merge=2)), 99, blocks=2, block_size=64)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=300))
def test_bins_hold_no_more_than_their_capacity_and_no_two_could_be_one(sizes):
    bins = pack(np.array(sizes), 50)
    filled = np.sort(np.bincount(bins, sizes))
    assert filled[0] > 0 and filled[-1] <= 50
    assert len(filled) == 1 or filled[0] + filled[1] > 50


def test_packing_fills_samples():
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(400), 1, 20_000).astype(np.int64), 2, 4097)
    bins = pack(sizes, 4097)
    assert sizes.sum() > 0.995 * 4097 * (bins.max() + 1)


views = st.lists(st.lists(st.integers(1, 16).map(lambda n: 4 * n), max_size=3), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(views, st.integers(1, 4), st.randoms())
def test_packing_fills_samples_up_to_their_tokens_and_patches(items, blocks, random):
    items = [item for item in items if assigned(item, blocks, 64) is not None] or [[]]
    sizes = np.array([random.randint(1, 20) for _ in items])
    inputs = dataclasses.replace(INPUTS, blocks=blocks)
    bins = pack(sizes, 20, PackedMedia([(item,) for item in items], (inputs,)))
    for number in range(bins.max() + 1):
        mine = np.flatnonzero(bins == number)
        together = [size for item in mine for size in items[item]]
        assert len(mine) and sizes[mine].sum() <= 20
        chosen = assigned(together, blocks, 64)
        assert chosen is not None
        assert max(np.bincount(chosen, together, blocks), default=0) <= 64


@pytest.mark.parametrize(("tokens", "mean"), [(4096, 1500), (900, 100), (1200, 600)])
def test_little_of_the_scarcer_dimension_is_padding(tokens, mean):
    """Patches are scarce, tokens are, both are."""
    rng = np.random.default_rng(0)
    inputs = dataclasses.replace(INPUTS, block_size=4096)
    views = [(4 * rng.integers(mean // 8, mean // 2, count)).tolist() for count in rng.integers(0, 3, 2000)]
    sizes = np.array([sum(of_item) // 4 for of_item in views]) + rng.integers(10, 300, 2000)
    count = pack(sizes, tokens, PackedMedia([(of_item,) for of_item in views], (inputs,))).max() + 1
    fewest = max(sizes.sum() / tokens, sum(map(sum, views)) / (2 * 4096))
    assert fewest <= count < 1.1 * fewest
