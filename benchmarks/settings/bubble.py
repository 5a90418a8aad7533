"""The bubble of a pipeline against the formula: python -m benchmarks.settings.bubble RECORD.json [--plot=FILE.svg]

RECORD.json: {"date", "commit", "rows": what `benchmarks.train_step` printed, each with its "command"}. Rows that differ
only in the number M of microbatches form a series. The slope of the line through its step times is the time t that one
microbatch adds, and the bubble of a step of time T is 1 - M t / T, including the weight update.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks import figures
from benchmarks.command_line import run, split
from benchmarks.records import config_of
from megajax.parallel.schedule import bubble
from megajax.training.reporting.console import format_bytes, format_count


def points(rows: list[dict]) -> list[dict]:
    """-> rows with "ranks", "chunks", "microbatches", "formula" and, if in a series, "bubble"; sorted."""
    found = []
    series = defaultdict(list)
    for row in rows:
        config = config_of(row["command"])
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


def plot(rows: list[dict], path: str) -> None:
    """The formula as lines, the measurements as dots."""
    found = [row for row in points(rows) if "bubble" in row]
    numbers = [2**power for power in range(1, max(row["microbatches"] for row in found).bit_length())]
    series = {}
    for ranks, chunks in sorted({(row["ranks"], row["chunks"]) for row in found}):
        dots = [
            (row["microbatches"], row["bubble"]) for row in found if (row["ranks"], row["chunks"]) == (ranks, chunks)
        ]
        line = [(number, bubble(ranks, number, chunks)) for number in numbers]
        series[f"pipeline {ranks}, virtual stages {chunks}"] = line, dots
    figures.lines_and_dots(path, series, "microbatches", "bubble: formula (lines), measured (dots)")


def main(arguments: list[str]) -> None:
    values, files = split(arguments, {"plot": ""})
    if len(files) != 1:
        raise ValueError("name one record: python -m benchmarks.settings.bubble benchmarks/measured/pipeline.json")
    rows = json.loads(Path(files[0]).read_text())["rows"]
    print(table(rows))
    if values["plot"]:
        plot(rows, values["plot"])


if __name__ == "__main__":
    run(main)
