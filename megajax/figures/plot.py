"""Plots runs and plans: python -m megajax plot RUN [RUN ...] --output=FILE.png

Loss, learning rate, gradient norm, throughput and MFU of one or several run
directories, from their metrics.jsonl. The loss is the mean since the line
before, as the terminal shows it; files show that of single steps faintly.

In a notebook: `figures.curves([figures.read_run("runs/a")])`. `train.py
--config=NAME --plan --plan_figure=FILE.svg` draws the memory and the pipeline
of a plan.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Annotated

from megajax.fields.ranges import PositiveInt
from megajax.figures.drawings import curves, save
from megajax.figures.runs import XAxis, read_run
from megajax.figures.terminal import drawing
from megajax.terminal.command_line import POSITIONAL, errors_in_one_line, parse
from megajax.training.reporting.console import log_to_stderr


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
        save(curves(runs, chosen.x, chosen.smooth), chosen.output)


if __name__ == "__main__":
    log_to_stderr()
    with errors_in_one_line():
        main()
