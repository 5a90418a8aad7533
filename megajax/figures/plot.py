"""Plots runs and plans: python -m megajax plot RUN [RUN ...] --output=FILE.png

  --x=step|tokens|flops|time   x axis (time: seconds spent in training steps)
  --smooth=N                   mean of the last N losses and gradient norms
  --output=FILE                .png, .svg or .pdf; needs matplotlib:
                               pip install 'megajax[plot]'
  --terminal                   draw in the terminal instead, without matplotlib

Loss, learning rate, gradient norm, throughput and MFU of one or several run
directories, from their metrics.jsonl. The loss is the mean since the line
before, as the terminal shows it; files show that of single steps faintly.

In a notebook: `figures.curves([figures.read_run("runs/a")])`. `train.py
--config=NAME --plan --plan_figure=FILE.svg` draws the memory and the pipeline
of a plan.
"""

import shutil
import sys

from megajax.fields.suggestions import did_you_mean
from megajax.figures.drawings import curves, save
from megajax.figures.runs import X_LABELS, read_run
from megajax.figures.terminal import drawing
from megajax.terminal.one_line import print_error
from megajax.training.reporting.console import log_to_stderr


def main(arguments: list[str]) -> None:
    names = [argument for argument in arguments if not argument.startswith("--")]
    options = {"x": "step", "smooth": "1", "output": "", "terminal": ""}
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument in ("--help", "-h"):
            print(__doc__.strip())
            return
        if argument.startswith("--") and name not in options:
            hint = did_you_mean(name, options, "--") or "; see python -m megajax plot --help"
            raise ValueError(f"{argument} is unknown{hint}")
        if argument.startswith("--"):
            options[name] = value if equals else "yes"
    x, smooth, output = options["x"], options["smooth"], options["output"]
    if x not in X_LABELS:
        raise ValueError(f"--x={x} is unknown; use one of {', '.join(X_LABELS)}")
    if not smooth.isdecimal() or int(smooth) < 1:
        raise ValueError(f"--smooth={smooth} must be the number of values to average, at least 1")
    if not names:
        raise ValueError("which run? python -m megajax plot runs/NAME --output=FILE.png, or --terminal")
    if not output and not options["terminal"]:
        raise ValueError("where to? --output=FILE.png (or .svg), or --terminal")
    runs = [read_run(name) for name in names]
    if options["terminal"]:
        print(drawing(runs, x, int(smooth), width=min(shutil.get_terminal_size().columns, 160)))
    if output:
        save(curves(runs, x, int(smooth)), output)


if __name__ == "__main__":
    log_to_stderr()
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None
