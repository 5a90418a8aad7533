"""Time of the bare train step of a recipe: python -m benchmarks.train_step --config=NAME [--section.field=value ...]

The step is the one that train.py runs, on random tokens that lie on the devices already: eight batches in turn, so that
the loss stays alive (a busy GPU is power-limited, and constant data would draw less power). Runs for `--seconds` (15),
the second half counts. --profile prints where the time goes, by kind of kernel. A program found in the compilation
cache compiles in no time; JAX_ENABLE_COMPILATION_CACHE=false measures that too.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

import configs
from benchmarks.profile import breakdown
from megajax.config import Config, override
from megajax.mesh import make_mesh, use_compilation_cache
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.sharding import batch_spec
from megajax.training.compiler_options import compiler_options
from megajax.training.console import format_bytes, log_to_stderr
from megajax.training.flops import find_device, utilisation
from megajax.training.step import TrainState, init_state, jit_train_step, state_shardings

RATE = np.float32(1e-5)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a measurement needs but the compiled step and its state."""

    config: Config
    mesh: Mesh
    model: Model
    optimizer: Optimizer
    shardings: TrainState
    batches: list[dict]
    """On the devices."""

    def new_state(self) -> TrainState:
        return init_state(self.model, self.optimizer, self.config.training.seed, self.mesh, self.shardings)

    def compile(self, state: TrainState, compiler_options: dict[str, str]) -> tuple[Compiled, float]:
        """-> (the step of this recipe, seconds it took)."""
        start, training = time.perf_counter(), self.config.training
        means = dict(loss_mean=training.loss_mean, group=training.microbatch_size, seed=training.seed)
        step = jit_train_step(self.model, self.optimizer, self.shardings, compiler_options, **means)
        with jax.set_mesh(self.mesh):
            return step.lower(state, self.batches[0], RATE).compile(), time.perf_counter() - start


def set_up(config: Config) -> Setup:
    config = config.check_on(jax.device_count())
    use_compilation_cache()
    training, mesh = config.training, make_mesh(config.mesh)
    model = Model(config.model, config.precision)
    optimizer = Optimizer(config.optimizer, model.decay_mask)
    shardings = state_shardings(model, optimizer, mesh, config.optimizer.shard_over_data)
    batch = training.schedule(config.mesh)(training.steps)
    shape = (batch.num_microbatches, batch.microbatch, training.sequence_length)
    sharding = NamedSharding(mesh, batch_spec())
    batches = [_random_batch(np.random.default_rng(i), shape, config, sharding) for i in range(8)]
    return Setup(config, mesh, model, optimizer, shardings, batches)


def _random_batch(rng: np.random.Generator, shape: tuple, config: Config, sharding: NamedSharding) -> dict:
    tokens = rng.integers(0, config.model.vocab_size, (*shape[:2], shape[2] + 1), dtype=np.int32)
    arrays = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "positions": np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape),
        "loss_mask": np.ones(shape, np.float32),
    }
    if not config.data.cross_document_attention:
        ends = rng.random(shape) < 1 / 500  # documents of about 500 tokens
        arrays["segment_ids"] = 1 + np.cumsum(ends, -1, dtype=np.int32)
    return {name: jax.device_put(np.ascontiguousarray(array), sharding) for name, array in arrays.items()}


def sustained(
    step: Callable, state: TrainState, batches: list[dict], seconds: float
) -> tuple[TrainState, dict[str, jax.Array], float]:
    """Runs the step for so long -> (state, metrics, seconds of a step in the second half)."""
    count, half, start = 0, None, time.perf_counter()
    while half is None or count == half[0] or time.perf_counter() - start < seconds:
        for batch in batches:
            state, metrics = step(state, batch, RATE)
        jax.block_until_ready(metrics)
        count += len(batches)
        if half is None and time.perf_counter() - start > seconds / 2:
            half = (count, time.perf_counter())
    return state, metrics, (time.perf_counter() - half[1]) / (count - half[0])


def measure(config: Config, seconds: float, profile: bool) -> dict:
    """Seconds of a step, sustained, with tokens/s and MFU a device; device memory in bytes."""
    setup = set_up(config)
    config, mesh, batches = setup.config, setup.mesh, setup.batches
    options = compiler_options(config.training.compiler_options, setup.model, mesh)
    state = setup.new_state()
    step, compile_seconds = setup.compile(state, options)
    state, metrics, step_seconds = sustained(step, state, batches, seconds)
    if profile:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for batch in batches[:3]:
                    state, metrics = step(state, batch, RATE)
                jax.block_until_ready(metrics)
            print(breakdown(folder, num_steps=3))
    device, training = jax.local_devices()[0], config.training
    per_device = training.global_batch_size * training.sequence_length / step_seconds / mesh.size
    known = find_device(device.device_kind)
    flops = config.model.flops_per_token(training.sequence_length, causal=False)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second_per_device": per_device,
        "mfu": utilisation(flops, per_device, known) if known else None,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "loss": float(metrics["loss"]),
        "device": f"{mesh.size} x {device.device_kind}",
        "jax": jax.__version__,
        "compiler_options": options,
    }


def main(arguments: list[str]) -> None:
    seconds, profile, name, overrides = 15.0, False, "", []
    for argument in arguments:
        if argument.startswith("--config="):
            name = argument.removeprefix("--config=")
        elif argument.startswith("--seconds="):
            seconds = float(argument.removeprefix("--seconds="))
        elif argument == "--profile":
            profile = True
        else:
            overrides.append(argument)
    result = measure(override(configs.recipe(name), overrides), seconds, profile)
    shown = {**result, "peak_memory_bytes": format_bytes(result["peak_memory_bytes"])}
    print(f"megajax {name} {' '.join(overrides)}: {json.dumps(shown)}", flush=True)


if __name__ == "__main__":
    log_to_stderr()
    main(sys.argv[1:])
