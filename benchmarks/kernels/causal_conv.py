"""Bandwidth of the causal convolution on one Hopper GPU: python -m benchmarks.kernels.causal_conv [--output=FILE]

Sixteen sequences of 2,048 tokens, with ids of documents, in bfloat16. Prints GB/s, for the bytes that
pallas_kernels/causal_conv.py gives, next to a copy on the device in the same run.
"""

import jax
import jax.numpy as jnp

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from pallas_kernels import causal_conv as kernel

SEQUENCES, TOKENS, TAPS = 16, 2048, 4
CHANNELS = 128, 1536, 5120


def measure(channels: int) -> dict:
    keys = jax.random.split(jax.random.key(0), 6)
    x, d_out = (jax.random.normal(key, (SEQUENCES, TOKENS, channels), jnp.bfloat16) for key in keys[:2])
    inputs = kernel.Inputs(
        x,
        jax.random.normal(keys[2], (TAPS, channels)),
        jax.random.normal(keys[3], (channels,)),
        jax.random.normal(keys[4], (SEQUENCES, TAPS - 1, channels), jnp.bfloat16),
        jnp.cumsum(jax.random.bernoulli(keys[5], 0.002, (SEQUENCES, TOKENS)), 1, dtype=jnp.int32),
        jnp.zeros((SEQUENCES, TAPS - 1), jnp.int32),
    )
    seconds = {"forward": seconds_of(kernel.forward, inputs), "backward": seconds_of(kernel.backward, inputs, d_out)}
    passes = {"forward": 2, "backward": 3}  # over the array
    speeds = {name: passes[name] * x.nbytes / seconds[name] / 1e9 for name in seconds}
    return {"channels": channels, "seconds": seconds, "gigabytes_per_second": speeds}


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    copy = copy_bandwidth()
    found = []
    print(f"copy on the device: {copy:,.0f} GB/s\n")
    print("| channels | forward | | backward | |\n|---|---|---|---|---|")
    for channels in CHANNELS:
        found.append(measure(channels))
        cells = [f"{speed:,.0f} | {speed / copy:.2f}" for speed in found[-1]["gigabytes_per_second"].values()]
        print(f"| {channels} | {' | '.join(cells)} |", flush=True)
    save(output, about() | {"copy": copy, "rows": found})


if __name__ == "__main__":
    run(main)
