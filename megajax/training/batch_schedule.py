"""Which samples form the batch of a step: batch size, its ramp-up, and the split into microbatches."""

import bisect
from typing import NamedTuple

MAX_SIZES = 1000  # of a ramp-up: each size is compiled separately


class Batch(NamedTuple):
    first_sample: int
    """Index of the first sample of the step; the batch is the samples that follow it."""
    num_microbatches: int
    microbatch: int
    """Sequences of one microbatch over all devices."""

    @property
    def size(self) -> int:
        return self.num_microbatches * self.microbatch


class BatchSchedule:
    """step -> Batch, a pure function, so that data and learning rate need no state but the step.

    rampup: (start, increment, samples): the batch size grows from `start` by `increment`, evenly over `samples`, to
    global_batch_size (Megatron's --rampup-batch-size). microbatch: sequences of a microbatch over all devices; None: no
    accumulation. Raises ValueError for sizes that do not divide.
    """

    def __init__(self, global_batch_size: int, microbatch: int | None, rampup: tuple[int, int, int] | None):
        self._microbatch = microbatch
        sizes = [global_batch_size]
        samples = 0
        if rampup is not None:
            start, increment, samples = rampup
            if start > global_batch_size or (global_batch_size - start) % increment:
                raise ValueError(
                    f"training.batch_size_rampup={rampup}: from {start} in steps of {increment} does not reach "
                    f"training.global_batch_size={global_batch_size}; choose (start, increment, samples) that does"
                )
            sizes = range(start, global_batch_size + 1, increment)
            if len(sizes) > MAX_SIZES:
                raise ValueError(
                    f"training.batch_size_rampup={rampup} has {len(sizes)} batch sizes, each compiled separately; the "
                    f"limit is {MAX_SIZES}; use an increment of at least {global_batch_size // (MAX_SIZES - 1) + 1}"
                )
        # Stages of constant batch size, as (first step, first sample, size).
        self._stages: list[tuple[int, int, int]] = []
        step = sample = 0
        increments = len(sizes) - 1
        for number, size in enumerate(sizes):
            self._stages.append((step, sample, size))
            if number < increments:
                # Each size lasts for samples / increments, rounded up to whole steps, in exact integer arithmetic.
                missing = samples * (number + 1) - sample * increments
                num_steps = max(-(-missing // (size * increments)), 0)
                step += num_steps
                sample += num_steps * size

    @property
    def sizes(self) -> list[int]:
        return [size for _, _, size in self._stages]

    def __call__(self, step: int) -> Batch:
        stage = bisect.bisect_right(self._stages, step, key=lambda stage: stage[0]) - 1
        first_step, first_sample, size = self._stages[stage]
        microbatch = self._microbatch or size
        return Batch(first_sample + (step - first_step) * size, size // microbatch, microbatch)

    def num_samples(self, num_steps: int) -> int:
        """Samples of the first num_steps steps."""
        return self(num_steps).first_sample
