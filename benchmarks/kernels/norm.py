"""Bandwidth of the fused norms on one Hopper GPU: python -m benchmarks.kernels.norm [--output=FILE]

First compares both directions with the formula in float32. Then prints GB/s, for the bytes that pallas_kernels/norm.py
gives, next to a copy on the device in the same run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.ops.norm import layer_norm, rms_norm
from pallas_kernels import norm as kernel

SHAPES = (16384, 2048), (8192, 4096), (8192, 5120), (8192, 8192), (8192, 12288)
EPSILON = 1e-5


def measure(rows: int, width: int, kind: str) -> dict:
    keys = jax.random.split(jax.random.key(0), 6)
    centred = kind == "LayerNorm"
    x, y, d_normed, d_residual = (jax.random.normal(key, (rows, width), jnp.bfloat16) for key in keys[:4])
    scale = 1 + 0.1 * jax.random.normal(keys[4], (width,))
    bias = 0.1 * jax.random.normal(keys[5], (width,))
    forward = jax.jit(functools.partial(kernel.forward, epsilon=EPSILON))
    backward = jax.jit(functools.partial(kernel.backward, centred=centred, epsilon=EPSILON))
    inputs = x, y, scale, bias if centred else None
    total, normed = forward(*inputs)

    @jax.jit
    def formula(total, scale, bias, d_normed, d_residual):
        total = total.astype(jnp.float32)

        def norm(s, scale, bias):
            return layer_norm(s, scale, bias, EPSILON) if centred else rms_norm(s, scale, EPSILON)

        normed, vjp = jax.vjp(norm, total, scale, bias)
        d_s, *others = vjp(d_normed.astype(jnp.float32))
        return normed, d_s + d_residual, *others[: 1 + centred]

    d_s, *sums = (a for a in backward(total, d_normed, d_residual, scale) if a is not None)
    got = normed, d_s, *(jnp.sum(a, 0) for a in sums)
    errors = [
        float(jnp.linalg.norm((actual - expected).ravel()) / jnp.linalg.norm(expected.ravel()))
        for actual, expected in zip(got, formula(total, scale, bias, d_normed, d_residual), strict=True)
    ]
    if not np.max(errors) < 2**-8:
        raise AssertionError(f"{kind} {rows} x {width}: relative errors {errors}")
    speeds = {
        "forward": 8 * rows * width / seconds_of(forward, *inputs) / 1e9,
        "backward": 8 * rows * width / seconds_of(backward, total, d_normed, d_residual, scale) / 1e9,
    }
    return {"kind": kind, "rows": rows, "width": width, "errors": errors, "gigabytes_per_second": speeds}


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    copy = copy_bandwidth()
    found = []
    print(f"copy on the device: {copy:,.0f} GB/s\n")
    print("| norm | rows, width | forward | | backward | |\n|---|---|---|---|---|---|")
    for rows, width in SHAPES:
        for kind in ("RMSNorm", "LayerNorm"):
            found.append(measure(rows, width, kind))
            cells = [f"{s:,.0f} | {s / copy:.2f}" for s in found[-1]["gigabytes_per_second"].values()]
            print(f"| {kind} | {rows}, {width} | {' | '.join(cells)} |", flush=True)
    save(output, about() | {"copy": copy, "rows": found})


if __name__ == "__main__":
    run(main)
