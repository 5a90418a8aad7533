"""Curves of runs in the terminal, without matplotlib."""

from collections.abc import Sequence

import numpy as np

from megajax.figures.runs import X_LABELS, Curve, RunMetrics, XAxis, panels
from megajax.training.reporting.console import format_count

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, [row][column]


def drawing(runs: Sequence[RunMetrics], x: XAxis = "step", smooth: int = 1, width: int = 80, height: int = 10) -> str:
    """The panels of `curves` as braille text, one below the other; width and height in characters."""
    return "\n\n".join(_panel(title, X_LABELS[x], found, width, height) for title, found in panels(runs, x, smooth))


def _panel(title: str, x_label: str, curves: list[Curve], width: int, height: int) -> str:
    """A letter at its end identifies each line."""
    every_x = np.concatenate([curve.at for curve in curves])
    every_y = np.concatenate([curve.values for curve in curves])
    left, right, low, high = every_x.min(), every_x.max(), every_y.min(), every_y.max()
    margin = 10
    columns = width - margin - 2
    dots = np.zeros((height, columns), int)
    letters = {}
    for number, curve in enumerate(curves):
        at = curve.at
        # One point per column of dots, so that a line has no gaps.
        fine_x = np.linspace(at[0], at[-1], 2 * columns) if len(at) > 1 else at
        fine_y = np.interp(fine_x, at, curve.values)
        column = _scaled(fine_x, left, right, 2 * columns)
        row = 4 * height - 1 - _scaled(fine_y, low, high, 4 * height)
        for c, r in zip(column, row, strict=True):
            dots[r // 4, c // 2] |= _DOTS[r % 4][c % 2]
        letters[row[-1] // 4, column[-1] // 2] = chr(ord("a") + number % 26)
    rows = [title + "".join(f"  {chr(ord('a') + n % 26)} {curve.label}" for n, curve in enumerate(curves))]
    for r in range(height):
        label = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(r, "")
        cells = (letters.get((r, c)) or chr(0x2800 + dots[r, c]) for c in range(columns))
        rows.append(f"{label:>{margin}} ┤{''.join(cells)}")
    ends = f"{format_count(left)}{x_label:^{max(columns - 16, 0)}}{format_count(right):>8}"
    return "\n".join([*rows, " " * (margin + 2) + ends])


def _scaled(values: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """int, from 0 to count - 1."""
    return np.round((values - low) / (high - low or 1.0) * (count - 1)).astype(int)
