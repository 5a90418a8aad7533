"""Measures the speed of prefill and decoding; one row per batch size."""

import dataclasses
import time

import jax
import numpy as np

from megajax.inference.engine import Engine
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.devices import find_device


@dataclasses.dataclass(frozen=True)
class Measurement:
    batch_size: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    step_seconds: float
    """Time of one decoding step, which generates one token for every row."""
    decode_tokens_per_second: float
    bandwidth: float | None
    """Fraction of the memory bandwidth used by reading once what a step needs: keys, values, and of the weights what
    Model.shares_read says (so of a mixture of experts it is a lower bound); None: unknown device."""


GREEDY = Sampling(temperature=0.0)


def measure(
    engine: Engine, batch_size: int, prompt_tokens: int, max_tokens: int, repeats: int, sampling: Sampling = GREEDY
) -> Measurement:
    """Random prompts of equal length; one generation to compile, then the median of `repeats`. max_tokens replaces that
    of `sampling`; no token ends a sequence.

    Prefill lasts until every row has its first token, decoding from then on. Raises ValueError if prompt and generated
    tokens do not fit, or if the engine has fewer rows or pages than the batch needs.
    """
    sampling = dataclasses.replace(sampling, max_tokens=max_tokens, ignore_eos=True)
    sizes = engine.serving
    needed = batch_size * -(-(prompt_tokens + max_tokens) // sizes.page_size)
    if batch_size > sizes.max_rows or needed > engine.stats().num_pages:
        raise ValueError(
            f"batch={batch_size} needs {batch_size} rows and {needed} pages; the engine has {sizes.max_rows} and "
            f"{engine.stats().num_pages}"
        )
    generator = np.random.default_rng()  # other prompts than before: those are in the prefix cache
    vocab_size = engine.executor.vocab_size  # of those that the tokenizer can decode

    def once() -> tuple[float, float]:
        prompts = generator.integers(0, vocab_size, (batch_size, prompt_tokens)).tolist()
        start = time.perf_counter()
        waiting = {engine.submit(prompt, sampling) for prompt in prompts}
        first_tokens = start
        while engine.has_work:
            for output in engine.step():
                if output.request in waiting:
                    waiting.remove(output.request)
                    first_tokens = time.perf_counter()
        return first_tokens - start, (time.perf_counter() - first_tokens) / max(max_tokens - 1, 1)

    once()
    runs = [once() for _ in range(repeats)]
    prefill_seconds, step_seconds = (float(np.median([run[part] for run in runs])) for part in (0, 1))
    return Measurement(
        batch_size,
        prefill_seconds,
        batch_size * prompt_tokens / prefill_seconds,
        step_seconds,
        batch_size / step_seconds,
        _bandwidth(engine, batch_size, prompt_tokens + max_tokens // 2, step_seconds),
    )


def _bandwidth(engine: Engine, batch_size: int, length: int, step_seconds: float) -> float | None:
    device = find_device(engine.mesh.devices.flat[0].device_kind)
    if device is None:
        return None
    keys_and_values = batch_size * length * engine.bytes_per_token / engine.mesh.shape["tensor"]
    num_bytes = bytes_read(engine) + keys_and_values
    return num_bytes / step_seconds / device.memory_bandwidth


def bytes_read(engine: Engine) -> float:
    """Bytes of the weights that a device reads at least in a decoding step."""

    def of_weight(share: float, node) -> float:
        return share * sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(node))

    return sum(jax.tree.leaves(jax.tree.map(of_weight, engine.model.shares_read(), engine.params)))


def table(measurements: list[Measurement]) -> str:
    lines = ["batch  prefill ms  prefill tok/s  decode tok/s    ms/token  bandwidth"]
    for m in measurements:
        bandwidth = "-" if m.bandwidth is None else f"{100 * m.bandwidth:.1f} %"
        lines.append(
            f"{m.batch_size:>5}  {1000 * m.prefill_seconds:>10.2f}  {m.prefill_tokens_per_second:>13,.0f}  "
            f"{m.decode_tokens_per_second:>12,.0f}  {1000 * m.step_seconds:>10.3f}  {bandwidth:>9}"
        )
    return "\n".join(lines)
