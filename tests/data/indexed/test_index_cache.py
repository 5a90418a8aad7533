"""The cache of sample indices: never stale, never half written."""

import logging
import os
import threading
import time

import numpy as np
import pytest

from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.indexed.index_cache import load_or_build
from megajax.data.samples.gpt import GptDataset, GptFormat


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


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _swap(first, second):
    """The contents of two files, as when a copy of a folder went wrong."""
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


DAMAGE = {
    "a bit flipped": lambda arrays, records: _flip(arrays[0]),
    "cut": lambda arrays, records: arrays[0].write_bytes(arrays[0].read_bytes()[:-8]),
    "emptied": lambda arrays, records: arrays[0].write_bytes(b""),
    "removed": lambda arrays, records: arrays[0].unlink(),
    "arrays swapped": lambda arrays, records: _swap(*arrays),
    "entries swapped": lambda arrays, records: (_swap(*arrays), _swap(*records)),
    "description emptied": lambda arrays, records: records[0].write_bytes(b""),
    "description of another type": lambda arrays, records: records[0].write_text('{"description": 3, "arrays": []}'),
    "not an object": lambda arrays, records: records[0].write_text("[]"),
}


@pytest.mark.fault
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_rebuilt_and_logged(tmp_path, damage, caplog):
    get = lambda seed: load_or_build(str(tmp_path), "kind", {"seed": seed}, lambda: {"x": np.arange(5) + seed})["x"]
    for seed in (1, 2):
        get(seed)
    records = sorted(tmp_path.glob("*.json"))
    damage([path.with_name(path.stem + "-x.npy") for path in records], records)
    for _ in range(2):
        for seed in (1, 2):
            assert get(seed).tolist() == list(range(seed, seed + 5))
    rebuilt = [record.getMessage() for record in caplog.records if "rebuilding" in record.getMessage()]
    assert 1 <= len(rebuilt) <= 2 and str(tmp_path) in rebuilt[0]


def test_rewritten_data_under_the_same_name_gets_new_indices(tmp_path):
    def samples(lengths):
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
            for length in lengths:
                writer.add_document([np.arange(length)])
        source = IndexedDataset(tmp_path / "x")
        form, cache = GptFormat(), str(tmp_path / "cache")
        return GptDataset(source, (0, len(source)), None, 8, 0, sample_format=form, cache_dir=cache)

    first, second = samples([10, 20, 30, 40]), samples([40, 30, 20, 10])
    assert not np.array_equal(first.sample_index, second.sample_index)


def test_another_process_waits_for_the_builder_and_logs_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, "megajax")
    building, results = threading.Event(), []

    def slow():
        building.set()
        while "waiting for another process" not in caplog.text:
            time.sleep(0.01)
        return {"x": np.arange(3)}

    def never():
        raise AssertionError("built twice")

    first = threading.Thread(target=lambda: results.append(load_or_build(str(tmp_path), "kind", {}, slow)["x"]))
    first.start()
    assert building.wait(120)
    second = load_or_build(str(tmp_path), "kind", {}, never)["x"]  # a lock of its own: as another process would
    first.join(10)
    assert second.tolist() == results[0].tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_written_keeps_the_arrays_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    found = load_or_build(str(tmp_path / "file" / "cache"), "kind", {}, lambda: {"x": np.arange(3)})
    assert found["x"].tolist() == [0, 1, 2] and "cannot be written" in caplog.text
