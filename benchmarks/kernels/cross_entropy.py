"""Time of the cross-entropy's kernel on one Hopper GPU: python -m benchmarks.kernels.cross_entropy [--output=FILE]

First compares log-sum-exp and gradient with the reference. Then prints milliseconds of both, and GB/s of the kernel for
the bytes that pallas_kernels/cross_entropy.py gives, next to a copy on the device in the same run. The rows are those
of a chunk of the loss.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.ops.cross_entropy import value_and_gradient as reference
from pallas_kernels import cross_entropy as kernel

# rows, width, tokens: vocabularies of GPT-2, Llama 3 and Qwen3
SHAPES = (8192, 50304, 50257), (4096, 128256, 128256), (3456, 151936, 151936)
Z_LOSS = 1e-4


def measure(rows: int, width: int, vocab_size: int) -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    products = 3 * jax.random.normal(keys[0], (rows, width), jnp.float32)
    labels = jax.random.randint(keys[1], (rows,), 0, vocab_size)
    inputs = products, labels, jax.random.uniform(keys[2], (rows,)) / rows
    static = dict(vocab_size=vocab_size, multiplier=1.0, z_loss=Z_LOSS, dtype=jnp.bfloat16)
    by_xla = jax.jit(functools.partial(reference, **static))
    by_kernel = jax.jit(functools.partial(kernel.value_and_gradient, **static))
    (lse, gradient), (wanted_lse, wanted) = by_kernel(*inputs), by_xla(*inputs)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)
    # Each rounds to 8 bits.
    np.testing.assert_allclose(gradient.astype(jnp.float32), wanted.astype(jnp.float32), rtol=2**-7)
    seconds = {"xla": seconds_of(by_xla, *inputs), "kernel": seconds_of(by_kernel, *inputs)}
    fetched_again = max(0, width - kernel.SLOTS * kernel.STEP)
    return {
        "rows": rows,
        "width": width,
        "xla_ms": 1e3 * seconds["xla"],
        "kernel_ms": 1e3 * seconds["kernel"],
        "gigabytes_per_second": rows * (6 * width + 4 * fetched_again) / seconds["kernel"] / 1e9,
    }


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    copy = copy_bandwidth()
    print(f"copy on the device: {copy:,.0f} GB/s\n")
    print("| rows, width | XLA, ms | kernel, ms | GB/s | of a copy |\n|---|---|---|---|---|")
    found = []
    for shape in SHAPES:
        row = measure(*shape)
        found.append(row)
        speed = row["gigabytes_per_second"]
        times = f"{row['xla_ms']:.3f} | {row['kernel_ms']:.3f}"
        print(f"| {row['rows']}, {row['width']} | {times} | {speed:,.0f} | {speed / copy:.2f} |", flush=True)
    save(output, about() | {"copy": copy, "rows": found})


if __name__ == "__main__":
    run(main)
