"""Timing in sustained operation, because a busy H100 is power-limited.

At its 700 W the clocks fall from 1,980 to about 1,440 MHz within seconds, and rise again if the work gets lighter: less
of it, constant data, a loss of zero. So each contender runs for seconds before the first window and through all
windows, on random tokens, with a learning rate too small to memorise them.
"""

import math
import time
from collections.abc import Callable

LEARNING_RATE = 1e-7  # at 1e-5 Adam memorised eight batches within 15 s (loss 0.005)


def windows(run: Callable[[int], None], *, seconds: float, num_windows: int) -> list[float]:
    """Seconds per step in each window of about `seconds`, after warming up for half a window.

    run(n) does n steps and returns when the last is done; nothing waits for the device inside a window.
    """
    run(1)  # may compile
    step_seconds = _timed(run, 3)
    found = []
    for window in (seconds / 2, *[seconds] * num_windows):
        step_seconds = _timed(run, math.ceil(window / step_seconds))
        found.append(step_seconds)
    return found[1:]


def _timed(run: Callable[[int], None], num_steps: int) -> float:
    start = time.perf_counter()
    run(num_steps)
    return (time.perf_counter() - start) / num_steps
