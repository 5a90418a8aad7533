"""Time of the bare train step of a recipe: python -m benchmarks.train_step --config=NAME [--section.field=value ...]

The step is the one that train.py runs, on random tokens that lie on the devices already: eight batches in turn, so that
the loss stays alive (a busy GPU is power-limited, and constant data would draw less power). Runs for `--seconds` (15),
the second half counts. --profile prints where the time goes, by kind of kernel.
"""

import json
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import NamedSharding

import configs
from benchmarks.profile import breakdown
from megajax.config import Config, override
from megajax.mesh import make_mesh
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.sharding import batch_spec
from megajax.training.console import format_bytes, log_to_stderr
from megajax.training.flops import find_device, utilisation
from megajax.training.step import init_state, make_train_step, state_shardings


def build(config: Config):
    """-> (jitted step, state, batches on the devices, mesh)."""
    config = config.check_on(jax.device_count())
    training, mesh = config.training, make_mesh(config.mesh)
    model = Model(config.model, config.precision)
    optimizer = Optimizer(config.optimizer, model.decay_mask)
    shardings = state_shardings(model, optimizer, mesh, config.optimizer.shard_over_data)
    state = init_state(model, optimizer, training.seed, mesh, shardings)
    step = make_train_step(
        model, optimizer, loss_mean=training.loss_mean, group=training.microbatch_size, seed=training.seed
    )
    batch = training.schedule(config.mesh)(training.steps)
    shape = (batch.num_microbatches, batch.microbatch, training.sequence_length)
    sharding = NamedSharding(mesh, batch_spec())
    batches = [_random_batch(np.random.default_rng(i), shape, config, sharding) for i in range(8)]
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), state, batches, mesh


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


def measure(config: Config, seconds: float, profile: bool) -> dict:
    """Seconds of a step, sustained, with tokens/s and MFU a device; device memory in bytes."""
    step, state, batches, mesh = build(config)
    rate = np.float32(1e-5)
    with jax.set_mesh(mesh):
        start = time.perf_counter()
        state, metrics = step(state, batches[0], rate)
        jax.block_until_ready(metrics)
        compile_seconds = time.perf_counter() - start
        count, half, start = 0, None, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for batch in batches:
                state, metrics = step(state, batch, rate)
            jax.block_until_ready(metrics)
            count += len(batches)
            if half is None and time.perf_counter() - start > seconds / 2:
                half = (count, time.perf_counter())
        step_seconds = (time.perf_counter() - half[1]) / (count - half[0])
        if profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for batch in batches[:3]:
                        state, metrics = step(state, batch, rate)
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
