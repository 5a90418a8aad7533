"""T5 samples: text and spans put together again, and what is cut out."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.samples.masking import Masking
from megajax.data.samples.t5 import T5Dataset, T5Format

PAD, EOS, BOS, SENTINELS = 0, 1, 2, tuple(range(99, 19, -1))
FIRST, PLACES = 100, 10_000  # token p of document d is FIRST + d * PLACES + p
VOCAB = FIRST + 100 * PLACES


def write(folder, documents):
    """Documents of the given sentence lengths as an indexed dataset."""
    with IndexedDatasetWriter(folder / "x", np.int32) as writer:
        for d, document in enumerate(documents):
            text = FIRST + d * PLACES + np.arange(sum(document))
            writer.add_document(np.split(text, np.cumsum(document)[:-1]))
    return IndexedDataset(folder / "x")


def t5(source, num_samples=None, sequence_length=32, seed=0, cache_dir=None, **form):
    form = {
        "bos_id": BOS,
        "eos_id": EOS,
        "pad_id": PAD,
        "sentinel_ids": SENTINELS,
        "vocab_size": VOCAB,
        "decoder_length": 16,
    } | form
    documents = (0, len(source.document_indices) - 1)
    form = T5Format(**form)
    return T5Dataset(source, documents, num_samples, sequence_length, seed, sample_format=form, cache_dir=cache_dir)


def spans(sample, sentinels=SENTINELS):
    """[span tokens, ...] as the labels tell them, after checking that they are written in order."""
    labels = sample["labels"][sample["loss_mask"] == 1]
    assert labels[-1] == EOS
    where = np.flatnonzero(np.isin(labels, sentinels))
    assert labels[where].tolist() == list(sentinels[: len(where)])
    assert len(where) == 0 or where[0] == 0
    return [part[1:] for part in np.split(labels[:-1], where[1:])] if len(where) else []


def put_together(sample, sentinels=SENTINELS):
    """The text: each sentinel of the encoder replaced by the span that the labels give for it."""
    text = sample["encoder_tokens"][sample["encoder_segment_ids"] == 1]
    parts = iter(spans(sample, sentinels))
    out = np.concatenate([next(parts) if token in sentinels else [token] for token in text])
    assert next(parts, None) is None
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """40 documents, some of one long sequence, some of sentences, one empty."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 30, rng.integers(2, 20)).tolist() for _ in range(30)]
    return write(tmp_path_factory.mktemp("t5"), [[], *documents, *([int(n)] for n in rng.integers(1, 400, 9))])


@settings(max_examples=40, deadline=None)
@given(
    sequence_length=st.integers(2, 80),
    decoder_length=st.integers(3, 60),
    num_sentinels=st.integers(1, 12),
    max_ngram=st.integers(1, 10),
    seed=st.integers(0, 2**32),
)
def test_encoder_and_labels_make_the_text(source, sequence_length, decoder_length, num_sentinels, max_ngram, seed):
    sentinels = SENTINELS[:num_sentinels]
    masking = Masking(0.3, max_ngram)
    dataset = t5(
        source,
        None,
        sequence_length,
        seed,
        sentinel_ids=sentinels,
        decoder_length=decoder_length,
        masking=masking,
    )
    for i in range(0, len(dataset), 13):
        sample = dataset[i]
        text, run = put_together(sample, sentinels), np.concatenate(dataset.sentences(i))
        # a window of the run: nothing lost but what does not fit
        assert len(text) == min(len(run), sequence_length)
        assert (np.diff(text) == 1).all() and np.isin(text, run).all()
        parts = spans(sample, sentinels)
        assert len(parts) <= num_sentinels
        assert all(len(part) <= max_ngram for part in parts)
        # the decoder reads what it has written
        real = int(sample["loss_mask"].sum())
        assert sample["tokens"][0] == BOS
        assert np.array_equal(sample["tokens"][1:real], sample["labels"][: real - 1])
        # at least one token between two spans
        encoder = np.isin(sample["encoder_tokens"], sentinels)
        assert not (encoder[1:] & encoder[:-1]).any()


def test_arrays_of_a_sample(source):
    sample = t5(source)[0]
    assert {key: (value.dtype.name, value.shape) for key, value in sample.items()} == {
        "encoder_tokens": ("int32", (32,)),
        "encoder_segment_ids": ("int32", (32,)),
        "encoder_positions": ("int32", (32,)),
        "tokens": ("int32", (16,)),
        "labels": ("int32", (16,)),
        "loss_mask": ("float32", (16,)),
        "positions": ("int32", (16,)),
        "segment_ids": ("int32", (16,)),
    }
    assert np.array_equal(sample["positions"], np.arange(16))
    assert np.array_equal(sample["encoder_positions"], np.arange(32))
    assert np.array_equal(sample["segment_ids"], sample["loss_mask"])
    for name, segments in (
        ("tokens", "segment_ids"),
        ("labels", "segment_ids"),
        ("encoder_tokens", "encoder_segment_ids"),
    ):
        assert np.array_equal(sample[name] == PAD, sample[segments] == 0)


def test_masked_share_and_mean_span(tmp_path):
    dataset = t5(write(tmp_path, [[512]] * 99), None, 512, decoder_length=128, masking=Masking(max_ngram=10))
    parts = [spans(dataset[i]) for i in range(len(dataset))]
    sizes = [len(part) for sample in parts for part in sample]
    # no text is too short to fill its 77 tokens
    assert [sum(map(len, sample)) for sample in parts] == [round(0.15 * 512)] * 99
    # 1 / n up to 10 has a mean of 3.4; long spans overlap others more often
    assert 2.8 < np.mean(sizes) < 3.4


@pytest.mark.parametrize("limits", [{"sentinel_ids": SENTINELS[:3]}, {"decoder_length": 12}])
def test_spans_end_where_sentinels_or_the_decoder_end(source, limits):
    dataset = t5(source, None, 200, **({"decoder_length": 128, "masking": Masking(0.5, 3)} | limits))
    counts = []
    for i in range(len(dataset)):
        sample = dataset[i]
        text = put_together(sample, limits.get("sentinel_ids", SENTINELS))
        assert len(text) == min(200, sum(map(len, dataset.sentences(i))))
        counts.append(len(spans(sample, limits.get("sentinel_ids", SENTINELS))))
    if "sentinel_ids" in limits:
        assert max(counts) == 3
    else:
        assert 3 <= max(counts) <= 5  # 11 tokens for spans of at least 2, sentinel included


@settings(max_examples=40, deadline=None)
@given(sequence_length=st.integers(2, 80), epochs=st.integers(1, 3), seed=st.integers(0))
def test_an_epoch_reads_every_token_once_before_trimming(source, sequence_length, epochs, seed):
    one = t5(source, None, sequence_length, seed)
    dataset = t5(source, (epochs - 1) * len(one) + 1, sequence_length, seed)
    want = np.concatenate([source.read(sequence) for sequence in range(len(source))])
    assert dataset.tokens_per_epoch == len(want)
    texts = np.concatenate([np.concatenate(dataset.sentences(i)) for i in range(len(dataset))])
    assert len(texts) % len(want) == 0
    for epoch in np.split(texts, len(texts) // len(want)):
        assert np.array_equal(np.sort(epoch), np.sort(want))


def test_documents_of_one_sequence_are_cut_and_lose_nothing(tmp_path):
    dataset = t5(write(tmp_path, [[100], [20], [64]]))
    texts = sorted(put_together(dataset[i]).tolist() for i in range(len(dataset)))
    assert [len(text) for text in texts] == [32, 32, 32, 4, 20, 32, 32]
    assert len(np.unique(np.concatenate(texts))) == 184


def test_special_tokens_of_the_text_are_not_cut_out_and_sentinels_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([np.array([500, EOS, 501, BOS, 502, PAD] * 4), np.array([503, EOS])])
        writer.add_document([np.array([500, SENTINELS[5]])])
    dataset = t5(IndexedDataset(tmp_path / "x"), masking=Masking(0.9, 3))
    seen = 0
    for i in range(len(dataset)):
        if dataset.rows[i, 0] == 2:
            with pytest.raises(ValueError, match=f"id {SENTINELS[5]}.*T5Format.sentinel_ids"):
                dataset[i]
        else:
            parts = spans(dataset[i])
            seen += len(parts)
            assert not np.isin(np.concatenate(parts), (PAD, EOS, BOS)).any()
    assert seen


def test_the_same_text_is_cut_otherwise_with_another_seed_and_in_another_epoch(tmp_path):
    source = write(tmp_path, [[30]])
    datasets = [t5(source, 2, seed=seed) for seed in range(4)]
    assert len({dataset[i]["labels"].tobytes() for dataset in datasets for i in (0, 1)}) > 4


def test_a_sample_depends_on_neither_access_order_nor_pickling(source, tmp_path):
    dataset, cached = t5(source, 100, seed=5), t5(source, 100, seed=5, cache_dir=str(tmp_path))
    blob = pickle.dumps(cached)
    assert len(blob) < 3000
    again = pickle.loads(blob)
    for i in (99, 0, 50, 99):
        for key, value in dataset[i].items():
            assert np.array_equal(value, cached[i][key]) and np.array_equal(value, again[i][key]), key


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eos_id": PAD}, "T5Format.eos_id=0"),
        ({"decoder_length": 2}, "decoder_length=2"),
        ({"sequence_length": 1}, "sequence_length=1"),
    ],
)
def test_wrong_formats_are_refused_by_name(source, options, message):
    with pytest.raises(ValueError, match=message):
        t5(source, **options)
    assert t5(source, bos_id=PAD)[0]["tokens"][0] == PAD  # T5's own choice
