"""Speed of the grouped matmul on one Hopper GPU: python -m benchmarks.kernels.grouped_matmul [--output=FILE]

First compares all three products with float32, with groups of awkward sizes. Then prints TFLOP/s, with equal groups and
skewed ones, next to one dense product of as many rows and, if PyTorch is installed, torch._grouped_mm in a process of
its own (benchmarks/peers/torch_grouped.py).
"""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, output_of, seconds_of
from benchmarks.records import save
from pallas_kernels import grouped_matmul as kernel

# Rows, model width, width of an expert, experts.
SHAPES = {
    "mixtral": (16384, 4096, 14336, 8),
    "deepseek": (32768, 7168, 2048, 32),
    "qwen3": (65536, 2048, 768, 128),
}
DIRECTIONS = ("forward", "input_gradient", "weight_gradient")


def group_sizes(name: str, skewed: bool) -> np.ndarray:
    """int32 [experts]: equal, or of random tokens that choose with the softmax of normal numbers."""
    rows, _, _, experts = SHAPES[name]
    if not skewed:
        return np.full(experts, rows // experts, np.int32)
    rng = np.random.default_rng(7)
    logits = rng.standard_normal(experts)
    return rng.multinomial(rows, np.exp(logits) / np.exp(logits).sum()).astype(np.int32)


def products(rows_RK, matrices, sizes_E, d_out_RWN) -> list[np.ndarray]:
    """out, d_rows, and d_matrix for each of the matrices, as the formula: one group after the other, in float32.

    By NumPy: XLA would tune a program for every size of a group, which takes minutes.
    """
    rows, d_outs, *matrices = (np.asarray(a, np.float32) for a in (rows_RK, d_out_RWN, *matrices))
    out = np.zeros_like(d_outs)
    d_rows = np.zeros_like(rows)
    d_matrices = [np.zeros_like(matrix) for matrix in matrices]
    ends = np.cumsum(sizes_E)
    for group, (start, end) in enumerate(zip(ends - sizes_E, ends, strict=True)):
        here = slice(start, end)
        for w, matrix in enumerate(matrices):
            out[here, w] = rows[here] @ matrix[group]
            d_rows[here] += d_outs[here, w] @ matrix[group].T
            d_matrices[w][group] = rows[here].T @ d_outs[here, w]
    return [out, d_rows, *d_matrices]


def inputs(rows: int, width: int, expert_width: int, experts: int, num_matrices: int = 1):
    keys = jax.random.split(jax.random.key(0), 2 + num_matrices)
    rows_RK = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    d_out_RWN = jax.random.normal(keys[1], (rows, num_matrices, expert_width), jnp.bfloat16)
    shape = (experts, width, expert_width)
    return rows_RK, [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[2:]], d_out_RWN


def check(num_matrices: int) -> None:
    """Raises AssertionError if a product differs from the formula."""
    sizes_E = np.array([300, 0, 1, 63, 64, 65, 127, 129, 1000, 7], np.int32)
    rows_RK, matrices, d_out_RWN = inputs(2048, 512, 320, len(sizes_E), num_matrices)
    expected = products(rows_RK, matrices, sizes_E, d_out_RWN)
    got = (
        kernel.forward(rows_RK, matrices, sizes_E),
        kernel.input_gradient(d_out_RWN, matrices, sizes_E),
        *kernel.weight_gradient(rows_RK, d_out_RWN, sizes_E, dtype=jnp.float32),
    )
    names = ("out", "d_rows", *["d_matrix"] * num_matrices)
    for name, result, wanted in zip(names, got, expected, strict=True):
        error = np.linalg.norm(np.asarray(result, np.float32) - wanted) / np.linalg.norm(wanted)
        if not error < 2**-8:
            raise AssertionError(f"{name} of {num_matrices} matrices: relative error {error}")
    if not np.array_equal(got[0], kernel.forward(rows_RK, matrices, sizes_E)):
        raise AssertionError("two calls differ")


def measure(name: str) -> dict:
    rows, width, expert_width, experts = SHAPES[name]
    rows_RK, matrices, d_out_RWN = inputs(*SHAPES[name])
    flops = 2 * rows * width * expert_width
    dense = jax.jit(jnp.dot)
    speeds = {"dense": flops / seconds_of(dense, rows_RK, matrices[0][0]) / 1e12}
    for kind in ("equal", "skewed"):
        sizes_E = jnp.asarray(group_sizes(name, kind == "skewed"))
        calls = (
            (kernel.forward, rows_RK, matrices, sizes_E),
            (kernel.input_gradient, d_out_RWN, matrices, sizes_E),
            (jax.jit(lambda x, d, s: kernel.weight_gradient(x, d, s, dtype=jnp.bfloat16)), rows_RK, d_out_RWN, sizes_E),
        )
        for direction, call in zip(DIRECTIONS, calls, strict=True):
            speeds[f"{direction}, {kind}"] = flops / seconds_of(*call) / 1e12
    return speeds


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    for num_matrices in (1, 2):
        check(num_matrices)
    found = {name: {"ours": measure(name)} for name in SHAPES}
    if importlib.util.find_spec("torch"):
        command = [sys.executable, "-m", "benchmarks.peers.torch_grouped"]
        peer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for name, speeds in peer.items():
            found[name]["torch"] = speeds
    for name, speeds in found.items():
        print(name, SHAPES[name])
        for key, value in speeds["ours"].items():
            torch = speeds.get("torch", {}).get(key)
            print(
                f"  {key:28} {value:6.0f}  " + (f"torch {torch:6.0f}  {value / torch:.2f}" if torch else ""), flush=True
            )
    save(output, about() | {"speeds": found})


if __name__ == "__main__":
    run(main)
