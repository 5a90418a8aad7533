"""What runs have logged, over steps, tokens, FLOPs or time."""

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megajax.config import Config
from megajax.mesh.config import MeshConfig
from megajax.training.reporting.metrics import read_metrics

logger = logging.getLogger("megajax")

XAxis = Literal["step", "tokens", "flops", "time"]
X_LABELS: dict[XAxis, str] = {
    "step": "step",
    "tokens": "tokens",
    "flops": "FLOPs (attention in full)",
    "time": "seconds in steps",
}
PANELS = (
    ("loss", ("mean_loss", "eval_loss")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("grad_norm",)),
    ("tokens/s", ("tokens_per_second",)),
    ("MFU", ("mfu",)),
)
"""(title, metrics) of each panel; panels without data are left out. Rates of evaluations follow (rate_panels)."""
SMOOTHED = ("mean_loss", "grad_norm")
KNOWN = {"eval_bits_per_byte", *(metric for _, metrics in PANELS for metric in metrics)}


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    name: str
    records: list[dict[str, Any]]
    """Lines of metrics.jsonl, by step."""
    flops_per_token: float | None
    """None if config.json cannot be read."""

    def series(self, metric: str, x: XAxis = "step", smooth: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(x, values) of the lines with a finite value of the metric; smooth: mean of the last N of them.

        Raises ValueError for x=flops without a config.
        """
        lines = [record for record in self.records if isinstance(record.get(metric), int | float)]
        values = np.array([record[metric] for record in lines], float)
        steps = np.array([record["step"] for record in lines], float)
        if smooth > 1 and len(values):
            sums = np.cumsum(np.insert(values, 0, 0.0))
            ends = np.arange(1, len(values) + 1)
            starts = np.maximum(ends - smooth, 0)
            values = (sums[ends] - sums[starts]) / (ends - starts)
        return self._x_of(steps, x), values

    def _x_of(self, steps: np.ndarray, x: XAxis) -> np.ndarray:
        """Evaluations have no tokens or seconds, so these are interpolated between logged steps."""
        if x == "step" or not len(steps):
            return steps
        if x == "time":
            known, seconds = self._seconds()
            return np.interp(steps, known, seconds)
        logged = [record for record in self.records if isinstance(record.get("consumed_tokens"), int)]
        if not logged:
            raise ValueError(f"run={self.name}: no line of metrics.jsonl has consumed_tokens; use --x=step")
        tokens = np.interp(steps, [r["step"] for r in logged], [r["consumed_tokens"] for r in logged])
        if x == "tokens":
            return tokens
        if self.flops_per_token is None:
            raise ValueError(
                f"run={self.name}: config.json, needed for FLOPs per token, cannot be read; use --x=tokens"
            )
        return tokens * self.flops_per_token

    def _seconds(self) -> tuple[list[float], list[float]]:
        """(steps, seconds spent in steps until then); step_seconds is the mean since the previous line."""
        steps = [0.0]
        seconds = [0.0]
        for record in self.records:
            if "loss" not in record:
                continue
            taken = (record["step"] - steps[-1]) * (record.get("step_seconds") or 0.0)
            steps.append(record["step"])
            seconds.append(seconds[-1] + taken)
        return steps, seconds


def read_run(run_dir: str | Path) -> RunMetrics:
    """Unreadable lines are logged and skipped. Raises ValueError if there is nothing to draw."""
    folder = Path(run_dir)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"run={run_dir}: {path} does not exist; give the directory of a run that has logged a step")
    records = []
    damaged = []
    for number, (_, record) in enumerate(read_metrics(path), start=1):
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        logger.warning("%s: %d lines cannot be read and are left out (%s)", path, len(damaged), shown)
    if not records:
        raise ValueError(f"run={run_dir}: {path} has no line that can be read; nothing to draw")
    return RunMetrics(folder.name, sorted(records, key=lambda record: record["step"]), _flops_per_token(folder))


def _flops_per_token(folder: Path) -> float | None:
    try:
        config = Config.load(folder)
        whole = dataclasses.replace(config, mesh=MeshConfig())
        return whole.make_model().flops_per_token(config.training.sequence_length, causal=False)
    except ValueError as error:
        logger.warning("%s", error)
        return None


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric of a run."""

    run: RunMetrics
    number: int
    """Of the run."""
    metric: str
    at: np.ndarray
    values: np.ndarray

    @property
    def is_evaluation(self) -> bool:
        return self.metric.startswith("eval_")

    @property
    def label(self) -> str:
        what = "evaluation" if self.is_evaluation else ""
        if self.is_evaluation and self.metric not in KNOWN:
            what = self.metric.removeprefix("eval_").replace("_", " ")
        return ", ".join(filter(None, (self.run.name, what))) or "training"


def rate_panels(runs: Sequence[RunMetrics]) -> list[tuple[str, list[str]]]:
    """Of the rates that evaluations report, those with the same first word together: answers, answers_grey."""
    names = sorted({name for run in runs for record in run.records for name in record if name.startswith("eval_")})
    rates = [name for name in names if name not in KNOWN]
    return [(title, list(group)) for title, group in itertools.groupby(rates, key=lambda name: name.split("_")[1])]


def panels(runs: Sequence[RunMetrics], x: XAxis, smooth: int) -> list[tuple[str, list[Curve]]]:
    """(title, curves) of each panel that is not empty. smooth: mean of the last N losses and gradient norms. Raises
    ValueError if there is nothing to draw."""
    found = []
    for title, metrics in (*PANELS, *rate_panels(runs)):
        curves = [
            Curve(run, number, metric, *run.series(metric, x, smooth if metric in SMOOTHED else 1))
            for (number, run), metric in itertools.product(enumerate(runs), metrics)
        ]
        if curves := [curve for curve in curves if len(curve.at)]:
            found.append((title, curves))
    if not found:
        raise ValueError("the runs have logged no loss, learning rate, gradient norm or speed; nothing to draw")
    return found
