"""Measures the speed of prefill and decoding; one row per batch size."""

import dataclasses
import time

import jax
import numpy as np

from megajax.devices import find_device
from megajax.inference.engine import DecodeState, Engine
from megajax.inference.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Measurement:
    batch_size: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    step_seconds: float
    """Time of one decoding step, which generates one token for every row."""
    decode_tokens_per_second: float
    bandwidth: float | None
    """Fraction of the memory bandwidth used by reading weights and caches once per step; None: unknown device."""


def measure(engine: Engine, batch_size: int, prompt_tokens: int, max_tokens: int, repeats: int) -> Measurement:
    """Random prompts of equal length, sampled greedily; one generation to compile, then the median of `repeats`.

    Raises ValueError if prompt and generated tokens do not fit into the model.
    """
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    sampling.check()
    vocab_size = engine.model.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab_size, (batch_size, prompt_tokens)).tolist()
    engine.check_prompts(prompts, sampling)

    def once() -> tuple[float, float, DecodeState]:
        start = time.perf_counter()
        state = jax.block_until_ready(engine.start(prompts, [sampling] * batch_size, max_tokens))
        middle = time.perf_counter()
        for _ in range(max_tokens):
            before = state.tokens_B
            state = engine.step(state)
            np.asarray(before)  # read one step late, as in a generation
        jax.block_until_ready(state.tokens_B)
        return middle - start, (time.perf_counter() - middle) / max_tokens, state

    once()
    runs = [once() for _ in range(repeats)]
    prefill_seconds, step_seconds = (float(np.median([run[part] for run in runs])) for part in (0, 1))
    return Measurement(
        batch_size,
        prefill_seconds,
        batch_size * prompt_tokens / prefill_seconds,
        step_seconds,
        batch_size / step_seconds,
        _bandwidth(engine, runs[-1][2], step_seconds),
    )


def _bandwidth(engine: Engine, state: DecodeState, step_seconds: float) -> float | None:
    device = find_device(engine.mesh.devices.flat[0].device_kind)
    if device is None:
        return None
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((engine.params, state.caches)))
    return num_bytes / step_seconds / device.memory_bandwidth


def table(measurements: list[Measurement]) -> str:
    lines = ["batch  prefill ms  prefill tok/s  decode tok/s    ms/token  bandwidth"]
    for m in measurements:
        bandwidth = "-" if m.bandwidth is None else f"{100 * m.bandwidth:.1f} %"
        lines.append(
            f"{m.batch_size:>5}  {1000 * m.prefill_seconds:>10.2f}  {m.prefill_tokens_per_second:>13,.0f}  "
            f"{m.decode_tokens_per_second:>12,.0f}  {1000 * m.step_seconds:>10.3f}  {bandwidth:>9}"
        )
    return "\n".join(lines)
