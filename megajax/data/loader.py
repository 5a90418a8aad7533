"""What feeds a training loop: batches whose samples are computed from indices, or any other BatchSource.

The order of the former is computed: Step s reads the samples [first(s), first(s) + global batch) of one list that does
not depend on the number of hosts or workers; a process reads only its rows. The only state is the step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from megajax.data.config import DataConfig
from megajax.data.datasets import Dataset
from megajax.data.worker_process import end_with_parent

NUM_THREADS = 4
"""That read samples ahead."""


class BatchSource(Protocol):
    """What feeds a training loop. Its `saved` values are part of every checkpoint."""

    @property
    def reads_weights(self) -> bool:
        """Whether batches depend on the weights: then each is made when its step begins, otherwise ahead of it."""

    def batches(
        self, start: int, stop: int, rows_of: Callable[[int], np.ndarray], weights: Callable[[], dict]
    ) -> Iterator[dict[str, np.ndarray]]:
        """The batches of steps start, ..., stop - 1: arrays [microbatches, rows, ...] of the rows that this process
        needs.

        rows_of: microbatch size -> these rows, ascending. weights: the weights before the step whose batch is made.
        Raises ValueError if one cannot be made.
        """

    def saved(self, step: int) -> dict[str, Any]:
        """JSON values, the same on all processes, from which `restore` continues after `step` finished steps."""

    def restore(self, saved: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class IndexedSource:
    """The BatchSource of a dataset, whose state is the step alone; see `step_batches`."""

    dataset: Dataset
    schedule: Callable[[int], tuple[int, int, int]]
    config: DataConfig
    reads_weights = False

    def batches(
        self, start: int, stop: int, rows_of: Callable[[int], np.ndarray], weights: Callable[[], dict]
    ) -> Iterator[dict[str, np.ndarray]]:
        return step_batches(self.dataset, self.schedule, rows_of, start_step=start, num_steps=stop, config=self.config)

    def saved(self, step: int) -> dict[str, Any]:
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        pass


def step_batches(
    dataset: Dataset,
    schedule: Callable[[int], tuple[int, int, int]],
    rows_of: Callable[[int], np.ndarray],
    *,
    start_step: int,
    num_steps: int,
    config: DataConfig,
) -> Iterator[dict[str, np.ndarray]]:
    """Iterates over the batches of steps start_step, ..., num_steps - 1 of a run, with the rows that this process
    needs.

    schedule: step -> (first sample, num_microbatches M, microbatch size B); samples must not decrease with the step.
    rows_of: B -> the rows of a microbatch that this process needs, ascending; may depend on B (a ramp-up).
    Yields dicts of arrays [M, len(rows), T]: entry [m, r] is sample first + m * B + rows[r].
    Raises ValueError at once if the last step needs more samples than the dataset has.
    """
    import grain

    if not 0 <= start_step <= num_steps:
        raise ValueError(f"data: cannot start at step {start_step} of a run of {num_steps} steps")
    if start_step < num_steps:
        first, num_microbatches, batch_size = schedule(num_steps - 1)
        if first + num_microbatches * batch_size > len(dataset):
            raise ValueError(
                f"data: step {num_steps - 1} needs samples up to {first + num_microbatches * batch_size}, the dataset "
                f"has {len(dataset)}; build it for all training.steps"
            )
    steps = grain.MapDataset.range(start_step, num_steps)
    steps = steps.map(functools.partial(_read_step, dataset, schedule, rows_of))
    steps = steps.to_iter_dataset(grain.ReadOptions(NUM_THREADS, prefetch_buffer_size=2 * NUM_THREADS))
    if config.num_workers:
        _let_grain_start_processes()
        steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=config.num_workers), end_with_parent)
    return iter(steps)


def _read_step(dataset: Dataset, schedule: Callable, rows_of: Callable, step: int) -> dict[str, Any]:
    first, num_microbatches, batch_size = schedule(int(step))
    rows = np.asarray(rows_of(batch_size))
    samples = (first + np.arange(num_microbatches)[:, None] * batch_size + rows).reshape(-1)
    batch = {}
    for position, i in enumerate(samples.tolist()):
        for key, value in dataset[i].items():
            if key not in batch:
                batch[key] = np.empty((len(samples), *value.shape), value.dtype)
            batch[key][position] = value
    return {key: value.reshape(num_microbatches, len(rows), *value.shape[1:]) for key, value in batch.items()}


@functools.cache
def _let_grain_start_processes() -> None:
    # Grain's workers read absl flags, which are not parsed in a program that is not an absl app.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
