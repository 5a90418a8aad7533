"""Guesses the next tokens of a sequence from its own text: what followed the last time that it ended like this (prompt
lookup, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

A guess costs little: the model computes it in the same step as the newest token, whose weights it reads anyway, and a
step with a right guess yields one token more. What is sampled depends only on (seed, position) and the tokens before,
so a guess that equals the sampled token changes nothing, and the first one that does not ends the step.
"""

from collections.abc import Sequence

LONGEST = 3  # tokens at the end that are looked up; then fewer, down to SHORTEST
SHORTEST = 2


class PromptLookup:
    """Of one sequence, which grows."""

    def __init__(self):
        self._num_read = 0
        self._ends: dict[tuple[int, ...], int] = {}
        """Index after the last occurrence of some tokens, not counting the end of the sequence."""

    def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow; none if the sequence has not ended like this before."""
        for end in range(max(self._num_read, 1), len(tokens)):
            for length in range(SHORTEST, LONGEST + 1):
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_read = len(tokens)
        for length in range(LONGEST, SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None and len(tokens) > length:
                return tuple(tokens[end : end + count])
        return ()
