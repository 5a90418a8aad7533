"""Text of a growing list of tokens: released when it is final, up to a stop text."""

import functools
import os
from collections import deque
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
        self._stop = _stop_texts(tuple(stop)) if stop else None
        self._stop_state = 0
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
        self._before = self._done
        self._done = len(self._tokens)
        return self._release(_after(old, whole))

    def finish(self) -> str:
        """All that is held back."""
        old = self._tokenizer.decode(self._tokens[self._before : self._done])
        whole = self._tokenizer.decode(self._tokens[self._before :])
        text = self._held + _after(old, whole)
        self._held = ""
        self._done = len(self._tokens)
        return text

    def _release(self, new: str) -> str:
        if self._stop is None:
            return new
        begin = len(self._held)
        self._held += new
        for end, character in enumerate(new, begin + 1):
            self._stop_state = self._stop.following(self._stop_state, character)
            self.stopped_by = self._stop.found[self._stop_state]
            if self.stopped_by is not None:
                return self._held[: end - len(self.stopped_by)]
        keep = self._stop.depth[self._stop_state]
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text


class StopTexts:
    """Finds the first of several texts that ends in a stream of characters (Aho and Corasick 1975,
    https://doi.org/10.1145/360825.360855), in a time that does not depend on their number.

    A state is a number; 0: no text has begun.
    """

    def __init__(self, texts: Sequence[str]):
        self.depth = [0]
        """State -> number of characters at the end of the stream that may begin a text."""
        self.found: list[str | None] = [None]
        """State -> the text that ends here, the longest if there are several."""
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # state -> that of the longest proper ending which also begins a text
        for text in texts:
            state = 0
            for length, character in enumerate(text, 1):
                state = self._next[state].setdefault(character, len(self.depth))
                if state == len(self.depth):  # a new one
                    self.depth.append(length)
                    self.found.append(None)
                    self._next.append({})
                    self._shorter.append(0)
            self.found[state] = text
        self._link()

    def following(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _link(self) -> None:
        """Breadth first: shorter beginnings before longer ones."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            self.found[state] = self.found[state] or self.found[self._shorter[state]]
            for character, longer in self._next[state].items():
                self._shorter[longer] = self.following(self._shorter[state], character)
                states.append(longer)


_stop_texts = functools.lru_cache(maxsize=64)(StopTexts)


def _after(old: str, whole: str) -> str:
    """What `whole` adds to `old`, whose last character may have been incomplete."""
    return whole[len(os.path.commonprefix((old, whole))) :]
