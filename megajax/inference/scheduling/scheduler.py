"""Decides what the next call of the device computes: chunks of prompts, or the next tokens of the running sequences.

While both have work, a call has both, with one token of each sequence that runs; or they alternate, where a call cannot
have both (Limits.rows_beside), so that long prompts do not stop the others. A sequence is admitted when a row
and enough pages for its tokens are free; clients take turns (waiting.py). When a running sequence needs a
page and none is free, the youngest one gives its pages back and waits again; its tokens are then computed once more
(recomputation). So does one for the first sequence of a client, or of a request, if another one has several.

The device is one call ahead of what the host knows: `num_pending` tokens of a sequence are being generated. Only its
length matters here, so that the next call can be prepared meanwhile.
"""

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from megajax.inference.scheduling.pages import KeptStates, PagePool
from megajax.inference.scheduling.waiting import WaitingLine
from megajax.inference.scheduling.work import (
    NO_ROW,
    Border,
    Chunk,
    Copy,
    Decode,
    Guess,
    Guesses,
    Prefill,
    Run,
    Sequence,
    Wait,
    look_up,
)

# Of a call that decodes: about what the host takes to prepare the next one, because a request that arrives waits for
# the calls under way. If the host takes longer, so do calls, up to the second number: else the device would wait.
CALL_SECONDS = 0.006
MOST_CALL_SECONDS = 0.02
TOLERATED_STEPS = 0.1  # by which the host may take longer than a call
SMOOTHING_CALLS = 16  # of the mean of what the host takes


class Limits(NamedTuple):
    num_rows: int
    """Sequences that run at the same time."""
    chunks: Items[int]
    """Prompt tokens of a call: a few sizes, to which others are padded; ascending."""
    num_chunks: int
    """Sequences whose prompts a call computes."""
    chunk_pages: int
    """Pages that these sequences have together."""
    decode_steps: int
    """Tokens per sequence of a call, at most."""
    draft_tokens: int = 0
    """Guesses per sequence of a call."""
    window: int | None = None
    """Last tokens that any layer reads; None: all."""
    whole_images: bool = False
    """Whether the tokens of an image see each other, so that one call has to compute them all."""
    image_tokens: int | None = None
    """Results of images that a call may read; None: any number."""
    rows_beside: int = 0
    """Sequences that a call with prompts decodes."""
    step_seconds: Items[tuple[int, float]] = ()
    """(number of sequences, seconds of a step that decodes up to that many), ascending; empty: not measured."""
    prefill_seconds: Items[tuple[int, int, float]] = ()
    """(prompt tokens, sequences, seconds) of calls with up to that many prompt tokens that decode up to that many
    sequences; empty: not measured."""


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
        self.waiting: WaitingLine[Sequence] = WaitingLine()
        self.running: list[Sequence] = []
        """In the order of admission; the last one is the first to be preempted."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.free_rows: list[int] = []
        self.use(limits)
        self._has_prefilled = False
        self._host_seconds = 0.0
        self._overlaps = False  # the host prepares a decoding call while the one before it runs
        self._states = states
        self._restored: list[Copy] = []
        """Since the last call with prompts."""

    def use(self, limits: Limits) -> None:
        """Calls keep these limits from here on. Rows in use must be among those that they allow."""
        self.limits = limits
        used = {sequence.row for sequence in self.running}
        self.free_rows = [row for row in reversed(range(limits.num_rows)) if row not in used]

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
        mixes = len(decoding) <= self.limits.rows_beside and not _is_constrained(decoding)
        chunks = [] if self._has_prefilled and decoding and not mixes else self._chunks(len(decoding) if mixes else 0)
        self._has_prefilled = bool(chunks)
        if chunks:
            return self._prefill(chunks, decoding if mixes else [])
        return self._decode(decoding) if decoding else None

    # ------------------------------------------------------------------ prompts

    def _prefill(self, chunks: list[Chunk], decoding: list[Sequence]) -> Prefill:
        runs = [self._run(sequence, 1, ()) for sequence in decoding]
        if self._missing(runs) <= self.pool.num_free:
            self._start(runs)
        else:
            runs = []  # The next call without prompts preempts one of them.
        states = self._states
        if states is None:
            return Prefill(chunks, runs)
        restored = self._restored
        self._restored = []
        # Sequences of this call have been admitted already: only those of later calls find these states.
        kept = [copy for chunk in chunks if (copy := _kept(chunk, states)) is not None]
        return Prefill(chunks, runs, restored, kept)

    def _call_tokens(self, num_decoding: int) -> int:
        """Prompt tokens of a call that decodes this many sequences: the size with which all prompts are read soonest.

        A padded call is one call; smaller ones without padding bring as many tokens of those that decode. Half of the
        time of these counts: they are wanted, and prompts wait for them.
        """
        available = sum(each.num_to_prefill - each.num_written for each in self.running if each.is_prefilling)
        if self.free_rows:
            available += self.waiting.num_tokens
        decoding_seconds = self._step_seconds(num_decoding) / 2 if num_decoding else 0.0
        costs: dict[int, float] = {}
        for tokens, most, seconds in self.limits.prefill_seconds:
            if most >= num_decoding:
                costs[tokens] = min(seconds - decoding_seconds, costs.get(tokens, math.inf))
        sizes = sorted(costs) or self.limits.chunks
        if available > sizes[-1] or not costs:
            return next((size for size in sizes if size >= available), sizes[-1])
        return _cheapest(max(available, 1), sizes, costs)[1]

    def _chunks(self, num_decoding: int) -> list[Chunk]:
        """num_decoding: sequences that the call decodes."""
        chunks: list[Chunk] = []
        # An image may need a whole call.
        tokens = self.limits.chunks[-1]
        if not self.limits.whole_images:
            tokens = self._call_tokens(num_decoding)
        pages = self.limits.chunk_pages
        room = math.inf if self.limits.image_tokens is None else self.limits.image_tokens
        for sequence in self._prefilling():
            end = min(sequence.num_written + tokens, sequence.num_to_prefill)
            if sequence.border is not None and sequence.num_written < sequence.border.position:
                end = min(end, sequence.border.position)
            if sequence.images is not None:
                whole = self.limits.whole_images
                end, results = sequence.images.end_within(sequence.num_written, end, room, whole=whole)
                if end == sequence.num_written:
                    break
                room -= results
            pages -= -(-end // self.pool.page_size)
            if pages < 0:
                break
            chunks.append(Chunk(sequence, sequence.num_written, end))
            tokens -= end - sequence.num_written
            self._advance(chunks[-1])
            if not tokens or len(chunks) == self.limits.num_chunks:
                break
        return chunks

    def _prefilling(self) -> Iterator[Sequence]:
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
        has_room = self.free_rows and missing + len(self.running) <= self.pool.num_free
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
            tokens = sequence.tokens[:num_tokens]
            self.pool.register(tokens, sequence.pages, sequence.num_released, sequence.request.sampling.adapter)

    def forget(self) -> None:
        """Empties the prefix cache, for other parameters; what runs continues."""
        self.pool.forget()
        if self._states is not None:
            self._states.forget()
        for sequence in self.running:
            sequence.shares_pages = False

    def _admit(self, sequence: Sequence) -> bool:
        if not self.free_rows:
            return False
        # Hidden states are not in pages.
        shares = self.pool.caches_prefixes and not sequence.wants_prompt_logprobs
        shared = self.pool.match(sequence.tokens, sequence.request.sampling.adapter) if shares else []
        border = None
        slot = None
        if self._states is not None and shared:
            shared, slot, border = self._with_state(shared, self._states)
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
        sequence.row = self.free_rows.pop()
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

    def _with_state(self, known: list[int], states: KeptStates) -> tuple[list[int], int | None, Border | None]:
        """known: pages of the beginning -> (those up to the last kept state, its slot, and where to keep another state
        if more pages are known).

        That two prompts begin the same way is the reason to keep a state: the second one computes it, at the end of
        what both have, and later ones continue from there.
        """
        count, slot = states.longest([self.pool.digest(page) for page in known])
        border = None
        if count < len(known):
            border = Border(len(known) * self.pool.page_size, self.pool.digest(known[-1]))
        self.pool.release(known[count:])
        return known[:count], slot, border

    # ------------------------------------------------------------------ decoding

    def _decode(self, decoding: list[Sequence]) -> Decode | Wait:
        is_constrained = _is_constrained(decoding)
        needs_newest = bool(self.limits.draft_tokens) or is_constrained
        self._overlaps = not needs_newest
        if needs_newest and any(sequence.num_pending for sequence in decoding):
            return Wait()
        drafts = self._drafts(decoding)
        longest = max(sequence.limit - sequence.length for sequence in decoding)
        num_steps = 1 if drafts or is_constrained else min(self._num_steps(len(decoding)), longest)
        runs = [self._run(sequence, num_steps, drafts.get(sequence, ())) for sequence in decoding]
        if self._missing(runs) > self.pool.num_free:
            num_steps = 1
            runs = [self._run(sequence, 1, ()) for sequence in decoding]
        if self._missing(runs) <= self.pool.num_free:
            self._start(runs)
            return Decode(runs, num_steps)
        if any(sequence.num_pending for sequence in self.running):
            return Wait()
        while self._missing(runs) > self.pool.num_free:
            youngest = self.running[-1]
            self.preempt(youngest)
            runs = [run for run in runs if run.sequence is not youngest]
        if not runs:
            return Wait()
        self._start(runs)
        return Decode(runs, num_steps)

    def _num_steps(self, num_rows: int) -> int:
        seconds = self._step_seconds(num_rows)
        if not seconds:
            return self.limits.decode_steps
        of_host = math.ceil(self._host_seconds / seconds - TOLERATED_STEPS)
        wanted = max(round(CALL_SECONDS / seconds), min(of_host, int(MOST_CALL_SECONDS / seconds)))
        return max(min(wanted, self.limits.decode_steps), 1)

    def host_took(self, seconds: float) -> None:
        """For a call that decodes: from the end of the step before to the end of this one, without waiting for results.
        Ignored where a call needs the results of the one before."""
        if self._overlaps:
            self._host_seconds += (min(seconds, MOST_CALL_SECONDS) - self._host_seconds) / SMOOTHING_CALLS

    def _step_seconds(self, num_rows: int) -> float:
        """Of a step that decodes this many sequences; 0: not measured."""
        return next((seconds for rows, seconds in self.limits.step_seconds if rows >= num_rows), 0.0)

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

    def _start(self, runs: list[Run]) -> None:
        for run in runs:
            sequence = run.sequence
            sequence.pages += self.pool.allocate(self._missing_pages(run))
            sequence.num_pending += run.count
            sequence.num_written += run.count
            self._release_invisible(sequence, self._num_certain(sequence))

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
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._register(sequence, max(self._num_certain(sequence), 0))
        self.pool.release(sequence.pages[sequence.num_released :])
        self.free_rows.append(sequence.row)
        self.running.remove(sequence)
        self.waiting.left(sequence)
        sequence.pages = []
        sequence.num_released = 0
        sequence.row = NO_ROW
        sequence.num_written = 0
        sequence.num_pending = 0


def _is_constrained(decoding: Items[Sequence]) -> bool:
    return any(sequence.matcher is not None for sequence in decoding)


def _cheapest(tokens: int, sizes: Items[int], costs: dict[int, float]) -> tuple[float, int]:
    """-> (cost of the calls that compute `tokens` prompt tokens, size of the first of them)."""
    padded = next(size for size in sizes if size >= tokens)
    full = max((size for size in sizes if size < tokens), default=None)
    if full is None:
        return costs[padded], padded
    rest, _ = _cheapest(tokens - full, sizes, costs)
    return min((costs[padded], padded), (costs[full] + rest, full))


def _kept(chunk: Chunk, states: KeptStates) -> Copy | None:
    """Where the state at the end of a chunk goes, if it is to be kept."""
    sequence = chunk.sequence
    if sequence.border is None or chunk.end != sequence.border.position or not sequence.shares_pages:
        return None
    slot = states.keep(sequence.border.digest)
    return None if slot is None else Copy(sequence.row, slot)
