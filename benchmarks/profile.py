"""Where the time of a step goes: python -m benchmarks.profile FOLDER [--num_steps=N]

Reads a profile that jax.profiler (or --training.profile_steps) wrote and sums the GPU kernels by kind.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import jax

KINDS = (
    ("matmul", r"nvjet|gemm|cublas|cutlass"),
    ("attention", r"sdpa|fmha|flash|dot_do_o|convert_dq"),
    ("communication", r"nccl|all-|reduce-scatter|AllReduce|AllGather|ReduceScatter|SendRecv"),
    ("copy", r"memcpy|memset|copy|slice|concatenate|transpose"),
    ("reduction", r"reduce"),
)


def kernel_times(folder: str | Path) -> tuple[Counter, Counter, float]:
    """-> (milliseconds, calls) by kernel name on the first GPU, and milliseconds from the first kernel to the last."""
    path = next(Path(folder).rglob("*.xplane.pb"))
    data = jax.profiler.ProfileData.from_file(str(path))
    plane = next(plane for plane in data.planes if re.search(r"GPU:0", plane.name, re.IGNORECASE))
    times, calls, first, last = Counter(), Counter(), float("inf"), 0.0
    for line in plane.lines:
        if "stream" not in line.name.lower():
            continue
        for event in line.events:
            name = re.sub(r"[._]?\d+$", "", event.name)
            times[name] += event.duration_ns / 1e6
            calls[name] += 1
            first, last = min(first, event.start_ns), max(last, event.start_ns + event.duration_ns)
    return times, calls, (last - first) / 1e6


def breakdown(folder: str | Path, num_steps: int, most: int = 30) -> str:
    """Table of milliseconds a step, by kind and by kernel."""
    times, calls, span = kernel_times(folder)
    kinds = Counter()
    for name, time in times.items():
        kinds[next((kind for kind, pattern in KINDS if re.search(pattern, name)), "element-wise")] += time
    busy = sum(times.values())
    lines = [f"one step: {span / num_steps:.1f} ms, kernels {busy / num_steps:.1f} ms (streams may overlap)"]
    lines += [f"  {time / num_steps:8.2f} ms  {kind}" for kind, time in kinds.most_common()]
    lines += ["by kernel:"]
    for name, time in times.most_common(most):
        lines.append(f"  {time / num_steps:8.2f} ms  x{calls[name] / num_steps:6.1f}  {name[:100]}")
    return "\n".join(lines)


if __name__ == "__main__":
    steps = [argument.removeprefix("--num_steps=") for argument in sys.argv[2:] if argument.startswith("--num_steps=")]
    print(breakdown(sys.argv[1], num_steps=int(steps[0]) if steps else 1))
