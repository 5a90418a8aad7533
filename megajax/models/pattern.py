"""The pattern of a decoder: what its layers are, where they are not all alike.

    w5f         five layers with a window, then one with full attention; repeated over the stack
    f3n         every fourth layer has no rotary embedding
    d3e58       three dense layers, then 58 with experts
    wf/de       both parts: attention, then feed-forward networks

Each part is a sequence of letters, with counts, that is repeated over the stack.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

ATTENTION = {"w": "attention within the window", "f": "full attention", "n": "the same without rotary embedding"}
FEED_FORWARD = {"d": "dense", "e": "with experts"}


class Pattern(NamedTuple):
    """Letters without counts; an empty part says nothing."""

    attention: str
    feed_forward: str


@functools.lru_cache
def read_pattern(text: str) -> Pattern:
    """Raises ValueError for anything else than the above."""
    runs = re.fullmatch(r"((?:[wfn]\d{0,4})*)(?:/(?=[de]))?((?:[de]\d{0,4})*)", text)
    if runs is None or re.search(r"[a-z]0", text):
        known = ", ".join(f"{letter} ({what})" for letter, what in (ATTENTION | FEED_FORWARD).items())
        raise ValueError(f"model.pattern={text!r} must be letters with counts, as w5f or d3e58 or wf/de: {known}")
    return Pattern(*map(_expanded, runs.groups()))


def pattern_of(attention: Sequence[str], feed_forward: Sequence[str]) -> str:
    """The shortest pattern for the letters of all layers; none for a part whose letters are all f, or all e."""
    parts = []
    for letters, usual in ((attention, "f"), (feed_forward, "e")):
        is_usual = set(letters) <= {usual}
        parts.append("" if is_usual else _shortest(letters))
    return "/".join(part for part in parts if part)


def _expanded(part: str) -> str:
    return "".join(letter * int(count or 1) for letter, count in re.findall(r"([a-z])(\d*)", part))


def _shortest(letters: Sequence[str]) -> str:
    number = len(letters)
    period = next(p for p in range(1, number + 1) if all(letters[n] == letters[n % p] for n in range(number)))
    runs = [(letter, len(list(run))) for letter, run in itertools.groupby(letters[:period])]
    return "".join(letter if count == 1 else f"{letter}{count}" for letter, count in runs)
