"""Evaluates every checkpoint of a run, while it trains or later, and adds the results to the run's metrics.

A process of its own: training does not wait, and a mistake in a task cannot end it. Results go to
RUN/evaluations.jsonl, one line per step and task, and to TensorBoard. Steps that the file already has are not evaluated
again.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megajax.checkpoint.steps import saved_steps
from megajax.config import Config
from megajax.training.reporting.best_effort import Appender
from megajax.training.reporting.metrics import TensorBoardFile, read_metrics

logger = logging.getLogger("megajax")

POLL_SECONDS = 5.0


def watch(
    run_dir: str | Path,
    task: dict[str, Any],
    evaluate: Callable[[int], dict[str, Any]],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Evaluates the steps that are saved, oldest first, and then each new one; ends after the last step of the run.

    task: {"task": its name, "settings": ...}, JSON values. evaluate: step -> results; it may fail for a step that
    training has deleted in the meantime. Yields the lines written: {"step", **task, "results"}.
    """
    folder = Path(run_dir)
    path = folder / "evaluations.jsonl"
    lines = Appender(path)
    scalars = TensorBoardFile(folder / "tensorboard" / "evaluations")
    task = json.loads(json.dumps(task))
    done = {line["step"] for _, line in read_metrics(path) if line is not None and task.items() <= line.items()}
    while True:
        steps = [step for step in saved_steps(folder) if step not in done]
        for step in steps:
            done.add(step)
            try:
                results = evaluate(step)
            except Exception:
                if step in saved_steps(folder):
                    raise
                logger.warning("step %d was deleted before it was evaluated", step)
                continue
            record = {"step": step, **task, "results": results}
            lines.append(to_json(record).encode() + b"\n")
            if Config.load(folder).logging.tensorboard:
                scalars.write(_scalars(task["task"], results), step)
            yield record
        if steps:
            continue
        if done and max(done) >= Config.load(folder).training.steps:
            return
        sleep(POLL_SECONDS)


def to_json(record: dict[str, Any], indent: int | None = None) -> str:
    """JSON, with null for numbers that are not finite."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record), indent=indent, allow_nan=False)


def _scalars(name: str, results: dict[str, Any]) -> dict[str, float]:
    """The numbers of nested results, by their path."""
    found = {}
    for key, value in results.items():
        if isinstance(value, dict):
            found |= _scalars(f"{name}/{key}", value)
        elif isinstance(value, int | float):
            found[f"{name}/{key}"] = value
    return found
