"""Bits per byte equal a computation by hand, from text and from tokens on disk; every token is scored exactly once."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.evaluation.perplexity import Totals, perplexity
from megajax.evaluation.windows import windows

TEXTS = ["Ein Anfang, ein längerer Satz: über vierundsechzig Zeichen lang, damit er in Fenstern gelesen wird.", "kurz"]
END = 256


def summed_log_prob(log_probs_by_hand, tokens, begin, end, num_scored):
    """Of the last tokens of a window."""
    found = log_probs_by_hand(tokens[begin:end])
    labels = np.array(tokens[begin + 1 : end])
    return found[np.arange(len(labels)), labels][-num_scored:].sum()


@given(
    num_tokens=st.integers(2, 200), num_context=st.integers(1, 3), length=st.integers(1, 40), data=st.data(),
    shifts_last=st.booleans(),
)  # fmt: skip
def test_every_token_is_scored_once_given_the_overlap(num_tokens, num_context, length, data, shifts_last):
    overlap = data.draw(st.integers(0, length - 1))
    scored = []
    for window in windows(num_tokens, num_context, length, overlap, shifts_last=shifts_last):
        assert 0 <= window.begin < window.end <= num_tokens and window.end - window.begin <= length + 1
        first = window.end - window.num_scored
        assert first - window.begin >= min(overlap + 1, first)
        if shifts_last:
            assert window.end - window.begin == min(length + 1, window.end)
        scored += range(first, window.end)
    assert scored == list(range(num_context, num_tokens))


def test_windows_are_those_of_an_example():
    assert list(windows(12, 1, 4, 2)) == [(0, 5, 4), (2, 7, 2), (4, 9, 2), (6, 11, 2), (7, 12, 1)]
    assert list(windows(12, 1, 4, 2, shifts_last=False))[-1] == (8, 12, 1)
    assert list(windows(12, 1, 4, 0)) == [(0, 5, 4), (4, 9, 4), (7, 12, 3)]


def test_bits_per_byte_equal_a_computation_by_hand(text_model, log_probs_by_hand, tmp_path):
    (tmp_path / "long.txt").write_text(TEXTS[0])
    records = [{"text": text} for text in (TEXTS[1], "", TEXTS[0], "x" * 500)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, records)))
    files = [str(tmp_path / "long.txt"), str(tmp_path / "some.jsonl")]
    long, some = perplexity(text_model, files, overlap=24, limit=2).values()

    tokens = [END, *TEXTS[0].encode()]
    assert len(tokens) - 1 == len(TEXTS[0].encode()) == 101
    parts = [(0, 65, 64), (37, 102, 37)]  # 37: the second window is shifted back, from 40, to the end
    nats = -sum(summed_log_prob(log_probs_by_hand, tokens, *part) for part in parts)
    assert long == Totals(1, 101, 101, pytest.approx(nats, rel=1e-6))
    metrics = long.metrics()
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / 101, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / 101), rel=1e-5)

    short = [END, *TEXTS[1].encode()]
    nats -= summed_log_prob(log_probs_by_hand, short, 0, 5, 4)
    assert some == Totals(2, 105, 105, pytest.approx(nats, rel=1e-6))  # the empty document does not count
    assert sum([long, some], Totals()).documents == 3


def test_tokens_on_disk_give_the_numbers_of_their_text(text_model, tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        for text in TEXTS:
            data = np.frombuffer(text.encode(), np.uint8)
            writer.add_document([data[:3], np.append(data[3:], np.uint16(END))])  # two sequences: sentences
        writer.add_document([np.array([END])])
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    prefix = str(tmp_path / "data")
    found = perplexity(text_model, [str(tmp_path / "text.jsonl")], [prefix])
    assert found[prefix] == found[str(tmp_path / "text.jsonl")]
    assert found[prefix].tokens == found[prefix].bytes == 105


def test_without_a_token_that_begins_documents_the_first_one_is_not_counted(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr(text_model.tokenizer, "eod_id", None)
    (tmp_path / "a.txt").write_text("abcde")
    (found,) = perplexity(text_model, [str(tmp_path / "a.txt")]).values()
    assert (found.tokens, found.bytes) == (4, 4)
    with pytest.raises(ValueError, match="the tokenizer has no token that begins a document"):
        text_model.continuation("", "abc")


def test_data_of_another_tokenizer_and_missing_files_are_refused(text_model, tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer.add_document([np.array([1, 2, 3])])
    meta = dict(tokenizer="other.json", tokenizer_identity="other", vocab_size=9, sha256="", num_documents=1)
    (tmp_path / "data.meta.json").write_text(json.dumps(meta | dict(num_tokens=3, num_bytes=3)))
    with pytest.raises(ValueError, match="written with the tokenizer other.json, which is not the model's"):
        perplexity(text_model, [], [str(tmp_path / "data")])
    with pytest.raises(ValueError, match="text=nothing.txt: the file does not exist"):
        perplexity(text_model, ["nothing.txt"])
    with pytest.raises(ValueError, match="overlap=64 must be at least 0 and less than max_length=64"):
        perplexity(text_model, [], [], overlap=64)
