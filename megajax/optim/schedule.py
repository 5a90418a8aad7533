"""Learning rate as a function of the step, in plain Python floats on the host.

With n the step, w the warm-up, N the decay steps, `peak` and `minimum` the two ends:

    n <= w (w > 0)       peak * n / w
    constant             peak, from then on
    n > N                minimum (every other style)
    inverse_square_root  max(minimum, peak * sqrt(max(w, 1)) / sqrt(max(n, 1)))
    linear               minimum + (peak - minimum) * (1 - r),                r = (n - w) / (N - w)
    cosine               minimum + (peak - minimum) * (1 + cos(pi r)) / 2,    same r (Loshchilov, Hutter 2017)
    wsd, wsd_...         peak until N - D, then over the last D steps minimum + (peak - minimum) * c(q),
                         q = (n - (N - D)) / D (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395), where c is
                         wsd         2 * 0.5**q - 1        wsd_linear      1 - q
                         wsd_cosine  (1 + cos(pi q)) / 2   wsd_minus_sqrt  1 - sqrt(q)

These are the formulas of Megatron-LM's OptimizerParamScheduler. Step 0 is the first update: with a warm-up it uses
0. As in Megatron-LM, n counts samples, here in units of the global batch size: during a batch size ramp-up a
step counts less than 1, and so w, N and D are steps of the full batch.
"""

import dataclasses
import math
from typing import Literal

ScheduleStyle = Literal[
    "constant", "linear", "cosine", "inverse_square_root", "wsd", "wsd_linear", "wsd_cosine", "wsd_minus_sqrt"
]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Maps a step to a learning rate; made by `OptimizerConfig.make_schedule`, which also checks the numbers."""

    style: ScheduleStyle
    peak: float
    minimum: float
    warmup_steps: int
    decay_steps: float
    wsd_decay_steps: int

    def __call__(self, step: float) -> float:
        """Learning rate of the update that follows `step` finished ones.

        `step` may be fractional: while the batch size ramps up it is consumed samples / final global batch size.
        """
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step > self.decay_steps:
            return self.minimum
        if self.style == "inverse_square_root":
            return max(self.minimum, self.peak * max(self.warmup_steps, 1) ** 0.5 / max(step, 1) ** 0.5)
        return self.minimum + self._remaining_fraction(step) * (self.peak - self.minimum)

    def _remaining_fraction(self, step: float) -> float:
        """How much of peak - minimum is left: 1 at the end of the warm-up, 0 at `decay_steps`."""
        if self.style.startswith("wsd"):
            annealing_start = self.decay_steps - self.wsd_decay_steps
            if step <= annealing_start:
                return 1.0
            return _falling(self.style, (step - annealing_start) / self.wsd_decay_steps)
        return _falling(self.style, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))


def _falling(style: ScheduleStyle, ratio: float) -> float:
    """Curve from 1 at ratio 0 to 0 at ratio 1."""
    if style in ("linear", "wsd_linear"):
        return 1.0 - ratio
    if style in ("cosine", "wsd_cosine"):
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "wsd":
        return 2.0 * 0.5**ratio - 1.0
    assert style == "wsd_minus_sqrt", style
    return 1.0 - math.sqrt(ratio)
