"""Time of the bare train step of a recipe: python -m benchmarks.train_step --config=NAME [--section.field=value ...]

The step is the one that train.py runs, on random tokens that are already on the devices: 64 batches in turn, with a
learning rate too small to memorise them, so that the loss does not go to zero (benchmarks/sustained.py explains why;
the first and the last loss are printed). A program found in the compilation cache is not compiled again; with
JAX_ENABLE_COMPILATION_CACHE=false compilation is measured too.

    --seconds=10            length of a window, after half as much to warm up
    --windows=1             number of windows; the median counts
    --steps=N               time N single steps instead, and report the last: for very long steps
    --profile[=FILE.json]   prints where the time goes (benchmarks/profile.py), and writes it as data
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled

from benchmarks import profile
from benchmarks.command_line import read_config, run, split
from benchmarks.image_batches import image_rows
from benchmarks.records import devices, jax_versions, record
from benchmarks.sustained import LEARNING_RATE, windows
from megajax.config import Config
from megajax.mesh.config import make_mesh
from megajax.mesh.devices import find_device, utilisation
from megajax.mesh.processes import use_compilation_cache
from megajax.models.interface import ModelConfig
from megajax.models.multimodal import MultimodalConfig
from megajax.parallel.context import sequence_order
from megajax.training.batches import abstract_batch
from megajax.training.program import Program
from megajax.training.reporting.console import format_bytes
from megajax.training.state import TrainState

NUM_BATCHES = 64
PROFILED_STEPS = 3
RATE = np.float32(LEARNING_RATE)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a measurement needs except the compiled step and its state."""

    config: Config
    program: Program
    """With the compiler options that a run of this recipe gets."""
    batches: list[dict]
    """Batches on the devices."""

    def new_state(self) -> TrainState:
        return self.program.first_state(self.config.training.seed)

    def compile(self, state: TrainState, compiler_options: dict[str, str]) -> tuple[Compiled, float]:
        """-> (compiled step of this recipe, compilation time in seconds)."""
        start = time.perf_counter()
        program = dataclasses.replace(self.program, compiler_options=compiler_options)
        step = program.train_step(self.config.training)
        with jax.set_mesh(program.mesh):
            return step.lower(state, self.batches[0], RATE).compile(), time.perf_counter() - start


def set_up(config: Config) -> Setup:
    config = config.check_on(jax.device_count())
    use_compilation_cache()
    training = config.training
    program = config.make_program(make_mesh(config.mesh))
    batch = training.schedule(config.mesh)(training.steps)
    arrays = abstract_batch(program.arrays(training), batch, program.mesh)
    order = sequence_order(arrays["tokens"].shape[-1], config.mesh.context, config.execution.context_attention)
    batches = _random_batches(arrays, order, config.model)
    return Setup(config, program, batches)


def _random_batches(arrays: dict[str, jax.ShapeDtypeStruct], order: np.ndarray, model: ModelConfig) -> list[dict]:
    """Random tokens with the other arrays of a batch; labels are the next tokens. An encoder reads one text per row. In
    a model that reads images, as benchmarks/image_batches.py has them."""
    shape = arrays["tokens"].shape
    vocab_size = model.vocab_size

    def on_devices(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        targets = {name: arrays[name] for name in values if name in arrays}
        return {
            name: jax.device_put(np.ascontiguousarray(values[name], target.dtype), target.sharding)
            for name, target in targets.items()
        }

    one_text = {name: np.ones(like.shape) for name, like in arrays.items() if name == "encoder_segment_ids"}
    same = on_devices({"positions": np.broadcast_to(order, shape), "loss_mask": np.ones(shape)} | one_text)

    def drawn(number: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(number)
        if isinstance(model, MultimodalConfig) and model.image_inputs:
            return image_rows(model, shape, rng)
        tokens = rng.integers(0, vocab_size, (*shape[:-1], shape[-1] + 1), dtype=np.int32)
        ends = rng.random(shape) < 1 / 500  # documents of about 500 tokens
        segments = (1 + np.cumsum(ends, -1, dtype=np.int32))[..., order]
        others = {name: rng.integers(0, vocab_size, like.shape) for name, like in arrays.items() if name not in same}
        return others | {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "segment_ids": segments}

    return [same | on_devices(drawn(number)) for number in range(NUM_BATCHES)]


def sustained(
    step: Callable, state: TrainState, batches: list[dict], seconds: float, num_windows: int = 1
) -> tuple[TrainState, dict[str, jax.Array], list[float]]:
    """-> (state, metrics, seconds per step in each window)."""
    source = itertools.cycle(batches)
    metrics = None

    def run_steps(count: int) -> None:
        nonlocal state, metrics
        for _ in range(count):
            waiting = metrics
            state, metrics = step(state, next(source), RATE)
            jax.block_until_ready(waiting)  # one step behind the device, like the training loop
        jax.block_until_ready(metrics)

    found = windows(run_steps, seconds=seconds, num_windows=num_windows)
    return state, metrics, found


@dataclasses.dataclass(frozen=True)
class Timed:
    step_seconds: float
    compile_seconds: float
    peak_memory_bytes: int
    """Planned by the compiler, per device."""
    first_loss: float
    loss: float
    program: str
    """Text of the compiled step."""


def timed(setup: Setup, seconds: float, options: dict[str, str] | None = None) -> Timed:
    """One window of the step from new weights. options: instead of the program's compiler options."""
    state = setup.new_state()
    step, compile_seconds = setup.compile(state, setup.program.compiler_options if options is None else options)
    state, first = jax.block_until_ready(step(state, setup.batches[-1], RATE))
    _, metrics, (step_seconds,) = sustained(step, state, setup.batches, seconds)
    memory = step.memory_analysis().peak_memory_in_bytes
    return Timed(step_seconds, compile_seconds, memory, float(first["loss"]), float(metrics["loss"]), step.as_text())


def measure(config: Config, seconds: float, num_windows: int, num_steps: int, profile_to: str) -> dict:
    """Seconds per step, tokens/s and MFU per device (attention counted in full, and causally); memory in bytes.

    num_steps: run this many steps and time the last; 0: time windows of `seconds`.
    profile_to: a file, "yes" to print only, "" for no profile.
    """
    setup = set_up(config)
    config = setup.config
    mesh = setup.program.mesh
    batches = setup.batches
    options = setup.program.compiler_options
    state = setup.new_state()
    step, compile_seconds = setup.compile(state, options)
    start = time.perf_counter()
    state, first = jax.block_until_ready(step(state, batches[-1], RATE))
    found = [time.perf_counter() - start]
    metrics = first
    for batch in batches[: num_steps - 1] if num_steps else ():
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch, RATE))
        found = [time.perf_counter() - start]
    if not num_steps:
        state, metrics, found = sustained(step, state, batches, seconds, num_windows)
    if profile_to:
        # For a kernel in a CUDA graph a profile shows only the graph, not the instruction.
        step, _ = setup.compile(state, options | {"xla_gpu_enable_command_buffer": ""})
        _profile(step, state, batches, profile_to)
    device = jax.local_devices()[0]
    training = config.training
    result = record(
        "megajax",
        found,
        devices(mesh.size),
        jax_versions(),
        compile_seconds=compile_seconds,
        peak_memory_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        first_loss=float(first["loss"]),
        loss=float(metrics["loss"]),
        compiler_options=options,
    )
    per_device = training.global_batch_size * training.sequence_length / result["step_seconds"] / mesh.size
    known = find_device(device.device_kind)
    known = known and known.computing_in(setup.config.precision.compute)
    mfu = {
        name: known
        and utilisation(setup.program.model.flops_per_token(training.sequence_length, causal=causal), per_device, known)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }
    return result | {"tokens_per_second_per_device": per_device} | mfu


def _profile(step: Compiled, state: TrainState, batches: list[dict], to: str) -> None:
    state, metrics = step(state, batches[0], RATE)  # loads the program
    jax.block_until_ready(metrics)
    with profile.recorded() as kernels:
        for batch in batches[:PROFILED_STEPS]:
            state, metrics = step(state, batch, RATE)
        jax.block_until_ready(metrics)
    found = profile.breakdown(kernels, PROFILED_STEPS, step.as_text())
    print(profile.as_text(found))
    if to != "yes":
        Path(to).write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    values, overrides = split(arguments, {"config": "", "seconds": "10", "windows": "1", "steps": "0", "profile": ""})
    config = read_config(values["config"], overrides)
    result = measure(config, float(values["seconds"]), int(values["windows"]), int(values["steps"]), values["profile"])
    memory = format_bytes(result["peak_memory_bytes"])
    print(f"megajax {values['config']} {' '.join(overrides)}, peak {memory}: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    run(main)
