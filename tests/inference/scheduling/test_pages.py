"""The pool of pages: who uses a page, and which beginnings are known."""

import random
from collections import deque

import numpy as np
import pytest

from megajax.inference.device.programs import Drawn
from megajax.inference.results import Results
from megajax.inference.scheduling.pages import KeptStates, PagePool
from megajax.inference.scheduling.scheduler import CALL_SECONDS, Limits, Scheduler
from megajax.inference.scheduling.waiting import Owner
from megajax.inference.scheduling.work import Decode, Prefill, Request, Sequence, Wait
from megajax.inference.tokens.sampling import Sampling


def test_a_known_beginning_is_found_up_to_the_last_whole_page_before_the_end():
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    pool.register([1, 2, 3, 4, 5], pages)
    assert pool.match([1, 2, 3, 4, 9]) == pages[:2]
    assert pool.match([1, 2, 3, 4]) == pages[:1]  # the last token is computed again
    assert pool.match([3, 4, 1]) == []  # a page depends on what comes before it
    pool.release(pages)
    assert pool.num_used == 2
    pool.release(pages[:2])
    pool.release(pages[:1])
    assert pool.num_used == 0


def test_least_recently_used_pages_go_first_and_ends_before_beginnings():
    pool = PagePool(4, 1)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.register([1, 2], old)
    pool.register([3, 4], new)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match([3, 4, 5]) == new
    with pytest.raises(KeyError):
        pool.allocate(1)
    pool.release(new)
    pool.forget()
    assert pool.match([3, 4, 5]) == [] and pool.num_free == 2


def test_the_least_recently_used_kept_state_is_replaced():
    states = KeptStates(2)
    slots = {name: states.keep(name) for name in (b"a", b"b")}
    assert set(slots.values()) == {0, 1} and states.keep(b"a") is None
    assert states.longest([b"a", b"x"]) == (1, slots[b"a"])
    assert states.keep(b"c") == slots[b"b"]
    assert states.longest([b"b"]) == (0, None) and states.longest([b"x", b"c"]) == (2, slots[b"b"])
    states.forget()
    assert states.longest([b"a"]) == (0, None) and {states.keep(b"a"), states.keep(b"b")} == {0, 1}


def test_prompts_continue_from_a_state_where_an_earlier_one_branched_off():
    pool = PagePool(20, 4)
    limits = Limits(4, chunks=[64], num_chunks=4, chunk_pages=20, decode_steps=1)
    scheduler = Scheduler(pool, limits, states=KeptStates(2))
    start = list(range(10))

    def calls(*prompts):
        requests = [Request(prompt, Sampling(max_tokens=1)) for prompt in prompts]
        for request in requests:
            request.sequences = [Sequence(request, 0, list(request.prompt), len(request.prompt) + 1)]
            scheduler.waiting += request.sequences
        works = []
        while (work := scheduler.next()) is not None:
            works.append(work)
        for request in requests:
            scheduler.finish(request.sequences[0])
        return [([(chunk.start, chunk.end) for chunk in work.chunks], len(work.restored), len(work.kept))
                for work in works]  # fmt: skip

    assert calls([*start, 50]) == [([(0, 11)], 0, 0)]
    assert calls([*start, 51, 52]) == [([(0, 8)], 0, 1), ([(8, 12)], 0, 0)]  # the first two pages are those of both
    assert calls([*start, 53], [*start[:5], 54]) == [([(8, 11), (0, 4)], 1, 1), ([(4, 6)], 0, 0)]
    assert calls([*start, 51, 52, 53]) == [([(8, 12)], 1, 1), ([(12, 13)], 0, 0)]  # replaces the state of start[:4]
    assert scheduler.prefix_hits == 16
    scheduler.forget()
    assert calls([*start, 51, 52, 53]) == [([(0, 13)], 0, 0)]
    assert pool.num_used == 0


class Device:
    """Runs calls of a model of which the state of a sequence is the tuple of its tokens, and decides the next one."""

    def __init__(self):
        self.rows = {}
        self.kept = {}
        self.num_restored = 0

    @staticmethod
    def following(state: tuple[int, ...]) -> int:
        return (sum(state) + len(state)) % 5

    def run(self, work: Prefill | Decode) -> tuple[Drawn, None, Drawn | None]:
        """-> (what is drawn, no log-probabilities of prompts, what is drawn beside prompts)."""
        if isinstance(work, Decode):
            return self._drawn(self._decode(work.runs, work.num_steps)), None, None
        beside = self._drawn(self._decode(work.beside, 1)) if work.beside else None
        return self._drawn(self._prefill(work)), None, beside

    @staticmethod
    def _drawn(tokens) -> Drawn:
        return Drawn(np.array(tokens, np.int32), None)

    def _prefill(self, work):
        for copy in work.restored:
            self.rows[copy.row] = self.kept[copy.slot]
            self.num_restored += 1
        for chunk in work.chunks:
            sequence = chunk.sequence
            assert not chunk.start or self.rows[sequence.row] == tuple(sequence.tokens[: chunk.start])
            self.rows[sequence.row] = tuple(sequence.tokens[: chunk.end])
        for copy in work.kept:
            self.kept[copy.slot] = self.rows[copy.row]
        return [self.following(self.rows[chunk.sequence.row]) for chunk in work.chunks if chunk.is_last]

    def _decode(self, runs, num_steps):
        drawn = np.zeros((num_steps, len(runs)))
        for number, run in enumerate(runs):
            state = self.rows[run.sequence.row]
            assert len(state) == run.start
            for step in range(run.count):
                state = (*state, self.following(state))
                drawn[step, number] = self.following(state)
            self.rows[run.sequence.row] = state
        return drawn


def step(scheduler, results, device, calls):
    """As Engine.step: starts the next call, and reads the one before it."""
    while isinstance(work := scheduler.next(), Wait):
        results.read(*calls.popleft())
    if work is not None:
        calls.append((work, *device.run(work)))
    if calls and (work is None or len(calls) > 1):
        results.read(*calls.popleft())


def test_sequences_continue_from_their_own_states_whatever_happens_around_them():
    """Results are read a call late, sequences are preempted and cancelled, and the cache is emptied."""
    rng = random.Random(0)
    device = Device()
    num_preemptions = 0
    for _ in range(20):
        pool = PagePool(10, 2)
        steps, rows_beside = rng.choice((1, 3)), rng.choice((0, 3))
        limits = Limits(3, [2, 6], num_chunks=2, chunk_pages=14, decode_steps=steps, rows_beside=rows_beside)
        scheduler = Scheduler(pool, limits, states=KeptStates(rng.choice((1, 3))))
        results = Results(scheduler, None)
        calls = deque()
        requests = []
        num_steps = 0
        while num_steps < 80 or scheduler.has_work or calls:
            num_steps += 1
            if num_steps < 80 and rng.random() < 0.4:
                prompt = [rng.randrange(2)] * rng.randrange(1, 12) + [rng.randrange(5)]
                owner = Owner(rng.randrange(2), rng.randrange(3))
                request = Request(prompt, Sampling(max_tokens=rng.randrange(1, 8), n=rng.choice((1, 2))), owner=owner)
                limit = len(prompt) + request.sampling.max_tokens
                request.sequences = [Sequence(request, n, [*prompt], limit) for n in range(request.sampling.n)]
                scheduler.waiting += request.sequences
                requests.append(request)
            if requests and rng.random() < 0.05:
                for sequence in rng.choice(requests).sequences:
                    results.cancel(sequence)
            if rng.random() < 0.02:
                scheduler.forget()
            step(scheduler, results, device, calls)
        assert pool.num_used == 0
        num_preemptions += scheduler.num_preemptions
        reasons = {(output.request, output.index): output.finish_reason for output in results.take()}
        for sequence in [sequence for request in requests for sequence in request.sequences]:
            tokens = list(sequence.request.prompt)
            while len(tokens) < len(sequence.tokens):
                tokens.append(device.following(tuple(tokens)))
            assert sequence.tokens == tokens
            assert len(tokens) == sequence.limit or reasons[sequence.request, sequence.index] == "cancelled"
    assert device.num_restored > 20 and num_preemptions > 20


def submit(scheduler, prompt, max_tokens, owner=Owner()):
    request = Request(prompt, Sampling(max_tokens=max_tokens), owner=owner)
    request.sequences = [Sequence(request, 0, [*prompt], len(prompt) + max_tokens)]
    scheduler.waiting += request.sequences
    return request


MEASURED = ((4, 4, 0.012), (16, 4, 0.015), (20, 0, 0.005), (64, 4, 0.045))
"""Calls with prompts; a step takes 8 ms, and half of it counts as decoding: they cost 8, 11 and 41 ms. The one that
decodes nothing is for prompts alone."""


@pytest.mark.parametrize(
    "length, computed",
    [
        (3, 3),
        (10, 10),  # with 16; 4 and 4 and 4 cost 24
        (18, 16),  # 16 and 4: 19; 64: 41
        (48, 16),  # three times 16: 33
        (60, 60),  # 16, 16, 16 and 16 cost 44
        (90, 64),
    ],
)
def test_calls_with_prompts_decode_too_and_take_the_least_time(length, computed):
    limits = Limits(
        4, [4, 16, 20, 64], num_chunks=4, chunk_pages=200, decode_steps=2, rows_beside=4, step_seconds=((4, 0.008),),
        prefill_seconds=MEASURED,
    )  # fmt: skip
    scheduler = Scheduler(PagePool(200, 2), limits)
    submit(scheduler, [1] * 10, 40)
    assert [(chunk.start, chunk.end) for chunk in scheduler.next().chunks] == [(0, 10)]
    assert isinstance(scheduler.next(), Decode)
    submit(scheduler, [2] * length, 40)
    call = scheduler.next()
    assert [(chunk.start, chunk.end) for chunk in call.chunks] == [(0, computed)]
    assert [(run.start, run.count) for run in call.beside] == [(11, 1)]


def test_calls_of_slow_steps_have_fewer():
    measured = ((1, CALL_SECONDS / 2.6), (3, 2 * CALL_SECONDS))
    limits = Limits(4, [64], num_chunks=4, chunk_pages=200, decode_steps=4, rows_beside=4, step_seconds=measured)
    scheduler = Scheduler(PagePool(200, 2), limits)
    for num_steps in (3, 1, 1, 4):
        submit(scheduler, [1] * 10, 40)
        assert isinstance(scheduler.next(), Prefill)
        assert scheduler.next().num_steps == num_steps


def test_calls_take_as_long_as_the_host_needs_for_the_next_one():
    limits = Limits(4, [64], num_chunks=4, chunk_pages=200, decode_steps=8, step_seconds=((4, 0.005),))
    scheduler = Scheduler(PagePool(200, 2), limits)
    submit(scheduler, [1] * 10, 300)
    assert isinstance(scheduler.next(), Prefill)
    scheduler.next()
    for seconds, num_steps in ((0.004, 1), (0.0104, 2), (0.011, 3), (1.0, 4), (0.004, 1)):
        for _ in range(200):
            scheduler.host_took(seconds)
        assert scheduler.next().num_steps == num_steps


def test_calls_that_wait_for_the_one_before_do_not_become_longer():
    limits = Limits(4, [64], num_chunks=4, chunk_pages=200, decode_steps=8, draft_tokens=2, step_seconds=((4, 0.005),))
    scheduler = Scheduler(PagePool(200, 2), limits)
    (sequence,) = submit(scheduler, list(range(10)), 300).sequences  # nothing to guess from
    assert isinstance(scheduler.next(), Prefill)
    for number in range(3):
        sequence.num_pending = 0
        sequence.tokens.append(20 + number)
        assert scheduler.next().num_steps == 1
        for _ in range(200):
            scheduler.host_took(0.015)


@pytest.mark.parametrize("first, second", [(Owner(0, 1), Owner(0, 2)), (Owner(0, 1), Owner(1, 2))])
def test_the_first_sequence_of_another_request_does_not_wait_for_one_with_many(first, second):
    device = Device()
    limits = Limits(4, chunks=[64], num_chunks=4, chunk_pages=200, decode_steps=2)
    scheduler = Scheduler(PagePool(200, 2), limits, states=KeptStates(3))
    results = Results(scheduler, None)

    calls = deque()
    many = [submit(scheduler, [1, 2, 3], 40, first) for _ in range(10)]
    for _ in range(5):
        step(scheduler, results, device, calls)
    short = submit(scheduler, [1, 2, 3], 2, second)
    for _ in range(8):
        step(scheduler, results, device, calls)
    assert short.is_finished and scheduler.num_preemptions == 1 and not any(request.is_finished for request in many)
    while not all(request.is_finished for request in many):
        step(scheduler, results, device, calls)
    assert scheduler.num_preemptions == 1
    assert all(request.sequences[0].tokens == many[0].sequences[0].tokens for request in many)


def test_no_call_writes_to_a_page_that_another_sequence_reads_in_it():
    """Pages behind a window are given back, to sequences that begin in the same call too."""
    generator = np.random.default_rng(0)
    window, size = 6, 8
    pool = PagePool(6, size, caches_prefixes=False)
    limits = Limits(4, chunks=[16], num_chunks=4, chunk_pages=20, decode_steps=3, window=window)
    scheduler = Scheduler(pool, limits)
    num_released = 0
    for _ in range(300):
        if len(scheduler.waiting) < 3:
            prompt = [1] * int(generator.integers(1, 40))
            request = Request(prompt, Sampling(max_tokens=8))
            request.sequences = [Sequence(request, 0, list(prompt), len(prompt) + 8)]
            scheduler.waiting += request.sequences
        work = scheduler.next()
        if isinstance(work, Prefill):
            spans = [(chunk.sequence, chunk.start, chunk.end) for chunk in work.chunks]
        else:
            spans = [(run.sequence, run.start, run.start + run.count) for run in work.runs]
        used = [
            sequence.pages[max(start + 1 - window, 0) // size : -(-end // size)] for sequence, start, end in spans
        ]  # fmt: skip
        assert len({page for pages in used for page in pages}) == sum(map(len, used))
        num_released += sum(sequence.num_released for sequence, _, _ in spans)
        for sequence in list(scheduler.running):  # as if the results of the call were known
            sequence.tokens += [1] * sequence.num_pending
            sequence.num_pending = 0
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish(sequence)
    assert num_released > 100
