"""Texts become tokens as lm-eval defines it, and generations keep to their settings."""

import dataclasses

import numpy as np
import pytest

from megajax.evaluation.text_model import TextModel, TokenText, sampling_of
from megajax.inference.engine import Output
from megajax.inference.tokens.sampling import Sampling

END = 256


@pytest.mark.parametrize(
    "context, text, num_context",
    [("The sky is", " blue", 10), ("The sky is ", "blue", 10), ("The sky is \n", "blue", 10)],
)
def test_white_space_before_a_continuation_belongs_to_it(text_model, context, text, num_context):
    assert text_model.continuation(context, text) == TokenText(list((context + text).encode()), num_context)


def test_a_text_without_context_begins_a_document(text_model):
    assert text_model.continuation("", "ab") == text_model.document("ab") == TokenText([END, *b"ab"], 1)


def test_of_a_long_context_the_end_is_read(text_model, log_probs_by_hand, caplog):
    text = text_model.continuation("x" * 80, " yes")
    (found,) = text_model.likelihoods([text])
    log_probs = log_probs_by_hand(list(b"x" * 61 + b" yes"))[-4:]
    assert found.log_prob == pytest.approx(log_probs[np.arange(4), list(b" yes")].sum(), rel=1e-5)
    assert "1 of 1 texts are longer than max_length=64" in caplog.text


def test_generation_cuts_contexts_and_texts_and_gives_repeats_their_own_seeds(text_model, monkeypatch):
    submitted = []

    class FakeEngine:
        has_work = True

        def submit(self, prompt, sampling, images=()):
            submitted.append((bytes(prompt), sampling.seed))
            return len(submitted)

        def cancel(self, request):
            """Nothing is left of any."""

        def step(self):
            """Out of order, in two parts."""
            self.has_work = False
            for part in (b" upon a ti", b"me\nand"):
                for request in range(len(submitted), 0, -1):
                    yield Output(request, 0, list(part), "", None, None, None)

    monkeypatch.setitem(text_model.__dict__, "engine", FakeEngine())
    to_newline = Sampling(max_tokens=16, temperature=0.0, stop=("\n", "and"))
    to_letter = dataclasses.replace(to_newline, stop=("a",))
    requests = [("Once", to_newline), ("A" * 20 + "B" * 48, to_newline), ("Once", to_letter), ("Once", to_newline)]
    assert text_model.generate(requests) == [" upon a time", " upon a time", " upon ", " upon a time"]
    assert submitted == [(b"Once", 0), (b"B" * 48, 0), (b"Once", 0), (b"Once", 1)]
    with pytest.raises(ValueError, match="max_tokens=64 leaves no room for a context in max_length=64"):
        text_model.generate([("Once", Sampling(max_tokens=64))])


@pytest.mark.parametrize(
    "settings, sampling",
    [
        ({}, Sampling(max_tokens=256, temperature=0.0)),
        ({"until": "a", "max_gen_toks": 3}, Sampling(max_tokens=3, temperature=0.0, stop=("a",))),
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7}, Sampling(256, 0.0, stop=("a",))),
        ({"do_sample": True, "top_k": 5}, Sampling(256, 1.0, top_k=5)),
        ({"temperature": 0.5, "top_p": 0.9, "num_beams": 2}, Sampling(256, 0.5, top_p=0.9)),
    ],
)
def test_settings_of_lm_eval(settings, sampling, caplog):
    assert sampling_of(settings) == sampling
    assert ("num_beams=2" in caplog.text) == ("num_beams" in settings)


def test_a_length_that_the_model_does_not_support_is_refused(run_dir):
    with pytest.raises(ValueError, match="max_length=65 must be at least 1 and at most model.max_positions=64"):
        TextModel.load(run_dir, max_length=65)


@pytest.mark.slow
def test_another_step_is_used_for_likelihoods_and_generations(run_dir):
    greedy = [("Once", Sampling(max_tokens=8, temperature=0.0))]
    text = [TokenText(list(b"Once upon"), 4)]

    def results(model):
        before = model.likelihoods(text)[0].log_prob
        generated = model.generate(greedy)
        after = model.likelihoods(text)[0].log_prob  # the weights are now in the form of the engine
        assert after == pytest.approx(before, rel=1e-6)
        return after, *generated

    model = TextModel.load(run_dir, step=1)
    first = results(model)
    model.use_step(2)
    log_prob, generated = results(TextModel.load(run_dir, step=2))
    assert results(model) == (pytest.approx(log_prob, rel=1e-6), generated)
    assert generated != first[1]
