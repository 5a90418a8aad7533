"""How time, memory, compilation and start-up grow with depth, width, sequence, experts and GPUs; needs no GPU.

    python -m benchmarks.growth --output=growth.json --plot=growth.svg

A step's time and its memory per GPU are those of --plan, for H100 (the README says how far its times are from measured
ones). Measured on this machine are the time to trace and compile the step for H100, where the CUDA wheels are
installed, and the start of train.py on virtual CPU devices, without a cache, up to the end of the first step of a model
of width 64. The points of a series differ in what it is named after, and in the sizes that follow from it.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime

import megajax
from benchmarks import figures
from benchmarks.command_line import only, run
from benchmarks.records import ROOT, commit, jax_versions, save
from megajax.config import Config
from megajax.mesh import compat
from megajax.mesh.config import make_mesh
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import compile_step, devices_without_gpu, plan_device
from megajax.planning.search import search
from megajax.planning.step_time import step_times

H100 = plan_device("h100")
LLAMA = {"mesh.data": 1, "mesh.fsdp": 8, "training.global_batch_size": 8, "training.sequence_length": 4096}
TINY = {
    "model.embed_dim": 64, "model.num_heads": 4, "model.mlp_dim": 128, "model.vocab_size": 256, "data.source": "mock",
    "data.text": "", "data.tokenizer": "null:255", "training.sequence_length": 64, "training.sample_prompt": "",
    "training.eval_every_steps": 0, "checkpoint.every_steps": 0, "launch.exit_at_step": 1, "logging.tensorboard": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Series:
    """What grows, and the config for each of its values."""

    title: str
    recipe: str
    overrides: Callable[[int], dict]
    values: tuple[int, ...]
    num_gpus: Callable[[int], int] | None = None
    """Of which the fastest mesh is searched for; None: the mesh of the overrides."""
    compiled: tuple[int, ...] | None = None
    """Values for which the step is compiled; None: all."""
    started: Callable[[int], dict] | None = None
    """Overrides of TINY with which train.py is started."""
    starts: tuple[int, ...] = ()

    def config(self, value: int) -> Config:
        config = megajax.recipe(self.recipe, self.overrides(value)).with_steps()
        if self.num_gpus is None:
            return config.for_plan()
        return search(config, self.num_gpus(value), H100).best[0].config


def _width(embed_dim: int) -> dict:
    sizes = {"embed_dim": embed_dim, "num_heads": embed_dim // 128, "mlp_dim": 7 * embed_dim // 2, "num_layers": 16}
    return LLAMA | {f"model.{name}": size for name, size in sizes.items()}


def _length(tokens: int) -> dict:
    return LLAMA | {"mesh.context": 8, "training.sequence_length": tokens, "execution.recompute": "selective"}


def _experts(number: int) -> dict:
    return {"model.moe.num_experts": number}


SERIES = (
    Series(
        "layers: Llama-3 8B's, 8 GPUs", "llama3_8b", lambda layers: LLAMA | {"model.num_layers": layers},
        (2, 4, 8, 16, 32, 64, 128),
        started=lambda layers: {"model.num_layers": layers}, starts=(2, 8, 32, 128),
    ),
    Series("width: 16 layers, 8 GPUs", "llama3_8b", _width, (1024, 2048, 4096, 8192, 16384)),
    Series(
        "tokens of a sequence: Llama-3 8B, 64 GPUs, 8 of them for each sequence", "llama3_8b", _length,
        (8192, 32768, 131072, 524288, 1048576),
    ),
    Series(
        "experts, 8 of them for a token: Qwen3-30B-A3B's, the fastest mesh of 32 GPUs", "qwen3_30b_a3b", _experts,
        (16, 32, 64, 128, 256, 512), lambda _: 32,
        started=lambda experts: {"model.moe.num_experts": experts, "model.moe.router.top_k": 2}, starts=(8, 64, 256),
    ),
    Series(
        "GPUs: GPT-3 175B, 3 sequences of 2,048 for 2 GPUs, on the fastest mesh", "gpt_175b",
        lambda gpus: {"training.global_batch_size": 3 * gpus // 2}, (64, 128, 256, 512, 1024, 2048, 4096, 10240),
        lambda gpus: gpus, compiled=(64, 128, 256),
        started=lambda devices: {"mesh.data": devices, "training.global_batch_size": 2 * devices,
                                 "launch.cpu_devices": devices},
        starts=(1, 8, 64, 256),
    ),
    Series(
        "GPUs: GPT-3 175B, 1,536 sequences of 2,048, on the fastest mesh", "gpt_175b", lambda gpus: {},
        (64, 128, 256, 512, 1024, 1536, 3072), lambda gpus: gpus, compiled=(),
    ),
)  # fmt: skip


def planned(config: Config) -> dict:
    program = config.make_program()
    memory, host = memory_per_device(program, config.training)
    seconds = step_times(program, config.training, H100, host).step
    tokens = config.training.global_batch_size * config.training.sequence_length / config.mesh.num_devices
    rate = program.model.flops_per_token(config.training.sequence_length, causal=False) * tokens / seconds
    axes = {axis: size for axis, size in config.mesh.sizes().items() if size > 1}
    return dict(
        step_seconds=seconds, bytes_per_gpu=sum(memory.values()), mfu=rate / H100.peak_flops, mesh=axes,
        microbatch_size=config.training.microbatch_size, recompute=config.execution.recompute,
    )  # fmt: skip


def compile_seconds(config: Config) -> float:
    mesh = make_mesh(config.mesh, devices_without_gpu(config.mesh.num_devices, H100))
    _, seconds = compile_step(dataclasses.replace(config.make_program(), mesh=mesh), config.training)
    return seconds


def start_seconds(overrides: dict) -> float:
    """Of train.py, from its start to its end after one step."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={value}" for name, value in (TINY | overrides).items()]
        command = [sys.executable, ROOT / "train.py", "--config=gpt_tiny", f"--run_dir={folder}/run", *words]
        begun = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
    if done.returncode:
        raise ValueError(f"{' '.join(words)}: {done.stderr[-500:]}")
    return seconds


def main(arguments: list[str]) -> None:
    values = only(arguments, {"output": "", "plot": "", "series": ",".join(map(str, range(len(SERIES))))})
    compiles = compat.gpu_compiler_installed()
    found = []
    record = dict(
        command=f"python -m benchmarks.growth {' '.join(arguments)}", machine=f"{os.cpu_count()} x {_processor()}",
        versions=jax_versions(), date=datetime.now(UTC).date().isoformat(), commit=commit(), series=found,
    )  # fmt: skip
    for series in (SERIES[int(number)] for number in values["series"].split(",")):
        rows = {}
        for value in series.values:
            config = series.config(value)
            rows[value] = planned(config)
            if compiles and value in (series.values if series.compiled is None else series.compiled):
                rows[value]["compile_seconds"] = compile_seconds(config)
            print(f"{series.title}: {value}: {json.dumps(rows[value])}", flush=True)
        for value in series.starts:
            rows.setdefault(value, {})["start_seconds"] = start_seconds(series.started(value))
            print(f"{series.title}: {value}: started in {rows[value]['start_seconds']:.1f} s", flush=True)
        found.append(dict(title=series.title, rows={str(value): row for value, row in sorted(rows.items())}))
        save(values["output"], record)
    if values["plot"]:
        figures.growth(values["plot"], found)


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    run(main)
