"""LAMBADA and WikiText as Megatron's tasks define them."""

import json
import math

import numpy as np
import pytest

from megajax.evaluation.text_model import Likelihood
from megajax.evaluation.zero_shot import detokenized, lambada, wikitext

# Lines in the format of WikiText-103, and what Megatron's detokenizer made of them.
WIKITEXT = {
    " = Robert Boulter = \n": " = Robert Boulter =\n",
    " = = Career = = \n \n": " == Career ==\n\n",
    " = = = 2000 @-@ 2005 = = = \n": " === 2000-2005 ===\n",
    "He had 1 @,@ 234 fans , a 3 @.@ 5 mark ; ' quite good ' : \" so he said \" .\n":
        "He had 1,234 fans, a 3.5 mark; 'quite good': \"so he said\" .\n",
    "The boys ' film ( 2006 ) [ UK ] { x } it 's 5 ° C . Yes ! No ? N times":
        "The boys'film (2006) [UK] {x} it's 5°C. Yes! No? 1 times",
}  # fmt: skip
PASSAGES = ["the quick brown fox jumps", "over  the lazy dog ", "fox over fox"]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("text", WIKITEXT)
def test_wikitext_is_written_as_usual(text):
    assert detokenized(text) == WIKITEXT[text]


def test_wikitext_perplexity_per_token_and_word(text_model, log_probs_by_hand, tmp_path):
    (tmp_path / "wiki.txt").write_text("\n = A = \n \n" + "one , two ( three ) " * 6)
    tokens = list(detokenized((tmp_path / "wiki.txt").read_text()).encode())
    found = wikitext(text_model, str(tmp_path / "wiki.txt"), overlap=44)
    # Megatron: windows begin at multiples of 20; the first token is not scored; each window but the first scores its
    # last 20 positions
    nats = 0.0
    for begin in range(0, len(tokens) - 1, 20):
        window = tokens[begin : begin + 65]
        log_probs = log_probs_by_hand(window)
        labels = np.array(window[1:])
        of_labels = log_probs[np.arange(len(labels)), labels]
        nats -= of_labels.sum() if begin == 0 else of_labels[44:].sum()
    words = len((tmp_path / "wiki.txt").read_text().strip().split(" "))
    assert (found["tokens"], found["words"]) == (len(tokens) - 1, words - 1)
    assert len(tokens) > 85  # three windows and more
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / (words - 1)), rel=1e-5)


@pytest.mark.parametrize(
    "strict, ends",
    [
        (False, [(b"the quick brown fox jump", b"s"), (b"over  the lazy dog", b" "), (b"fox over fo", b"x")]),
        (True, [(b"the quick brown fox", b" jumps"), (b"over  the lazy", b" dog"), (b"fox over", b" fox")]),
    ],
)
def test_lambada_counts_passages_whose_end_is_most_likely(text_model, monkeypatch, tmp_path, strict, ends):
    def likelihoods(texts):
        read = [bytes(text.tokens) for text in texts]
        counts = [text.num_context for text in texts]
        assert [(tokens[:count], tokens[count:]) for tokens, count in zip(read, counts, strict=True)] == ends
        return [Likelihood(-1.0, True), Likelihood(-2.0, False), Likelihood(-0.5, True)]

    monkeypatch.setattr(text_model, "likelihoods", likelihoods)
    found = lambada(text_model, write_lines(tmp_path / "lambada.jsonl", PASSAGES), strict=strict)
    assert (found["examples"], found["correct"], found["accuracy"]) == (3, 2, 2 / 3)
    num_tokens = sum(len(target) for _, target in ends)
    assert found["target_perplexity"] == pytest.approx(math.exp(3.5 / num_tokens))


def test_passages_that_cannot_be_scored_are_named(text_model, tmp_path):
    with pytest.raises(ValueError, match="lambada.jsonl line 2: not an object with a field text"):
        (tmp_path / "lambada.jsonl").write_text('{"text": "a b"}\n{"words": "a"}\n')
        lambada(text_model, str(tmp_path / "lambada.jsonl"))
    with pytest.raises(ValueError, match="line 1: 'word' has nothing before its last word"):
        lambada(text_model, write_lines(tmp_path / "one.jsonl", ["word"]), strict=True)
