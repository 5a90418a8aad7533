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

import jax

from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, jax_versions, save
from benchmarks.train_step import RATE, Setup, set_up, sustained
from megajax.ops.low_precision import FORMATS
from megajax.precision import Recipe
from megajax.training.reporting.console import format_bytes

MATMULS = {"FP8": '"__cublas$lt$matmul$f8"', "other": '"__cublas$lt$matmul"'}


@dataclasses.dataclass(frozen=True)
class Row:
    recipe: str
    step_seconds: float
    tokens_per_second: float
    """Of all devices."""
    peak_memory_bytes: int
    """Planned by the compiler, per device."""
    matmuls: dict[str, int]
    """Calls of cuBLASLt in the program, by kind."""
    first_loss: float
    loss: float


def measure(setup: Setup, recipe: str, seconds: float) -> Row:
    precision = dataclasses.replace(setup.config.precision, recipe=recipe)
    config = dataclasses.replace(setup.config, precision=precision)
    config.check()
    setup = dataclasses.replace(setup, config=config, program=config.make_program(setup.program.mesh))
    state = setup.new_state()
    step, _ = setup.compile(state, setup.program.compiler_options)
    text = step.as_text()
    state, first = jax.block_until_ready(step(state, setup.batches[-1], RATE))
    _, metrics, step_seconds = sustained(step, state, setup.batches, seconds)
    tokens = config.training.global_batch_size * config.training.sequence_length
    return Row(
        recipe,
        step_seconds,
        tokens / step_seconds,
        step.memory_analysis().peak_memory_in_bytes,
        {kind: text.count(f"custom_call_target={target}") for kind, target in MATMULS.items()},
        float(first["loss"]),
        float(metrics["loss"]),
    )


def line(row: Row, baseline: Row) -> str:
    emulated = " (emulated)" if row.recipe in FORMATS and FORMATS[row.recipe].is_emulated else ""
    matmuls = ", ".join(f"{count} {kind}" for kind, count in row.matmuls.items())
    speed_up = baseline.step_seconds / row.step_seconds
    return (
        f"| {row.recipe}{emulated} | {row.step_seconds * 1e3:.1f} ms | {speed_up:.3f} x "
        f"| {row.tokens_per_second:,.0f} | {format_bytes(row.peak_memory_bytes)} | {matmuls} "
        f"| {row.first_loss:.4f} | {row.loss:.4f} |"
    )


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
    save(values["output"], [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    run(main)
