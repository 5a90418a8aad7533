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
from megajax.models.interface import BatchArray
from megajax.models.model import Model
from megajax.parallel.context import sequence_order
from megajax.sharding import axes_of, batch_spec
from megajax.training.batch_schedule import Batch


def abstract_batch(
    model: Model, batch: Batch, sequence_length: int, mesh: Mesh, *, packed: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a step, [microbatches, batch, ...] with their shardings. packed: see ModelConfig.batch."""

    def array(one: BatchArray) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, batch_spec(one.dims))
        return jax.ShapeDtypeStruct(
            (batch.num_microbatches, batch.microbatch, *one.shape), one.dtype, sharding=sharding
        )

    arrays = model.config.batch(sequence_length, packed=packed)
    return {name: array(one) for name, one in sorted(arrays.items())}


def device_batches(
    dataset: Dataset,
    schedule: Callable[[int], Batch],
    *,
    start: int,
    stop: int,
    model: Model,
    sequence_length: int,
    mesh: Mesh,
    config: DataConfig,
) -> Iterator[dict[str, jax.Array]]:
    """The batches of steps start, ..., stop - 1: global arrays as `abstract_batch` has them, one step ahead of the
    reader. Where `context` splits a sequence its tokens are put in the order in which attention wants them.

    Raises ValueError if the dataset lacks an array that the model reads, or has it in another shape or dtype.
    """
    packed = not config.cross_document_attention
    arrays = model.config.batch(sequence_length, packed=packed)
    order_of = functools.cache(
        lambda length: sequence_order(length, mesh.shape["context"], model.execution.context_attention)
    )

    # Which parts of a batch the devices of this process hold: processes that read get them, but cannot get devices.
    num_parts = math.prod(mesh.shape[axis] for axis in axes_of(batch_spec()[1]))
    slices = NamedSharding(mesh, batch_spec(())).addressable_devices_indices_map((1, num_parts)).values()
    parts = np.unique(np.concatenate([np.arange(num_parts)[rows] for _, rows in slices]))
    rows_of = functools.partial(_rows_of, parts, num_parts)

    def place(step: int, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        now = schedule(step)
        rows = rows_of(now.microbatch)

        def part(array, index):
            wanted = np.arange(now.microbatch)[index[1]]
            return array[index[0], np.searchsorted(rows, wanted)][..., *index[2:]]

        def make(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(like.shape, like.sharding, lambda index: part(array, index))

        wanted = abstract_batch(model, now, sequence_length, mesh, packed=packed)
        return {name: make(local[name], like) for name, like in wanted.items()}

    def ordered(local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if missing := sorted(arrays.keys() - local.keys()):
            raise ValueError(
                f"model.kind={model.config.kind} reads {', '.join(missing)}, which data.kind={config.kind} does not "
                "have; use another --data.kind"
            )
        return {name: in_order(name, local[name], one) for name, one in arrays.items()}

    def in_order(name: str, array: np.ndarray, one: BatchArray) -> np.ndarray:
        if array.dtype != one.dtype or array.shape[2:] != one.shape:
            raise ValueError(
                f"data.kind={config.kind} gives {name} as {array.dtype}{list(array.shape[2:])} a sample, and "
                f"model.kind={model.config.kind} reads {np.dtype(one.dtype)}{list(one.shape)}; use another --data.kind"
            )
        if "time" not in one.dims:
            return array
        dim = one.dims.index("time")
        order = order_of(one.shape[dim])
        is_sorted = np.array_equal(order, np.arange(len(order)))
        return array if is_sorted else np.take(array, order, axis=2 + dim)

    def as_tuple(step: int) -> tuple[int, int, int]:
        return dataclasses.astuple(schedule(step))

    local = step_batches(dataset, as_tuple, rows_of, start_step=start, num_steps=stop, config=config)
    ahead = None
    for step, one in enumerate(local, start=start):
        placed = place(step, ordered(one))
        if ahead is not None:
            yield ahead
        ahead = placed
    if ahead is not None:
        yield ahead


def _rows_of(parts: np.ndarray, num_parts: int, batch: int) -> np.ndarray:
    """Ascending rows of these parts, of `batch` rows in num_parts equal parts."""
    return np.arange(batch).reshape(num_parts, -1)[parts].reshape(-1)
