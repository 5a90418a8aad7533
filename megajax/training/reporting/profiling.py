"""Profiles some steps of a run."""

from pathlib import Path
from typing import Any

import jax

from megajax.training.reporting.best_effort import BestEffort
from megajax.training.reporting.console import Console


class Profiler:
    """Traces the steps (first, last), as far as this run executes them; None: nothing."""

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, console: Console):
        self._steps = steps
        self._folder = run_dir / "profile"
        self._console = console
        self._metrics: Any = None  # of the latest step of the current trace
        self._writes = BestEffort(str(self._folder))

    def before(self, step: int) -> None:
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and self._metrics is None:
            with self._writes:
                jax.profiler.start_trace(str(self._folder))

    def after(self, step: int, metrics: dict) -> None:
        if self._steps is not None and self._steps[0] <= step <= self._steps[1]:
            self._metrics = metrics
            if step == self._steps[1]:
                self._stop()

    def _stop(self) -> None:
        jax.block_until_ready(self._metrics)
        self._metrics = None
        with self._writes:
            jax.profiler.stop_trace()
            self._console.note(f"profile written to {self._folder}")

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_) -> None:
        if self._metrics is not None:
            self._stop()
