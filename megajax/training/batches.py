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

    def array(spec: BatchArray) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, batch_spec(spec.dims))
        return jax.ShapeDtypeStruct(
            (batch.num_microbatches, batch.microbatch, *spec.shape), spec.dtype, sharding=sharding
        )

    arrays = model.config.batch(sequence_length, packed=packed)
    return {name: array(spec) for name, spec in sorted(arrays.items())}


class BatchPlacer:
    """Transfers batches to the mesh with the shardings of `abstract_batch`. If `context` splits the sequences, permutes
    their tokens as attention requires (parallel/context.py)."""

    def __init__(self, model: Model, sequence_length: int, mesh: Mesh, config: DataConfig):
        self._model = model
        self._sequence_length = sequence_length
        self._mesh = mesh
        self._kind = config.kind
        self._packed = not config.cross_document_attention
        self._arrays = model.config.batch(sequence_length, packed=self._packed)
        self._permutation_of = functools.cache(
            lambda length: sequence_order(length, mesh.shape["context"], model.execution.context_attention)
        )

    @functools.cached_property
    def rows_of(self) -> Callable[[int], np.ndarray]:
        """Microbatch size -> rows of a microbatch that the devices of this process hold, ascending. The function holds
        no device objects, so that it can be pickled for data workers."""
        num_parts = math.prod(self._mesh.shape[axis] for axis in axes_of(batch_spec()[1]))
        slices = NamedSharding(self._mesh, batch_spec(())).addressable_devices_indices_map((1, num_parts)).values()
        parts = np.unique(np.concatenate([np.arange(num_parts)[rows] for _, rows in slices]))
        return functools.partial(_rows_of, parts, num_parts)

    def place(self, batch: Batch, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """local: arrays [microbatches, rows of `rows_of`, ...]; those that the model does not read are ignored.

        Raises ValueError if one is missing, or has another shape or dtype than the model reads.
        """
        local = self._permuted(local)
        rows = self.rows_of(batch.microbatch)

        def part(array, index):
            wanted = np.arange(batch.microbatch)[index[1]]
            return array[index[0], np.searchsorted(rows, wanted)][..., *index[2:]]

        def make(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(like.shape, like.sharding, lambda index: part(array, index))

        wanted = abstract_batch(self._model, batch, self._sequence_length, self._mesh, packed=self._packed)
        return {name: make(local[name], like) for name, like in wanted.items()}

    def _permuted(self, local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if missing := sorted(self._arrays.keys() - local.keys()):
            raise ValueError(
                f"model.kind={self._model.config.kind} reads {', '.join(missing)}, which data.kind={self._kind} does "
                "not provide; use another --data.kind"
            )
        return {name: self._permuted_array(name, local[name], spec) for name, spec in self._arrays.items()}

    def _permuted_array(self, name: str, array: np.ndarray, spec: BatchArray) -> np.ndarray:
        if array.dtype != spec.dtype or array.shape[2:] != spec.shape:
            raise ValueError(
                f"data.kind={self._kind} gives {name} as {array.dtype}{list(array.shape[2:])} per sample, and "
                f"model.kind={self._model.config.kind} reads {np.dtype(spec.dtype)}{list(spec.shape)}; use another "
                "--data.kind"
            )
        if "time" not in spec.dims:
            return array
        dim = spec.dims.index("time")
        permutation = self._permutation_of(spec.shape[dim])
        is_sorted = np.array_equal(permutation, np.arange(len(permutation)))
        return array if is_sorted else np.take(array, permutation, axis=2 + dim)


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
    """Yields the batches of steps start, ..., stop - 1 on the mesh, transferring one step ahead.

    Raises ValueError if the dataset lacks an array that the model reads, or has another shape or dtype for it.
    """
    placer = BatchPlacer(model, sequence_length, mesh, config)

    def as_tuple(step: int) -> tuple[int, int, int]:
        return dataclasses.astuple(schedule(step))

    local = step_batches(dataset, as_tuple, placer.rows_of, start_step=start, num_steps=stop, config=config)
    next_batch = None
    for step, arrays in enumerate(local, start=start):
        placed = placer.place(schedule(step), arrays)
        if next_batch is not None:
            yield next_batch
        next_batch = placed
    if next_batch is not None:
        yield next_batch


def _rows_of(parts: np.ndarray, num_parts: int, batch: int) -> np.ndarray:
    """Rows of the given parts, ascending, if `batch` rows are divided into num_parts equal parts."""
    return np.arange(batch).reshape(num_parts, -1)[parts].reshape(-1)
