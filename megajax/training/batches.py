"""From samples on the host to global arrays on the mesh."""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from megajax.data.loader import BatchSource
from megajax.mesh.sharding import axes_of, batch_spec
from megajax.models.interface import BatchArray
from megajax.parallel.context import sequence_order
from megajax.training.batch_schedule import Batch
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.state import TrainState


def abstract_batch(
    arrays: dict[str, BatchArray], batch: Batch, mesh: Mesh | AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a step, [microbatches, batch, ...] with their shardings. arrays: see Task.arrays."""

    def array(spec: BatchArray) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, batch_spec(spec.dims))
        return jax.ShapeDtypeStruct(
            (batch.num_microbatches, batch.microbatch, *spec.shape), spec.dtype, sharding=sharding
        )

    return {name: array(spec) for name, spec in sorted(arrays.items())}


def step_arguments(
    program: Program, training: TrainingConfig, done: int, mesh: Mesh | AbstractMesh
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """What the step after `done` finished ones is called with, as shapes, dtypes and shardings; the batch is on this
    mesh."""
    batch = training.schedule(program.mesh_config)(done)
    arrays = abstract_batch(program.arrays(training), batch, mesh)
    return program.abstract_state, arrays, jax.ShapeDtypeStruct((), np.float32)


class BatchPlacer:
    """Transfers batches to the mesh with the shardings of `abstract_batch`. If `context` splits the sequences, permutes
    their tokens as attention requires (parallel/context.py)."""

    def __init__(self, program: Program[Mesh], training: TrainingConfig):
        self._program = program
        self._mesh = program.mesh
        self.arrays = program.arrays(training)
        attention = program.model.execution.context_attention
        self._permutation_of = functools.cache(
            lambda length: sequence_order(length, program.mesh.shape["context"], attention)
        )

    @functools.cached_property
    def rows_of(self) -> Callable[[int], np.ndarray]:
        """Microbatch size -> rows of a microbatch that the devices of this process hold, ascending. The function holds
        no device objects, so that it can be pickled for data workers."""
        num_parts = math.prod(self._mesh.shape[axis] for axis in axes_of(batch_spec()[1]))
        slices = NamedSharding(self._mesh, batch_spec(())).devices_indices_map((1, num_parts)).items()
        own = [rows for device, (_, rows) in slices if device.process_index == jax.process_index()]
        parts = np.unique(np.concatenate([np.arange(num_parts)[rows] for rows in own]))
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

        wanted = abstract_batch(self.arrays, batch, self._mesh)
        return {name: make(local[name], like) for name, like in wanted.items()}

    def _permuted(self, local: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if missing := sorted(self.arrays.keys() - local.keys()):
            raise ValueError(
                f"{self._reader} reads {', '.join(missing)}, which the samples of task.kind="
                f"{self._program.task.kind} do not have"
            )
        return {name: self._permuted_array(name, local[name], spec) for name, spec in self.arrays.items()}

    @property
    def _reader(self) -> str:
        return f"model.kind={self._program.model.config.kind}"

    def _permuted_array(self, name: str, array: np.ndarray, spec: BatchArray) -> np.ndarray:
        if array.dtype != spec.dtype or array.shape[2:] != spec.shape:
            raise ValueError(
                f"task.kind={self._program.task.kind} gives {name} as {array.dtype}{list(array.shape[2:])} per sample, "
                f"and {self._reader} reads {np.dtype(spec.dtype)}{list(spec.shape)}"
            )
        if "time" not in spec.dims:
            return array
        dim = spec.dims.index("time")
        permutation = self._permutation_of(spec.shape[dim])
        is_sorted = np.array_equal(permutation, np.arange(len(permutation)))
        return array if is_sorted else np.take(array, permutation, axis=2 + dim)


def device_batches(
    source: BatchSource,
    schedule: Callable[[int], Batch],
    placer: BatchPlacer,
    *,
    start: int,
    stop: int,
    weights: Callable[[], dict],
) -> Iterator[dict[str, jax.Array]]:
    """Yields the batches of steps start, ..., stop - 1 on the mesh; transfers one step ahead, unless they are made from
    the weights of the moment, which `weights` returns.

    Raises ValueError if a batch lacks an array of the task, or has another shape or dtype for it.
    """
    local = source.batches(start, stop, placer.rows_of, weights)
    ready = None
    for step, arrays in enumerate(local, start=start):
        placed = placer.place(schedule(step), arrays)
        if source.reads_weights:
            yield placed
            continue
        if ready is not None:
            yield ready
        ready = placed
    if ready is not None:
        yield ready


def _rows_of(parts: np.ndarray, num_parts: int, batch: int) -> np.ndarray:
    """Rows of the given parts, ascending, if `batch` rows are divided into num_parts equal parts."""
    return np.arange(batch).reshape(num_parts, -1)[parts].reshape(-1)
