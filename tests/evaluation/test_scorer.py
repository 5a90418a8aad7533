"""Scores of given tokens equal a softmax by hand, whatever is scored with them and on whatever mesh."""

import numpy as np
import pytest

from megajax.evaluation.scorer import Scorer
from megajax.evaluation.text_model import TextModel
from megajax.mesh.config import MeshConfig

# Of all lengths that are rounded differently, up to the longest.
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, 257, length).tolist() for length in (2, 33, 34, 5, 65, 64, 17, 40, 33, 3, 36)]
# Sums of float32 in another order; log p is around -6.
TOLERANCE = 1e-5


def test_scores_equal_a_softmax_by_hand(text_model, log_probs_by_hand):
    for sequence, scores in zip(SEQUENCES, text_model.scorer.score(SEQUENCES), strict=True):
        want = log_probs_by_hand(sequence)
        labels = np.array(sequence[1:])
        np.testing.assert_allclose(scores.log_probs, want[np.arange(len(labels)), labels], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(scores.is_top, want.argmax(-1) == labels)


def test_the_most_likely_token_is_marked(text_model, log_probs_by_hand):
    best = log_probs_by_hand([7, 8, 0])[-1].argmax()
    scores = text_model.scorer.score([[7, 8, best], [7, 8, (best + 1) % 257]])
    assert [bool(found.is_top[-1]) for found in scores] == [True, False]


def test_batching_changes_only_rounding(text_model):
    scorer = text_model.scorer
    alone = Scorer(scorer.model, scorer.params, scorer.mesh, batch_tokens=1)
    for one, many in zip(alone.score(SEQUENCES), scorer.score(SEQUENCES), strict=True):
        np.testing.assert_allclose(one.log_probs, many.log_probs, rtol=0, atol=TOLERANCE)


def test_a_mesh_scores_the_same(run_dir, text_model):
    model = TextModel.load(run_dir, MeshConfig(fsdp=2, context=2, tensor=2), batch_tokens=128)
    chosen = [sequence for sequence in SEQUENCES if len(sequence) > 33]  # one program: 64 tokens in another order
    assert len(chosen) % 2  # the last row is padding
    for one, many in zip(text_model.scorer.score(chosen), model.scorer.score(chosen), strict=True):
        np.testing.assert_allclose(one.log_probs, many.log_probs, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(one.is_top, many.is_top)


@pytest.mark.parametrize(
    "sequence, message",
    [
        ([1], "sequence 1 has 1 tokens; a score needs"),
        ([1, 257], "token ids 1 to 257; they must be below model.vocab_size=257"),
        ([1] * 66, "66 tokens; the model supports 65"),
    ],
)
def test_what_cannot_be_scored_is_refused(text_model, sequence, message):
    with pytest.raises(ValueError, match=message):
        text_model.scorer.score([[1, 2], sequence])
