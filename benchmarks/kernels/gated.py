"""Bandwidth of the activation of experts on one Hopper GPU: python -m benchmarks.kernels.gated [--output=FILE]

Prints milliseconds of pallas_kernels/gated.py and of XLA, in both directions, for rows that are all filled and, for the
kernel, with a third of them empty. GB/s count the bytes that the kernel's docstring gives for all rows, next to a copy
on the device in the same run. tests/gpu/test_gated.py compares the results with the formula.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.ops.weighted_activation import reference
from pallas_kernels import gated as kernel

SHAPES = {"Mixtral": (16384, 14336), "like DeepSeek": (32768, 2048), "Qwen3": (32768, 768)}
UNITS = {"forward": 3, "backward": 5}
"""Arrays [R, F] that are read or written."""


def xla(wide_R2F, weights_R):
    return reference(wide_R2F, weights_R, "swiglu")


def measure(name: str) -> dict:
    rows, width = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    wide = jax.random.normal(keys[0], (rows, 2, width), jnp.bfloat16)
    weights = jax.random.uniform(keys[1], (rows,))
    d_hidden = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)
    forward = jax.jit(functools.partial(kernel.forward, function="silu"))
    backward = jax.jit(functools.partial(kernel.backward, function="silu"))
    of_xla = {
        "forward": seconds_of(jax.jit(xla), wide, weights),
        "backward": seconds_of(jax.jit(lambda *of: jax.vjp(xla, *of[:2])[1](of[2])), wide, weights, d_hidden),
    }
    found = {"name": name, "rows": rows, "width": width, "xla_ms": {k: 1e3 * s for k, s in of_xla.items()}}
    for label, count in (("filled", rows), ("third_empty", 2 * rows // 3)):
        given = wide, weights, jnp.int32(count)
        seconds = {"forward": seconds_of(forward, *given), "backward": seconds_of(backward, *given, d_hidden)}
        found[f"{label}_ms"] = {direction: 1e3 * s for direction, s in seconds.items()}
    num_bytes = 2 * rows * width
    found["gigabytes_per_second"] = {k: UNITS[k] * num_bytes / ms / 1e6 for k, ms in found["filled_ms"].items()}
    return found


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    copy = copy_bandwidth()
    print(f"copy on the device: {copy:,.0f} GB/s\n")
    print("| rows, width | | XLA | ours | | GB/s | a third empty |\n|---|---|---|---|---|---|---|")
    found = []
    for name in SHAPES:
        found.append(measure(name))
        row = found[-1]
        for direction in UNITS:
            of_xla, filled, third = (row[f"{key}_ms"][direction] for key in ("xla", "filled", "third_empty"))
            print(
                f"| {name}, {row['rows']:,} x {row['width']} | {direction} | {of_xla:.3f} | {filled:.3f} "
                f"| {of_xla / filled:.2f} | {row['gigabytes_per_second'][direction]:,.0f} | {third:.3f} |",
                flush=True,
            )
    save(output, about() | {"copy": copy, "rows": found})


if __name__ == "__main__":
    run(main)
