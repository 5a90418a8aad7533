"""From samples on the host to global arrays on the mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from megajax.data.config import DataConfig
from megajax.data.datasets import Dataset
from megajax.data.loader import step_batches
from megajax.sharding import axes_of, batch_spec
from megajax.training.batch_schedule import Batch


def device_batches(
    dataset: Dataset,
    schedule: Callable[[int], Batch],
    *,
    start: int,
    stop: int,
    sequence_length: int,
    mesh: Mesh,
    config: DataConfig,
    order: np.ndarray,
) -> Iterator[dict[str, jax.Array]]:
    """The batches of steps start, ..., stop - 1: global arrays [microbatches, batch, T], one step ahead of the reader.

    tokens, labels, positions int32, loss_mask float32, and segment_ids int32 where documents must not see each other.
    order: place in the sequence of what lies at each index of T (parallel/context.py).
    """
    sharding, length = NamedSharding(mesh, batch_spec()), sequence_length
    names = {"tokens", "labels", "loss_mask", "positions", "segment_ids"}
    if config.cross_document_attention:
        names.remove("segment_ids")

    # Which parts of a batch the devices of this process hold: processes that read get them, but cannot get devices.
    num_parts = math.prod(mesh.shape[axis] for axis in axes_of(batch_spec()[1]))
    slices = sharding.addressable_devices_indices_map((1, num_parts, length)).values()
    parts = np.unique(np.concatenate([np.arange(num_parts)[rows] for _, rows, _ in slices]))
    rows_of = functools.partial(_rows_of, parts, num_parts)

    def place(step: int, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        now = schedule(step)
        rows, shape = rows_of(now.microbatch), (now.num_microbatches, now.microbatch, length)

        def part(array, index):
            wanted = np.arange(now.microbatch)[index[1]]
            return array[index[0], np.searchsorted(rows, wanted)][..., index[2]]

        make = lambda array: jax.make_array_from_callback(shape, sharding, lambda index: part(array, index))
        return {name: make(local[name]) for name in sorted(names)}

    def ordered(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if np.array_equal(order, np.arange(length)):
            return arrays
        return {name: arrays[name][..., order] for name in names}

    triple = lambda step: dataclasses.astuple(schedule(step))
    local = step_batches(dataset, triple, rows_of, start_step=start, num_steps=stop, config=config)
    ahead = None
    for step, arrays in enumerate(local, start=start):
        placed = place(step, ordered(arrays))
        if ahead is not None:
            yield ahead
        ahead = placed
    if ahead is not None:
        yield ahead


def _rows_of(parts: np.ndarray, num_parts: int, batch: int) -> np.ndarray:
    """Ascending rows of these parts, of `batch` rows in num_parts equal parts."""
    return np.arange(batch).reshape(num_parts, -1)[parts].reshape(-1)
