"""Blends: equal to Megatron's, and to the sequential rule for any weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data import blend
from megajax.data.blend import BlendedDataset, Phase, blending_indices, normalize_weights, plan_phases
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.samples.gpt import GptDataset, GptFormat, split_ranges

ORACLES = Path(__file__).parents[1] / "oracles"


@pytest.mark.parametrize("split", ["train", "valid"])
def test_blend_equals_megatrons(split, tmp_path):
    oracle = np.load(ORACLES / "gpt_dataset.npz")
    meta = json.loads(str(oracle["meta"]))
    number = ["train", "valid"].index(split)
    weights = normalize_weights(meta["weights"])
    phases, built = plan_phases([weights], [meta["sizes"][number]])
    parts = []
    for name, size in zip(meta["names"], built, strict=True):
        source = IndexedDataset(ORACLES / "data" / name)
        part = split_ranges((90, 10, 0), len(source))[number]
        form = GptFormat(pad_id=meta["pad"])
        parts.append(GptDataset(source, part, size, 64, meta["seed"], sample_format=form, cache_dir=None))
    for cache_dir in (None, str(tmp_path), str(tmp_path)):
        dataset = BlendedDataset(parts, phases, cache_dir)
        assert len(dataset) == oracle[f"blend/{split}/len"]
        for name in ("dataset_index", "dataset_sample_index"):
            want = oracle[f"blend/{split}/{name}"]
            assert getattr(dataset, name).dtype == want.dtype
            assert np.array_equal(getattr(dataset, name), want)
        want = oracle[f"blend/{split}/tokens"]
        assert np.array_equal(np.stack([dataset[i]["tokens"] for i in range(len(want))]), want)


def _sequential(weights, size):
    counts, picks, samples = [0] * len(weights), [], []
    for i in range(size):
        behind = [weight * float(max(i, 1)) - count for weight, count in zip(weights, counts, strict=True)]
        pick = behind.index(max(behind))
        picks.append(pick)
        samples.append(counts[pick])
        counts[pick] += 1
    return picks, samples


@settings(max_examples=40, deadline=None)
@given(
    weights=st.one_of(
        st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=12),
        st.lists(st.integers(1, 4).map(float), min_size=1, max_size=12),  # ties, decided by rounding errors
    ),
    size=st.integers(1, 3000),
    chunk=st.integers(1, 200),
)
def test_parallel_blending_equals_the_sequential_rule(weights, size, chunk):
    weights = normalize_weights(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "MIN_CHUNK", chunk)
        picks, samples = blending_indices(weights, size)
    want_picks, want_samples = _sequential(weights, size)
    assert picks.tolist() == want_picks
    assert samples.tolist() == want_samples


def test_every_prefix_is_within_two_samples_of_the_weights():
    weights = np.array(normalize_weights([0.7, 0.29, 0.01]))
    picks, _ = blending_indices(weights, 20_000)
    counts = np.cumsum(picks[:, None] == np.arange(3), axis=0)
    # 1.1 here; a pick looks at the sample before it, so a dataset can be off by more than one
    assert np.abs(counts - weights * np.arange(1, 20_001)[:, None]).max() < 2


def test_a_dataset_shorter_than_its_share_is_refused():
    with pytest.raises(ValueError, match="dataset 1 .* has 3 samples, the blend needs 5"):
        BlendedDataset([range(10), range(3)], [Phase((0.5, 0.5), 10)], None)


def test_weights_that_are_not_positive_are_refused():
    for weights in ([1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="data.paths"):
            normalize_weights(weights)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), st.integers(1, 200)),
        min_size=1,
        max_size=4,
    )
)
def test_phases_follow_their_weights_and_go_on_where_the_last_one_stopped(given_phases):
    weights = [(np.array(one) / sum(one)).tolist() for one, _ in given_phases]
    phases, built = plan_phases(weights, [size for _, size in given_phases])
    dataset = BlendedDataset([range(size) for size in built], phases, None)
    begin = 0
    for phase, (_, size) in zip(phases, given_phases, strict=True):
        picks = dataset.dataset_index[begin : begin + phase.size]
        counts = np.bincount(picks, minlength=3)
        assert phase.size == size or phase is phases[-1]
        assert np.abs(counts - phase.size * np.array(phase.weights)).max() < 2
        assert not counts[np.array(phase.weights) == 0].any()
        begin += phase.size
    for number in range(3):  # each dataset's own samples in their order, none twice
        mine = dataset.dataset_sample_index[dataset.dataset_index == number]
        assert mine.tolist() == list(range(len(mine)))
