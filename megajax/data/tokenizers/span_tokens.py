"""Texts with sentinels, which stand for spans that are missing (T5): `<extra_id_0>`, `<extra_id_1>`, ..."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from megajax.data.tokenizers.tokenizer import Tokenizer

NUM_SENTINELS = 100  # of T5
NUM_ADDED = NUM_SENTINELS + 1
"""Most ids that `SpanTokens` adds to those of a tokenizer that has an end-of-document token."""
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclasses.dataclass(frozen=True)
class SpanTokens:
    """The special tokens of an encoder-decoder: those of a tokenizer, or ids beyond its own for those that it lacks."""

    tokenizer: Tokenizer
    pad_id: int
    """Padding, and the first token of the decoder."""
    eos_id: int
    """After the last token of the decoder."""
    sentinel_ids: tuple[int, ...]
    vocab_size: int
    """Number of ids of the tokenizer and of these."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "SpanTokens":
        """Raises ValueError for a tokenizer without an end-of-document token."""
        if tokenizer.eod_id is None:
            raise ValueError(
                f"data.tokenizer: {tokenizer.identity} has no end-of-document token, which ends the spans of a text; "
                "use a tokenizer that has one"
            )
        ids = itertools.count(tokenizer.vocab_size)
        pad = tokenizer.token_id("<pad>")
        pad = next(ids) if pad is None else pad
        known = map(tokenizer.token_id, (f"<extra_id_{i}>" for i in range(NUM_SENTINELS)))
        own = [number for number in itertools.takewhile(lambda number: number is not None, known) if number is not None]
        sentinels = own or [next(ids) for _ in range(NUM_SENTINELS)]
        return SpanTokens(tokenizer, pad, tokenizer.eod_id, tuple(sentinels), next(ids))

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which `<extra_id_0>` is a sentinel. Raises ValueError for a sentinel that there is
        not."""
        if self._has_own_names:
            return self.tokenizer.encode_template(text)
        ids = []
        for number, part in enumerate(_SENTINEL.split(text)):
            ids += [self._sentinel(int(part))] if number % 2 else self.tokenizer.encode(part) if part else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The opposite of encode; other special tokens are left out."""
        kept = [i for i in ids if i not in (self.pad_id, self.eos_id)]
        if self._has_own_names:
            return self.tokenizer.decode(kept)
        names = {token: f"<extra_id_{number}>" for number, token in enumerate(self.sentinel_ids)}
        parts = itertools.groupby(kept, key=names.__contains__)
        return "".join("".join(names[i] for i in part) if named else self._text(part) for named, part in parts)

    def _text(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])

    @property
    def _has_own_names(self) -> bool:
        return self.sentinel_ids[0] < self.tokenizer.vocab_size

    def _sentinel(self, number: int) -> int:
        if number >= len(self.sentinel_ids):
            raise ValueError(
                f"<extra_id_{number}> is not a sentinel; the last is <extra_id_{len(self.sentinel_ids) - 1}>"
            )
        return self.sentinel_ids[number]
