"""Snapshots of a run on a fast disk of each machine (/dev/shm, NVMe), newer than the checkpoints that machines share.

LOCAL_DIR/RUN/STEP/process_N/ is what process N has on its devices: `arrays`, the bytes of its distinct shards one after
the other, and `index.json`, which says what they are and has the meta data of the step, with the digests of the whole
arrays. It is of use only where the same processes come back with the same shards; Orbax keeps the rest.
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
from megajax.checkpoint.verify import differing, on_all_processes, unsealed

logger = logging.getLogger("megajax")

KEPT = 2  # a process may have finished one snapshot more than another when the run ends


def run_folder(local_dir: str | Path, run_dir: Path) -> Path:
    """LOCAL_DIR/RUN. RUN is of this very directory: neither of a copy, nor of a run that was there before it.

    Every process of the run must call it.
    """
    run_id = _run_id(run_dir) if jax.process_index() == 0 else uuid.uuid4()
    numbers = np.frombuffer(run_id.bytes, np.uint32)
    if jax.process_count() > 1:
        numbers = multihost_utils.broadcast_one_to_all(numbers)
    return Path(local_dir) / hashlib.sha256(f"{numbers.tolist()} {run_dir}".encode()).hexdigest()[:16]


def _run_id(run_dir: Path) -> uuid.UUID:
    """What run_id holds; a new one where there is none."""
    path = run_dir / "run_id"
    run_id = uuid.uuid4()
    if path.exists():
        try:
            return uuid.UUID(path.read_text())
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): the run has no local snapshots from before", path, error)
    run_dir.mkdir(parents=True, exist_ok=True)
    path.with_name("run_id.new").write_text(run_id.hex)
    path.with_name("run_id.new").replace(path)
    return run_id


class LocalSnapshots:
    """The newest snapshots of this process. Every process must call `save` and `restore`."""

    def __init__(self, folder: Path):
        """folder: from `run_folder`. What a process that was killed left unfinished is removed."""
        self._folder = folder
        self._name = f"process_{jax.process_index()}"
        self._pool = ThreadPoolExecutor(1)
        self._writing = None
        for unfinished in folder.glob(f"*/{self._name}.new"):
            _remove(unfinished)

    def save(self, step: int, trees: dict[str, Any], meta: dict[str, Any]) -> None:
        """Copies the shards to the host, then writes them while training goes on.

        meta: with the digests of the trees. Waits for the snapshot before, and raises what went wrong with it.
        """
        self.wait()
        arrays = {}
        blocks = []
        offset = 0
        shards = {path: _distinct_shards(leaf) for path, leaf in _leaves(trees).items()}
        for of_one in shards.values():
            for shard in of_one.values():
                shard.copy_to_host_async()
        for path, leaf in _leaves(trees).items():
            places = []
            for bounds, shard in shards[path].items():
                places.append([bounds, offset])
                blocks.append(_copy_on_host(shard))
                offset += blocks[-1].nbytes
            arrays[path] = {"shape": leaf.shape, "dtype": str(leaf.dtype), "shards": places}
        self._writing = self._pool.submit(self._write, step, blocks, {"meta": meta, "arrays": arrays})

    def check(self) -> None:
        """Raises what went wrong with the last snapshot; does not wait for one that is being written."""
        if not self.is_writing():
            self.wait()

    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Until the last snapshot is written; raises what went wrong with it, once."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def restore(
        self, after: int, up_to: float, abstract: dict[str, Any], layer_rows: Rows
    ) -> tuple[int, dict, dict] | None:
        """-> (step, trees, meta) of the newest snapshot between those steps, laid out as the abstract trees say.

        None if there is none, or none that every process has whole and with the shards that it needs: the log says why.
        """
        own = {step for step in self._steps() if after < step <= up_to}
        for step in sorted(_on_any_process(own), reverse=True):
            found = self._read_verified(step, abstract, layer_rows)
            if not isinstance(found, str):
                logger.info("step %d is taken from the local snapshot in %s", step, self._folder)
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
        """That this process has whole."""
        steps = [path.parents[1].name for path in self._folder.glob(f"*/{self._name}/index.json")]
        return sorted(int(step) for step in steps if step.isdecimal())

    def _write(self, step: int, blocks: list[np.ndarray], index: dict) -> None:
        target = self._path(step)
        new = target.with_name(self._name + ".new")
        try:
            new.mkdir(parents=True, exist_ok=True)
            with (new / "arrays").open("wb", buffering=0) as file:
                for block in blocks:
                    waiting = memoryview(block)
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
            _remove(self._path(other))  # later ones too: the run did not go on from them

    def _read_verified(self, step: int, abstract: dict[str, Any], layer_rows: Rows) -> tuple[dict, dict] | str:
        """-> (trees, meta), or why not; all processes come to the same."""
        problem = ""
        found = None
        try:
            found = self._read(step, abstract, layer_rows)
        except Exception as error:  # whatever it is, the shared checkpoint is there
            problem = str(error) or type(error).__name__
        if not on_all_processes(found is not None):
            return problem or "another process says why"
        trees, meta = found
        saved = meta.pop("digests", {})
        wrong = [f"{name}{path}" for name in trees for path in differing(saved.get(name, {}), trees[name])]
        if not on_all_processes(not wrong):
            return f"{', '.join(wrong[:4])} {'is' if len(wrong) == 1 else 'are'} not what was saved"
        return trees, meta

    def _read(self, step: int, abstract: dict[str, Any], layer_rows: Rows) -> tuple[dict, dict]:
        """-> (trees, meta). Raises ValueError if they are not the shards that are needed here."""
        folder = self._path(step)
        if not (folder / "index.json").is_file():
            raise ValueError(f"{folder} does not exist")
        index = json.loads((folder / "index.json").read_text())
        meta = unsealed(index["meta"], folder)
        if meta.get("step", step) != step:
            raise ValueError(f"{folder} is of step {meta['step']}")
        saved = {place: rows.tolist() for place, rows in saved_rows(meta, layer_rows).items()}
        if saved != {place: rows.tolist() for place, rows in layer_rows.items()}:
            raise ValueError("it was saved with another layout of the pipeline")
        wanted = _leaves(abstract)
        if wanted.keys() != index["arrays"].keys():
            raise ValueError("it has other arrays")
        with (folder / "arrays").open("rb") as file:
            made = {path: _array(path, a, index["arrays"][path], file) for path, a in wanted.items()}
        return jax.tree.unflatten(jax.tree.structure(abstract), list(made.values())), meta


def _remove(folder: Path) -> None:
    """The folder of one process, and that of its step after the last one."""
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
    """uint8 [bytes]; of its own, because the next step overwrites the array."""
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
    for device, place in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
        bounds = _bounds(place, wanted.shape)
        if bounds not in offsets:
            raise ValueError(f"it was saved on another mesh: {path} has other shards")
        if bounds not in blocks:
            shape = [stop - start for start, stop in bounds]
            file.seek(offsets[bounds])
            block = np.fromfile(file, jnp.dtype(wanted.dtype), math.prod(shape))
            if block.size != math.prod(shape):
                raise ValueError(f"the file is cut off in {path}")
            blocks[bounds] = block.reshape(shape)
        pieces.append(
            jax.device_put(blocks[bounds], SingleDeviceSharding(device, memory_kind=wanted.sharding.memory_kind))
        )
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, pieces)


def _on_any_process(steps: set[int]) -> set[int]:
    """Steps that some process of the run has, the newest few."""
    if jax.process_count() == 1:
        return steps
    own = np.full(2 * KEPT, -1, np.int32)
    newest = sorted(steps)[-own.size :]
    own[: len(newest)] = newest
    return set(multihost_utils.process_allgather(own).ravel().tolist()) - {-1}
