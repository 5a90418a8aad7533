"""Restricts a text to a JSON schema or a regular expression, with llguidance (pip install 'megajax[grammar]').

For each sequence a matcher says, before each token, which tokens keep the text valid; the device samples among them.
"""

import json

import numpy as np

from megajax.data.tokenizers.libraries import HuggingFaceTokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.tokens.sampling import Sampling


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
        self._known = None

    def start(self, sampling: Sampling) -> Matcher | None:
        """A matcher for the beginning of a text, or None if the settings ask for none. Raises ValueError for a schema
        or an expression that is invalid or not supported, and for a tokenizer that does not know the bytes of its
        tokens."""
        if not sampling.is_constrained:
            return None
        name = "regex" if sampling.schema is None else "schema"
        llguidance = self._library(name)
        try:
            if sampling.schema is not None:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(json.loads(sampling.schema))
            else:
                grammar = llguidance.LLMatcher.grammar_from_regex(sampling.regex)
            matcher = llguidance.LLMatcher(self._known, grammar, log_level=0)
            problem = matcher.get_error()
        except (ValueError, TypeError) as error:
            problem = str(error)
        if problem:
            raise ValueError(f"{name}={getattr(sampling, name)!r} cannot be used: {_reason(problem)}")
        return Matcher(matcher, self._vocab_size)

    def _library(self, name: str):
        try:
            import llguidance
        except ImportError:
            raise ValueError(f"{name} needs the package llguidance; pip install 'megajax[grammar]'") from None
        if self._known is None:
            self._known = self._read(llguidance, name)
        return llguidance

    def _read(self, llguidance, name: str):
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.eod_id is None:
            raise ValueError(f"{name} needs a tokenizer with an end-of-document token; the engine has none")
        options = dict(n_vocab=self._vocab_size, eos_token=tokenizer.eod_id)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return llguidance.LLTokenizer(tokenizer.as_json(), **options)
        if not hasattr(tokenizer, "token_bytes"):
            raise ValueError(f"{name}: tokens of {tokenizer.identity} are no text; use another tokenizer")
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Described(tokenizer, self._vocab_size)), **options)


def _reason(problem: str) -> str:
    """What is wrong, of a message of several lines that also shows where."""
    lines = problem.splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines)[0]


class _Described:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._encode = tokenizer.encode
        self.eos_token_id = tokenizer.eod_id
        self.bos_token_id = None
        self.tokens = tokenizer.token_bytes()[:vocab_size]
        self.special_token_ids = sorted({tokenizer.eod_id, *tokenizer.special_tokens.values()})

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
