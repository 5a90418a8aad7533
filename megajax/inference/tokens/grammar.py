"""Restricts a text to a JSON schema, an expression or a grammar, with llguidance (pip install 'megajax[grammar]').

For each sequence a matcher says, before each token, which tokens keep the text valid; the device samples among them.
"""

import json
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from megajax.data.tokenizers.libraries import HuggingFaceTokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.config import Sampling

if TYPE_CHECKING:
    import llguidance


class Matcher:
    """The state of one text."""

    def __init__(self, matcher, vocab_size: int):
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)

    def mask(self) -> np.ndarray:
        """The allowed tokens, uint32 [ceil(V / 32)], one bit each (sampling.py `unpacked`)."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return found[: self._num_words]

    def add(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def is_finished(self) -> bool:
        """Whether no token can follow, but the end of the text."""
        return self._matcher.is_stopped()


class Grammars:
    """Makes matchers for one tokenizer; compiled grammars are the library's concern."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: llguidance.LLTokenizer | None = None

    def start(self, sampling: Sampling) -> Matcher | None:
        """A matcher for the beginning of a text, or None if the settings ask for none. Raises ValueError for a schema,
        an expression or a grammar that is invalid or not supported, and for a tokenizer that does not know the bytes
        of its tokens."""
        if sampling.form is None:
            return None
        name, text = sampling.form
        llguidance, known = self._library(name)
        try:
            if name == "schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(json.loads(text))
            elif name == "regex":
                grammar = llguidance.LLMatcher.grammar_from_regex(text)
            else:
                grammar = llguidance.LLMatcher.grammar_from_lark(text)
            matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        except (ValueError, TypeError) as error:
            raise _unusable(name, text, str(error)) from None
        if problem := matcher.get_error():
            raise _unusable(name, text, problem)
        return Matcher(matcher, self._vocab_size)

    def _library(self, name: str) -> "tuple[ModuleType, llguidance.LLTokenizer]":
        try:
            import llguidance
        except ImportError:
            raise ValueError(f"{name} needs the package llguidance; pip install 'megajax[grammar]'") from None
        if self._known is None:
            self._known = self._read(llguidance, name)
        return llguidance, self._known

    def _read(self, llguidance: ModuleType, name: str) -> "llguidance.LLTokenizer":
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.eod_id is None:
            raise ValueError(f"{name} needs a tokenizer with an end-of-document token; the engine has none")
        options = dict(n_vocab=self._vocab_size, eos_token=tokenizer.eod_id)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return llguidance.LLTokenizer(tokenizer.as_json(), **options)
        if not isinstance(tokenizer, _KnowsBytes):
            raise ValueError(f"{name}: tokens of {tokenizer.identity} are no text; use another tokenizer")
        tokens = tokenizer.token_bytes()[: self._vocab_size]
        described = _Described(tokenizer.encode, tokenizer.eod_id, tokens, tokenizer.special_tokens.values())
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(described), **options)


def _unusable(name: str, text: str, problem: str) -> ValueError:
    """problem: several lines, which also show where it is."""
    lines = problem.splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ValueError(f"{name}={text!r} cannot be used: {(reasons or lines)[0]}")


@runtime_checkable
class _KnowsBytes(Protocol):
    def token_bytes(self) -> list[bytes]: ...


class _Described:
    """A tokenizer as the library wants it."""

    def __init__(self, encode: Callable[[str], list[int]], end: int, tokens: list[bytes], special: Iterable[int]):
        self._encode = encode
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = sorted({end, *special})

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
