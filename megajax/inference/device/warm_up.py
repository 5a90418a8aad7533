"""Compiles programs before they are needed, in stages, and says in the log how many are done."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megajax.inference.device.batches import Shapes

logger = logging.getLogger("megajax")

# Each compiles a program. They wait for each other (for the kernels that XLA measures, and for locks in LLVM), so more
# of them than processors are faster: Llama-3 8B was ready after 29 s with 24 threads, 40 s with 16, and 60 s with 8
# (one H100, 16 processors; 24 and 16 measured kernels only for up to 32 rows, 8 for all).
THREADS = max(8, min(2 * (os.cpu_count() or 1), 32))
QUIET_SECONDS = 5.0  # between two lines in the log

Compilation = Callable[[], Any]


class Stage(NamedTuple):
    """With its programs, and those of the stages before, an engine can keep to these shapes."""

    shapes: Shapes
    compilations: list[Compilation]
    """One for each program, which any thread may call."""

    def compile(self) -> None:
        """All programs, several at a time."""
        with ThreadPoolExecutor(THREADS) as threads:
            for job in [threads.submit(compilation) for compilation in self.compilations]:
                job.result()


class Counter:
    """Counts compilations, from any thread: one line in the log every few seconds, and one for the last."""

    def __init__(self):
        self._begin = self._shown = time.monotonic()
        self._total = 0
        self._done = 0
        self._lock = threading.Lock()

    def counted(self, compilation: Compilation) -> Compilation:
        self._total += 1

        def compile_and_count() -> None:
            compilation()
            with self._lock:
                self._done += 1
                now = time.monotonic()
                if self._done == self._total or now > self._shown + QUIET_SECONDS:
                    self._shown = now
                    seconds = now - self._begin
                    logger.info("compiled %d of %d programs in %.1f s", self._done, self._total, seconds)

        return compile_and_count


def staged(shapes: Sequence[Shapes], compilations: Sequence[Sequence[Mapping[tuple, Compilation]]]) -> list[Stage]:
    """A stage for each of the shapes, with the programs that none before has. compilations: for each of the shapes,
    those of each executor, by what tells them apart."""
    counter = Counter()
    seen = set()
    found = []
    for of_shapes, of_executors in zip(shapes, compilations, strict=True):
        named = {(number, key): made for number, each in enumerate(of_executors) for key, made in each.items()}
        found.append(Stage(of_shapes, [counter.counted(made) for name, made in named.items() if name not in seen]))
        seen |= named.keys()
    return found
