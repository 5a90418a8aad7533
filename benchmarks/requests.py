"""What engines are asked for, the same for megajax and its peers: a mix of requests at once, or at random times."""

import random
import time
from collections.abc import Callable, Iterable

import numpy as np

SHORTEST = 64
LONGEST = 1024
NEW_TOKENS = 256
SECONDS = 8.0
"""For which requests arrive."""

Submit = Callable[[int, list[int]], None]
"""(number, prompt): greedy, NEW_TOKENS tokens whatever they are."""
Step = Callable[[], Iterable[tuple[int, int]]]
"""-> of each request that has new tokens, its number and how many; waits for them if there are requests."""


def prompts_of(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Of random tokens, and of lengths that are spread evenly from SHORTEST to LONGEST."""
    generator = random.Random(seed)
    lengths = [generator.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def at_once(count: int, vocab_size: int, submit: Submit, step: Step, seed: int = 0) -> dict:
    """seed: of the prompts; with the same one, an engine may know them."""
    return _run([0.0] * count, prompts_of(count, vocab_size, seed), submit, step)


def at_rate(rate: float, vocab_size: int, submit: Submit, step: Step) -> dict:
    """Requests of independent users (a Poisson process), rate per second on average."""
    generator = random.Random(1)
    count = round(SECONDS * rate)
    arrivals = np.cumsum([generator.expovariate(rate) for _ in range(count)]).tolist()
    return {"rate": rate} | _run(arrivals, prompts_of(count, vocab_size, round(100 * rate)), submit, step)


def _run(arrivals: list[float], prompts: list[list[int]], submit: Submit, step: Step) -> dict:
    """Milliseconds [p50, p99]: from arrival to first token; per token after it; the longest pause of a request."""
    times: list[list[float]] = [[] for _ in prompts]
    counts = [0] * len(prompts)
    num_submitted = 0
    start = time.perf_counter()
    while min(counts) < NEW_TOKENS:
        now = time.perf_counter() - start
        while num_submitted < len(prompts) and arrivals[num_submitted] <= now:
            submit(num_submitted, prompts[num_submitted])
            num_submitted += 1
        if all(count == NEW_TOKENS for count in counts[:num_submitted]):
            time.sleep(arrivals[num_submitted] - now)
            continue
        for number, count in step():
            counts[number] += count
            times[number].append(time.perf_counter() - start)
    seconds = time.perf_counter() - start
    first = [all_of_one[0] - arrival for all_of_one, arrival in zip(times, arrivals, strict=True)]
    per_token = [(all_of_one[-1] - all_of_one[0]) / (NEW_TOKENS - 1) for all_of_one in times]
    pauses = [float(np.max(np.diff(all_of_one))) for all_of_one in times]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "seconds": seconds,
        "generated_tokens_per_second": sum(counts) / seconds,
        "first_token_ms": _percentiles(first),
        "per_token_ms": _percentiles(per_token),
        "longest_pause_ms": _percentiles(pauses),
    }


def _percentiles(seconds: list[float]) -> list[float]:
    return [round(1000 * float(np.percentile(seconds, percent)), 2) for percent in (50, 99)]
