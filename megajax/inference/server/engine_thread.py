"""Runs an engine on a thread of its own, for coroutines.

An engine belongs to one thread (engine_loop.py). Coroutines send it commands, and it sends what a step has produced
back to the event loop, in one call per step.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from megajax.inference.engine import Engine, Output, Request, Stats
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.scheduling.waiting import Owner
from megajax.inference.server.engine_loop import EngineLoop
from megajax.inference.server.engine_process import EngineProcess
from megajax.inference.tokens.sampling import Sampling
from megajax.weights.sources import Source

logger = logging.getLogger("megajax")

EVENTS_PER_SECOND = 5000
"""Of all streams together: an event costs 20 to 70 us of Python (on two machines), during which the thread of an engine
in this process cannot run. With more than a hundred streams, two or three tokens are sent together."""
FEW_SAMPLES = 16
"""A request with at most this many samples may take all free places."""

_numbers = itertools.count()  # of generations


class Overloaded(Exception):
    """Too many requests wait or run."""


class NotReady(Exception):
    """The engine is warming up, or has failed."""


def check_room(num_open: int, num_new: int, max_requests: int) -> None:
    """num_open: samples that wait or run; num_new: those of a request. Raises Overloaded if there is no room for the
    new ones beside them, and ValueError if there is none without them.

    A request gets half of the places that are free, so that large ones leave room for others.
    """
    most = _room(max_requests)
    if num_new > most:
        raise ValueError(f"{num_new} samples (prompts times n) are too many for one request; ask for at most {most}")
    if num_new > _room(max_requests - num_open):
        raise Overloaded(f"{num_open} samples wait or run: no room for {num_new} more (max_requests={max_requests})")


def _room(num_free: int) -> int:
    return max(num_free // 2, min(num_free, FEW_SAMPLES))


class Part(NamedTuple):
    """New tokens of one sample of one prompt."""

    prompt: int
    """Number of the prompt in its generation."""
    output: Output


class Generation:
    """The prompts of one call of `EngineThread.generate`, each with its samples.

    A context manager: leaving it cancels what has not finished.
    """

    def __init__(self, thread: "EngineThread", num_prompts: int, sampling: Sampling, deadline: float | None):
        """deadline: time of the event loop."""
        self.sampling = sampling
        self.requests: list[Request] = []
        """One per prompt, once the engine has accepted them."""
        self.arrival = time.monotonic()
        self.last_seen: dict[tuple[int, int], float] = {}
        """(prompt, sample) -> time.monotonic() of the arrival of its newest tokens."""
        self._thread = thread
        self.num_unfinished = num_prompts * sampling.n
        """Samples whose last part has not arrived."""
        self.num_generated = 0
        """Tokens that have arrived."""
        self._unread: dict[tuple[int, int], Part] = {}  # by prompt and sample
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._alarm = None if deadline is None else loop.call_at(deadline, self.fail, TimeoutError())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    async def parts(self) -> AsyncIterator[Part]:
        """The parts of all prompts until every sample has finished; those of one sample that have arrived since it was
        read are joined.

        Raises TimeoutError at the deadline, and NotReady if the engine fails.
        """
        while self.num_unfinished or self._unread:
            await self._has_news.wait()
            self._has_news.clear()
            unread = list(self._unread.values())
            self._unread = {}
            for number, part in enumerate(unread):
                if number:
                    await asyncio.sleep(0)  # others take turns with who has much to read
                yield part
            if self._error is not None and self.num_unfinished:
                raise self._error

    def put(self, part: Part, now: float) -> None:
        """The first and the last part of a sample can be read at once, others from the next `wake` on."""
        output = part.output
        key = part.prompt, output.index
        is_last = output.finish_reason is not None
        if is_last or key not in self.last_seen:
            self._has_news.set()
        self.last_seen[key] = now
        self.num_generated += len(output.tokens)
        self.num_unfinished -= is_last
        before = self._unread.get(key)
        self._unread[key] = part if before is None else Part(part.prompt, before.output.joined(output))

    def wake(self) -> None:
        if self._unread:
            self._has_news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._has_news.set()

    def close(self) -> None:
        """No deadline any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_) -> None:
        self._thread.leave(self)


class Observer(Protocol):
    """Called on the event loop."""

    def produced(self, generation: Generation, part: Part, now: float) -> None:
        """now: time.monotonic(); generation.last_seen does not have this part yet."""

    def left(self, num_unfinished: int) -> None:
        """The caller is not interested in the rest of a generation any more."""


class EngineThread:
    def __init__(
        self,
        engine: Engine | EngineProcess,
        max_requests: int,
        observer: Observer | None = None,
        on_failure: Callable[[], None] | None = None,
        share: float = 1.0,
    ):
        """max_requests: most samples that wait or run; a generation with which there would be more is refused.
        on_failure: called on the event loop if the engine raises an error. share: of EVENTS_PER_SECOND."""
        self.engine = engine
        self.is_ready = False
        self.failure: BaseException | None = None
        self._max_requests = max_requests
        self._observer = observer
        self._on_failure = on_failure
        self._open: set[Generation] = set()  # of the event loop
        self._calls: set[asyncio.Future] = set()  # that wait for the thread; of the event loop
        self._owners: dict[int, tuple[Generation, int]] = {}  # id of a request -> whose prompt it is; of the thread
        self._is_started = asyncio.Event()  # the engine is ready, or has failed
        self._share = share
        self._next_wake = 0.0  # no generation wakes before, on the clock of the event loop
        self._waking: asyncio.TimerHandle | None = None
        self._work = EngineLoop(engine, self._on_ready, self._on_step)
        if isinstance(engine, EngineProcess):
            engine.on_failure = self._work.wake
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ on the event loop

    def start(self) -> None:
        """Returns at once; the engine warms up in the background, and compiles on when it is ready."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Returns when everything that was accepted has finished."""
        self._work.stop()
        await asyncio.to_thread(self._thread.join)

    async def until_ready(self) -> None:
        """Raises NotReady if the engine fails."""
        await self._is_started.wait()
        self.check_ready()

    @property
    def stats(self) -> Stats:
        """As of the latest step."""
        return self._work.stats

    @property
    def num_open(self) -> int:
        """Samples that wait or run, whether or not their texts are being read."""
        return sum(generation.num_unfinished for generation in self._open)

    def check_ready(self) -> None:
        """Raises NotReady."""
        if self.failure is not None:
            raise NotReady(f"the engine has failed: {type(self.failure).__name__}: {self.failure}")
        if not self.is_ready:
            raise NotReady("the model is warming up; try again later")

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        deadline: float | None = None,
        client: Hashable = None,
        images: Sequence[Sequence[PromptImage]] = (),
    ) -> Generation:
        """Returns when the engine has accepted all prompts.

        deadline: time of the event loop. client: clients take turns. images: of each prompt (Engine.submit). Raises
        ValueError for a prompt or a setting that the engine refuses, Overloaded, NotReady, and TimeoutError at the
        deadline.
        """
        self.check_ready()
        check_room(self.num_open, len(prompts) * sampling.n, self._max_requests)
        generation = Generation(self, len(prompts), sampling, deadline)
        self._open.add(generation)
        try:
            async with asyncio.timeout_at(deadline):
                owner = Owner(client, next(_numbers))
                await self.call(lambda: self._submit(generation, prompts, owner, images))
        except BaseException:
            self._close(generation)
            raise
        return generation

    def leave(self, generation: Generation) -> None:
        """Cancels what has not finished."""
        if self._observer is not None and generation.num_unfinished:
            self._observer.left(generation.num_unfinished)
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        generation.close()
        self._open.remove(generation)
        self._work.put(lambda: self._drop(generation))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Calls the function on the thread of the engine, between two steps; returns or raises what it does.

        Raises NotReady if the engine is not ready, or fails meanwhile.
        """
        self.check_ready()
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                self._loop.call_soon_threadsafe(_settle, future, result, None)

        self._work.put(run)
        return await future

    async def check(self, source: Source) -> None:
        """As Engine.check. Raises NotReady, too."""
        self.check_ready()
        await asyncio.to_thread(self.engine.check, source)

    async def load(self, source: Source) -> None:
        """As Engine.load, between two steps. Raises NotReady, too."""
        await self.call(lambda: self.engine.load(source))

    def _become_ready(self, seconds: float, num_left: int) -> None:
        meanwhile = f"; {num_left} more programs are compiled meanwhile" if num_left else ""
        logger.info("ready: warmed up in %.1f s%s", seconds, meanwhile)
        self.is_ready = True
        self._is_started.set()

    def _deliver(self, parts: list[tuple[Generation, Part]]) -> None:
        now = time.monotonic()
        for generation, part in parts:
            if generation not in self._open:  # left meanwhile
                continue
            if self._observer is not None:
                self._observer.produced(generation, part, now)
            generation.put(part, now)
        if self._waking is None:
            self._waking = self._loop.call_at(self._next_wake, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._next_wake = self._loop.time() + self.num_open / (EVENTS_PER_SECOND * self._share)
        for generation in self._open:
            generation.wake()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._is_started.set()
        failure = NotReady(f"the engine has failed: {type(error).__name__}: {error}")
        for generation in self._open:
            generation.fail(failure)
        for future in list(self._calls):
            _settle(future, None, failure)
        if self._on_failure is not None:
            self._on_failure()

    # ------------------------------------------------------------------ on the thread of the engine

    def _run(self) -> None:
        try:
            self._work.run()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _on_ready(self, seconds: float, num_left: int) -> None:
        self._loop.call_soon_threadsafe(self._become_ready, seconds, num_left)

    def _on_step(self, outputs: Sequence[Output]) -> None:
        owned = [(*self._owners[o.request.id], o) for o in outputs if o.request.id in self._owners]
        parts = [(generation, Part(number, output)) for generation, number, output in owned]
        if parts:
            self._loop.call_soon_threadsafe(self._deliver, parts)

    def _submit(
        self,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        owner: Owner,
        images: Sequence[Sequence[PromptImage]],
    ) -> None:
        for number, prompt in enumerate(prompts):
            of_prompt = images[number] if images else ()
            request = self.engine.submit(prompt, generation.sampling, owner, of_prompt)
            self._owners[request.id] = generation, number
            generation.requests.append(request)

    def _drop(self, generation: Generation) -> None:
        for request in generation.requests:
            del self._owners[request.id]
            self.engine.cancel(request)


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():  # the caller has given up
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
