"""Table and figure of docs/speed.md, "Time to a loss", from its record: python -m benchmarks.time_to_loss

--plot=FILE.svg   draws the training losses of the runs that have a `label`, without that of the first step
"""

import json
from collections.abc import Iterable

from benchmarks import figures
from benchmarks.command_line import only, run
from benchmarks.records import ROOT

RECORD = ROOT / "benchmarks" / "measured" / "time_to_loss.json"
STEPS = (100, 200, 300, 400)


def table(runs: Iterable[dict]) -> str:
    """Markdown: the held-out loss of each run that has a `row`, its title, after STEPS, as far as it came."""
    lines = ["| run | 100 steps | 200 | 300 | 400 | ms per step |", "|---|---|---|---|---|---|"]
    for found in runs:
        if "row" in found:
            losses = {step: f"{loss:.3f}" for step, loss, _ in found["held_out"]}
            shown = " | ".join(losses.get(step, "-") for step in STEPS)
            lines.append(f"| {found['row']} | {shown} | {found['step_ms']:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    values = only(arguments, {"plot": ""})
    runs = json.loads(RECORD.read_text())["runs"].values()
    print(table(runs))
    if values["plot"]:
        curves = {found["label"]: found["losses"][1:] for found in runs if "label" in found}
        figures.lines(values["plot"], curves, "step of 65,536 tokens", "training loss")


if __name__ == "__main__":
    run(main)
