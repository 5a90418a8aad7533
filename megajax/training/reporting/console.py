"""What a person sees of a run: the start-up card and the line that moves.

On a terminal the card is a table and the step a live bar; otherwise (a log file, a batch job) both are plain lines.
"""

import logging
import sys
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table


def format_count(count: float) -> str:
    """124439808 -> "124.4M", 1.23e9 -> "1.23G", 950 -> "950"."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"), separator="")


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
    """Prints for one process.

    Args:
        is_terminal: live output with colour; None asks stdout.
        enabled: False on every process but 0: each method does nothing.
    """

    def __init__(self, is_terminal: bool | None = None, enabled: bool = True):
        self._enabled = enabled
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self._rich = RichConsole(force_terminal=self._is_terminal, highlight=False)
        self._progress: Progress | None = None

    def card(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The start-up card: a title and (name, value) rows."""
        if not self._enabled:
            return
        if not self._is_terminal:
            width = max((len(name) for name, _ in rows), default=0)
            _print_plain("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]))
            return
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in rows:
            table.add_row(_escaped(name), _escaped(value))
        self._rich.print(table)

    def step(self, step: int, total_steps: int, metrics: dict[str, Any]) -> None:
        """Shows the metrics of a step, with the keys of metrics.jsonl; what is missing or None is left out."""
        if not self._enabled:
            return
        if not self._is_terminal:
            _print_plain(_plain_line(step, total_steps, metrics))
        elif "loss" not in metrics:
            self._rich.print(_plain_line(step, total_steps, metrics), markup=False)
        else:
            self._move_bar(step, total_steps, metrics)

    def note(self, text: str) -> None:
        """One line that stays, above the live line."""
        if not self._enabled:
            return
        if self._is_terminal:
            self._rich.print(text, markup=False)
        else:
            _print_plain(text)

    def close(self) -> None:
        """Leaves the last state of the live line on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _move_bar(self, step: int, total_steps: int, metrics: dict[str, Any]) -> None:
        line = "  ".join(_fields(metrics) + _time_left(step, total_steps, metrics))
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}", markup=False),
                console=self._rich,
                refresh_per_second=4,
            )
            self._progress.start()
            self._progress.add_task("train", total=total_steps, line=line)
        self._progress.update(self._progress.task_ids[0], completed=step, total=total_steps, line=line)


def _plain_line(step: int, total_steps: int, metrics: dict[str, Any]) -> str:
    return " ".join([f"step {step}/{total_steps}", *_fields(metrics), *_time_left(step, total_steps, metrics)])


def _fields(metrics: dict[str, Any]) -> list[str]:
    """The metrics worth a glance, in reading order."""
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
    }
    return [show(metrics[name]) for name, show in formats.items() if metrics.get(name) is not None]


def _time_left(step: int, total_steps: int, metrics: dict[str, Any]) -> list[str]:
    if metrics.get("step_seconds") is None or step >= total_steps:
        return []
    return [f"{format_seconds((total_steps - step) * metrics['step_seconds'])} left"]


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _print_plain(text: str) -> None:
    print(text, flush=True)


def log_to_stderr() -> None:
    """Our own messages one line each, those of the libraries only when something is wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("megajax: %(message)s"))
    logger = logging.getLogger("megajax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("absl").setLevel(logging.ERROR)
