"""The cache of sample indices: never stale, never half written."""

import os

import numpy as np
import pytest

from megajax.data.gpt import GptDataset, SampleFormat
from megajax.data.index_cache import load_or_build
from megajax.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def test_second_call_maps_the_files_and_does_not_build(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return {"x": np.arange(5)}

    for _ in range(3):
        arrays = load_or_build(str(tmp_path), "kind", {"seed": 1}, build)
        assert np.array_equal(arrays["x"], np.arange(5))
    assert isinstance(arrays["x"], np.memmap)
    assert len(calls) == 1
    load_or_build(str(tmp_path), "kind", {"seed": 2}, build)
    assert len(calls) == 2


def test_an_interrupted_write_is_not_taken_for_an_entry(tmp_path, monkeypatch):
    replace = os.replace

    def fail(source, target):
        if target.endswith(".json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        load_or_build(str(tmp_path), "kind", {}, lambda: {"x": np.zeros(3)})
    monkeypatch.undo()
    assert load_or_build(str(tmp_path), "kind", {}, lambda: {"x": np.ones(3)})["x"].tolist() == [1, 1, 1]


def test_rewritten_data_under_the_same_name_gets_new_indices(tmp_path):
    def samples(lengths):
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
            for length in lengths:
                writer.add_document([np.arange(length)])
        source = IndexedDataset(tmp_path / "x")
        form, cache = SampleFormat(), str(tmp_path / "cache")
        return GptDataset(source, (0, len(source)), None, 8, 0, sample_format=form, cache_dir=cache)

    first, second = samples([10, 20, 30, 40]), samples([40, 30, 20, 10])
    assert not np.array_equal(first.sample_index, second.sample_index)
