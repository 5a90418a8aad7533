"""Windows over a text that is longer than a model reads, in which every token is scored once."""

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    begin: int
    end: int
    """The tokens [begin, end) of the text; the last one is not read, only scored."""
    num_scored: int
    """Of the last ones."""


def windows(
    num_tokens: int, num_context: int, length: int, overlap: int, *, shifts_last: bool = True
) -> Iterator[Window]:
    """The windows of a text whose first num_context tokens, at least 1, are not scored.

    length: tokens that a window reads. overlap: of these, tokens that the window before has read too, so that a token
    is scored given at least `overlap` + 1 tokens before it, or all there are. shifts_last: the last window begins
    earlier, so that it is as long as the others.
    """
    scored = num_context
    begin = 0
    while scored < num_tokens:
        end = min(begin + length + 1, num_tokens)
        if end > scored:
            yield Window(max(0, end - length - 1) if shifts_last else begin, end, end - scored)
            scored = end
        begin += length - overlap
