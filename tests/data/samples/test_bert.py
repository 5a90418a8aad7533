"""BERT samples: which sentences make a sample, what A and B are, and what is masked."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.samples.bert import BertDataset, BertFormat
from megajax.data.samples.masking import Masking, choose_spans

CLS, SEP, MASK, PAD, FIRST = 0, 1, 2, 3, 4
PLACES = 10_000  # token p of document d is FIRST + d * PLACES + p
VOCAB = FIRST + 40 * PLACES


class Documents:
    """Sentence source in memory; documents: sentence lengths of each."""

    prefix, dtype = "documents", np.dtype(np.int64)

    def __init__(self, documents):
        self.document_indices = np.cumsum([0, *map(len, documents)])
        self.lengths = np.array([length for document in documents for length in document], np.int32)
        self.texts = [
            FIRST + d * PLACES + np.arange(end - length, end)
            for d, document in enumerate(documents)
            for length, end in zip(document, np.cumsum(document), strict=True)
        ]

    def __len__(self):
        return len(self.lengths)

    def read(self, sequence, offset=0, length=None):
        return self.texts[sequence][offset : None if length is None else offset + length]


def bert(
    documents, num_samples=None, sequence_length=32, seed=0, cache_dir=None, document_range=None, masking=None, **form
):
    source = Documents(documents) if isinstance(documents, list) else documents
    form = {"vocab_size": VOCAB, **form}
    return BertDataset(
        source,
        document_range or (0, len(source.document_indices) - 1),
        num_samples,
        sequence_length,
        seed,
        sample_format=BertFormat(CLS, SEP, MASK, PAD, masking=masking or Masking(), **form),
        cache_dir=cache_dir,
    )


def original(sample):
    """The text before masking, without padding."""
    text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["tokens"])
    return text[sample["segment_ids"] == 1]


def segments(sample):
    """(A, B) of the text before masking; B is empty in a sample of one segment."""
    text = original(sample)
    ends = np.flatnonzero(text == SEP)
    assert text[0] == CLS and len(text) == ends[-1] + 1
    return text[1 : ends[0]], text[ends[0] + 1 : ends[-1]]


def some_documents(seed=0, num_documents=30, low=2, high=12, longest=12):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, longest + 1, rng.integers(low, high)).tolist() for _ in range(num_documents)]


DOCUMENTS = st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=12)


def _sequential_runs(documents, max_tokens, min_sentences):
    """The rule as one walks it: sentence after sentence, document after document. [(document, first, end), ...]"""
    runs = []
    for d, document in enumerate(documents):
        sentences = [s for s, length in enumerate(document) if length]
        current, size = [], 0
        for number, s in enumerate(sentences if len(sentences) >= min_sentences else []):
            current.append(s)
            size += document[s]
            remaining = len(sentences) - number - 1
            if remaining == 0 or (size >= max_tokens and len(current) >= min_sentences and remaining >= min_sentences):
                runs.append((d, current[0], current[-1] + 1))
                current, size = [], 0
    return runs


@settings(max_examples=80, deadline=None)
@given(documents=DOCUMENTS, min_sentences=st.sampled_from([1, 2]), sequence_length=st.integers(35, 60))
def test_runs_are_those_of_a_sequential_walk(documents, min_sentences, sequence_length):
    want = _sequential_runs(documents, sequence_length - 1 - min_sentences, min_sentences)
    options = {"next_sentence": "sop" if min_sentences == 2 else "none", "short_sequence_probability": 0.0}
    if not want:
        with pytest.raises(ValueError, match="data.split"):
            bert(documents, None, sequence_length, **options)
        return
    dataset = bert(documents, None, sequence_length, **options)
    starts = dataset.indexed.document_indices
    rows = sorted((starts[d] + first, 0, starts[d] + end - 1, documents[d][end - 1]) for d, first, end in want)
    assert sorted(map(tuple, dataset.rows.tolist())) == rows


@settings(max_examples=60, deadline=None)
@given(
    documents=DOCUMENTS,
    kind=st.sampled_from(["sop", "none"]),
    sequence_length=st.integers(5, 60),
    num_samples=st.none() | st.integers(1, 60),
    short=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_every_sentence_is_in_exactly_one_sample_of_an_epoch(
    documents, kind, sequence_length, num_samples, short, seed
):
    smallest = 2 if kind == "sop" else 1
    usable = [d for d, document in enumerate(documents) if sum(map(bool, document)) >= smallest]
    if not usable:
        return
    options = {"next_sentence": kind, "short_sequence_probability": short}
    dataset = bert(documents, num_samples, sequence_length, seed, **options)
    want = np.concatenate([FIRST + d * PLACES + np.arange(sum(documents[d])) for d in usable])
    assert dataset.tokens_per_epoch == len(want)
    assert dataset.documents.tolist() == usable
    assert len(dataset) >= (num_samples or 1)
    texts = [np.concatenate(dataset.sentences(i)) for i in range(len(dataset))]
    for text in texts:  # of one document, in order
        assert (np.diff(text) == 1).all() and len(set((text - FIRST) // PLACES)) == 1
    while texts:  # epoch after epoch
        seen = []
        while sum(map(len, seen)) < len(want):
            seen.append(texts.pop(0))
        assert np.array_equal(np.sort(np.concatenate(seen)), want)


def test_epochs_have_other_orders_and_short_samples_other_bounds():
    documents = some_documents()
    for short, same_runs in ((0.0, True), (0.5, False)):
        one = bert(documents, next_sentence="sop", short_sequence_probability=short)
        two = bert(documents, len(one) + 1, next_sentence="sop", short_sequence_probability=short)
        first, second = two.rows[: len(one)], two.rows[len(one) :]
        assert np.array_equal(first, one.rows)
        assert not np.array_equal(first, second[: len(one)])
        assert (sorted(first.tolist()) == sorted(second.tolist())) == same_runs


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_next_sentence_label_says_the_truth(kind):
    documents = some_documents()
    dataset = bert(documents, 3000, next_sentence=kind)
    labels = []
    for i in range(len(dataset)):
        sample = dataset[i]
        a, b = (part - FIRST for part in segments(sample))
        assert len(set(a // PLACES)) == len(set(b // PLACES)) == 1
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
        label = int(sample["next_sentence"])
        if kind == "nsp":
            assert label == (a[0] // PLACES != b[0] // PLACES)
        else:
            assert label == (b[0] < a[0])
        if not (kind == "nsp" and label):
            # halves of one run: one begins after a sentence of the other, up to what was trimmed
            run = np.concatenate(dataset.sentences(i)) - FIRST
            assert np.isin(np.concatenate([a, b]), run).all()
            if len(run) <= 29:
                assert len(a) + len(b) == len(run)
                ends = np.cumsum(documents[a[0] // PLACES])
                assert max(a[0], b[0]) % PLACES in ends
        labels.append(label)
    # 5 standard deviations
    assert abs(np.mean(labels) - 0.5) < 2.5 / np.sqrt(len(labels))


def test_random_second_segment_comes_from_every_other_document_of_the_split():
    documents = [[9] * 3, [5], *some_documents(num_documents=6), [9] * 3]
    dataset = bert(documents, 2000, document_range=(1, 8), next_sentence="nsp")
    pairs = {tuple(int(part[0] - FIRST) // PLACES for part in segments(dataset[i])) for i in range(len(dataset))}
    # document 1 has one sentence; 0 and 8 are of other splits
    assert pairs == {(a, b) for a in range(2, 8) for b in range(2, 8)}


def test_random_second_segment_is_as_long_as_the_one_it_replaces_or_ends_its_document():
    dataset = bert([[5] * 10] * 8, 400, sequence_length=64, next_sentence="nsp", short_sequence_probability=0.0)
    full = 0
    for sample in (dataset[i] for i in range(400)):
        a, b = segments(sample)
        ends_document = (b[-1] - FIRST) % PLACES == 49
        assert len(a) + len(b) == 50 or (len(a) + len(b) < 50 and ends_document)
        full += bool(sample["next_sentence"]) and not ends_document and len(b) > 5
    assert full > 20


def test_arrays_of_a_sample_and_trimming_of_the_longer_segment():
    # sentences, then the lengths of A and B, the shorter first
    cases = (
        ("sop", [40, 3], [3, 26]),
        ("sop", [40, 40], [14, 15]),
        ("sop", [4, 3], [3, 4]),
        ("none", [25, 25], [0, 30]),
        ("none", [7], [0, 7]),
    )
    for kind, sizes, kept in cases:
        sample = bert([sizes], next_sentence=kind, short_sequence_probability=0.0)[0]
        shapes = {key: (value.dtype.name, value.shape) for key, value in sample.items()}
        names = ("tokens", "labels", "positions", "segment_ids", "token_types")
        want = {name: ("int32", (32,)) for name in names} | {"loss_mask": ("float32", (32,))}
        assert shapes == want | ({"next_sentence": ("int32", ())} if kind == "sop" else {})
        text, (a, b) = original(sample), segments(sample)
        assert sorted((len(a), len(b))) == kept
        assert np.array_equal(sample["positions"], np.arange(32))
        assert np.array_equal(sample["segment_ids"], np.arange(32) < len(text))
        second = (np.arange(32) >= len(a) + 2) & (np.arange(32) < len(text))
        assert np.array_equal(sample["token_types"], second)
        assert (sample["tokens"][len(text) :] == PAD).all()
        assert not sample["labels"][sample["loss_mask"] == 0].any()


def test_trimming_takes_from_both_ends():
    dataset = bert([[200]] * 40, sequence_length=22, next_sentence="none", short_sequence_probability=0.0)
    assert len(dataset) == 40 * 10  # one sequence a document is cut into samples and none of it is lost
    dataset = bert([[50, 50]] * 40, sequence_length=23, next_sentence="sop", short_sequence_probability=0.0)
    fronts = [int(segments(dataset[i])[0][0] - FIRST) % PLACES % 50 for i in range(len(dataset))]
    assert 10 < np.mean(fronts) < 30 and len(set(fronts)) > 5  # 40 tokens too many, binomial


def test_masking_follows_the_shares_of_the_paper():
    vocab = 200
    rng = np.random.default_rng(1)
    source = Documents(some_documents(num_documents=60, low=10, high=30))
    source.texts = [rng.integers(FIRST, vocab, len(text)) for text in source.texts]
    masking = Masking(max_ngram=10)
    dataset = bert(source, None, 128, vocab_size=vocab, masking=masking, next_sentence="sop")
    masked = real = 0
    outcomes = []
    for sample in (dataset[i] for i in range(len(dataset))):
        chosen = sample["loss_mask"] == 1
        tokens, labels = sample["tokens"][chosen], sample["labels"][chosen]
        assert not np.isin(labels, (CLS, SEP, MASK, PAD)).any() and not np.isin(tokens, (CLS, SEP, PAD)).any()
        assert not (chosen & (sample["segment_ids"] == 0)).any()
        text = int(sample["segment_ids"].sum()) - 3
        # as Devlin et al. round; at least one
        assert 1 <= chosen.sum() <= max(1, round(0.15 * text))
        masked, real = masked + chosen.sum(), real + text
        outcomes.append(np.select([tokens == MASK, tokens == labels], [0, 1], 2))
    assert 0.14 < masked / real < 0.16
    outcomes = np.concatenate(outcomes)
    # a random id is the original one in 1 of 196 cases; 5 standard deviations
    for share, want in zip(np.bincount(outcomes) / len(outcomes), (0.8, 0.1005, 0.0995), strict=True):
        assert abs(share - want) < 5 * np.sqrt(want * (1 - want) / len(outcomes))


def test_span_lengths_have_the_distribution_asked_for():
    masking = Masking(0.01, 5)
    weights = 1 / np.arange(1, 6)
    sizes = []
    for seed in range(40):
        spans = choose_spans(np.zeros(20_000, bool), masking, np.random.default_rng(seed), apart=False)
        sizes += np.diff(spans[:-1]).ravel().tolist()  # the last one is cut to what is left
    shares = np.bincount(sizes, minlength=6)[1:] / len(sizes)
    # some 3,000 spans: 4 standard deviations of 0.009, and few overlap in a sparse text
    assert np.abs(shares - weights / weights.sum()).max() < 0.035


def test_special_tokens_of_the_text_are_not_masked():
    source = Documents([[20, 20]])
    source.texts = [np.where(np.arange(20) % 2, SEP, text) for text in source.texts]
    dataset = bert(source, None, 64, masking=Masking(probability=0.9), next_sentence="sop")
    sample = dataset[0]
    assert not np.isin(sample["labels"][sample["loss_mask"] == 1], (CLS, SEP)).any()
    assert sample["loss_mask"].sum() == round(0.9 * 20)


def test_a_sample_depends_on_neither_access_order_nor_pickling(tmp_path):
    documents = some_documents()
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        source = Documents(documents)
        for begin, end in zip(source.document_indices, source.document_indices[1:], strict=False):
            writer.add_document(source.texts[begin:end])
    stored = bert(IndexedDataset(tmp_path / "x"), 100, seed=5, cache_dir=str(tmp_path / "cache"))
    blob = pickle.dumps(stored)
    assert len(blob) < 2000
    in_memory, again = bert(documents, 100, seed=5), pickle.loads(blob)
    for i in (99, 0, 50, 99):
        for key, value in in_memory[i].items():
            assert np.array_equal(value, stored[i][key]) and np.array_equal(value, again[i][key]), key
    # the same text is masked otherwise with another seed, and in another epoch
    one_run = [bert([[9, 9]], 2, seed=seed, next_sentence="none") for seed in range(4)]
    assert len({sample["loss_mask"].tobytes() for dataset in one_run for sample in (dataset[0], dataset[1])}) > 4
    with pytest.raises(IndexError, match="of a dataset of"):
        stored[len(stored)]


def test_documents_of_one_sequence_serve_one_segment_only():
    dataset = bert([[50], [7]], next_sentence="none", short_sequence_probability=0.0)
    assert sorted(len(segments(dataset[i])[0]) for i in range(len(dataset))) == [7, 20, 30]
    for kind in ("nsp", "sop"):
        with pytest.raises(ValueError, match="2 non-empty sentences.*split_sentences.*next_sentence=none"):
            bert([[50], [7]], next_sentence=kind)
    with pytest.raises(ValueError, match="next_sentence=nsp needs another"):
        bert([[5, 5], [7]], next_sentence="nsp")


def test_wrong_data_and_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="sequence_length=4.*at least 5"):
        bert(some_documents(), sequence_length=4)
    with pytest.raises(ValueError, match="data.tokenizer's 500 ids"):
        bert(some_documents(), vocab_size=500)[0]
    source = Documents(some_documents())
    source.dtype = np.dtype(np.float32)
    with pytest.raises(ValueError, match="float32, not token ids"):
        bert(source)
