"""Metrics of short answers, against values by hand."""

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.evaluation.answers import METRICS, edit_distance, normalized


@pytest.mark.parametrize(("prediction", "answers", "want"), [
    ("red", ["blue", "red"], 1), (" red\n", ["red "], 1), ("Red", ["red"], 0), ("", ["red"], 0), ("", [""], 1),
])  # fmt: skip
def test_exact_match(prediction, answers, want):
    assert METRICS["exact_match"](prediction, answers) == want


@pytest.mark.parametrize(("answer", "want"), [
    ("The Two dogs.", "2 dogs"), ("an apple", "apple"), ("A", ""), ("none", "0"), ("ten", "10"), ("eleven", "eleven"),
    ("dont", "don't"), ("couldnt've", "couldn't've"), ("couldn'tve", "couldn't've"), ("don't", "don't"),
    ("twas", "'twas"), ("oclock", "o'clock"), ("ID'VE", "i'd've"),
    ("well", "well"), ("its", "its"), ("shed", "shed"), ("hell", "hell"),  # words of their own
    ("3.5", "3.5"), ("3.5.", "3.5"), ("St. John", "st john"), ("U.S.A.", "usa"), (".5", ".5"),
    ("red/blue", "red blue"), ("red / blue", "red blue"), ("yes, sir", "yes sir"), ("left,right", "left right"),
    ("1,000", "1000"), ("t-shirt", "t shirt"), ("t- shirt", "t shirt"), ("7-up, 1,5", "7up 15"),
    ("10:30", "10:30"), ("dog's", "dog's"), ("what?!", "what"), ("  a \t b\nc ", "b c"),
    ("one-two", "1 2"), ("(yes)", "yes"), ("the the", ""),
])  # fmt: skip
def test_answers_of_vqa_are_normalised(answer, want):
    assert normalized(answer) == want


@pytest.mark.parametrize(("prediction", "counts", "want"), [
    # with m matches of 10: m times min((m - 1) / 3, 1), and 10 - m times min(m / 3, 1), divided by 10
    ("red", {"red": 10}, 1), ("red", {"blue": 10}, 0),
    ("red", {"red": 1, "blue": 9}, (1 * 0 + 9 * 1 / 3) / 10),
    ("red", {"red": 2, "blue": 8}, (2 * 1 / 3 + 8 * 2 / 3) / 10),
    ("red", {"red": 3, "blue": 7}, (3 * 2 / 3 + 7 * 1) / 10),
    ("red", {"red": 4, "blue": 6}, 1),
    ("The red.", {"red": 1, "Red": 1, "a red": 1, "blue": 7}, 0.9),
    ("two", {"2": 3, "one": 7}, 0.9), ("two", {"2": 1, "one": 3}, (1 * 0 + 3 * 1 / 3) / 4),
])  # fmt: skip
def test_vqa_accuracy(prediction, counts, want):
    answers = [answer for answer, count in counts.items() for _ in range(count)]
    assert METRICS["vqa_accuracy"](prediction, answers) == pytest.approx(want, abs=1e-12)


def test_vqa_accuracy_of_too_few_answers_is_refused():
    with pytest.raises(ValueError, match="vqa_accuracy: 3 answers; it needs those of at least 4 people"):
        METRICS["vqa_accuracy"]("red", ["red"] * 3)


@pytest.mark.parametrize(("prediction", "answers", "want"), [
    ("kitten", ["sitting"], 1 - 3 / 7), ("sitting", ["xyz", "kitten"], 1 - 3 / 7), ("Invoice  12", ["invoice 12"], 1),
    ("abcd", ["abxy"], 0.5), ("abcd", ["axyz"], 0), ("abc", ["abxy"], 0.5), ("ab", ["abxyz"], 0),
    ("", ["a"], 0), ("", [""], 1), ("a", [], 0), ("ab", ["ba", "abc"], 1 - 1 / 3),
])  # fmt: skip
def test_anls(prediction, answers, want):
    assert METRICS["anls"](prediction, answers) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(("prediction", "answers", "want"), [
    ("105", ["100"], 1), ("95", ["100"], 1), ("105.1", ["100"], 0), ("94.9", ["100"], 0), ("-100", ["100"], 0),
    ("-104", ["-100"], 1), ("41%", ["40%"], 1), ("0.41", ["40%"], 1), ("40", ["40%"], 0), ("43%", ["40%"], 0),
    ("0", ["0.0"], 1), ("0.01", ["0"], 0), ("Yes", ["yes"], 1), ("yes", ["no", "YES"], 1),
    ("2014", ["1990", "2013"], 1),
    ("100", ["hundred"], 0), ("inf", ["inf"], 1), ("nan", ["1"], 0), ("", ["1"], 0),
])  # fmt: skip
def test_relaxed_accuracy(prediction, answers, want):
    assert METRICS["relaxed_accuracy"](prediction, answers) == want


@settings(deadline=None)
@given(st.text("abc", max_size=8), st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_edit_distance_is_a_metric(first, second, third):
    found = edit_distance(first, second)
    assert found == edit_distance(second, first)
    assert (found == 0) == (first == second)
    assert found <= edit_distance(first, third) + edit_distance(third, second)
    # any sequence of edits is at least as long, such as the one that the standard library finds
    codes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    upper = sum(max(a_end - a, b_end - b) for tag, a, a_end, b, b_end in codes if tag != "equal")
    assert abs(len(first) - len(second)) <= found <= upper
