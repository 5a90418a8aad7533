"""Products with matrices in 4 bits on one Hopper GPU: python -m benchmarks.kernels.four_bits [--output=FILE]

Prints microseconds of a product with our kernel (ops/four_bits.py), the sum of its parts included, and of
one with a matrix in bfloat16 as XLA compiles it, for the matrices of Llama-3 8B; GB/s are those of levels, scales and
zeros, next to a copy on the device. Each product of a call has a matrix of its own, so that none is in the cache.
"""

import jax
import jax.numpy as jnp

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.inference.device.compiler_options import IN_GRAPHS, WHOLE_LOOP
from megajax.ops.four_bits import multiply
from megajax.quantization.weights import QuantizedWeight

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
ROWS = (8, 32, 128, 512)
GROUP = 128
PER_CALL = 8


def drawn(seed: int, inputs: int, outputs: int) -> QuantizedWeight:
    levels = jax.random.bits(jax.random.key(seed), (outputs, inputs // 2), jnp.uint8)
    groups = (inputs // GROUP, outputs)
    return QuantizedWeight(levels, jnp.full(groups, 0.01, jnp.float16), None, "unchanged", jnp.zeros(groups, jnp.int8))


def seconds_of_product(multiplied, weights: list, inputs: int, rows: int) -> float:
    def call(x, weights):
        for weight in weights:
            x = x + jnp.tanh(multiplied(x, weight)[:, :1])
        return x

    x = jnp.ones((rows, inputs), jnp.bfloat16)
    compiled = jax.jit(call).lower(x, weights).compile(compiler_options={IN_GRAPHS: WHOLE_LOOP})
    return seconds_of(compiled, x, weights) / PER_CALL


def measure(inputs: int, outputs: int) -> list[dict]:
    found = []
    quantized = [drawn(seed, inputs, outputs) for seed in range(PER_CALL)]
    plain = [jnp.full((inputs, outputs), seed, jnp.bfloat16) for seed in range(PER_CALL)]
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(quantized[0]))
    for rows in ROWS:
        ours = seconds_of_product(multiply, quantized, inputs, rows)
        of_xla = seconds_of_product(jnp.dot, plain, inputs, rows)
        found.append(
            {
                "inputs": inputs,
                "outputs": outputs,
                "rows": rows,
                "microseconds": 1e6 * ours,
                "bfloat16_microseconds": 1e6 * of_xla,
                "gigabytes_per_second": num_bytes / ours / 1e9,
            }
        )
    return found


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    copy = copy_bandwidth()
    print(f"copy on the device: {copy:,.0f} GB/s\n")
    print("| inputs, outputs | rows | 4 bits (us) | GB/s | bfloat16 (us) |\n|---|---|---|---|---|")
    found = []
    for shape in SHAPES:
        found += measure(*shape)
        for row in found[-len(ROWS) :]:
            print(
                f"| {row['inputs']:,}, {row['outputs']:,} | {row['rows']} | {row['microseconds']:.1f} "
                f"| {row['gigabytes_per_second']:,.0f} | {row['bfloat16_microseconds']:.1f} |",
                flush=True,
            )
    save(output, about() | {"copy": copy, "rows": found})


if __name__ == "__main__":
    run(main)
