"""The bubble of a pipeline against the formula: python -m benchmarks.settings.bubble RECORD.json [--plot=FILE.svg]

RECORD.json: {"date", "commit", "rows": what `benchmarks.train_step` printed, each with its "command"}. Rows that differ
only in the number M of microbatches form a series. The slope of the line through its step times is the time t that one
microbatch adds, and the bubble of a step of time T is 1 - M t / T, including the weight update.
"""

import json
import math
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.command_line import read_config, run, split
from megajax.config import RENAMED, Config
from megajax.parallel.schedule import bubble
from megajax.training.reporting.console import format_bytes, format_count

COLORS = ("#1f6feb", "#e07b39", "#2da44e")
WIDTH = 560
HEIGHT = 260
LEFT = 60
TOP = 40


def config_of(row: dict) -> Config:
    """The config with which a row was measured, from its command."""
    values, rest = split(shlex.split(row["command"])[3:], {"config": "", "seconds": "", "steps": ""})
    # Renamed since the record was made.
    moved = {f"--{old}=": f"--{new.partition('=')[0]}=" for old, new in RENAMED.items()}
    return read_config(values["config"], [_renamed(argument, moved) for argument in rest])


def _renamed(argument: str, names: dict[str, str]) -> str:
    old = next((old for old in names if argument.startswith(old)), None)
    return argument if old is None else names[old] + argument.removeprefix(old)


def points(rows: list[dict]) -> list[dict]:
    """-> rows with "ranks", "chunks", "microbatches", "formula" and, if in a series, "bubble"; sorted."""
    found = []
    series = defaultdict(list)
    for row in rows:
        config = config_of(row)
        mesh = config.mesh
        training = config.training
        number = training.schedule(mesh)(training.steps).num_microbatches
        sizes = {"ranks": mesh.pipeline, "chunks": mesh.virtual_stages, "microbatches": number}
        found.append(row | sizes | {"formula": bubble(mesh.pipeline, number, mesh.virtual_stages)})
        series[mesh.pipeline, mesh.virtual_stages].append(found[-1])
    for several in (several for several in series.values() if len(several) > 2):
        numbers, seconds = ([row[name] for row in several] for name in ("microbatches", "step_seconds"))
        each = np.polyfit(numbers, seconds, 1)[0]
        for row in several:
            row["bubble"] = 1 - row["microbatches"] * each / row["step_seconds"]
    return sorted(found, key=lambda row: (row["chunks"], row["microbatches"]))


def table(rows: list[dict]) -> str:
    lines = [
        "| virtual stages | microbatches | step | tokens/s per GPU | bubble, formula | measured | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in points(rows):
        measured = f"{row['bubble']:.1%}" if "bubble" in row else "-"
        cells = (
            row["chunks"],
            row["microbatches"],
            f"{1000 * row['step_seconds']:.0f} ms",
            format_count(row["tokens_per_second_per_device"]),
            f"{row['formula']:.1%}",
            measured,
            format_bytes(row["peak_memory_bytes"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def plot(rows: list[dict]) -> str:
    """SVG: the formula as lines, the measurements as dots."""
    found = [row for row in points(rows) if "bubble" in row]
    most = max(row["microbatches"] for row in found)
    top = math.ceil(10 * max(row[name] for row in found for name in ("formula", "bubble"))) / 10

    def x(number: int) -> float:
        return LEFT + WIDTH * math.log2(number) / math.log2(most)

    def y(part: float) -> float:
        return TOP + HEIGHT * (1 - part / top)

    parts = [_text(LEFT, 20, "bubble, part of the step; lines: formula, dots: measured", "font-weight='bold'")]
    for tenth in range(round(10 * top) + 1):
        parts += [_line(LEFT, y(tenth / 10), LEFT + WIDTH, y(tenth / 10), "#ddd")]
        parts += [_text(LEFT - 8, y(tenth / 10) + 4, f"{10 * tenth} %", "text-anchor='end'")]
    numbers = [2**power for power in range(int(math.log2(most)) + 1)]
    parts += [_text(x(n), TOP + HEIGHT + 20, f"{n}", "text-anchor='middle'") for n in numbers]
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 40, "microbatches", "text-anchor='middle'"))
    for number, key in enumerate(sorted({(row["ranks"], row["chunks"]) for row in found})):
        color = COLORS[number % len(COLORS)]
        curve = " ".join(f"{x(n):.1f},{y(part):.1f}" for n in numbers if (part := bubble(key[0], n, key[1])) <= top)
        parts.append(f"<polyline points='{curve}' fill='none' stroke='{color}' stroke-width='2'/>")
        for row in (row for row in found if (row["ranks"], row["chunks"]) == key):
            parts.append(
                f"<circle cx='{x(row['microbatches']):.1f}' cy='{y(row['bubble']):.1f}' r='4' fill='{color}'/>"
            )
        name = f"pipeline {key[0]}, virtual stages {key[1]}"
        parts.append(_text(LEFT + WIDTH - 180, TOP + 20 + 18 * number, name, f"style='fill:{color}'"))
    size = f"width='{LEFT + WIDTH + 20}' height='{TOP + HEIGHT + 55}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='13' fill='#222'>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{text}</text>"


def _line(x: float, y: float, to_x: float, to_y: float, color: str) -> str:
    return f"<line x1='{x:.1f}' y1='{y:.1f}' x2='{to_x:.1f}' y2='{to_y:.1f}' stroke='{color}'/>"


def main(arguments: list[str]) -> None:
    values, files = split(arguments, {"plot": ""})
    if len(files) != 1:
        raise ValueError("name one record: python -m benchmarks.settings.bubble benchmarks/measured/pipeline.json")
    rows = json.loads(Path(files[0]).read_text())["rows"]
    print(table(rows))
    if values["plot"]:
        Path(values["plot"]).write_text(plot(rows))


if __name__ == "__main__":
    run(main)
