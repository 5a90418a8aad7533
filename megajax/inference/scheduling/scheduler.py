"""Decides what the next call of the device computes: chunks of prompts, or the next tokens of the running sequences.

The two alternate while both have work, so that long prompts do not stop the others. A sequence is admitted when a row
and enough pages for its tokens are free; clients take turns (waiting.py). When a running sequence needs a
page and none is free, the youngest one gives its pages back and waits again; its tokens are then computed once more
(recomputation). So does one for the first sequence of a client, or of a request, if another one has several.

The device is one call ahead of what the host knows: `num_pending` tokens of a sequence are being generated. Only its
length matters here, so that the next call can be prepared meanwhile.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from megajax.inference.scheduling.pages import KeptStates, PagePool
from megajax.inference.scheduling.waiting import Owner, WaitingLine
from megajax.inference.tokens.grammar import Matcher
from megajax.inference.tokens.sampling import Sampling, TokenLogprobs
from megajax.inference.tokens.speculation import PromptLookup

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
    row: int | None = None
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


class Prefill(NamedTuple):
    chunks: list[Chunk]
    restored: Items[Copy] = ()
    """Before the chunks are computed, from the kept states."""
    kept: Items[Copy] = ()
    """After they are computed, to the kept states, in this order: a later one may replace an earlier one."""


class Run(NamedTuple):
    """The next tokens of a sequence."""

    sequence: Sequence
    start: int
    """Position of its newest token, which is computed first."""
    count: int
    """Tokens that it gets; with a draft, at most."""
    draft: tuple[int, ...] = ()
    """Guesses of the tokens that follow the newest one; computed in the same step to see whether they are right."""


Guesses = dict[Sequence, tuple[int, ...]]
"""The tokens that may follow the newest one of each sequence."""


Guess = Callable[[dict[Sequence, int], int], Guesses]


def look_up(most: dict[Sequence, int], total: int) -> Guesses:
    """Guesses by prompt lookup: up to the given number of tokens for each sequence, and `total` for all."""
    drafts = {}
    for sequence, count in most.items():
        drafts[sequence] = sequence.lookup.guess(sequence.tokens, min(count, total))
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


class Limits(NamedTuple):
    num_rows: int
    """Sequences that run at the same time."""
    chunk_tokens: int
    """Prompt tokens of a call."""
    num_chunks: int
    """Sequences whose prompts a call computes."""
    chunk_pages: int
    """Pages that these sequences have together."""
    decode_steps: int
    """Tokens per sequence of a call."""
    draft_tokens: int = 0
    """Guesses per sequence of a call."""
    window: int | None = None
    """Last tokens that any layer reads; None: all."""


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        limits: Limits,
        guess: Guess = look_up,
        states: KeptStates | None = None,
        *,
        has_draft_model: bool = False,
    ):
        """guess: called like `look_up`. states: for a model with layers whose state is not in pages; None: pages are
        all that a sequence needs. has_draft_model: whether a draft model has pages too."""
        self._guess = guess
        self._has_draft_model = has_draft_model
        self.pool = pool
        self.waiting = WaitingLine()
        self.running: list[Sequence] = []
        """In the order of admission; the last one is the first to be preempted."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._rows: list[int] = []
        """Free ones."""
        self.use(limits)
        self._has_prefilled = False
        self._states = states
        self._restored: list[Copy] = []
        """Since the last call with prompts."""

    def use(self, limits: Limits) -> None:
        """Calls keep these limits from here on. Rows in use must be among those that they allow."""
        self.limits = limits
        used = {sequence.row for sequence in self.running}
        self._rows = [row for row in reversed(range(limits.num_rows)) if row not in used]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def next(self) -> Prefill | Decode | Wait | None:
        """The next call, whose pages are allocated; None: nothing to do."""
        if self.waiting:
            yielding = self._yielding(self.waiting.first)
            if yielding is not None and yielding.num_pending:
                return Wait()
            if yielding is not None:
                self.preempt(yielding)
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        chunks = [] if self._has_prefilled and decoding else self._chunks()
        self._has_prefilled = bool(chunks)
        if chunks:
            return self._prefill(chunks)
        return self._decode(decoding) if decoding else None

    # ------------------------------------------------------------------ prompts

    def _prefill(self, chunks: list[Chunk]) -> Prefill:
        if self._states is None:
            return Prefill(chunks)
        restored = self._restored
        self._restored = []
        # Sequences of this call have been admitted already: only those of later calls find these states.
        kept = [copy for copy in map(self._kept, chunks) if copy is not None]
        return Prefill(chunks, restored, kept)

    def _kept(self, chunk: Chunk) -> Copy | None:
        """Where the state at the end of a chunk goes, if it is to be kept."""
        sequence = chunk.sequence
        if sequence.border is None or chunk.end != sequence.border.position or not sequence.shares_pages:
            return None
        slot = self._states.keep(sequence.border.digest)
        return None if slot is None else Copy(sequence.row, slot)

    def _chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        tokens = self.limits.chunk_tokens
        pages = self.limits.chunk_pages
        for sequence in self._prefilling():
            end = min(sequence.num_written + tokens, sequence.num_to_prefill)
            if sequence.border is not None and sequence.num_written < sequence.border.position:
                end = min(end, sequence.border.position)
            pages -= -(-end // self.pool.page_size)
            if pages < 0:
                break
            chunks.append(Chunk(sequence, sequence.num_written, end))
            tokens -= end - sequence.num_written
            self._advance(chunks[-1])
            if not tokens or len(chunks) == self.limits.num_chunks:
                break
        return chunks

    def _prefilling(self):
        yield from [sequence for sequence in self.running if sequence.is_prefilling]
        while self.waiting and self._admit(self.waiting.first):
            yield self.running[-1]

    def _advance(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        sequence.num_written = chunk.end
        sequence.num_drafted = chunk.end
        # Already now: a later sequence of the same call may use these pages, since keys are written before any is read.
        self._register(sequence, chunk.end)
        if chunk.is_last:
            sequence.num_pending += 1
        self._release_invisible(sequence, chunk.start)

    def _release_invisible(self, sequence: Sequence, start: int) -> None:
        """Gives back the pages that the token at `start` and later ones do not read: those that this call and later
        ones compute. Calls under way read them before another sequence writes to them."""
        if self.limits.window is None:
            return
        end = max(start + 1 - self.limits.window, 0) // self.pool.page_size
        if end > sequence.num_released:
            self._register(sequence, start)
            self.pool.release(sequence.pages[sequence.num_released : end])
            sequence.num_released = end

    def _num_certain(self, sequence: Sequence) -> int:
        """Tokens with keys and values in pages, whatever the calls under way give."""
        written = min(sequence.num_written, len(sequence.tokens) - 1)
        return min(written, sequence.num_drafted) if self._has_draft_model else written

    def _yielding(self, first: Sequence) -> Sequence | None:
        """The sequence that gives its place to the first one that waits; None: none has to, or there is room.

        Only the first sequence of a client gets the place of one of another client, and only the first sequence of a
        request that of another request of the same client.
        """
        missing = -(-len(first.tokens) // self.pool.page_size)
        has_room = self._rows and missing + len(self.running) <= self.pool.num_free
        if has_room or not self.waiting.may_take_a_place(first.owner):
            return None
        if self.waiting.runs(first.owner.client):
            owners = Counter(each.owner for each in self.running if each.owner.client == first.owner.client)
        else:
            owners = Counter(each.owner[:1] for each in self.running)
        ((most, _),) = owners.most_common(1)
        youngest = next(s for s in reversed(self.running) if s.owner[: len(most)] == most)
        is_enough = missing + len(self.running) <= self.pool.num_free + len(youngest.pages)
        return youngest if is_enough else None

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.shares_pages:
            self.pool.register(sequence.tokens[:num_tokens], sequence.pages, sequence.num_released)

    def forget(self) -> None:
        """Empties the prefix cache, for other parameters; what runs continues."""
        self.pool.forget()
        if self._states is not None:
            self._states.forget()
        for sequence in self.running:
            sequence.shares_pages = False

    def _admit(self, sequence: Sequence) -> bool:
        if not self._rows:
            return False
        # Hidden states are not in pages.
        shares = self.pool.caches_prefixes and not sequence.wants_prompt_logprobs
        shared = self.pool.match(sequence.tokens) if shares else []
        border = None
        slot = None
        if self._states is not None and shared:
            shared, slot, border = self._with_state(shared)
        missing = -(-len(sequence.tokens) // self.pool.page_size) - len(shared)
        reserve = len(self.running)  # each running sequence soon needs one more page
        if missing + reserve > self.pool.num_free and self.running or missing > self.pool.num_free:
            self.pool.release(shared)
            return False
        self.waiting.admit(sequence)
        sequence.pages = shared + self.pool.allocate(missing)
        sequence.num_written = len(shared) * self.pool.page_size
        sequence.num_drafted = sequence.num_written
        sequence.num_to_prefill = len(sequence.tokens)
        sequence.row = self._rows.pop()
        if slot is not None:
            self._restored.append(Copy(sequence.row, slot))
        is_new = len(sequence.tokens) == len(sequence.request.prompt)
        sequence.border = border if is_new else None
        sequence.shares_pages = True
        self.running.append(sequence)
        if shares:
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.num_written
        if not sequence.index and is_new:
            sequence.request.num_cached = sequence.num_written
        return True

    def _with_state(self, known: list[int]) -> tuple[list[int], int | None, Border | None]:
        """known: pages of the beginning -> (those up to the last kept state, its slot, and where to keep another state
        if more pages are known).

        That two prompts begin the same way is the reason to keep a state: the second one computes it, at the end of
        what both have, and later ones continue from there.
        """
        count, slot = self._states.longest([self.pool.digest(page) for page in known])
        border = None
        if count < len(known):
            border = Border(len(known) * self.pool.page_size, self.pool.digest(known[-1]))
        self.pool.release(known[count:])
        return known[:count], slot, border

    # ------------------------------------------------------------------ decoding

    def _decode(self, decoding: list[Sequence]) -> Decode | Wait:
        is_constrained = any(sequence.matcher is not None for sequence in decoding)
        needs_newest = self.limits.draft_tokens or is_constrained
        if needs_newest and any(sequence.num_pending for sequence in decoding):
            return Wait()
        drafts = self._drafts(decoding)
        longest = max(sequence.limit - sequence.length for sequence in decoding)
        num_steps = 1 if drafts or is_constrained else min(self.limits.decode_steps, longest)
        runs = [self._run(sequence, num_steps, drafts.get(sequence, ())) for sequence in decoding]
        if self._missing(runs) <= self.pool.num_free:
            return self._started(runs, num_steps)
        runs = [self._run(sequence, 1, ()) for sequence in decoding]
        if self._missing(runs) <= self.pool.num_free:
            return self._started(runs, 1)
        if any(sequence.num_pending for sequence in self.running):
            return Wait()
        while self._missing(runs) > self.pool.num_free:
            youngest = self.running[-1]
            self.preempt(youngest)
            runs = [run for run in runs if run.sequence is not youngest]
        return self._started(runs, 1) if runs else Wait()

    def _drafts(self, decoding: list[Sequence]) -> Guesses:
        """Guesses, as far as there are rows of a step that no sequence needs."""
        if not self.limits.draft_tokens:
            return {}
        guessed = [s for s in decoding if not s.request.sampling.has_adjusted_logits and s.matcher is None]
        most = {s: min(self.limits.draft_tokens, s.limit - s.length - 1) for s in guessed}
        drafts = self._guess(most, self.limits.num_rows - len(decoding))
        return {sequence: draft for sequence, draft in drafts.items() if draft}

    def _run(self, sequence: Sequence, num_steps: int, draft: tuple[int, ...]) -> Run:
        count = min(num_steps, sequence.limit - sequence.length) + len(draft)
        return Run(sequence, sequence.length - 1, count, draft)

    def _missing(self, runs: Items[Run]) -> int:
        return sum(self._missing_pages(run) for run in runs)

    def _missing_pages(self, run: Run) -> int:
        return max(-(-(run.start + run.count) // self.pool.page_size) - len(run.sequence.pages), 0)

    def _started(self, runs: list[Run], num_steps: int) -> Decode:
        for run in runs:
            sequence = run.sequence
            sequence.pages += self.pool.allocate(self._missing_pages(run))
            sequence.num_pending += run.count
            sequence.num_written += run.count
            self._release_invisible(sequence, self._num_certain(sequence))
        return Decode(runs, num_steps)

    # ------------------------------------------------------------------ leaving

    def preempt(self, sequence: Sequence) -> None:
        """Gives its pages back; it waits before the others of its request."""
        self._leave(sequence)
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """Gives its pages back for good, wherever it is."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._register(sequence, max(self._num_certain(sequence), 0))
        self.pool.release(sequence.pages[sequence.num_released :])
        self._rows.append(sequence.row)
        self.running.remove(sequence)
        self.waiting.left(sequence)
        sequence.pages = []
        sequence.num_released = 0
        sequence.row = None
        sequence.num_written = 0
        sequence.num_pending = 0
