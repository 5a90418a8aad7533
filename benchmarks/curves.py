"""Compares the loss curves of several runs: python -m benchmarks.curves NAME=RUN_DIR [NAME=RUN_DIR ...]

The first run is the reference for the others. All must have logged the same steps.

    --output=FILE.json   saves the losses     --plot=FILE.svg   curves, and below them the differences
"""

import json
import statistics
from pathlib import Path

from benchmarks import figures
from benchmarks.command_line import run, split


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


def main(arguments: list[str]) -> None:
    values, named = split(arguments, {"output": "", "plot": ""})
    if not named or not all("=" in word for word in named):
        raise ValueError("name the runs: python -m benchmarks.curves reference=runs/A fast=runs/B")
    found = collect({name: read(folder) for name, _, folder in (word.partition("=") for word in named)})
    print(table(found))
    if values["output"]:
        Path(values["output"]).write_text(json.dumps(found) + "\n")
    if values["plot"]:
        figures.losses(values["plot"], found["steps"], found["losses"])


if __name__ == "__main__":
    run(main)
