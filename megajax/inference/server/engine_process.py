"""An engine in a process of its own, which does not share the interpreter with the server and with other engines.

The process runs the steps (engine_loop.py). Commands and what they produce pass through a pipe; prompts are checked
here, before they are sent.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import itertools
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megajax.inference.engine import Engine, Output, Request, Stats
from megajax.inference.prompts import Prompts
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.scheduling.waiting import Owner
from megajax.inference.server.engine_loop import EngineLoop, compilations
from megajax.inference.tokens.sampling import Sampling, TokenLogprobs
from megajax.training.reporting.console import log_to_stderr
from megajax.weights.sources import Source

logger = logging.getLogger("megajax")

NEWS_SECONDS = 0.002
"""`step` waits at most this long for news, so a command may be delayed by as much."""
END_SECONDS = 20
"""A process that has not ended after this time is killed. Programs are stored for EXIT_SECONDS of it."""


class Made(NamedTuple):
    """The first message of the process."""

    prompts: Prompts
    adapters: tuple[str, ...]
    stats: Stats


class Ready(NamedTuple):
    """The process can serve; it compiles the rest itself."""

    stats: Stats


class Begun(NamedTuple):
    """Of a request, with its first output."""

    num_cached: int
    prompt_logprobs: list[TokenLogprobs] | None


class Step(NamedTuple):
    outputs: list[tuple[int, tuple]]
    """(id that `submit` has sent, the fields of the Output after its request)."""
    begun: dict[int, Begun]
    stats: Stats


class Answer(NamedTuple):
    """To a command with this number."""

    number: int
    error: Exception | None


class Failure(NamedTuple):
    text: str


class EngineProcess:
    """Has the methods of an Engine that an EngineThread calls."""

    def __init__(self, name: str, make: Callable[[], Engine], environment: Mapping[str, str] = {}):
        """Starts the process; `open` waits until it has made the engine.

        name: in its log. make: is pickled. environment: of the process.
        """
        self.on_failure: Callable[[], None] = _nothing
        """Called on another thread if the process fails; `step` raises the error."""
        self._connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(other, name, make, dict(environment)), name=name)
        self._process.start()
        other.close()
        self._news: queue.SimpleQueue[Step | Failure] = queue.SimpleQueue()
        self._ready = Future[None]()
        self._requests: dict[int, Request] = {}  # not finished; of the thread that calls `step`
        self._num_unfinished: dict[int, int] = {}  # samples of each of them
        self._answers: dict[int, Future[None]] = {}
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._failure: Failure | None = None
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, name=f"{name}, news", daemon=True)

    def open(self) -> None:
        """Raises ValueError if the engine cannot be made."""
        message = self._receive()
        if isinstance(message, Failure):
            raise ValueError(message.text)
        self.prompts, self.adapters, self._stats = message
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ask_to_end(self) -> None:
        """Returns at once; `close` waits for the end."""
        self._is_closed = True
        self._send("close")

    def close(self) -> None:
        """Ends the process, and what it still does."""
        self.ask_to_end()
        self._process.join(END_SECONDS)
        self._process.kill()
        self._process.join()

    # ------------------------------------------------------------------ as an Engine

    def warm_up_first(self) -> list:
        """Returns when the process is ready to serve; it compiles the rest itself."""
        self._ready.result()
        return []

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, owner: Owner = Owner(), images: Sequence[PromptImage] = ()
    ) -> Request:
        self.prompts.check(prompt, sampling)
        tokens = self.prompts.with_images(prompt, images, sampling)[0] if images else list(prompt)
        request = Request(tokens, sampling, owner=owner)
        self._requests[request.id] = request
        self._num_unfinished[request.id] = sampling.n
        self._send("submit", request.id, prompt, sampling, owner, images)
        return request

    def cancel(self, request: Request) -> None:
        if request.id in self._requests:
            self._send("cancel", request.id)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._failure is not None

    def step(self) -> list[Output]:
        """What the process has produced since; empty if nothing is there within NEWS_SECONDS. Raises RuntimeError if
        the process has failed."""
        try:
            news = self._news.get(timeout=NEWS_SECONDS)
        except queue.Empty:
            return []
        if isinstance(news, Failure):
            raise RuntimeError(news.text)
        self._stats = news.stats
        for number, begun in news.begun.items():
            request = self._requests[number]
            request.num_cached = begun.num_cached
            request.prompt_logprobs = begun.prompt_logprobs
        return [self._received(number, fields) for number, fields in news.outputs]

    def stats(self) -> Stats:
        """As of the latest step that has arrived."""
        return self._stats

    def check(self, source: Source) -> None:
        """As Engine.check, on another thread of the process than the steps."""
        self._call("check", source)

    def load(self, source: Source) -> None:
        self._call("load", source)

    # ------------------------------------------------------------------ messages

    def _received(self, number: int, fields: tuple) -> Output:
        output = Output(self._requests[number], *fields)
        if output.finish_reason is not None:
            self._num_unfinished[number] -= 1
            if not self._num_unfinished[number]:
                del self._requests[number], self._num_unfinished[number]
        return output

    def _send(self, *command: Any) -> None:
        """To a process that has ended nothing is sent: the thread that reads notices it, too."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(command)

    def _call(self, name: str, source: Source) -> None:
        """Returns when the process has done it, or raises what it raised."""
        number = next(self._numbers)
        future = self._answers[number] = Future[None]()
        if self._failure is not None:
            raise RuntimeError(self._failure.text)
        self._send(name, number, pickle.dumps(source))
        future.result()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return self._ending()

    def _ending(self) -> Failure:
        self._process.join(END_SECONDS)
        return Failure(f"the process of {self._process.name} has ended with exit code {self._process.exitcode}")

    def _read(self) -> None:
        """On a thread of its own."""
        while self._failure is None:
            message = self._receive()
            if self._is_closed:
                return
            if isinstance(message, Answer):
                _settle(self._answers.pop(message.number), message.error)
            elif isinstance(message, Ready):
                self._stats = message.stats
                self._ready.set_result(None)
            elif isinstance(message, Step):
                self._news.put(message)
            else:
                self._fail(message)

    def _fail(self, failure: Failure) -> None:
        self._failure = failure
        self._news.put(failure)
        error = RuntimeError(failure.text)
        for future in [*self._answers.values(), self._ready]:
            if not future.done():
                future.set_exception(error)
        self.on_failure()


# ---------------------------------------------------------------------- in the process


def _run(connection: Connection, name: str, make: Callable[[], Engine], environment: Mapping[str, str]) -> None:
    """The server ends this process; signals to the whole group are for the server."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.environ.update(environment)
    log_to_stderr(name)
    faulthandler.enable(file=2)
    try:
        _Worker(connection).run(make)
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("failed")
        connection.send(Failure(f"{name}: {error}"))


class _Worker:
    def __init__(self, connection: Connection):
        self._connection = connection
        self._sending = threading.Lock()
        self._requests: dict[int, Request] = {}  # by the ids of the server, until they have finished
        self._ids: dict[int, int] = {}  # id of each of them here -> that of the server
        self._num_unfinished: dict[int, int] = {}  # samples, by the ids of the server; of requests with an output

    def run(self, make: Callable[[], Engine]) -> None:
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        self._engine = make()
        self._count = compilations()
        self._loop = EngineLoop(self._engine, lambda *_: self._send(Ready(self._stats())), self._on_step)
        self._send(Made(self._engine.prompts, self._engine.adapters, self._stats()))
        self._loop.run()

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _stats(self) -> Stats:
        return dataclasses.replace(self._engine.stats(), compiled_programs=self._count())

    def _read(self) -> None:
        """On a thread of its own; ends the process when the server has closed it. It sends the other commands only once
        the engine is made."""
        while True:
            try:
                name, *arguments = self._connection.recv()
            except (EOFError, OSError):  # the server has ended without a word
                os._exit(0)
            if name == "close":
                atexit._run_exitfuncs()  # processes of multiprocessing do not; programs are stored there
                os._exit(0)
            if name == "check":
                threading.Thread(target=self._answer, args=[self._engine.check, *arguments]).start()
            else:
                self._loop.put(lambda name=name, arguments=arguments: getattr(self, f"_{name}")(*arguments))

    def _submit(self, number: int, prompt: Sequence[int], *arguments: Any) -> None:
        request = self._engine.submit(prompt, *arguments)
        self._requests[number] = request
        self._ids[request.id] = number

    def _cancel(self, number: int) -> None:
        if number in self._requests:
            self._engine.cancel(self._requests[number])

    def _load(self, number: int, source: bytes) -> None:
        self._answer(self._engine.load, number, source)

    def _answer(self, function: Callable[[Source], None], number: int, source: bytes) -> None:
        """source: pickled; a folder is opened again, which may fail."""
        error = None
        try:
            function(pickle.loads(source))
        except ValueError as raised:
            error = ValueError(str(raised))
        except Exception as raised:
            logger.exception("new weights cannot be loaded")
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        self._send(Answer(number, error))

    def _on_step(self, outputs: Sequence[Output]) -> None:
        begun = {}
        sent = []
        for output in outputs:
            request = output.request
            number = self._ids[request.id]
            if number not in self._num_unfinished:
                self._num_unfinished[number] = request.sampling.n
                begun[number] = Begun(request.num_cached, request.prompt_logprobs)
            sent.append((number, output[1:]))
            if output.finish_reason is not None:
                self._num_unfinished[number] -= 1
                if not self._num_unfinished[number]:
                    del self._requests[number], self._ids[request.id], self._num_unfinished[number]
        self._send(Step(sent, begun, self._stats()))


def _settle(future: Future[None], error: Exception | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _nothing() -> None:
    pass
