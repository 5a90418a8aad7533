"""Runs the steps of an engine on the thread that owns it, and commands of other threads between two steps."""

import functools
import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from megajax.inference.device.warm_up import Stage
from megajax.inference.engine import Output, Stats


class EngineLoop:
    def __init__(
        self,
        engine: Any,
        on_ready: Callable[[float, int], None],
        on_step: Callable[[Sequence[Output]], None],
    ):
        """engine: an Engine, or what has its methods. Both functions are called on its thread. on_ready: with the
        seconds that warming up took, and the number of programs that are left to compile meanwhile; on_step: with what
        a step has produced."""
        self.stats: Stats = engine.stats()
        """As of the latest step."""
        self._engine = engine
        self._on_ready = on_ready
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._has_ended = threading.Event()

    # ------------------------------------------------------------------ any thread

    def put(self, command: Callable[[], None]) -> None:
        """To be called between two steps; an error ends the loop."""
        self._inbox.put(command)

    def wake(self) -> None:
        """The engine has work that no command has given it."""
        self.put(_nothing)

    def stop(self) -> None:
        """The loop ends when there is no work left."""
        self._inbox.put(None)

    # ------------------------------------------------------------------ the thread of the engine

    def run(self) -> None:
        """Warms up, then works until it is stopped. Raises what the engine and the commands raise."""
        try:
            begin = time.monotonic()
            stages = self._engine.warm_up_first()
            self.stats = self._engine.stats()
            _keep_out_of_collections()
            self._on_ready(time.monotonic() - begin, sum(len(stage.compilations) for stage in stages))
            # No daemon: a process that ends while XLA compiles would be aborted.
            threading.Thread(target=self._compile, args=[stages], name="compiler", daemon=False).start()
            while self._take_commands():
                outputs = self._engine.step()
                self.stats = self._engine.stats()
                self._on_step(outputs)
        finally:
            self._has_ended.set()

    def _compile(self, stages: Sequence[Stage]) -> None:
        """On a thread of its own: one program at a time, to leave processors to the engine."""
        for stage in stages:
            for compilation in stage.compilations:
                if self._has_ended.is_set():
                    return
                try:
                    compilation()
                except Exception as error:
                    self.put(functools.partial(_raise, error))
                    return
            self.put(functools.partial(self._engine.use_shapes, stage.shapes))
        if stages:
            _keep_out_of_collections()

    def _take_commands(self) -> bool:
        """Runs all commands, and waits for one while the engine has no work. False: the loop is to end."""
        while True:
            if self._is_stopping and not self._engine.has_work:
                return False
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                self._is_stopping = True
            else:
                command()
            self.stats = self._engine.stats()


@functools.cache
def compilations() -> Callable[[], int]:
    """-> a function that returns how many programs XLA has compiled since the first call of this one."""
    durations = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: len(durations)


def _keep_out_of_collections() -> None:
    """What there is now, modules and traced programs, stays: the garbage collector need not look through it again,
    which stopped the engine for 0.2 s, once in some 800 requests (gpt_tiny on two CPU cores)."""
    gc.collect()
    gc.freeze()


def _raise(error: Exception) -> None:
    raise error


def _nothing() -> None:
    pass
