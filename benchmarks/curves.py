"""Compares the loss curves of several runs: python -m benchmarks.curves NAME=RUN_DIR [NAME=RUN_DIR ...]

The first run is the reference for the others. All must have logged the same steps.

    --output=FILE.json   saves the losses     --plot=FILE.svg   curves, and below them the differences
"""

import json
import statistics
from pathlib import Path

from benchmarks.command_line import run, split

COLORS = ("#222222", "#1f6feb", "#e07b39", "#2da44e", "#8250df", "#cf222e", "#9a6700", "#1b7c83")
WIDTH = 640
HEIGHT = 260
LEFT = 60


def read(folder: str) -> dict[int, float]:
    """{step: training loss} of a run. Raises ValueError if it has none."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is not there; name the run_dir of a run that has logged its losses")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def collect(runs: dict[str, dict[int, float]]) -> dict:
    """-> {"steps": [...], "losses": {name: [...]}}. Raises ValueError if the runs logged different steps."""
    first, *others = runs
    steps = list(runs[first])
    for name in others:
        if list(runs[name]) != steps:
            raise ValueError(f"{name} and {first} logged different steps; give both the same training.log_every_steps")
    return {"steps": steps, "losses": {name: list(losses.values()) for name, losses in runs.items()}}


def table(found: dict) -> str:
    """Markdown: how much each run differs from the first."""
    first = next(iter(found["losses"].values()))
    tail = max(len(first) // 8, 1)
    lines = ["| run | loss, mean of the last eighth | difference, mean over all steps | largest |", "|---|---|---|---|"]
    for name, losses in found["losses"].items():
        differences = [loss - other for loss, other in zip(losses, first, strict=True)]
        shown = (
            f"{statistics.mean(differences):+.4f} | {max(map(abs, differences)):.4f}"
            if losses is not first
            else "- | -"
        )
        lines.append(f"| {name} | {statistics.mean(losses[-tail:]):.4f} | {shown} |")
    return "\n".join(lines)


def plot(found: dict) -> str:
    """SVG: the losses, and below them their differences from the first run. A run may end before the others."""
    first = next(iter(found["losses"].values()))
    differences = {
        name: [a - b for a, b in zip(losses, first, strict=False)] for name, losses in found["losses"].items()
    }
    parts = _panel(found["steps"], found["losses"], 20, HEIGHT, "loss")
    parts += _panel(found["steps"], differences, HEIGHT + 60, HEIGHT // 2, "difference")
    y = HEIGHT * 3 // 2 + 100
    for number, name in enumerate(found["losses"]):
        parts.append(f"<rect x='{LEFT}' y='{y}' width='18' height='4' fill='{COLORS[number % len(COLORS)]}'/>")
        parts.append(f"<text x='{LEFT + 26}' y='{y + 7}'>{name}</text>")
        y += 20
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH + LEFT + 30}' height='{y + 10}' "
    head += "font-family='sans-serif' font-size='12' fill='#222'>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *parts, "</svg>"]) + "\n"


def _panel(steps: list[int], lines: dict[str, list[float]], top: int, height: int, title: str) -> list[str]:
    low = min(map(min, lines.values()))
    high = max(max(map(max, lines.values())), low + 1e-9)

    def x_of(step: float) -> float:
        return LEFT + WIDTH * (step - steps[0]) / max(steps[-1] - steps[0], 1)

    def y_of(value: float) -> float:
        return top + height * (high - value) / (high - low)

    parts = [f"<rect x='{LEFT}' y='{top}' width='{WIDTH}' height='{height}' fill='none' stroke='#ccc'/>"]
    for value in (low, (low + high) / 2, high):
        parts.append(f"<text x='{LEFT - 6}' y='{y_of(value) + 4:.1f}' text-anchor='end'>{value:.2f}</text>")
    for step in (steps[0], steps[-1]):
        parts.append(f"<text x='{x_of(step):.1f}' y='{top + height + 16}' text-anchor='middle'>{step}</text>")
    parts.append(f"<text x='{LEFT + WIDTH / 2}' y='{top + height + 16}' text-anchor='middle'>{title}, by step</text>")
    for number, values in enumerate(lines.values()):
        points = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in zip(steps, values, strict=False))
        color = COLORS[number % len(COLORS)]
        parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='1.2'/>")
    return parts


def main(arguments: list[str]) -> None:
    values, named = split(arguments, {"output": "", "plot": ""})
    if not named or not all("=" in word for word in named):
        raise ValueError("name the runs: python -m benchmarks.curves reference=runs/A fast=runs/B")
    found = collect({name: read(folder) for name, _, folder in (word.partition("=") for word in named)})
    print(table(found))
    if values["output"]:
        Path(values["output"]).write_text(json.dumps(found) + "\n")
    if values["plot"]:
        Path(values["plot"]).write_text(plot(found))


if __name__ == "__main__":
    run(main)
