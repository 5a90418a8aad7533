"""Steps that are written and read piece by piece: a model need not fit into memory."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from megajax.checkpoint.layout import Rows, saved_rows, stack_of
from megajax.checkpoint.steps import read_meta
from megajax.checkpoint.verify import digest_of_pieces, sealed

PIECE_BYTES = 2**25  # of an array in memory at a time; about four copies are made while one is compressed and written

Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class PiecewiseArray:
    """An array that is elsewhere, and of which any part can be read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    order: tuple[int, ...] | None = None
    """The axes in the order in which they are in memory, outermost first, if that is not the order of the shape."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def at(self, place: tuple[int, ...]) -> "PiecewiseArray":
        """The part at these indices of the first dims."""
        return PiecewiseArray(self.shape[len(place) :], self.dtype, lambda index: self.read((*place, *index)))

    def times(self, factor: np.ndarray) -> "PiecewiseArray":
        """Multiplied by a factor that broadcasts to its shape, in float32."""
        factor = np.broadcast_to(factor, self.shape)
        return PiecewiseArray(
            self.shape, np.dtype(np.float32), lambda index: self.read(index).astype(np.float32) * factor[index]
        )

    def digest(self) -> list[int]:
        return digest_of_pieces(self.read(piece) for piece in pieces(self.shape, self.dtype))


def piece_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Of parts of at most PIECE_BYTES that follow each other in memory: whole rows of the first axis where these fit,
    else of the next one."""
    for axis in range(len(shape)):
        row = math.prod(shape[axis + 1 :]) * dtype.itemsize
        if row <= PIECE_BYTES:
            rows = max(1, min(shape[axis], PIECE_BYTES // max(row, 1)))
            return (*[1] * axis, rows, *shape[axis + 1 :])
    return (1,) * len(shape)


def pieces(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[slice, ...]]:
    """In the order of memory."""
    steps = piece_shape(shape, dtype)
    counts = [-(-size // step) for size, step in zip(shape, steps, strict=True)]
    for place in np.ndindex(*counts):
        firsts = [number * step for number, step in zip(place, steps, strict=True)]
        ends = [min(first + step, size) for first, step, size in zip(firsts, steps, shape, strict=True)]
        yield tuple(map(slice, firsts, ends))


# ----------------------------------------------------------------------------- writing


class _Handler(ocp.type_handlers.NumpyHandler):
    """On disk a PiecewiseArray, which the values are, is like any array of NumPy, with a chunk for each piece."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args=None):
        """One array after the other."""
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            (written,) = await super().serialize([value], [info], [arg])
            await asyncio.to_thread(written.result)
        return []

    async def _open_and_write(self, value: Any, tspec: dict, ts_context: tensorstore.Context):
        tspec["metadata"]["chunks"] = piece_shape(value.shape, value.dtype)
        store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
        for piece in pieces(value.shape, value.dtype):
            await store[piece].write(value.read(piece), can_reference_source_data_indefinitely=True)


def write(run_dir: str | Path, step: int, params: dict, meta: dict[str, Any]) -> None:
    """Writes a step with parameters alone, as Checkpointer.write would of arrays.

    params: nested dict of PiecewiseArray, each of which is read twice: for its digest, and to be written.
    """
    digests = {
        jax.tree_util.keystr(path): [str(leaf.dtype), leaf.digest()]
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    types = ocp.type_handlers.create_type_handler_registry((PiecewiseArray, _Handler()))
    handlers = {"params": ocp.PyTreeCheckpointHandler(type_handler_registry=types), "meta": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    meta = sealed(step, meta, {"params": digests})
    items = {"params": ocp.args.PyTreeSave(params), "meta": ocp.args.JsonSave(meta)}
    run_dir = Path(run_dir).resolve()
    with ocp.CheckpointManager(run_dir / "checkpoints", item_handlers=handlers, options=options) as manager:
        manager.save(step, args=ocp.args.Composite(**items), force=True)
    (run_dir / "latest").symlink_to(Path("checkpoints") / str(step))


# ----------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class StoredParameter:
    """A parameter where it is stored, in the order in which it is stored. Nothing of it is verified yet."""

    parts: list[tuple[int | None, PiecewiseArray]]
    """(number of a layer, its array), -1 for rows of padding; or a single (None, array) outside the layers."""
    digest: list[int] | None
    """Of all parts together, the sum of the digests of each from its position; None: the source has none (a folder)."""


class StoredParams:
    """The parameters of a step, read where they are wanted."""

    def __init__(self, run_dir: str | Path, step: int, layer_rows: Rows):
        """layer_rows: the layers that the model has. Raises ValueError if the step has others or is damaged."""
        meta = read_meta(run_dir, step)
        self._folder = Path(run_dir).resolve() / "checkpoints" / str(step)
        self._rows = saved_rows(meta, layer_rows)
        found = meta["digests"]["params"]
        self._digests = {_name(path): value for path, (_, value) in found.items()}
        self.dtypes = {_name(path): np.dtype(dtype) for path, (dtype, _) in found.items()}
        """By name."""

    def open(self, name: str) -> PiecewiseArray:
        """An array as it is stored, after it was verified. Raises ValueError if it is not what was saved."""
        with self._naming(name):
            found = self._open(name)
            is_whole = found.digest() == self._digests.get(name)
        if not is_whole:
            raise ValueError(f"{self._folder} is damaged: {name} is not what was saved; use another step")
        return found

    def parts(self, name: str) -> StoredParameter:
        """Raises ValueError if it cannot be read, or has no digest."""
        with self._naming(name):
            array = self._open(name)
        if name not in self._digests:
            raise ValueError(f"{self._folder} is damaged: {name} has no digest; use another step")
        stack = stack_of(name, self._rows)
        if stack is None:
            return StoredParameter([(None, array)], self._digests[name])
        rows = self._rows[stack]
        places = np.ndindex(rows.shape)
        return StoredParameter([(int(rows[place]), array.at(place)) for place in places], self._digests[name])

    def row_of(self, name: str, layer: int | None) -> tuple[int, ...]:
        """Where a layer is in an array."""
        stack = stack_of(name, self._rows)
        if stack is None or layer is None:
            return ()
        (row,) = np.argwhere(self._rows[stack] == layer)
        return tuple(row.tolist())

    @contextlib.contextmanager
    def _naming(self, name: str) -> Generator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            problem = str(error).strip().splitlines()[0]
            raise ValueError(f"{self._folder} cannot be read ({name}: {problem}); use another step") from error

    def _open(self, name: str) -> PiecewiseArray:
        kvstore = {"driver": "ocdbt", "base": f"file://{self._folder / 'params'}/", "path": f"{name}/"}
        spec = {"driver": "auto", "kvstore": kvstore}
        store = tensorstore.open(spec, read=True).result()
        dtype = store.dtype.numpy_dtype
        # Several pieces of a chunk are read one after the other: it is decoded once.
        chunk_rows = (store.chunk_layout.read_chunk.shape or store.shape)[:1]
        nbytes = math.prod(size or 1 for size in (*chunk_rows, *store.shape[1:])) * dtype.itemsize
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": nbytes}})
        store = tensorstore.open(spec, read=True, context=context).result()
        return PiecewiseArray(tuple(store.shape), dtype, lambda index: store[index].read().result())


def _name(path: str) -> str:
    """Of jax.tree_util.keystr: ['layers']['dense'] -> layers.dense."""
    return path.strip("[]'").replace("']['", ".")
