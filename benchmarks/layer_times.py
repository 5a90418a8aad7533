"""Times of one layer: the forward pass, and both passes in one program."""

from collections.abc import Callable

import jax

from benchmarks import profile
from benchmarks.kernels.timing import seconds_of

PROFILED_RUNS = 4


def layer_times(forward: Callable, both: Callable, weights, x, d_y, *, num_layers: int = 1, profiled: bool) -> str:
    """forward(weights, x) and both(weights, x, d_y) are jitted and run num_layers layers; the times are of one.

    profiled: prints where the time of both passes goes.
    """
    seconds = [seconds_of(*call) / num_layers for call in ((forward, weights, x), (both, weights, x, d_y))]
    if profiled:
        # For a kernel in a CUDA graph a profile shows only the graph, not the instruction.
        compiled = both.lower(weights, x, d_y).compile({"xla_gpu_enable_command_buffer": ""})
        with profile.recorded() as kernels:
            jax.block_until_ready([compiled(weights, x, d_y) for _ in range(PROFILED_RUNS)][-1])
        print(profile.as_text(profile.breakdown(kernels, PROFILED_RUNS * num_layers, compiled.as_text())))
    return f"forward {1e3 * seconds[0]:.2f} ms, forward and backward {1e3 * seconds[1]:.2f}"
