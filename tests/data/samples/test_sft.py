"""Fine-tuning samples: whole conversations, each once an epoch, with a loss on answers only."""

import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.samples.sft import PAD, SftDataset, SftFormat


class Conversations:
    """In memory: token p of conversation d is d * 1000 + p. lengths: of the sequences of each conversation."""

    prefix, dtype = "conversations", np.dtype(np.uint16)

    def __init__(self, conversations):
        self.conversations = conversations
        self.lengths = np.array([length for one in conversations for length in one], np.int32)
        self.document_indices = np.cumsum([0, *map(len, conversations)])
        self._tokens = []
        for number, one in enumerate(conversations):
            ends = np.cumsum([0, *one])
            self._tokens += [number * 1000 + np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def read(self, sequence, offset=0, length=None):
        return self._tokens[sequence].astype(np.uint16)


def sft(source, num_samples=None, sequence_length=16, seed=0, cache_dir=None, document_range=None, **form):
    document_range = document_range or (0, len(source.document_indices) - 1)
    form = SftFormat(**form)
    return SftDataset(
        source, document_range, num_samples, sequence_length, seed, sample_format=form, cache_dir=cache_dir
    )


def answered(conversation, length):
    """Positions below `length` of tokens that belong to answers, but for position 0."""
    ends = np.cumsum([0, *conversation])
    spans = [range(a, min(b, length)) for a, b in zip(ends[1::2], ends[2::2], strict=False)]
    return {position for span in spans for position in span} - {0}


conversations = st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    conversations, st.integers(1, 24), st.integers(0, 30), st.integers(0, 1000), st.sampled_from(["skip", "truncate"])
)
def test_every_fitting_conversation_is_whole_in_one_sample_an_epoch(source, length, num_samples, seed, on_misfit):
    source = Conversations(source)
    sizes = [sum(one) for one in source.conversations]
    want = {
        number: min(sizes[number], length + 1)
        for number, one in enumerate(source.conversations)
        if answered(one, length + 1) and (on_misfit == "truncate" or sizes[number] <= length + 1)
    }
    if not want:
        with pytest.raises(ValueError, match="none is a conversation"):
            sft(source, num_samples, length, seed, on_misfit=on_misfit)
        return
    dataset = sft(source, num_samples, length, seed, on_misfit=on_misfit)
    assert len(dataset) >= num_samples
    assert dataset.tokens_per_epoch == sum(want.values())
    assert dataset.num_conversations + dataset.num_unanswered == len(sizes) - dataset.num_long * (on_misfit == "skip")
    seen = []
    for i in range(len(dataset)):
        sample = dataset[i]
        assert {name: (value.dtype.name, value.shape) for name, value in sample.items()} == {
            "tokens": ("int32", (length,)),
            "labels": ("int32", (length,)),
            "loss_mask": ("float32", (length,)),
            "positions": ("int32", (length,)),
            "segment_ids": ("int32", (length,)),
        }
        assert sample["loss_mask"].any()
        seen += check_sample(sample, source, want)
    epochs = len(seen) // len(want)
    assert sorted(seen) == sorted([*want] * epochs)
    assert all(sorted(seen[e * len(want) :][: len(want)]) == sorted(want) for e in range(epochs))


def check_sample(sample, source, want):
    """The conversations of a sample, after checking every array against them."""
    found, length = [], len(sample["tokens"])
    segments = sample["segment_ids"]
    padding = segments == 0
    assert not np.diff(padding.astype(int)).min(initial=0) < 0  # at the end
    for name, value in (("tokens", PAD), ("labels", PAD), ("loss_mask", 0), ("positions", 0)):
        assert (sample[name][padding] == value).all()
    for segment in range(1, segments.max() + 1):
        (where,) = np.nonzero(segments == segment)
        number, size = divmod(int(sample["tokens"][where[0]]), 1000)[0], len(where)
        assert np.array_equal(sample["tokens"][where], number * 1000 + np.arange(size))
        assert np.array_equal(sample["positions"][where], np.arange(size))
        labels = sample["labels"][where].tolist()
        full = where[-1] == length - 1 and want[number] == size + 1  # its last token is only a label
        assert full or want[number] == size
        assert labels == [number * 1000 + p for p in range(1, size + full)] + [PAD] * (not full)
        answers = answered(source.conversations[number], want[number])
        assert sample["loss_mask"][where].tolist() == [float(p + 1 in answers) for p in range(size)]
        found.append(number)
    return found


def test_a_longer_run_begins_as_a_shorter_one_and_epochs_differ():
    source = Conversations([[3, 2, 1, 1]] * 40)
    one, three = sft(source), sft(source, 50)
    count = len(one)
    assert len(three) > 2 * count
    assert all(np.array_equal(one[i]["tokens"], three[i]["tokens"]) for i in range(count))
    assert any(not np.array_equal(three[i]["tokens"], three[i + count]["tokens"]) for i in range(count))
    assert any(not np.array_equal(one[i]["tokens"], sft(source, seed=1)[i]["tokens"]) for i in range(count))


def test_misfits_are_refused_with_number_and_length():
    source = Conversations([[2, 2], [2, 2], [9, 9], [2, 20]])
    with pytest.raises(ValueError, match=r"document 2 of conversations has 18 tokens.* 17 \(2 of 3.*task.on_misfit"):
        sft(source, document_range=(1, 4))
    for silent in ([4], [4, 0, 1], [0, 1], []):
        source = Conversations([[2, 2], silent])
        with pytest.raises(ValueError, match=f"document 1 .* {sum(silent)} tokens, and no answer to learn .1 of 2"):
            sft(source)


def test_what_is_left_out_or_cut_is_counted_and_logged(caplog, tmp_path):
    # too long; too long and the answer is beyond the cut; no answer; its only answer token has nothing before it
    source = Conversations([[1, 2], [1, 1], [9, 9], [30, 2], [4], [0, 1]])
    want = {"skip": (2, 5, 2, 2), "truncate": (3, 22, 1, 3)}
    for on_misfit, counts in [*want.items()] * 2:  # built, loaded
        caplog.clear()
        with caplog.at_level(logging.WARNING, "megajax"):
            dataset = sft(source, on_misfit=on_misfit, cache_dir=str(tmp_path))
        got = dataset.num_conversations, dataset.tokens_per_epoch, dataset.num_long, dataset.num_unanswered
        assert got == counts
        assert len(caplog.records) == 1
        assert f"{counts[2]} are longer than 17" in caplog.text and f"{counts[3]} have no answer" in caplog.text


def test_reads_its_range_of_a_file_and_survives_pickling(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for number in range(50):
            writer.add_document(
                [np.full(3, number), np.full(2, 100 + number), np.full(1, number), np.full(4, 200 + number)]
            )
    source = IndexedDataset(tmp_path / "x")
    dataset = sft(source, None, 32, document_range=(10, 40), cache_dir=str(tmp_path / "cache"), vocab_size=60_001)
    learnt = np.concatenate([dataset[i]["labels"][dataset[i]["loss_mask"] > 0] for i in range(len(dataset))])
    want = np.concatenate([np.r_[np.full(2, 100 + n), np.full(4, 200 + n)] for n in range(10, 40)])
    assert np.array_equal(np.sort(learnt), np.sort(want))
    blob = pickle.dumps(dataset)
    assert len(blob) < 2000
    assert np.array_equal(pickle.loads(blob)[3]["tokens"], dataset[3]["tokens"])
    with pytest.raises(IndexError, match=f"sample {len(dataset)}"):
        dataset[len(dataset)]


def test_ids_beyond_the_tokenizer_are_refused_by_name():
    source = Conversations([[2, 2]] * 3)
    with pytest.raises(ValueError, match="data.tokenizer's 900 ids"):
        sft(source, vocab_size=900)[0]
