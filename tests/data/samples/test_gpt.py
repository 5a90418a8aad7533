"""GPT samples: order equal to Megatron's, and what stands in a sample."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.samples.gpt import GptDataset, GptFormat, build_indices, split_ranges

ORACLES = Path(__file__).parents[2] / "oracles"


class Documents:
    """Token source in memory: document d is d * 1000 + 0, 1, 2, ..."""

    prefix, dtype = "documents", np.dtype(np.int64)

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)

    def __len__(self):
        return len(self.lengths)

    def read(self, sequence, offset=0, length=None):
        end = int(self.lengths[sequence]) if length is None else offset + length
        return sequence * 1000 + np.arange(offset, end)


def gpt(source, num_samples=None, sequence_length=8, seed=0, cache_dir=None, sequence_range=None, **form):
    sequence_range = sequence_range or (0, len(source))
    form = GptFormat(**form)
    return GptDataset(
        source, sequence_range, num_samples, sequence_length, seed, sample_format=form, cache_dir=cache_dir
    )


@pytest.mark.parametrize("split", ["train", "valid"])
def test_order_and_samples_equal_megatrons(split, tmp_path):
    oracle = np.load(ORACLES / "gpt_dataset.npz")
    meta = json.loads(str(oracle["meta"]))
    number = ["train", "valid"].index(split)
    source = IndexedDataset(ORACLES / "data" / "a")
    ranges = split_ranges([float(share) for share in meta["split"].split(",")], len(source))
    for cache_dir in (None, str(tmp_path), str(tmp_path)):  # built in memory, built and cached, loaded
        dataset = gpt(
            source,
            meta["sizes"][number],
            meta["sequence_length"],
            meta["seed"],
            cache_dir,
            ranges[number],
            pad_id=meta["pad"],
        )
        for name in ("document_index", "sample_index", "shuffle_index"):
            want = oracle[f"single/{split}/{name}"]
            assert getattr(dataset, name).dtype == want.dtype
            assert np.array_equal(getattr(dataset, name), want), name
        assert len(dataset) == oracle[f"single/{split}/len"]
        for name in ("tokens", "labels"):
            want = oracle[f"single/{split}/{name}"]
            assert np.array_equal(np.stack([dataset[i][name] for i in range(len(want))]), want)


def test_pad_takes_no_loss_and_becomes_zero():
    oracle = np.load(ORACLES / "gpt_dataset.npz")
    source = IndexedDataset(ORACLES / "data" / "a")
    plain, padded = (gpt(source, 100, 64, 1234, sequence_range=(0, 33), pad_id=pad) for pad in (None, 999))
    found = 0
    for i in range(len(oracle["single/train/tokens"])):
        was_pad = plain[i]["labels"] == 999
        found += was_pad.sum()
        assert np.array_equal(padded[i]["loss_mask"], 1 - was_pad.astype(np.float32))
        assert not padded[i]["labels"][was_pad].any()
        assert 999 not in padded[i]["tokens"]
        assert plain[i]["loss_mask"].all()
    assert found


def _sequential_sample_index(lengths, sequence_length):
    """The rule as Megatron's helpers.cpp walks it: one sample after the other, one document after the other."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range((sum(lengths) - 1) // sequence_length):
        missing = sequence_length + 1
        while lengths[position] - offset < missing:
            missing -= lengths[position] - offset
            position, offset = position + 1, 0
        offset += missing - 1
        rows.append([position, offset])
    return rows


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1),
    sequence_length=st.integers(1, 40),
    num_samples=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_the_tokens_of_whole_epochs_once_each(lengths, sequence_length, num_samples, seed):
    dataset = gpt(Documents(lengths), num_samples, sequence_length, seed)
    assert len(dataset) >= num_samples
    order = dataset.document_index
    num_epochs = len(order) // len(lengths)
    assert np.array_equal(np.bincount(order, minlength=len(lengths)), np.full(len(lengths), num_epochs))
    stream = np.concatenate([dataset.indexed.read(d) for d in order])
    assert len(dataset) == (len(stream) - 1) // sequence_length
    assert np.array_equal(np.sort(dataset.shuffle_index), np.arange(len(dataset)))
    in_order = [lengths[document] for document in order]
    assert dataset.sample_index.tolist() == _sequential_sample_index(in_order, sequence_length)
    for i in range(len(dataset)):
        start = int(dataset.shuffle_index[i]) * sequence_length
        assert np.array_equal(dataset[i]["tokens"], stream[start : start + sequence_length])
        assert np.array_equal(dataset[i]["labels"], stream[start + 1 : start + sequence_length + 1])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 24),
    seed=st.integers(0, 1000),
)
def test_segments_are_documents_and_positions_restart_with_them(lengths, seed):
    source = Documents(lengths)
    plain, reset = gpt(source, 5, 24, seed), gpt(source, 5, 24, seed, reset_positions=True)
    together = gpt(source, 5, 24, seed, cross_document_attention=True, reset_positions=True)
    for i in range(5):
        sample = plain[i]
        document, offset = np.divmod(sample["tokens"], 1000)
        # a new document begins where the number changes, or the same document follows itself (another epoch)
        new = np.r_[True, (np.diff(document) != 0) | (np.diff(offset) != 1)]
        assert np.array_equal(sample["segment_ids"], np.cumsum(new))
        assert np.array_equal(sample["positions"], np.arange(24))
        starts = np.maximum.accumulate(np.where(new, np.arange(24), 0))
        assert np.array_equal(reset[i]["positions"], np.arange(24) - starts)
        assert np.array_equal(together[i]["segment_ids"], np.ones(24))
        assert np.array_equal(together[i]["positions"], reset[i]["positions"])
        assert {key: (value.dtype.name, value.shape) for key, value in sample.items()} == {
            "tokens": ("int32", (24,)),
            "labels": ("int32", (24,)),
            "loss_mask": ("float32", (24,)),
            "positions": ("int32", (24,)),
            "segment_ids": ("int32", (24,)),
        }


def test_segments_follow_the_index_and_not_an_end_token():
    source = Documents([30, 30])
    source.read = lambda sequence, offset=0, length=None: np.zeros(
        int(source.lengths[sequence]) - offset if length is None else length, np.int64
    )
    dataset = gpt(source, None, 59, eod_id=0)
    assert dataset[0]["segment_ids"].tolist() == [1] * 30 + [2] * 29


def test_document_end_takes_no_loss_when_masked():
    dataset = gpt(Documents([10] * 20), 5, 24, eod_id=1009, mask_document_end=True)
    for i in range(5):
        assert np.array_equal(dataset[i]["loss_mask"] == 0, dataset[i]["labels"] == 1009)
    with pytest.raises(ValueError, match="task.mask_document_end"):
        gpt(Documents([10] * 20), 5, 24, mask_document_end=True)


def test_a_barely_used_last_epoch_is_shuffled_apart():
    lengths = np.full(100, 10, np.int32)  # 111 samples of 9 in one epoch
    apart = build_indices(lengths, 0, 120, 9, 3)
    together = build_indices(lengths, 0, 220, 9, 3)
    for arrays, separate in ((apart, True), (together, False)):
        assert len(arrays["document_index"]) == 200
        assert (sorted(arrays["document_index"][:100]) == list(range(100))) == separate
        assert (arrays["shuffle_index"][:111].max() < 111) == separate


def test_samples_survive_pickling_and_the_pickle_is_small(tmp_path):
    source = IndexedDataset(ORACLES / "data" / "a")
    dataset = gpt(source, 5000, 16, cache_dir=str(tmp_path))
    blob = pickle.dumps(dataset)
    assert len(blob) < 2000
    assert np.array_equal(pickle.loads(blob)[17]["tokens"], dataset[17]["tokens"])


@pytest.mark.fault
def test_token_ids_beyond_the_tokenizer_are_refused_by_name():
    with pytest.raises(ValueError, match="data.tokenizer.*500"):
        gpt(IndexedDataset(ORACLES / "data" / "a"), 5, 64, vocab_size=500)[0]


def test_a_split_too_small_for_a_sample_is_refused():
    with pytest.raises(ValueError, match="data.split.*too few"):
        gpt(Documents([3, 2]), None, 8)
    with pytest.raises(ValueError, match="data.split.*too few"):
        gpt(Documents([0, 0]), 4, 8)


def test_sample_beyond_the_end_is_refused():
    with pytest.raises(IndexError, match="sample 3"):
        gpt(Documents([25]), None, 8)[3]


def test_split_ranges_round_as_megatron():
    assert split_ranges((90, 10, 0), 37) == [(0, 33), (33, 37), None]
    assert split_ranges((969, 30, 1), 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert split_ranges((1, 1, 0), 5) == [(0, 2), (2, 5), None]  # round(2.5) is 2


def _build(prefix, cache_dir, queue):
    queue.put(gpt(IndexedDataset(prefix), 2000, 16, cache_dir=cache_dir)[7]["tokens"])


def test_processes_that_build_at_once_agree_and_leave_no_temporary_files(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for length in range(1, 400):
            writer.add_document([np.arange(length)])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = str(tmp_path / "x"), str(tmp_path / "cache"), queue
    processes = [context.Process(target=_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    samples = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert all(np.array_equal(sample, samples[0]) for sample in samples)
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".lock", ".npy", ".npy", ".npy"]


def test_an_unwritable_cache_is_reported_and_survived(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    dataset = gpt(Documents([100]), None, 8, cache_dir=str(tmp_path / "file"))
    assert len(dataset) == 12
    assert "data.cache_dir" in caplog.text
