"""The pool of pages: who uses a page, and which beginnings are known."""

import numpy as np

from megajax.inference.pages import PagePool
from megajax.inference.sampling import Sampling
from megajax.inference.scheduler import Limits, Prefill, Request, Scheduler, Sequence


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
    assert pool.allocate(1) is None
    pool.release(new)
    pool.forget()
    assert pool.match([3, 4, 5]) == [] and pool.num_free == 2


def test_no_call_writes_to_a_page_that_another_sequence_reads_in_it():
    """Pages behind a window are given back, to sequences that begin in the same call too."""
    generator = np.random.default_rng(0)
    window, size = 6, 8
    pool = PagePool(6, size, caches_prefixes=False)
    limits = Limits(4, chunk_tokens=16, num_chunks=4, chunk_pages=20, decode_steps=3, window=window)
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
