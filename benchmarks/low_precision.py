"""Step time of each precision.recipe: python -m benchmarks.low_precision --config=NAME [--section.field=value ...]

Measures the bare train step (benchmarks/train_step.py) in each recipe, in one process on the same batches, and bf16
once more at the end, which shows the drift: smaller differences are not significant. --precision.high_layers=0,0 leaves
no layer in bfloat16, as most published FP8 speeds do.

    --recipes=bf16,fp8,...   default: all but fp16
    --seconds=10             length of each measurement
    --output=FILE.json       saves the numbers
"""

import dataclasses
import sys
import typing

from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, jax_versions, save
from benchmarks.train_step import Setup, set_up, timed
from megajax.ops.low_precision import FORMATS
from megajax.precision import Recipe
from megajax.training.reporting.console import format_bytes

MATMULS = {"FP8": '"__cublas$lt$matmul$f8"', "other": '"__cublas$lt$matmul"'}


def measure(setup: Setup, recipe: str, seconds: float) -> dict:
    """A row of the table. "matmuls": calls of cuBLASLt in the program, by kind."""
    precision = dataclasses.replace(setup.config.precision, recipe=recipe)
    config = dataclasses.replace(setup.config, precision=precision)
    config.check()
    setup = dataclasses.replace(setup, config=config, program=config.make_program(setup.program.mesh))
    row = dataclasses.asdict(timed(setup, seconds))
    program = row.pop("program")
    tokens = config.training.global_batch_size * config.training.sequence_length
    return (
        {"recipe": recipe}
        | row
        | {
            "tokens_per_second": tokens / row["step_seconds"],
            "matmuls": {kind: program.count(f"custom_call_target={target}") for kind, target in MATMULS.items()},
        }
    )


def line(row: dict, baseline: dict) -> str:
    recipe = row["recipe"]
    emulated = " (emulated)" if recipe in FORMATS and FORMATS[recipe].is_emulated else ""
    cells = (
        f"{recipe}{emulated}",
        f"{row['step_seconds'] * 1e3:.1f} ms",
        f"{baseline['step_seconds'] / row['step_seconds']:.3f} x",
        f"{row['tokens_per_second']:,.0f}",
        format_bytes(row["peak_memory_bytes"]),
        ", ".join(f"{count} {kind}" for kind, count in row["matmuls"].items()),
        f"{row['first_loss']:.4f}",
        f"{row['loss']:.4f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    known = [recipe for recipe in typing.get_args(Recipe) if recipe != "fp16"]
    values, overrides = split(arguments, {"config": "", "recipes": ",".join(known), "seconds": "10", "output": ""})
    recipes = values["recipes"].split(",")
    if unknown := [recipe for recipe in recipes if recipe not in typing.get_args(Recipe)]:
        raise ValueError(f"--recipes={unknown[0]} is unknown; use some of {', '.join(typing.get_args(Recipe))}")
    setup = set_up(read_config(values["config"], overrides))
    rows = []
    for recipe in [*recipes, recipes[0]]:
        rows.append(measure(setup, recipe, float(values["seconds"])))
        print(line(rows[-1], rows[0]), file=sys.stderr, flush=True)
    where = ", ".join([devices(), *(f"{name} {version}" for name, version in jax_versions().items())])
    print(f"{values['config']} {' '.join(overrides)}, {where}\n")
    print("| recipe | step | speed-up | tokens/s | memory | cuBLASLt matmuls | first loss | loss |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(line(row, rows[0]) for row in rows))
    save(values["output"], rows)


if __name__ == "__main__":
    run(main)
