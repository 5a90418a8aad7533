"""Our attention kernels compared with cuDNN's, on one GPU: python -m benchmarks.kernels.attention [--output=FILE.json]

Milliseconds and TFLOP/s of forward, and of forward and backward, counted over unmasked pairs of query and key: 4 H
FLOPs per pair and head forward, 10 H backward. Both alternate in the same process; the median of all turns counts.
Packed documents: cuDNN gets them as a bias [B, 1, T, T], ours as intervals.
"""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import only, run
from benchmarks.records import save
from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops import attention_mask as masks
from megajax.ops.attention import attention
from megajax.training.reporting.starts import start_record

# name: batch, length, heads, key-value heads, head dim, window, mean length of documents
CASES = {
    "causal": (4, 4096, 16, 16, 128, None, None),
    "causal, long": (1, 16384, 16, 16, 128, None, None),
    "causal, 64": (8, 2048, 16, 16, 64, None, None),
    "causal, grouped": (2, 8192, 32, 8, 128, None, None),
    "window 1024": (1, 16384, 16, 16, 128, 1024, None),
    "window 256, 64": (8, 2048, 16, 16, 64, 256, None),
    "packed": (4, 4096, 16, 16, 128, None, 600),
    "packed, 64": (8, 2048, 16, 16, 64, None, 300),
    "both directions, 64": (32, 512, 16, 16, 64, None, None),
    "both directions, packed, 64": (32, 512, 16, 16, 64, None, 400),
    # Images in one row, in vision towers: heads of 72 and 80 are padded to 128, or to 80 once that is in HEAD_DIMS.
    "both directions, packed, 72": (1, 8192, 16, 16, 72, None, 1000),
    "both directions, packed, 80": (1, 8192, 16, 16, 80, None, 1000),
    "both directions, packed, 128": (1, 8192, 16, 16, 128, None, 1000),
}
BOTH_DIRECTIONS = "both directions"  # the cases without a causal mask begin with it
TURNS = 4
CALLS = 40


def segments_of(batch: int, length: int, mean: int) -> np.ndarray:
    """int32 [batch, length]: documents with exponentially distributed lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(batch):
        ends = np.cumsum(1 + rng.exponential(mean, 2 * length // mean + 8).astype(int))
        rows.append(np.searchsorted(ends, np.arange(length), "right"))
    return np.array(rows, np.int32)


def num_pairs(batch: int, length: int, window: int | None, segments: np.ndarray | None, causal: bool) -> int:
    index = np.arange(length)
    if not causal:
        return batch * length**2 if segments is None else sum(int(np.sum(np.bincount(row) ** 2)) for row in segments)
    seen = np.minimum(index + 1, window or length) * np.ones((batch, 1), int)
    if segments is not None:
        starts = np.stack([np.searchsorted(row, row, "left") for row in segments])
        seen = np.minimum(seen, index + 1 - starts)
    return int(seen.sum())


def measure(name: str) -> dict:
    """Of one of CASES: {backend: {"forward": seconds, "both": seconds}}, and FLOPs forward."""
    case = CASES[name]
    causal = not name.startswith(BOTH_DIRECTIONS)
    batch, length, heads, kv_heads, head_dim, window, mean = case
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (batch, length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    ]
    segments = None if mean is None else segments_of(batch, length, mean)
    programs = {}
    for backend in ("cudnn", "pallas"):
        op = functools.partial(
            attention,
            mask=(masks.CAUSAL if causal else masks.FULL) & masks.window(window),
            scale=head_dim**-0.5,
            segments=None if segments is None else (jnp.asarray(segments),) * 2,
            backend=backend,
        )
        programs[backend, "forward"] = jax.jit(functools.partial(_forward, op))
        programs[backend, "both"] = jax.jit(functools.partial(_both, op))
    found = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*arrays))
    for _ in range(TURNS):
        for name, program in programs.items():
            start = time.perf_counter()
            results = [program(*arrays) for _ in range(CALLS)]
            jax.block_until_ready(results)
            found[name].append((time.perf_counter() - start) / CALLS)
            del results
    flops = 4 * head_dim * heads * num_pairs(batch, length, window, segments, causal)
    seconds = {f"{backend} {what}": statistics.median(times) for (backend, what), times in found.items()}
    return {"shape": list(case), "forward_flops": flops, "seconds": seconds}


def _forward(op: Callable, q, k, v, _):
    return op(q, k, v)


def _both(op: Callable, q, k, v, d_out):
    """Gradients of the forward pass, which runs both passes."""
    return jax.vjp(op, q, k, v)[1](d_out)


def table(results: dict[str, dict]) -> str:
    """Markdown."""
    lines = [
        "| | B, T, N, K, H | forward: cuDNN | ours | | forward and backward: cuDNN | ours | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        cells = []
        for what, factor in (("forward", 1.0), ("both", 3.5)):
            cudnn, ours = (found["seconds"][f"{backend} {what}"] for backend in ("cudnn", "pallas"))
            flops = factor * found["forward_flops"]
            cells += [f"{1e3 * t:.3f} ms, {flops / t / 1e12:.0f}" for t in (cudnn, ours)] + [f"{cudnn / ours:.2f}"]
        lines.append(f"| {name} | {', '.join(map(str, found['shape'][:5]))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    values = only(arguments, {"output": "", "cases": ";".join(CASES)})
    chosen = values["cases"].split(";")
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"--cases={';'.join(unknown)} is unknown; there are {';'.join(CASES)}")
    if problem := compat.mosaic_problem():
        raise ValueError(f"{problem}: these kernels are for H100 and H200")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        results = {name: measure(name) for name in chosen}
    print(table(results))
    save(values["output"], {"start": start_record(mesh, {}), "results": results})
    return 0


if __name__ == "__main__":
    run(main)
