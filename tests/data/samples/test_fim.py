"""Fill in the middle: nothing is lost but the end, and everything else in a sample stays true."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.samples.fim import FillInTheMiddle, rearrange
from megajax.data.samples.gpt import GptDataset, GptFormat

PREFIX, MIDDLE, SUFFIX, EOD = 90_001, 90_002, 90_003, 90_004


def fim(rate=1.0, spm_rate=0.5, **fields):
    return FillInTheMiddle(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, **fields)


def restore(document):
    """(tokens in the order they had, "plain", "psm" or "spm") of one document without its end token."""
    document = list(document)
    if PREFIX not in document:
        return document, "plain"
    assert document[0] == PREFIX and document.count(SUFFIX) == document.count(MIDDLE) == 1
    middle, suffix = document.index(MIDDLE), document.index(SUFFIX)
    if suffix == 1:  # an empty prefix makes the two the same, up to their names
        return document[middle + 1 :] + document[2:middle], "spm"
    return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle], "psm"


class Documents:
    """Token source in memory: document d is d * 1000 + 0, 1, 2, ... and ends in EOD."""

    prefix, dtype = "documents", np.dtype(np.int64)

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)

    def __len__(self):
        return len(self.lengths)

    def read(self, sequence, offset=0, length=None):
        total = int(self.lengths[sequence])
        tokens = sequence * 1000 + np.arange(total)
        tokens[-1:] = EOD
        return tokens[offset : total if length is None else offset + length]


def gpt(source, form, sequence_length=24, num_samples=6, seed=3):
    return GptDataset(
        source,
        (0, len(source)),
        num_samples,
        sequence_length,
        seed,
        sample_format=GptFormat(eod_id=EOD, fill_in_the_middle=form, reset_positions=True),
        cache_dir=None,
    )


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
    key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**40)),
)
def test_three_parts_in_order_are_the_document(lengths, spm_rate, key):
    documents = [Documents(lengths).read(d) for d in range(len(lengths))]
    out = rearrange(documents, fim(spm_rate=spm_rate), EOD, key)
    for document, changed in zip(documents, out, strict=True):
        assert changed[-1] == EOD
        body, kind = restore(changed[:-1])
        assert body == document[:-1].tolist()
        assert kind != "psm" or spm_rate < 1
        # a document of its end token alone has nothing to fill
        assert len(changed) - len(document) == (3 if len(document) > 1 else 0)


def test_shares_are_the_rates():
    documents = [np.arange(50)] * 4000
    kinds = [restore(document)[1] for document in rearrange(documents, fim(0.3, 0.25), None, (1, 2))]
    changed = len(kinds) - kinds.count("plain")
    # five standard deviations, and 1/51 of the PSM documents have an empty prefix and look like SPM
    assert abs(changed - 1200) < 5 * np.sqrt(4000 * 0.3 * 0.7)
    assert abs(kinds.count("spm") / changed - (0.25 + 0.75 / 51)) < 5 * np.sqrt(0.25 * 0.75 / 1200)


def test_every_cut_is_as_likely_as_any_other():
    counts = np.zeros((4, 4))
    for document in rearrange([np.arange(3)] * 8000, fim(1.0, 0.0), None, (1, 2)):
        document = document.tolist()
        prefix, middle = document.index(SUFFIX) - 1, len(document) - document.index(MIDDLE) - 1
        counts[prefix, prefix + middle] += 1
    # two independent cuts from 0, 1, 2, 3, sorted: twice as many ways to be different as to be equal
    ways = np.triu(np.full((4, 4), 2)) - np.eye(4)
    assert np.abs(counts - 500 * ways).max() < 5 * np.sqrt(1000)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 1),
    sequence_length=st.integers(1, 40),
)
def test_rate_zero_is_the_plain_sample(lengths, sequence_length):
    source = Documents(lengths)
    plain, zero = (gpt(source, form, sequence_length) for form in (None, fim(0.0)))
    for i in range(len(plain)):
        for name, value in plain[i].items():
            assert np.array_equal(value, zero[i][name]) and value.dtype == zero[i][name].dtype


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 1),
    sequence_length=st.integers(1, 40),
    rate=st.sampled_from([0.3, 1.0]),
)
def test_samples_keep_their_order_shapes_and_bounds(lengths, sequence_length, rate):
    source = Documents(lengths)
    plain, changed = gpt(source, None, sequence_length), gpt(source, fim(rate), sequence_length)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(plain, name), getattr(changed, name))
    for i in range(len(plain)):
        before, after = plain[i], changed[i]
        for name, value in before.items():
            assert (value.dtype, value.shape) == (after[name].dtype, after[name].shape)
        assert np.array_equal(after["tokens"][1:], after["labels"][:-1])
        segments = after["segment_ids"]
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}
        for segment in range(1, segments[-1] + 1):
            where = segments == segment
            assert np.array_equal(after["positions"][where], np.arange(where.sum()))
            if segment < segments[-1]:  # the last one may be cut
                tokens = after["tokens"][where].tolist()
                want = before["tokens"][before["segment_ids"] == segment].tolist()
                end = [token for token in tokens[-1:] if token == EOD]
                assert restore(tokens[: len(tokens) - len(end)])[0] + end == want


def test_samples_do_not_depend_on_the_order_of_reading_and_differ():
    dataset = gpt(Documents([2000]), fim(), 24, 40)
    forward = [dataset[i]["tokens"] for i in range(40)]
    backward = [dataset[i]["tokens"] for i in reversed(range(40))][::-1]
    assert np.array_equal(forward, backward)
    # where the suffix begins, of samples that all hold one part of the same document
    assert len({int(np.argmax(tokens == SUFFIX)) for tokens in forward}) > 5


def test_marks_that_are_the_same_are_refused():
    with pytest.raises(ValueError, match="three different"):
        gpt(Documents([50]), FillInTheMiddle(0.5, 0.5, 7, 7, 8))
