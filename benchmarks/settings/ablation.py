"""Effect of each compiler option: python -m benchmarks.settings.ablation --config=NAME [--section.field=value ...]

Measures the bare train step (benchmarks/train_step.py) with the options that a run would get, then without each of
them, with each candidate added or replaced, and finally with the original options again, which shows the drift: smaller
differences are not significant. One process, one table.

    --seconds=6                     length of each measurement
    --options="xla_a=1 xla_b=x,y"   the candidates, instead of those below
    --output=FILE.json              saves the numbers
"""

import dataclasses
import sys

import jax
import jaxlib

from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, save
from benchmarks.train_step import set_up, timed
from megajax.config import Config
from megajax.training.compiler_options import parse
from megajax.training.reporting.console import format_bytes

# Options set by published recipes for H100, and options that should help collectives that overlap with matmuls.
CANDIDATES = (
    "xla_gpu_enable_triton_gemm=True xla_gpu_enable_command_buffer= xla_gpu_nccl_collective_max_nchannels=8 "
    "xla_gpu_enable_nccl_user_buffers=True xla_gpu_experimental_enable_nccl_symmetric_buffers=True "
    "xla_gpu_enable_highest_priority_async_stream=False xla_gpu_experimental_parallel_collective_overlap_limit=4 "
    "xla_gpu_experimental_parallel_async_compute_limit=2"
)
BASELINE = "as a run has them"
AGAIN = "the same again"


def variants(options: dict[str, str], candidates: dict[str, str]) -> dict[str, dict[str, str]]:
    """{change: all options}, with the unchanged options first and last."""
    without = {f"without {name}": {n: v for n, v in options.items() if n != name} for name in options}
    added = {name: value for name, value in candidates.items() if options.get(name) != value}
    with_one = {f"{name}={value}": options | {name: value} for name, value in added.items()}
    return {BASELINE: options} | without | with_one | {AGAIN: options}


def ablate(config: Config, candidates: dict[str, str], seconds: float) -> list[dict]:
    """A row for each variant; what did not compile, or did not run, has no time but a problem."""
    setup = set_up(config)
    rows = []
    for change, options in variants(setup.program.compiler_options, candidates).items():
        row = {"change": change, "step_seconds": None}
        try:
            row |= dataclasses.asdict(timed(setup, seconds, options))
            del row["program"]
        except jax.errors.JaxRuntimeError as error:  # the compiler refuses the option, or memory is too small
            row["problem"] = str(error).splitlines()[0][:200]
        rows.append(row)
        print(_line(row, rows[0]), file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict]) -> str:
    lines = ["| compiler options | step | difference | memory |", "|---|---|---|---|"]
    return "\n".join(lines + [_line(row, rows[0]) for row in rows])


def _line(row: dict, baseline: dict) -> str:
    if "problem" in row:
        return f"| `{row['change']}` | - | {row['problem']} | - |"
    change = row["change"] if row["change"] in (BASELINE, AGAIN) else f"`{row['change']}`"
    first = baseline["step_seconds"]
    difference = f"{row['step_seconds'] / first - 1:+.2%}" if first else "-"
    memory = format_bytes(row["peak_memory_bytes"])
    return f"| {change} | {1000 * row['step_seconds']:.2f} ms | {difference} | {memory} |"


def main(arguments: list[str]) -> None:
    known, overrides = split(arguments, {"config": "", "seconds": "6", "options": CANDIDATES, "output": ""})
    config = read_config(known["config"], overrides)
    rows = ablate(config, parse(known["options"]), float(known["seconds"]))
    about = {"overrides": overrides, "devices": devices(), "jaxlib": jaxlib.__version__}
    print(f"{known['config']} {' '.join(overrides)} on {devices()}, jaxlib {jaxlib.__version__}\n\n{table(rows)}")
    save(known["output"], known | about | {"rows": rows})


if __name__ == "__main__":
    run(main)
