"""Text of a growing list of tokens: released when it is final, up to a stop text."""

import os
from collections.abc import Sequence

from megajax.data.tokenizers.tokenizer import Tokenizer

CONTEXT = 8  # tokens before the new ones that are decoded with them: some tokenizers drop the space of a first token
MAX_UNFINISHED = 64  # tokens; longer ones are not the beginning of a character
REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens one by one. A character whose bytes are not complete, and text that may be the beginning of a stop
    text, are held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens = list(prompt[-CONTEXT:])
        self._before = 0
        """First token that is still decoded."""
        self._done = len(self._tokens)
        """Tokens whose text is in `_held` or released."""
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """-> the text that is now final; `stopped_by` is then the stop text that was found, if any."""
        self._tokens.append(token)
        old = self._tokenizer.decode(self._tokens[self._before : self._done])
        whole = self._tokenizer.decode(self._tokens[self._before :])
        is_cut = whole.endswith(REPLACEMENT) and len(self._tokens) - self._done < MAX_UNFINISHED
        if is_cut or len(whole) <= len(old):
            return ""
        self._held += _after(old, whole)
        self._before = self._done
        self._done = len(self._tokens)
        return self._release()

    def finish(self) -> str:
        """All that is held back."""
        old = self._tokenizer.decode(self._tokens[self._before : self._done])
        whole = self._tokenizer.decode(self._tokens[self._before :])
        text = self._held + _after(old, whole)
        self._held = ""
        self._done = len(self._tokens)
        return text

    def _release(self) -> str:
        found = [(self._held.find(stop), stop) for stop in self._stop]
        found = [(start, stop) for start, stop in found if start >= 0]
        if found:
            start, self.stopped_by = min(found)
            return self._held[:start]
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text


def _after(old: str, whole: str) -> str:
    """What `whole` adds to `old`, whose last character may have been incomplete."""
    return whole[len(os.path.commonprefix((old, whole))) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)
