"""Loss curves of each precision.recipe on real text: python -m benchmarks.precision_curves [--section.field=value ...]

Trains one model once for each recipe, with the same initial weights, the same batches in the same order and the same
learning rates, on the bytes of the files of Python's standard library, which every machine has (no network). The files
that the run does not train on give a validation loss at the end. The first recipe is the reference.
`bf16_two_microbatches` differs from bf16 only by the order in which gradients are summed: its gap is what rounding
alone does to a run, and smaller gaps are not significant.

    python -m benchmarks.precision_curves --output=precision_curves.json --plot=precision.svg

    --config=gpt2_124m
    --recipes=bf16,bf16_two_microbatches,fp8,fp8_rowwise,fp8_blockwise,nvfp4
    --seconds=90           end the run of a recipe after this much training, without compilation, and at the latest
                           where the reference ended; it is compared at its last step with the reference at that step
    --output=FILE.json     the losses, written after each recipe, so that an interrupted measurement keeps what it has
    --plot=FILE.svg        curves, and below them the differences from the reference
    --checkpoint.start_from=RUN
                           all recipes start with the weights of a run of train.py. Where the loss falls fastest the
                           smallest change moves a curve by percents; start behind that to compare the recipes alone

2,000 steps of 8 x 1,024 bytes unless --training.* says otherwise; --precision.high_layers=0,0 leaves no layer in
bfloat16, and --data.text takes other files. A recipe has about 20 s of compilation besides its steps.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import figures
from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, jax_versions
from megajax.config import Config
from megajax.mesh.processes import use_compilation_cache
from megajax.ops.low_precision import FORMATS
from megajax.overrides import override
from megajax.run import load_data, make_program, make_trainer
from megajax.training.faults.watchdog import Watchdog
from megajax.training.loop import Trainer

SETTINGS = (
    "--data.source=text",
    "--data.text=stdlib",
    "--data.tokenizer=bytes",
    "--model.vocab_size=257",
    "--optimizer.warmup_steps=200",
    "--training.steps=2000",
    "--training.global_batch_size=8",
    "--training.microbatch_size=None",
    "--training.sequence_length=1024",
    "--training.eval_every_steps=2000",
    "--training.eval_steps=40",
)
RECIPES = "bf16,bf16_two_microbatches,fp8,fp8_rowwise,fp8_blockwise,nvfp4"
TWO_MICROBATCHES = "_two_microbatches"
LAST = 100  # losses that are averaged for the final one
EVERY = 10  # losses that are averaged for a point of the curve


@dataclasses.dataclass(frozen=True)
class Curve:
    losses: list[float]
    """Of each step, nats per token."""
    validation_loss: float
    """On the held-out files, in the recipe, after the last of these steps."""
    step_seconds: float
    compile_seconds: float


def config_of(config: Config, name: str) -> Config:
    """The config that trains in the recipe of this name, on all devices."""
    config = config.check_on(jax.device_count())
    recipe = name.removesuffix(TWO_MICROBATCHES)
    arguments = [f"--precision.recipe={recipe}"]
    if recipe != name:
        half = config.training.global_batch_size // config.mesh.batch_shards // 2
        arguments.append(f"--training.microbatch_size={half}")
    if recipe not in FORMATS:
        arguments.append("--precision.high_layers=1,1")
    return override(config, arguments)


def measure(config: Config, seconds: float, num_steps: int) -> Curve:
    """Trains until num_steps steps are done, or `seconds` have passed."""
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, run_dir=folder)
        program = make_program(config)
        with (
            make_trainer(config, program, load_data(config), Watchdog(0)) as trainer,
            jax.set_mesh(program.mesh),
        ):
            return _train(trainer, seconds, num_steps)


def _train(trainer: Trainer, seconds: float, num_steps: int) -> Curve:
    state = trainer.initial_state()
    step_function = trainer.program.train_step(trainer.config)
    losses = []
    began = time.perf_counter()
    batches = trainer.train_batches(0, num_steps, lambda: state.weights)
    for step, batch in enumerate(batches):
        state, metrics = step_function(state, batch, np.float32(trainer.learning_rate(step)))
        losses.append(metrics["loss"])
        if step == 0:
            jax.block_until_ready(metrics)
            compile_seconds = time.perf_counter() - began
            began = time.perf_counter()
        jax.block_until_ready(losses[-2:][0])  # one step behind the device, like the training loop
        if time.perf_counter() - began > seconds:
            break
    jax.block_until_ready(state)
    step_seconds = (time.perf_counter() - began) / max(len(losses) - 1, 1)
    validation = trainer.evaluator()(state.weights)["eval_loss"]
    return Curve([float(loss) for loss in losses], validation, step_seconds, compile_seconds)


def summary(curve: Curve, reference: Curve) -> dict:
    """What a curve ends with, and the gap of its last losses to those of the reference at the same steps, relative."""
    count = len(curve.losses)
    last = slice(max(count - LAST, 0), count)
    final = statistics.mean(curve.losses[last])
    return {
        "steps": count,
        "final_loss": final,
        "gap": final / statistics.mean(reference.losses[last]) - 1,
        "validation_loss": curve.validation_loss,
        "step_seconds": curve.step_seconds,
        "compile_seconds": curve.compile_seconds,
    }


def table(summaries: dict[str, dict]) -> str:
    """Markdown, a row for each recipe. The validation loss of a shorter run than the reference has no gap."""
    first = next(iter(summaries.values()))
    lines = [
        f"| recipe | steps | loss, mean of the last {LAST} | gap | held-out loss | gap | step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in summaries.items():
        emulated = " (emulated)" if name in FORMATS and FORMATS[name].is_emulated else ""
        gap = f"{row['gap']:+.2%}" if row is not first else "-"
        is_compared = row is not first and row["steps"] == first["steps"]
        held_out = f"{row['validation_loss'] / first['validation_loss'] - 1:+.2%}" if is_compared else "-"
        lines.append(
            f"| {name}{emulated} | {row['steps']:,} | {row['final_loss']:.4f} | {gap} | {row['validation_loss']:.4f} "
            f"| {held_out} | {row['step_seconds'] * 1e3:.1f} ms |"
        )
    return "\n".join(lines)


def record(command: str, curves: dict[str, Curve]) -> dict:
    """The file: what was run where, a summary of each recipe, and curves with a point for each EVERY steps."""
    reference = next(iter(curves.values()))
    return {
        "command": command,
        "device": devices(),
        "versions": jax_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "summaries": {name: summary(curve, reference) for name, curve in curves.items()},
        "steps": list(range(EVERY, max(len(curve.losses) for curve in curves.values()) + 1, EVERY)),
        "losses": {name: _averaged(curve.losses) for name, curve in curves.items()},
    }


def _averaged(losses: list[float]) -> list[float]:
    ends = range(EVERY, len(losses) + 1, EVERY)
    return [round(statistics.mean(losses[end - EVERY : end]), 5) for end in ends]


def main(arguments: list[str]) -> None:
    known = {"config": "gpt2_124m", "recipes": RECIPES, "seconds": "90", "output": "", "plot": ""}
    values, overrides = split(arguments, known)
    config = read_config(values["config"], [*SETTINGS, *overrides])
    names = values["recipes"].split(",")
    configs = {name: config_of(config, name) for name in names}
    use_compilation_cache()
    num_steps = config.training.steps
    curves = {}
    found = {}
    for name in names:
        curves[name] = measure(configs[name], float(values["seconds"]), num_steps)
        num_steps = len(curves[names[0]].losses)
        found = record(" ".join(["python -m benchmarks.precision_curves", *arguments]), curves)
        print(table(found["summaries"]), file=sys.stderr, flush=True)
        if values["output"]:
            Path(values["output"]).write_text(json.dumps(found) + "\n")
        jax.clear_caches()
    print(table(found["summaries"]))
    if values["plot"]:
        figures.losses(values["plot"], found["steps"], found["losses"])


if __name__ == "__main__":
    run(main)
