"""Plots runs and plans: python -m megajax plot RUN [RUN ...] --output=FILE.png

Loss, learning rate, gradient norm, throughput and MFU of one or several run
directories, from their metrics.jsonl. The loss is the mean since the line
before, as the terminal shows it; files show that of single steps faintly.

In a notebook: `figure([read_run("runs/a"), read_run("runs/b")])`. `train.py
--config=NAME --plan --plan_figure=FILE.svg` draws the memory and the pipeline
of a plan.
"""

import dataclasses
import itertools
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from megajax.config import Config
from megajax.fields.ranges import PositiveInt
from megajax.mesh.devices import Device
from megajax.parallel.schedule import Stages, Table, make_table
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import USABLE_MEMORY
from megajax.terminal.command_line import POSITIONAL, errors_in_one_line, parse
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.console import format_bytes, format_count, log_to_stderr
from megajax.training.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger("megajax")

XAxis = Literal["step", "tokens", "flops", "time"]
X_LABELS = {"step": "step", "tokens": "tokens", "flops": "FLOPs (attention in full)", "time": "seconds in steps"}
PANELS = (
    ("loss", ("mean_loss", "eval_loss")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("grad_norm",)),
    ("tokens/s", ("tokens_per_second",)),
    ("MFU", ("mfu",)),
)
"""(title, metrics) of each panel; panels without data are left out."""
SMOOTHED = ("mean_loss", "grad_norm")
FAINT = {"alpha": 0.3, "linewidth": 0.8}
"""How the loss of single steps is drawn, behind their mean."""
MAX_TICKS = 80
"""Only this many ticks of a schedule are drawn."""


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
            raise ValueError(f"run={self.name}: config.json, needed for FLOPs per token, cannot be read; "
                             "use --x=tokens")  # fmt: skip
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
            records.append(with_mean_loss(record))
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        logger.warning("%s: %d lines cannot be read and are left out (%s)", path, len(damaged), shown)
    if not records:
        raise ValueError(f"run={run_dir}: {path} has no line that can be read; nothing to draw")
    return RunMetrics(folder.name, sorted(records, key=lambda record: record["step"]), _flops_per_token(folder))


def with_mean_loss(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl; one of an older run, or one without it, gets the loss of its step as mean_loss."""
    return {"mean_loss": record["loss"], **record} if "loss" in record else dict(record)


def _flops_per_token(folder: Path) -> float | None:
    try:
        config = Config.load(folder)
        layers = dataclasses.replace(config, mesh=type(config.mesh)())
        return layers.make_model().flops_per_token(config.training.sequence_length, causal=False)
    except ValueError as error:
        logger.warning("%s", error)
        return None


# ----------------------------------------------------------------------------- curves


def figure(runs: list[RunMetrics], x: XAxis = "step", smooth: int = 1) -> "Figure":
    """A matplotlib figure with a panel per kind of metric and a colour per run."""
    panels = [(title, metrics) for title, metrics in PANELS if any(len(r.series(m)[0]) for r in runs for m in metrics)]
    if not panels:
        raise ValueError("the runs have logged no loss, learning rate, gradient norm or speed; nothing to draw")
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    made = new_figure(5.5 * columns, 3 * rows)
    axes = made.subplots(rows, columns, squeeze=False)
    for axis, (title, metrics) in itertools.zip_longest(axes.flat, panels, fillvalue=("", ())):
        axis.set_visible(bool(title))
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.set_xlabel(X_LABELS[x])
        for number, run in enumerate(runs):
            for metric in metrics:
                is_eval = metric.startswith("eval_")
                at, values = run.series(metric, x, smooth if metric in SMOOTHED else 1)
                label = f"{run.name}, evaluation" if is_eval else run.name
                style = {"marker": "o", "markersize": 3, "linestyle": "--"} if is_eval else {"linewidth": 1.2}
                if metric == "mean_loss":
                    axis.plot(*run.series("loss", x), color=f"C{number}", **FAINT)
                if len(at):
                    axis.plot(at, values, color=f"C{number}", label=label, **style)
    axes.flat[0].legend(fontsize="small")
    return made


def save(made: "Figure", path: str) -> None:
    """Raises ValueError for an unsupported file type, and if the file cannot be written."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    known = ("png", "svg", "pdf")
    if suffix not in known:
        raise ValueError(f"{path}: the name must end in .{', .'.join(known)}")
    try:
        made.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror})") from None


def new_figure(width: float, height: float) -> "Figure":
    """Without pyplot, which has windows and global state. Raises ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(
            "figures need matplotlib, which is not installed; pip install 'megajax[plot]' (without it, megajax plot "
            "--terminal draws curves of runs)"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


# ----------------------------------------------------------------------------- terminal

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, [row][column]


def drawing(runs: list[RunMetrics], x: XAxis = "step", smooth: int = 1, width: int = 80, height: int = 10) -> str:
    """The panels of `figure` as braille text, one below the other; width and height in characters."""
    parts = []
    for title, metrics in PANELS:
        lines = []
        for run, metric in itertools.product(runs, metrics):
            at, values = run.series(metric, x, smooth if metric in SMOOTHED else 1)
            if len(at):
                lines.append((f"{run.name}, evaluation" if metric.startswith("eval_") else run.name, at, values))
        if lines:
            parts.append(_panel(title, X_LABELS[x], lines, width, height))
    if not parts:
        raise ValueError("the runs have logged no loss, learning rate, gradient norm or speed; nothing to draw")
    return "\n\n".join(parts)


def _panel(title: str, x_label: str, lines: list[tuple[str, np.ndarray, np.ndarray]], width: int, height: int) -> str:
    """A letter at its end identifies each line."""
    every_x = np.concatenate([at for _, at, _ in lines])
    every_y = np.concatenate([values for _, _, values in lines])
    left, right, low, high = every_x.min(), every_x.max(), every_y.min(), every_y.max()
    margin = 10
    columns = width - margin - 2
    dots = np.zeros((height, columns), int)
    letters = {}
    for number, (_, at, values) in enumerate(lines):
        # One point per column of dots, so that a line has no gaps.
        fine_x = np.linspace(at[0], at[-1], 2 * columns) if len(at) > 1 else at
        fine_y = np.interp(fine_x, at, values)
        column = _scaled(fine_x, left, right, 2 * columns)
        row = 4 * height - 1 - _scaled(fine_y, low, high, 4 * height)
        for c, r in zip(column, row, strict=True):
            dots[r // 4, c // 2] |= _DOTS[r % 4][c % 2]
        letters[row[-1] // 4, column[-1] // 2] = chr(ord("a") + number % 26)
    rows = [title + "".join(f"  {chr(ord('a') + n % 26)} {name}" for n, (name, _, _) in enumerate(lines))]
    for r in range(height):
        label = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(r, "")
        cells = (letters.get((r, c)) or chr(0x2800 + dots[r, c]) for c in range(columns))
        rows.append(f"{label:>{margin}} ┤{''.join(cells)}")
    ends = f"{format_count(left)}{x_label:^{max(columns - 16, 0)}}{format_count(right):>8}"
    return "\n".join([*rows, " " * (margin + 2) + ends])


def _scaled(values: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """int, from 0 to count - 1."""
    return np.round((values - low) / (high - low or 1.0) * (count - 1)).astype(int)


# ----------------------------------------------------------------------------- plans


def plan_figure(program: Program, training: TrainingConfig, device: Device, title: str = "") -> "Figure":
    """Memory of one GPU and, if something is offloaded, of its host; the schedule of the pipeline, if there is one."""
    stages = program.model.stages
    memory, host = memory_per_device(program, training)
    made = new_figure(9, 2.6 if stages is None else 5.2)
    axes = made.subplots(1 if stages is None else 2, squeeze=False)[:, 0]
    bars = [(device.name, memory, USABLE_MEMORY * device.memory_bytes)]
    draw_memory(axes[0], [*bars, ("its host", host, None)] if host else bars)
    if stages is not None:
        draw_schedule(axes[1], stages, training.schedule(program.mesh_config)(training.steps).num_microbatches)
    made.suptitle(f"{title}: {program.mesh_config.num_devices} x {device.name}" if title else "")
    return made


def draw_memory(axes: "Axes", bars: Sequence[tuple[str, Mapping[str, int], float | None]]) -> None:
    """Stacked bars: (name, bytes by kind, usable bytes or None) of each."""
    kinds = list(dict.fromkeys(kind for _, sizes, _ in bars for kind in sizes))
    left = np.zeros(len(bars))
    for kind in kinds:
        sizes = np.array([sizes.get(kind, 0) for _, sizes, _ in bars]) / 2**30
        axes.barh(range(len(bars)), sizes, left=left, label=kind)
        left += sizes
    for y, (_, sizes, usable) in enumerate(bars):
        axes.text(left[y], y, f" {format_bytes(sum(sizes.values()))}", va="center")
        if usable is not None:
            axes.plot([usable / 2**30] * 2, [y - 0.45, y + 0.45], "k--", linewidth=1)
    axes.margins(x=0.2)  # for the text
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device (dashed: usable)")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_schedule(axes: "Axes", stages: Stages, num_microbatches: int) -> None:
    """The pipeline schedule: rows are ranks, columns are ticks; forward above, backward below, with the microbatch
    number, lighter for later chunks of virtual stages."""
    table = make_table(stages.schedule, stages.num_ranks, num_microbatches, stages.num_chunks)
    ticks = min(len(table.forward), MAX_TICKS)
    for kind, color, y in (("forward", "C0", 0.0), ("backward", "C1", 0.42)):
        for tick, rank in itertools.product(range(ticks), range(stages.num_ranks)):
            _draw_pass(axes, table, kind, color, tick, rank, rank + y)
    shown = "" if ticks == len(table.forward) else f", the first {ticks} of {len(table.forward)} ticks"
    axes.set_title(f"{stages.schedule}, {num_microbatches} microbatches{shown}", fontsize="medium")
    axes.set_xlim(0, ticks)
    axes.set_ylim(stages.num_ranks, 0)
    axes.set_yticks([rank + 0.42 for rank in range(stages.num_ranks)], [f"rank {r}" for r in range(stages.num_ranks)])
    axes.set_xlabel("tick: one forward pass (blue) and one backward pass (orange)")


def _draw_pass(axes: "Axes", table: Table, kind: str, color: str, tick: int, rank: int, y: float) -> None:
    microbatch = getattr(table, kind)[tick, rank]
    if microbatch < 0:
        return
    chunk = getattr(table, f"{kind}_chunk")[tick, rank]
    axes.barh(y, 1, left=tick, height=0.4, align="edge", color=color, alpha=1 / (1 + 0.5 * chunk), edgecolor="white")
    axes.text(tick + 0.5, y + 0.2, str(microbatch), ha="center", va="center", fontsize=6)


# ----------------------------------------------------------------------------- command line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    runs: Annotated[tuple[str, ...], POSITIONAL] = ()
    """Directories of runs."""
    x: XAxis = "step"
    """The x axis; time: seconds spent in training steps."""
    smooth: PositiveInt = 1
    """Mean of the last N losses and gradient norms."""
    output: str = ""
    """File to write: .png, .svg or .pdf."""
    terminal: bool = False
    """Draw in the terminal, without matplotlib."""


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse(Options, arguments, "python -m megajax plot", __doc__)
    if not chosen.runs:
        raise ValueError("which run? python -m megajax plot runs/NAME --output=FILE.png, or --terminal")
    if not chosen.output and not chosen.terminal:
        raise ValueError("where to? --output=FILE.png (or .svg), or --terminal")
    runs = [read_run(name) for name in chosen.runs]
    if chosen.terminal:
        print(drawing(runs, chosen.x, chosen.smooth, width=min(shutil.get_terminal_size().columns, 160)))
    if chosen.output:
        save(figure(runs, chosen.x, chosen.smooth), chosen.output)


if __name__ == "__main__":
    log_to_stderr()
    with errors_in_one_line():
        main()
