"""What engines are asked for, the same for megajax and its peers: requests at once, or at random times.

mixed: 64 to 1,024 prompt tokens, evenly spread. shared: one of four beginnings of 512 tokens, and 64 to 512 of its own.
long: one of eight requests has 4,096 to 7,168 prompt tokens, the others 64 to 512.
"""

import random
import time
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import numpy as np

Workload = Literal["mixed", "shared", "long"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
NEW_TOKENS = 256
SECONDS = 8.0
"""For which requests arrive."""

Submit = Callable[[int, list[int]], None]
"""(number, prompt): greedy, NEW_TOKENS tokens whatever they are."""
Step = Callable[[], Iterable[tuple[int, int]]]
"""-> of each request that has new tokens, its number and how many; waits for them if there are requests."""


def prompts_of(count: int, vocab_size: int, seed: int, workload: Workload = "mixed") -> list[list[int]]:
    """Of random tokens."""
    generator = random.Random(seed)

    def tokens(shortest: int, longest: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(generator.randint(shortest, longest))]

    if workload == "shared":
        beginnings = [tokens(512, 512) for _ in range(4)]
        return [generator.choice(beginnings) + tokens(64, 512) for _ in range(count)]
    if workload == "long":
        return [tokens(64, 512) if number % 8 else tokens(4096, 7168) for number in range(count)]
    return [tokens(64, 1024) for _ in range(count)]


def at_once(count: int, vocab_size: int, submit: Submit, step: Step, seed: int = 0) -> dict:
    """seed: of the prompts; with the same one, an engine may know them."""
    return _run([0.0] * count, prompts_of(count, vocab_size, seed), submit, step)


def at_rate(rate: float, vocab_size: int, submit: Submit, step: Step, workload: Workload = "mixed") -> dict:
    """Requests of independent users (a Poisson process), rate per second on average."""
    generator = random.Random(1)
    count = round(SECONDS * rate)
    arrivals = np.cumsum([generator.expovariate(rate) for _ in range(count)]).tolist()
    prompts = prompts_of(count, vocab_size, round(100 * rate) + WORKLOADS.index(workload), workload)
    return {"rate": rate, "workload": workload} | _run(arrivals, prompts, submit, step)


def cases(rates: Iterable[float]) -> list[tuple[float, Workload]]:
    """(rate, workload) of what arrives: the mix at each rate, the others at the median one."""
    each = sorted(rates)
    return [(rate, "mixed") for rate in each] + [(each[len(each) // 2], name) for name in WORKLOADS[1:] if each]


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
