"""Speed of the grouped matmul on one Hopper GPU: python -m benchmarks.kernels.grouped_matmul [--output=FILE]

First compares all three products with float32, with groups of awkward sizes. Then prints TFLOP/s, with equal groups and
skewed ones, next to one dense product of as many rows and, if PyTorch is installed, torch._grouped_mm in a process of
its own (benchmarks/peers/torch_grouped.py).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run, split
from benchmarks.kernels.paged_attention import seconds_of
from benchmarks.peers.torch_grouped import SHAPES, group_sizes
from megajax import compat
from pallas_kernels import grouped_matmul as kernel

DIRECTIONS = ("forward", "input_gradient", "weight_gradient")


def products(rows_RK, matrices, sizes_E, d_out_RWN, dtype=jnp.bfloat16):
    """All three, as the formula: one group after the other in float32."""
    bounds = np.concatenate([[0], np.cumsum(sizes_E)])
    out = jnp.zeros(d_out_RWN.shape, jnp.float32)
    d_rows = jnp.zeros(rows_RK.shape, jnp.float32)
    d_matrices = [[] for _ in matrices]
    for group, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        x = rows_RK[start:end].astype(jnp.float32)
        for w, matrix in enumerate(matrices):
            matrix_KN = matrix[group].astype(jnp.float32)
            d_out = d_out_RWN[start:end, w].astype(jnp.float32)
            out = out.at[start:end, w].set(x @ matrix_KN)
            d_rows = d_rows.at[start:end].add(d_out @ matrix_KN.T)
            d_matrices[w].append(x.T @ d_out)
    return out, d_rows, *(jnp.stack(d) for d in d_matrices)


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
    with jax.default_matmul_precision("highest"):
        expected = products(rows_RK, matrices, sizes_E, d_out_RWN)
    got = (
        kernel.forward(rows_RK, matrices, sizes_E),
        kernel.input_gradient(d_out_RWN, matrices, sizes_E),
        *kernel.weight_gradient(rows_RK, d_out_RWN, sizes_E, dtype=jnp.float32),
    )
    for name, a, b in zip(("out", "d_rows", *["d_matrix"] * num_matrices), got, expected, strict=True):
        error = float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
        if not error < 2**-8:
            raise AssertionError(f"{name} of {num_matrices} matrices: relative error {error}")
    got_again = kernel.forward(rows_RK, matrices, sizes_E)
    if not np.array_equal(np.asarray(got[0].astype(np.float32)), np.asarray(got_again.astype(np.float32))):
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
    values, rest = split(arguments, {"output": ""})
    if rest:
        raise ValueError(f"{rest[0]} is unknown; there is --output=FILE")
    if reason := compat.mosaic_problem():
        raise ValueError(f"{reason}; this needs a Hopper GPU")
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
    if values["output"]:
        record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "speeds": found}
        Path(values["output"]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
