"""Time of an operation alone on a GPU, and what the benchmarks of kernels share."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.command_line import only
from megajax.mesh import compat


def seconds_of(
    call: Callable, *arguments, seconds: float = 0.1, wait: Callable[[object], object] = jax.block_until_ready
) -> float:
    """Seconds per call, the best of three windows. Calls are queued on the device; wait: for a result."""
    wait(call(*arguments))

    def window(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call(*arguments)
        wait(result)
        return (time.perf_counter() - start) / count

    count = max(3, round(seconds / window(3)))
    return min(window(count) for _ in range(3))


def copy_bandwidth() -> float:
    """GB/s, read and written, of the faster of adding to an array of 512 MiB and copying it."""
    x = jnp.zeros(2**27, jnp.float32)
    calls = jax.jit(lambda x: x + 1), jax.jit(jnp.copy)
    return 2 * x.nbytes / min(seconds_of(call, x) for call in calls) / 1e9


def output_of(arguments: list[str]) -> str:
    """The file of --output, which is all that most of them take. Raises ValueError without a Hopper GPU."""
    output = only(arguments, {"output": ""})["output"]
    if reason := compat.mosaic_problem():
        raise ValueError(f"{reason}; this needs a Hopper GPU")
    return output


def about() -> dict[str, str]:
    """Of the records."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
