"""What is asked of an engine, and what a call of the device computes of it."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from megajax.inference.config import Sampling
from megajax.inference.scheduling.images import PromptImages
from megajax.inference.scheduling.waiting import Owner
from megajax.inference.tokens.grammar import Matcher
from megajax.inference.tokens.sampling import TokenLogprobs
from megajax.inference.tokens.speculation import PromptLookup

NO_ROW = -1

_ids = itertools.count()


@dataclasses.dataclass(eq=False)
class Request:
    prompt: list[int]
    sampling: Sampling
    id: int = dataclasses.field(default_factory=lambda: next(_ids))
    arrival: float = dataclasses.field(default_factory=time.monotonic)
    """time.monotonic() when it was submitted."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt tokens after the first, if sampling.prompt_logprobs asks for them; complete with the first
    Output."""
    num_cached: int = 0
    """Prompt tokens of the first sample that were found in the prefix cache."""
    sequences: "list[Sequence]" = dataclasses.field(default_factory=list, repr=False)
    """Its n samples."""
    owner: Owner = Owner()

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


def check_prompt(
    name: str, prompt: Items[int], max_tokens: int, max_length: int, model_length: int | None, vocab_size: int
) -> None:
    """max_length: tokens that the engine has room for. model_length: those that the model reads; None: unlimited.
    Raises ValueError for a prompt that is empty, too long, or has tokens that the model does not know."""
    if len(prompt) == 0:
        raise ValueError(f"{name} has no tokens; give at least one")
    if len(prompt) + max_tokens > max_length:
        way_out = f"use max_tokens={max_length - len(prompt)} or less"
        if len(prompt) >= max_length:
            way_out = "give a shorter prompt"
        limit = "the model supports" if max_length == model_length else "the engine has room for"
        raise ValueError(
            f"{name} has {len(prompt)} tokens, which with max_tokens={max_tokens} exceeds the {max_length} tokens that "
            f"{limit}; {way_out}"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(
            f"{name} has token ids {min(prompt)} to {max(prompt)}; they must be below model.vocab_size={vocab_size}"
        )


class Border(NamedTuple):
    """The end of the last page that a sequence has in common with an earlier one."""

    position: int
    """Number of tokens up to there."""
    digest: bytes


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request."""

    request: Request
    index: int
    tokens: list[int]
    """Prompt and generated tokens that the host knows."""
    limit: int
    """Maximum length in tokens."""
    row: int = NO_ROW
    """Its row in the arrays of the device while it runs."""
    pages: list[int] = dataclasses.field(default_factory=list)
    num_released: int = 0
    """Of these pages, the first ones that it has given back, because no layer reads them any more."""
    num_written: int = 0
    """Tokens whose keys and values are in pages, or will be after the calls that are under way."""
    num_to_prefill: int = 0
    """Length when it was admitted: all these tokens are computed before it decodes."""
    num_pending: int = 0
    """Tokens that calls under way generate."""
    num_drafted: int = 0
    """Tokens whose keys and values of the draft model, if there is one, are in pages."""
    is_finished: bool = False
    shares_pages: bool = True
    """Whether its pages may enter the prefix cache: not if they were computed with other parameters."""
    border: Border | None = None
    """Where its state is to be kept; None: nowhere."""
    matcher: Matcher | None = None
    """Which tokens may follow, if the text must follow a schema or a regular expression."""
    lookup: PromptLookup = dataclasses.field(default_factory=PromptLookup, repr=False)
    images: PromptImages | None = None
    """Of its prompt."""
    guesses: tuple[int, ...] = ()
    """The tokens that may follow the newest one, guessed by layers of the model in the call that generated it."""

    @property
    def owner(self) -> Owner:
        return self.request.owner

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def is_prefilling(self) -> bool:
        return self.num_written < self.num_to_prefill

    @property
    def is_decoding(self) -> bool:
        return not self.is_prefilling and self.length < self.limit

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first sample of a request computes them for all."""
        return self.request.prompt_logprobs is not None and self.index == 0


class Chunk(NamedTuple):
    """Tokens start <= i < end of a sequence; the last chunk of a prompt also samples the token that follows."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_to_prefill


class Copy(NamedTuple):
    """Of the state of a sequence: from its row to a slot of the kept states, or back."""

    row: int
    slot: int


class Run(NamedTuple):
    """The next tokens of a sequence."""

    sequence: Sequence
    start: int
    """Position of its newest token, which is computed first."""
    count: int
    """Tokens that it gets; with a draft, at most."""
    draft: tuple[int, ...] = ()
    """Guesses of the tokens that follow the newest one; computed in the same step to see whether they are right."""


class Prefill(NamedTuple):
    chunks: list[Chunk]
    beside: Items[Run] = ()
    """Sequences that get their next token in the same call."""
    restored: Items[Copy] = ()
    """Before the chunks are computed, from the kept states."""
    kept: Items[Copy] = ()
    """After they are computed, to the kept states, in this order: a later one may replace an earlier one."""


Guesses = dict[Sequence, tuple[int, ...]]
"""The tokens that may follow the newest one of each sequence."""


Guess = Callable[[dict[Sequence, int], int], Guesses]


def look_up(most: dict[Sequence, int], total: int) -> Guesses:
    """Guesses by prompt lookup: up to the given number of tokens for each sequence, and `total` for all."""
    drafts = {}
    for sequence, count in most.items():
        found = sequence.lookup.guess(sequence.tokens, min(count, total))
        drafts[sequence] = tuple(itertools.takewhile(lambda token: token >= 0, found))  # below 0: of an image
        total -= len(drafts[sequence])
    return drafts


def guessed_before(most: dict[Sequence, int], total: int) -> Guesses:
    """As `look_up`, by layers of the model."""
    drafts = {}
    for sequence, count in most.items():
        drafts[sequence] = sequence.guesses[: min(count, total)]
        total -= len(drafts[sequence])
    return drafts


class Decode(NamedTuple):
    runs: list[Run]
    num_steps: int


class Wait(NamedTuple):
    """Nothing can be scheduled before the results of earlier calls are known."""
