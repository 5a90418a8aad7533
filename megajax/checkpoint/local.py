"""Snapshots of a run on a fast local disk of each machine (/dev/shm, NVMe), newer than the shared checkpoints.

LOCAL_DIR/RUN/STEP/process_N/ holds what process N has on its devices: `arrays`, the bytes of its distinct shards one
after the other, and `index.json`, which describes them and has the metadata of the step, with the digests of the whole
arrays. A snapshot can be used only if the same processes return with the same shards; for all else there are Orbax's
checkpoints.
"""

import contextlib
import hashlib
import json
import logging
import math
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from megajax.checkpoint.layout import Rows, saved_rows
from megajax.checkpoint.verify import damaged_arrays, on_all_processes, on_each_process, unsealed

logger = logging.getLogger("megajax")

KEPT = 2  # a process may have finished one snapshot more than another when the run ends


def run_folder(local_dir: str | Path, run_dir: Path) -> Path:
    """LOCAL_DIR/RUN. RUN identifies this run directory, as opposed to a copy of it or an earlier run in its place.

    Every process of the run must call it.
    """
    run_id = _run_id(run_dir) if jax.process_index() == 0 else uuid.uuid4()
    numbers = np.frombuffer(run_id.bytes, np.uint32)
    if jax.process_count() > 1:
        numbers = multihost_utils.broadcast_one_to_all(numbers)
    return Path(local_dir) / hashlib.sha256(f"{numbers.tolist()} {run_dir}".encode()).hexdigest()[:16]


def _run_id(run_dir: Path) -> uuid.UUID:
    """The id in the file run_id, which is created if it does not exist."""
    path = run_dir / "run_id"
    run_id = uuid.uuid4()
    if path.exists():
        try:
            return uuid.UUID(path.read_text())
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): earlier local snapshots of the run are ignored", path, error)
    run_dir.mkdir(parents=True, exist_ok=True)
    path.with_name("run_id.new").write_text(run_id.hex)
    path.with_name("run_id.new").replace(path)
    return run_id


class LocalSnapshots:
    """The newest snapshots of this process. Every process must call `save` and `restore`."""

    def __init__(self, folder: Path):
        """folder: from `run_folder`. Unfinished snapshots of a killed process are removed."""
        self._folder = folder
        self._name = f"process_{jax.process_index()}"
        self._pool = ThreadPoolExecutor(1)
        self._writing = None
        for unfinished in folder.glob(f"*/{self._name}.new"):
            _remove(unfinished)

    def save(self, step: int, trees: dict[str, Any], meta: dict[str, Any]) -> None:
        """Copies the shards to the host, then writes them while training continues.

        meta: from `sealed`. Waits for the previous snapshot, and raises its error.
        """
        self.wait()
        arrays = {}
        blocks = []
        offset = 0
        shards = {path: _distinct_shards(leaf) for path, leaf in _leaves(trees).items()}
        for array_shards in shards.values():
            for shard in array_shards.values():
                shard.copy_to_host_async()
        for path, leaf in _leaves(trees).items():
            offsets = []
            for bounds, shard in shards[path].items():
                offsets.append([bounds, offset])
                blocks.append(_copy_on_host(shard))
                offset += blocks[-1].nbytes
            arrays[path] = {"shape": leaf.shape, "dtype": str(leaf.dtype), "shards": offsets}
        self._writing = self._pool.submit(self._write, step, blocks, {"meta": meta, "arrays": arrays})

    def check(self) -> None:
        """Raises the error of the last snapshot; does not wait for one that is being written."""
        if not self.is_writing():
            self.wait()

    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Waits until the last snapshot is written; raises its error, once."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def restore(
        self, after: int, up_to: float, abstract: dict[str, Any], layer_rows: Rows
    ) -> tuple[int, dict, dict] | None:
        """-> (step, trees, meta) of the newest snapshot between those steps, with the shardings of the abstract trees.

        None if there is none that every process has complete and with the shards that it needs; the log says why.
        """
        own = {step for step in self._steps() if after < step <= up_to}
        for step in sorted(_on_any_process(own), reverse=True):
            found = self._read_verified(step, abstract, layer_rows)
            if not isinstance(found, str):
                logger.info("step %d is restored from the local snapshot in %s", step, self._folder)
                return step, *found
            logger.warning("the local snapshot %d is not used: %s", step, found)
        return None

    def remove_up_to(self, step: int) -> None:
        for own in self._steps():
            if own <= step:
                _remove(self._path(own))
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def close(self) -> None:
        self._pool.shutdown()

    def _path(self, step: int) -> Path:
        return self._folder / str(step) / self._name

    def _steps(self) -> list[int]:
        """Steps of which this process has a complete snapshot."""
        steps = [path.parents[1].name for path in self._folder.glob(f"*/{self._name}/index.json")]
        return sorted(int(step) for step in steps if step.isdecimal())

    def _write(self, step: int, blocks: list[np.ndarray], index: dict) -> None:
        target = self._path(step)
        new = target.with_name(self._name + ".new")
        try:
            new.mkdir(parents=True, exist_ok=True)
            with (new / "arrays").open("wb", buffering=0) as file:
                for block in blocks:
                    waiting = block.data
                    while waiting:  # Linux writes at most 2 GB at once
                        waiting = waiting[file.write(waiting) :]
            (new / "index.json").write_text(json.dumps(index))
            shutil.rmtree(target, ignore_errors=True)
            new.replace(target)
        except BaseException:
            _remove(new)
            raise
        before = [other for other in self._steps() if other <= step]
        for other in set(self._steps()) - set(before[-KEPT:]):
            _remove(self._path(other))  # later ones too: the run did not resume from them

    def _read_verified(self, step: int, abstract: dict[str, Any], layer_rows: Rows) -> tuple[dict, dict] | str:
        """-> (trees, meta), or the reason why not; all processes agree on which."""
        try:
            trees, meta = on_each_process(lambda: self._read(step, abstract, layer_rows))
        except Exception as error:  # in any case the shared checkpoint can be used
            return str(error) or type(error).__name__
        damage = damaged_arrays(meta.pop("digests"), trees)
        # Of a replicated array, only some processes may have a damaged copy.
        return (trees, meta) if on_all_processes(not damage) else damage or "another process logs why"

    def _read(self, step: int, abstract: dict[str, Any], layer_rows: Rows) -> tuple[dict, dict]:
        """-> (trees, meta). Raises ValueError if the snapshot does not have the shards that are needed here."""
        folder = self._path(step)
        if not (folder / "index.json").is_file():
            raise ValueError(f"{folder} does not exist")
        index = json.loads((folder / "index.json").read_text())
        meta = unsealed(index["meta"], step, folder)
        saved = {stack: rows.tolist() for stack, rows in saved_rows(meta, layer_rows).items()}
        if saved != {stack: rows.tolist() for stack, rows in layer_rows.items()}:
            raise ValueError("it was saved with another pipeline layout")
        wanted = _leaves(abstract)
        if wanted.keys() != index["arrays"].keys():
            raise ValueError("it has different arrays")
        with (folder / "arrays").open("rb") as file:
            arrays = {path: _array(path, a, index["arrays"][path], file) for path, a in wanted.items()}
        return jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values())), meta


def _remove(folder: Path) -> None:
    """Removes the folder of one process, and the folder of the step once it is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _leaves(trees) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _distinct_shards(array: jax.Array) -> dict[tuple, jax.Array]:
    return {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def _copy_on_host(shard: jax.Array) -> np.ndarray:
    """uint8 [bytes], as a copy, because the next step overwrites the array."""
    host = np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8)
    (device,) = shard.devices()
    is_copy = device.platform != "cpu" and shard.sharding.memory_kind == "device"
    return host if is_copy else host.copy()


def _array(path: str, wanted: jax.ShapeDtypeStruct, stored: dict, file) -> jax.Array:
    """The array from its shards. Raises ValueError if one is missing."""
    if (tuple(stored["shape"]), stored["dtype"]) != (wanted.shape, str(wanted.dtype)):
        raise ValueError(f"{path} is {stored['dtype']}{stored['shape']} there, not {wanted.dtype}{list(wanted.shape)}")
    offsets = {tuple(map(tuple, bounds)): offset for bounds, offset in stored["shards"]}
    pieces = []
    blocks = {}
    for device, index in wanted.sharding.devices_indices_map(wanted.shape).items():
        if device.process_index != jax.process_index():
            continue
        bounds = _bounds(index, wanted.shape)
        if bounds not in offsets:
            raise ValueError(f"it was saved on another mesh: {path} has different shards")
        if bounds not in blocks:
            shape = [stop - start for start, stop in bounds]
            file.seek(offsets[bounds])
            block = np.fromfile(file, jnp.dtype(wanted.dtype), math.prod(shape))
            if block.size != math.prod(shape):
                raise ValueError(f"the file is truncated in {path}")
            blocks[bounds] = block.reshape(shape)
        pieces.append(
            jax.device_put(blocks[bounds], SingleDeviceSharding(device, memory_kind=wanted.sharding.memory_kind))
        )
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, pieces)


def _on_any_process(steps: set[int]) -> set[int]:
    """The newest few steps that any process of the run has."""
    if jax.process_count() == 1:
        return steps
    own = np.full(2 * KEPT, -1, np.int32)
    newest = sorted(steps)[-own.size :]
    own[: len(newest)] = newest
    return set(multihost_utils.process_allgather(own).ravel().tolist()) - {-1}
