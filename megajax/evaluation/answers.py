"""Metrics of short answers to questions: each takes a prediction and the accepted answers, and returns 0 to 1."""

import math
import re
from collections.abc import Callable, Sequence

ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05
# What the evaluation of VQA 2.0 takes for another spelling, https://visualqa.org/evaluation.html.
NUMBER_WORDS = {
    word: str(number)
    for number, words in enumerate(
        ["none zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
    for word in words.split()
}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's i'd've isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
# Each contraction with one of its apostrophes missing -> the contraction.
MISSPELLED = {
    word[: mark.start()] + word[mark.end() :]: word for word in CONTRACTIONS.split() for mark in re.finditer("'", word)
}


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, up to spaces around them."""
    return float(prediction.strip() in {answer.strip() for answer in answers})


def vqa_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Agreement with people who were asked the same (Antol et al. 2015, https://arxiv.org/abs/1505.00468), 10 in VQA:
    min(matches / 3, 1), averaged over all ways of leaving one person out, after `normalized`.

    The published script skips the normalisation where all people gave the same answer. Raises ValueError for fewer than
    4 answers, with which nothing is fully right.
    """
    if len(answers) < 4:
        raise ValueError(f"vqa_accuracy: {len(answers)} answers; it needs those of at least 4 people, in VQA 10")
    found = normalized(prediction)
    matches = [normalized(answer) == found for answer in answers]
    return sum(min((sum(matches) - match) / 3, 1) for match in matches) / len(matches)


def anls(prediction: str, answers: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity (Biten et al. 2019, https://arxiv.org/abs/1905.13648) of one question:
    1 - edit distance / length of the longer one, of the nearest answer; 0 if that is less than ANLS_THRESHOLD.

    Upper and lower case, and the number of spaces, do not count. A similarity of exactly ANLS_THRESHOLD counts, as in
    the script of DocVQA; the paper excludes it.
    """
    found = " ".join(prediction.lower().split())
    similarity = 0.0
    for answer in answers:
        wanted = " ".join(answer.lower().split())
        longer = max(len(found), len(wanted))
        similarity = max(similarity, 1 - edit_distance(found, wanted) / longer if longer else 1.0)
    return similarity if similarity >= ANLS_THRESHOLD else 0.0


def relaxed_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is within 5 % of an answer that is a number, such as 12.5 or 40%, or else equal to it up to
    upper and lower case (ChartQA: Masry et al. 2022, https://arxiv.org/abs/2203.10244)."""
    return float(any(_is_near(prediction.strip(), answer.strip()) for answer in answers))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "vqa_accuracy": vqa_accuracy,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
}


def normalized(answer: str) -> str:
    """The answer as the evaluation of VQA 2.0 compares it: in lower case, without articles, punctuation (except
    apostrophes, colons and decimal points) and surplus spaces; number words as digits; contractions with their
    apostrophe.

    Punctuation becomes a space, or nothing if it stands next to a space anywhere in the answer, or if the answer has a
    comma between digits.
    """
    answer = answer.replace("\n", " ").replace("\t", " ").strip()
    has_digit_comma = re.search(r"\d,\d", answer) is not None
    text = answer
    for mark in PUNCTUATION:
        is_removed = has_digit_comma or f"{mark} " in answer or f" {mark}" in answer
        text = text.replace(mark, "" if is_removed else " ")
    text = re.sub(r"\.(?!\d)", "", text)
    words = [NUMBER_WORDS.get(word, word) for word in text.lower().split()]
    return " ".join(MISSPELLED.get(word, word) for word in words if word not in ARTICLES)


def edit_distance(first: str, second: str) -> int:
    """Characters to insert, delete or replace in one text to make it the other (Levenshtein)."""
    row = list(range(len(second) + 1))
    for i, character in enumerate(first, 1):
        diagonal = row[0]
        row[0] = i
        for j, other in enumerate(second, 1):
            changed = diagonal + (character != other)
            diagonal = row[j]
            row[j] = min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def _is_near(prediction: str, answer: str) -> bool:
    found = _number(prediction)
    wanted = _number(answer)
    if found is None or wanted is None:
        return prediction.lower() == answer.lower()
    return abs(found - wanted) <= RELAXED_TOLERANCE * abs(wanted)


def _number(text: str) -> float | None:
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return None
    return (number / 100 if text.endswith("%") else number) if math.isfinite(number) else None
