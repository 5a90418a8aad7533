"""Latency and throughput under load, as users of a server see them.

Requests arrive either at a rate, at random as independent users do (a Poisson process), or each when an earlier one has
finished (a closed loop, with a fixed number of requests at a time).
"""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import httpx2
import numpy as np

from megajax.inference.config import Sampling, Workload
from megajax.inference.server.engine_thread import EngineThread, Overloaded

NUM_TOKEN_IDS = 256  # prompts are random tokens below this, which every vocabulary has


def prompts_of(workload: Workload) -> list[list[int]]:
    """New ones each time, so that no prefix cache knows them."""
    shape = (workload.num_requests, workload.prompt_tokens)
    return np.random.default_rng().integers(0, NUM_TOKEN_IDS, shape).tolist()


@dataclasses.dataclass(frozen=True)
class Load:
    """Either of the two."""

    request_rate: float | None = None
    """Requests per second on average; infinity: all at once."""
    concurrency: int | None = None
    """Requests at a time."""

    def __str__(self) -> str:
        return f"{self.request_rate:g}/s" if self.concurrency is None else f"{self.concurrency} at a time"


class Target(Protocol):
    def stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        """Greedily generates max_tokens tokens; yields the number of new tokens as they arrive. Raises Overloaded."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Seconds. Percentiles of latencies are None if there is nothing to measure."""

    load: Load
    workload: Workload
    num_finished: int
    num_refused: int
    """Because the server was overloaded."""
    seconds: float
    """From the first arrival to the last token."""
    num_generated: int
    first_token: dict[str, float]
    """{"p50": ..., "p99": ...} from the arrival of a request to its first token."""
    between_tokens: dict[str, float]
    """Between two tokens of a request; of k tokens that arrive together each took a k-th of the time."""
    whole: dict[str, float]
    """From the arrival of a request to its last token."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_generated / self.seconds

    def record(self) -> dict:
        """For JSON."""
        load: dict[str, Any] = {
            name: value for name, value in dataclasses.asdict(self.load).items() if value is not None
        }
        if self.load.request_rate == math.inf:
            load["request_rate"] = "inf"  # JSON has no infinity
        rest = {
            "num_finished": self.num_finished,
            "num_refused": self.num_refused,
            "seconds": self.seconds,
            "requests_per_second": self.num_finished / self.seconds,
            "generated_tokens_per_second": self.tokens_per_second,
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.between_tokens,
            "request_latency_seconds": self.whole,
        }
        return load | dataclasses.asdict(self.workload) | rest


@dataclasses.dataclass
class _Record:
    arrival: float
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """(when, number of tokens)."""


async def measure(target: Target, load: Load, workload: Workload) -> Result:
    """Sends all requests of the workload, and waits for their answers."""
    prompts = prompts_of(workload)
    finished: list[_Record] = []
    num_refused = 0

    async def send(prompt: Sequence[int]) -> None:
        nonlocal num_refused
        record = _Record(time.monotonic())
        try:
            async for count in target.stream(prompt, workload.max_tokens):
                record.arrivals.append((time.monotonic(), count))
        except Overloaded:
            num_refused += 1
            return
        finished.append(record)

    begin = time.monotonic()
    if load.concurrency is not None:
        waiting = iter(prompts)

        async def send_one_after_another() -> None:
            for prompt in waiting:
                await send(prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(send_one_after_another())
    else:
        rate = load.request_rate or math.inf
        pauses = np.random.default_rng(workload.seed).exponential(1 / rate, workload.num_requests)
        async with asyncio.TaskGroup() as group:
            for prompt, at in zip(prompts, begin + np.cumsum(pauses), strict=True):
                await asyncio.sleep(at - time.monotonic())
                group.create_task(send(prompt))
    return _result(load, workload, finished, num_refused, time.monotonic() - begin)


def _result(load: Load, workload: Workload, records: list[_Record], num_refused: int, seconds: float) -> Result:
    between = []
    for record in records:
        for (before, _), (now, count) in zip(record.arrivals, record.arrivals[1:], strict=False):
            between += [(now - before) / count] * count
    return Result(
        load=load,
        workload=workload,
        num_finished=len(records),
        num_refused=num_refused,
        seconds=seconds,
        num_generated=sum(count for record in records for _, count in record.arrivals),
        first_token=_percentiles([record.arrivals[0][0] - record.arrival for record in records]),
        between_tokens=_percentiles(between),
        whole=_percentiles([record.arrivals[-1][0] - record.arrival for record in records]),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 99)} if values else {}


def table(results: Sequence[Result]) -> str:
    columns = ("first token ms", "between tokens", "whole request")
    head = f"{'':>14}" + "".join(f"{column:>20}" for column in columns)
    lines = [head, f"{'load':>14}" + f"{'p50':>12}{'p99':>8}" * 3 + f"{'requests/s':>12}{'tokens/s':>10}{'refused':>9}"]
    for result in results:
        cells = ""
        for latency in (result.first_token, result.between_tokens, result.whole):
            cells += "".join(
                f"{1000 * latency[name]:>{width}.1f}" if latency else f"{'-':>{width}}"
                for name, width in (("p50", 12), ("p99", 8))
            )
        rates = f"{result.num_finished / result.seconds:>12.2f}{result.tokens_per_second:>10,.0f}"
        lines.append(f"{str(result.load):>14}{cells}{rates}{result.num_refused:>9}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------- targets


class EngineTarget:
    """An engine in this process, on its thread as in the server, without HTTP."""

    def __init__(self, thread: EngineThread):
        self._thread = thread

    async def stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        with await self._thread.generate([prompt], sampling) as generation:
            async for part in generation.parts():
                if part.output.tokens:
                    yield len(part.output.tokens)


class ServerTarget:
    """A server with OpenAI's interface. As an asynchronous context manager it closes its connections."""

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Idle connections are closed before any server closes them, perhaps while a request is on its way.
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=1.0)
        self._client = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None)
        self.model: str | None = None

    async def __aenter__(self) -> "ServerTarget":
        """Raises ValueError if the server does not answer."""
        try:
            answer = await self._client.get("/v1/models")
            self.model = _checked(answer)["data"][0]["id"]
        except (httpx2.HTTPError, LookupError, ValueError) as error:
            await self._client.aclose()
            raise ValueError(f"url={self.url}: {type(error).__name__}: {error}") from None
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.aclose()

    async def stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                await answer.aread()
                _checked(answer)
            async for event in _events(answer):
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if count := sum(len(choice["token_ids"]) for choice in event["choices"]):
                    yield count


async def _events(answer: httpx2.Response) -> AsyncIterator[dict]:
    """Server-sent events. Their lines end with newlines only, and what JSON may contain, such as U+0085, ends none."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _checked(answer: httpx2.Response) -> dict:
    """Raises Overloaded and ValueError."""
    if answer.status_code == 429:
        raise Overloaded(answer.text)
    if answer.is_error:
        raise ValueError(f"status {answer.status_code}: {answer.text}")
    return answer.json()
