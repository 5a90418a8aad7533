"""Console output of a run: the start-up card, a line for each logged step, and a progress bar.

In a terminal the card is in colour and wrapped, lines of steps leave out what is too wide, and a progress bar below
moves with every step. In a notebook the newest line replaces the one before, above the curve of the loss. Elsewhere (a
log file, a batch job) card and lines are plain text, without a bar.
"""

import contextlib
import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

import rich
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from megajax.terminal.announce import announced
from megajax.terminal.one_line import for_terminal, printable, shorten_library_errors, wrapped
from megajax.training.reporting.notebook import LiveProgress, in_notebook

# Left out of lines that are too long for the terminal, in this order, with the room that each may need. All lines of a
# run leave out the same, although the first ones lack some fields and are shorter.
LEAST_IMPORTANT = {
    "peak_memory_bytes": "peak 100.0 GiB",
    "grad_norm": "grad_norm 100.000",
    "learning_rate": "lr 1.000e-03",
    "step_seconds": "100.0 ms/step",
    "mfu": "MFU 10.0%",
    "tokens_per_second": "100.0k tokens/s",
}
WIDEST_LOSS = "loss 10.0000"
# Shown next to the progress bar.
BESIDE_BAR = ("loss", "tokens_per_second", "mfu", "time_left")
BAR_WIDTH = 20


def format_count(count: float) -> str:
    """For parameters and tokens: 124439808 -> "124.4M", 1.23e9 -> "1.23B", 950 -> "950"."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T"), separator="")


def format_flops(count: float) -> str:
    """1.08e12 -> "1.08 TFLOP"."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"), separator=" ") + "FLOP"


def format_number_of(count: int, singular: str, plural: str = "") -> str:
    """(1, "process", "processes") -> "1 process", (1200, "step") -> "1,200 steps"; plural: default singular + s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_bytes(num_bytes: float) -> str:
    """13207024435 -> "12.3 GiB"."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), separator=" ")


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 75 -> "1m 15s", 7500 -> "2h 05m", 93600 -> "1d 02h"."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"


def _scaled(value: float, base: int, units: tuple[str, ...], *, separator: str) -> str:
    """`value` with the largest unit that leaves at least 1: two decimals below 10, one above, none without a unit."""
    index = 0
    # Compares what would be printed, so that 999.96M becomes 1.00G and never 1000.0M.
    while index + 1 < len(units) and round(abs(value), 1 if index else 0) >= base:
        value /= base
        index += 1
    decimals = 0 if index == 0 and value == int(value) else 2 if abs(value) < 9.995 else 1
    return f"{value:.{decimals}f}{separator}{units[index]}"


class Console:
    """Console output of one process.

    Args:
        is_terminal: live output with colour; None: whether stdout is a terminal.
        enabled: False on all processes but 0, where each method does nothing.
    """

    def __init__(self, is_terminal: bool | None = None, enabled: bool = True):
        self._enabled = enabled
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        # rich's global console, shared with `announced`, so that a spinner appears below the bar.
        self.terminal = rich.get_console() if is_terminal is None else RichConsole(force_terminal=is_terminal)
        if self._is_terminal:
            self.terminal.soft_wrap = True  # lines of the log that appear above the bar: see _print
        self._live = LiveProgress() if is_terminal is None and in_notebook() else None
        self._progress: Progress | None = None
        self._newest: dict[str, Any] = {}

    def card(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The start-up card: a title and (name, value) rows."""
        if not self._enabled:
            return
        title = printable(title)
        rows = [(name, printable(value)) for name, value in rows]
        width = max((len(name) for name, _ in rows), default=0)
        if not self._is_terminal:
            print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]), flush=True)
            return
        self._print(Text(wrapped(title, self.terminal.width), "bold"))
        for name, value in rows:
            line = Text(wrapped(f"  {name:<{width}}  {value}", self.terminal.width, width + 4))
            line.stylize("cyan", 0, width + 2)
            self._print(line)

    def step(self, step: int, total_steps: int, metrics: dict[str, Any]) -> None:
        """A line with the metrics of a step, named as in metrics.jsonl; missing ones and None are left out."""
        if not self._enabled:
            return
        start = f"step {step}/{total_steps}"
        fields = _fields(step, total_steps, metrics)
        if self._live is not None:
            self._live.show(" ".join([start, *fields.values()]), step, metrics)
            return
        if not self._is_terminal:
            print(" ".join([start, *fields.values()]), flush=True)
            return
        left_out = _left_out(total_steps, self.terminal.width) | {"time_left"}  # which the bar shows
        self._print(" ".join([start, *(text for name, text in fields.items() if name not in left_out)]))
        if "loss" in metrics:
            self._newest = metrics
            self.progress(step, total_steps)

    def progress(self, step: int, total_steps: int) -> None:
        """Advances the progress bar of a terminal."""
        if not self._enabled or not self._is_terminal:
            return
        start = f"step {step}/{total_steps}"
        fields = _fields(step, total_steps, self._newest)
        fields = {name: text for name, text in fields.items() if name in BESIDE_BAR}
        line = _fitted(fields, self.terminal.width - len(start) - BAR_WIDTH - 3)
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(BAR_WIDTH),
                TextColumn("{task.fields[line]}", markup=False),
                console=self.terminal,
                refresh_per_second=4,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._progress.start()
            self._progress.add_task(start, total=total_steps, line=line)
        task = self._progress.task_ids[0]
        self._progress.update(task, description=start, completed=step, total=total_steps, line=line)

    def note(self, text: str) -> None:
        """Prints one line, above the progress bar."""
        if not self._enabled:
            return
        text = printable(text)
        if self._is_terminal:
            self._print(wrapped(text, self.terminal.width))
        else:
            print(text, flush=True)

    def _print(self, text: str | Text) -> None:
        """As it is: rich would break words that are too long, such as names of files."""
        self.terminal.print(text, markup=False, highlight=False, soft_wrap=True)

    def announced(self, what: str) -> AbstractContextManager:
        """As `megajax.terminal.announce.announced`."""
        return announced(what) if self._enabled else contextlib.nullcontext()

    def close(self) -> None:
        """Stops the progress bar and leaves it on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _fields(step: int, total_steps: int, metrics: dict[str, Any]) -> dict[str, str]:
    """The most important metrics, in reading order; the loss is the mean over the steps since the previous line."""
    formats = {
        "loss": lambda value: f"loss {value:.4f}",
        "eval_loss": lambda value: f"eval_loss {value:.4f}",
        "eval_bits_per_byte": lambda value: f"bits/byte {value:.4f}",
        "grad_norm": lambda value: f"grad_norm {value:.3f}",
        "learning_rate": lambda value: f"lr {value:.3e}",
        "step_seconds": lambda value: f"{format_seconds(value)}/step",
        "tokens_per_second": lambda value: f"{format_count(value)} tokens/s",
        "mfu": lambda value: f"MFU {100 * value:.1f}%",
        "peak_memory_bytes": lambda value: f"peak {format_bytes(value)}",
        "time_left": lambda value: f"{format_seconds(value)} left",
    }
    shown = dict(metrics)
    if "mean_loss" in metrics:
        shown["loss"] = metrics["mean_loss"]
    if metrics.get("step_seconds") is not None and step < total_steps:
        shown["time_left"] = (total_steps - step) * metrics["step_seconds"]
    found = {name: show(shown[name]) for name, show in formats.items() if shown.get(name) is not None}
    others = [name for name in shown if name.startswith("eval_") and name not in formats and shown[name] is not None]
    return found | {name: _of_evaluation(name.removeprefix("eval_"), shown[name]) for name in others}


def _of_evaluation(name: str, value: float) -> str:
    """A loss of a control, or a rate."""
    return f"{name} {value:.4f}" if name.startswith("loss_") else f"{name} {100 * value:.1f}%"


def _left_out(total_steps: int, width: int) -> set[str]:
    """LEAST_IMPORTANT metrics for which the lines of a run have no room."""
    shown = dict(LEAST_IMPORTANT)
    start = f"step {total_steps}/{total_steps} {WIDEST_LOSS}"
    while shown and len(" ".join([start, *shown.values()])) > width:
        del shown[next(iter(shown))]
    return LEAST_IMPORTANT.keys() - shown.keys()


def _fitted(fields: dict[str, str], width: int) -> str:
    """One line, shortened to `width` characters by leaving out fields, first the LEAST_IMPORTANT."""
    left = dict(fields)
    for name in ("", *LEAST_IMPORTANT, "time_left"):
        left.pop(name, None)
        line = "  ".join(left.values())
        if len(line) <= width:
            break
    return line


class _InOneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return for_terminal(printable(super().formatMessage(record)), sys.stderr)


class _ToStderr(logging.StreamHandler):
    """Writes to the current sys.stderr: rich replaces it to print above a progress bar or spinner."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(prefix: str = "megajax") -> None:
    """Logs our own messages, one line each, and of libraries only errors, one line each and the same one
    not twice in a minute. Calling it again changes nothing. prefix: of each line."""
    logger = logging.getLogger("megajax")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        handler = _ToStderr()
        handler.setFormatter(_InOneLine(f"{prefix}: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("absl").setLevel(logging.ERROR)
    shorten_library_errors()
