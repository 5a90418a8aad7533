"""Arrays that are read when they are written to a checkpoint, one after the other: a model need not fit into memory."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.checkpoint.verify import digest_of_host, sealed

CHUNK_BYTES = 2**26  # of an array on disk; what writes or reads a part of it has whole chunks in memory


@dataclasses.dataclass(frozen=True)
class DeferredArray:
    """A leaf of a tree for Checkpointer.write."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    """Called twice: for its digest, and to be written."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class _Handler(ocp.type_handlers.NumpyHandler):
    """On disk a DeferredArray is like any array of NumPy."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Sequence[DeferredArray], infos: Sequence[Any], args=None):
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            (written,) = await super().serialize([value.read()], [info], [arg])
            await asyncio.to_thread(written.result)
        return []


def write(run_dir: str | Path, step: int, params: dict, meta: dict[str, Any]) -> None:
    """Writes a step with parameters alone, as Checkpointer.write would of arrays.

    params: nested dict of DeferredArray; the largest of them is in memory, and what is being compressed of it.
    """
    meta = meta | {"digests": {"params": _digests(params)}}
    types = ocp.type_handlers.create_type_handler_registry((DeferredArray, _Handler()))
    handlers = {"params": ocp.PyTreeCheckpointHandler(type_handler_registry=types), "meta": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    in_chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
    items = {"params": ocp.args.PyTreeSave(params, save_args=in_chunks), "meta": ocp.args.JsonSave(sealed(meta))}
    run_dir = Path(run_dir).resolve()
    with ocp.CheckpointManager(run_dir / "checkpoints", item_handlers=handlers, options=options) as manager:
        manager.save(step, args=ocp.args.Composite(**items), force=True)
    (run_dir / "latest").symlink_to(Path("checkpoints") / str(step))


def _digests(params: dict) -> dict[str, list]:
    """Of one array after the other."""
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), digest_of_host(leaf.read())]
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
