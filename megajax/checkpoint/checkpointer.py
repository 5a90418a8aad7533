"""Checkpoints of a run: parameters, optimizer state, position and config of one step, written together by Orbax.

A step is a directory `checkpoints/STEP/` with the items `params`, `optimizer` and `meta` (JSON). Arrays are global: any
mesh and any pipeline layout can restore what any other saved, and serving restores only `params`. `meta` holds a digest
of every array (checkpoint/verify.py), and arrays that do not match are not used. `latest`, next to `checkpoints`, is a
link to the newest step on disk.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.checkpoint.config import CheckpointConfig, Kept
from megajax.checkpoint.layout import Rows, of_layers, saved_rows, stored_form, wanted_form
from megajax.checkpoint.local import LocalSnapshots, run_folder
from megajax.checkpoint.steps import read_meta
from megajax.checkpoint.verify import (
    as_stored,
    damaged_arrays,
    digests,
    on_all_processes,
    on_each_process,
    sealed,
)
from megajax.terminal.one_line import in_one_line

logger = logging.getLogger("megajax")

SAME_FAILURE_SECONDS = 60.0  # between lines in the log about saves that fail
TIMES = "_CHECKPOINT_METADATA"  # a file of Orbax in each step


class _Manager(ocp.CheckpointManager):
    def __init__(self, *arguments, on_disk: Callable[[int], None], **others):
        self._on_disk = on_disk
        super().__init__(*arguments, **others)

    def reached_preemption(self, step: int) -> bool:
        """Never: only the loop asks. Orbax would ask from its saving thread about an earlier step, and JAX, which keeps
        the step it was last asked about, could then agree to stop at a step that has passed."""
        return False

    def _finalize_checkpoint(self, step: int) -> None:
        """Called by the saving thread when the step is on disk and before old ones are removed."""
        super()._finalize_checkpoint(step)
        self._on_disk(step)


class Checkpointer:
    """Saves in the background. Use as a context manager: leaving it waits for the last save.

    config: None opens the checkpoints read-only and changes nothing, because the run may still be training.
    """

    def __init__(self, run_dir: str | Path, config: CheckpointConfig | None):
        self.run_dir = Path(run_dir).resolve()
        self.folder = self.run_dir / "checkpoints"
        self.failed_saves = 0
        self._failure_logged = -math.inf
        self._left_unfinished = False
        self._config = config or CheckpointConfig(keep=0)
        self._kept = Kept(self._config)
        self._manager = self._open(writes=config is not None)
        self._local = None
        if self._config.local_dir:
            self._local = LocalSnapshots(run_folder(self._config.local_dir, self.run_dir))
        if self._config.keep_best:
            for step in self.steps():
                with contextlib.suppress(Exception):  # restore_newest reports damage
                    self._kept.evaluated(step, self.read_meta(step))

    def _open(self, *, writes: bool) -> _Manager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            enable_async_checkpointing=writes,
            cleanup_tmp_directories=writes,
            create=writes,
            read_only=not writes,
        )
        damaged = [path for path in self.folder.glob(f"*/{TIMES}") if not _has_times(path)]
        if writes and jax.process_index() == 0:
            for path in damaged:
                logger.warning("%s is damaged: renamed, the step can be read without it", path)
                path.rename(path.with_name(f"{TIMES}.damaged"))
        try:
            return _Manager(
                self.folder, item_names=("params", "optimizer", "meta"), options=options, on_disk=self._point_latest
            )
        except (ValueError, TypeError, RecursionError) as error:
            if not damaged:
                raise
            raise ValueError(f"{damaged[0]} is damaged; remove it, the step can be read without it") from error

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Those that can be restored unless they are damaged, the newest last."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, params, optimizer_state, meta: dict[str, Any]) -> None:
        """Copies the arrays to the host, then writes them while training continues. Does nothing if the step exists.

        meta: JSON values; its eval_loss, if present, decides whether the step is one of checkpoint.keep_best. Errors,
        immediate or in the background, are logged and counted in `failed_saves`; the next save tries again.
        """
        with self._counted("checkpoint"):  # an error of the previous save must not prevent this one
            self.wait()
        with self._counted("checkpoint"):
            self._clear_failed()
            self.write(step, {"params": params, "optimizer": optimizer_state}, meta)

    def is_due(self, step: int) -> bool:
        """Whether checkpoint.every_steps requires a checkpoint of this step."""
        every = self._config.every_steps
        return bool(every) and step % every == 0

    def is_saving(self) -> bool:
        """Whether a save is in progress in the background."""
        return self._manager.is_saving_in_progress()

    def local_is_due(self, step: int) -> bool:
        return self._local is not None and step % self._config.local_every_steps == 0

    def save_local(self, step: int, params, optimizer_state, meta: dict[str, Any]) -> None:
        """Like `save`, but to the fast local disk of each machine, if there is one."""
        if self._local is None:
            return
        trees = {"params": params, "optimizer": optimizer_state}
        self.wait_for_local()
        with self._counted("local snapshot"):
            self._local.save(step, trees, _sealed(step, trees, meta))

    def check(self) -> None:
        """Checks whether a background save has failed; does not wait for one in progress."""
        with self._counted("checkpoint"):
            if not self.is_saving():
                self.wait()
        with self._counted("local snapshot"):
            if self._local is not None:
                self._local.check()

    def _clear_failed(self) -> None:
        """Removes remains of failed saves, which may be filling the disk, and reloads the list of steps, from which
        Orbax has dropped the oldest one for each failed save."""
        if on_all_processes(not self._left_unfinished):
            return
        if jax.process_index() == 0:
            for unfinished in self.folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        self._manager.reload()
        self._left_unfinished = False

    @contextlib.contextmanager
    def _counted(self, what: str) -> Generator[None]:
        """Counts and logs an error of a save (a full, missing or slow disk): training continues."""
        try:
            yield
        except Exception as error:
            self.failed_saves += 1
            self._left_unfinished |= what == "checkpoint"
            if time.monotonic() - self._failure_logged >= SAME_FAILURE_SECONDS:
                self._failure_logged = time.monotonic()
                logger.error("a %s could not be saved (failure %d): %s", what, self.failed_saves, in_one_line(error))

    def write(self, step: int, trees: dict[str, Any], meta: dict[str, Any]) -> None:
        """Starts saving {item: tree of arrays}, like `save`, but raises errors, here or in `wait`."""
        if step in self.steps():
            return
        self._kept.evaluated(step, meta)
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items["params"] = ocp.args.StandardSave(trees["params"], _by_layer(trees["params"], meta.get("layer_rows", {})))
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(_sealed(step, trees, meta)))
        self._manager.save(step, args=args, force=True)

    def _point_latest(self, step: int) -> None:
        """Points run_dir/latest to checkpoints/STEP atomically, because another process may be reading it."""
        link = self.run_dir / "latest"
        new = self.run_dir / "latest.new"
        if jax.process_index() != 0 or not (self.folder / str(step)).is_dir():
            return
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(Path(self.folder.name) / str(step))
            new.replace(link)
        except OSError as error:  # a file system without links, or a copy that followed them
            logger.warning("%s does not point to step %d: %s", link, step, error)

    def read_meta(self, step: int) -> dict[str, Any]:
        """Raises ValueError if the metadata is damaged."""
        return read_meta(self.run_dir, step)

    def restore_newest(
        self, abstract_params, abstract_optimizer_state, layer_rows: Rows
    ) -> tuple[int, Any, Any, dict] | None:
        """-> (step, params, optimizer state, meta) of the newest undamaged step, or None if there is no step.

        Newer steps, which cannot be read or have a damaged array, are renamed to STEP.damaged, with a warning that says
        why. Raises ValueError, and renames nothing, if there are steps but all are damaged. A newer local snapshot that
        matches is preferred, and is saved as a checkpoint at once.
        """
        trees = dict(params=abstract_params, optimizer=abstract_optimizer_state)
        steps = self.steps()[::-1]
        problems = {}
        for step, one_before in zip((*steps, None), (math.inf, *steps), strict=True):
            found = self._restore_local(step or 0, one_before, trees, layer_rows)
            is_local = found is not None
            if not is_local and step is not None:
                found = self._restore_or_say_why(step, trees, layer_rows, problems)
            if found is not None:
                for damaged, problem in problems.items():
                    logger.warning("checkpoint %d is not used: %s", damaged, problem)
                    self._set_aside(damaged)
                if is_local:
                    self.save(*found)
                return found
        if problems:
            reasons = "; ".join(f"step {step}: {problem}" for step, problem in problems.items())
            raise ValueError(
                f"{self.folder}: no step can be used ({reasons}); copy a good one there, or use another --run_dir"
            )
        return None

    def _restore_local(self, after: int, up_to: float, trees: dict, layer_rows: Rows) -> tuple | None:
        """A local snapshot between these steps, in the form that `restore_newest` returns."""
        found = None if self._local is None else self._local.restore(after, up_to, trees, layer_rows)
        if found is None:
            return None
        step, trees, meta = found
        return step, trees["params"], trees["optimizer"], meta

    def _restore_or_say_why(self, step: int, trees: dict, layer_rows: Rows, problems: dict[int, str]) -> tuple | None:
        for _ in range(2):  # a disk may fail once
            try:
                restored = self.restore(step, trees["params"], trees["optimizer"], layer_rows)
            except (MemoryError, jax.errors.JaxRuntimeError):  # not the fault of the checkpoint
                raise
            except ValueError as error:
                problems[step] = str(error)
                continue
            if problem := problems.pop(step, None):
                logger.warning("checkpoint %d was read in the second attempt: %s", step, problem)
            self._point_latest(step)
            return step, *restored
        folder = self.folder / str(step)
        if not on_all_processes(_is_permitted(folder)):
            raise ValueError(
                f"{folder}: this user has no permission to read all of it ({problems[step]}); grant it, or move the "
                "directory away"
            )
        return None

    def _set_aside(self, step: int) -> None:
        problem = None
        if jax.process_index() == 0:
            names = (f"{step}.damaged{number or ''}" for number in itertools.count())
            aside = next(name for name in names if not (self.folder / name).exists())
            try:
                (self.folder / str(step)).rename(self.folder / aside)
            except OSError as error:
                problem = error
        if not on_all_processes(problem is None):
            raise ValueError(f"{self.folder / str(step)} is damaged and cannot be renamed ({problem}); move it away")
        self._manager.reload()

    def restore(self, step: int, abstract_params, abstract_optimizer_state, layer_rows: Rows) -> tuple[Any, Any, dict]:
        """-> (params, optimizer state, meta), with the shardings of the abstract trees.

        layer_rows: the layer of each row in these trees; the checkpoint records its own. Raises ValueError that names
        the step if it cannot be read, or if an array is damaged.
        """
        trees = dict(params=abstract_params, optimizer=abstract_optimizer_state)
        restored, meta = self._restore(step, trees, layer_rows)
        return restored["params"], restored["optimizer"], meta

    def restore_params(self, step: int, abstract_params, layer_rows: Rows):
        """Like `restore`, but only for the parameters."""
        return self._restore(step, dict(params=abstract_params), layer_rows)[0]["params"]

    def _restore(self, step: int, abstract: dict, wanted: Rows) -> tuple[dict, dict]:
        restored, saved, stored, meta = on_each_process(lambda: self._read(step, abstract, wanted))
        if damage := damaged_arrays(saved, restored):
            raise ValueError(f"{self.folder / str(step)} is damaged: {damage}; use another step")
        moved = {name: wanted_form(restored[name], tree, stored, wanted) for name, tree in abstract.items()}
        return {name: jax.tree.map(_cast, moved[name], tree) for name, tree in abstract.items()}, meta

    def _read(self, step: int, abstract: dict, wanted: Rows) -> tuple[Any, dict, Rows, dict]:
        """-> (trees as they are stored, digests, rows of the layers, metadata)."""
        meta = self.read_meta(step)
        try:
            stored = saved_rows(meta, wanted)
            saved = meta.pop("digests")
            forms = {
                name: as_stored(saved.get(name, {}), stored_form(tree, stored, wanted))
                for name, tree in abstract.items()
            }
            items = {name: ocp.args.StandardRestore(form) for name, form in forms.items()}
            return self._manager.restore(step, args=ocp.args.Composite(**items)), saved, stored, meta
        except (MemoryError, jax.errors.JaxRuntimeError):  # not the fault of the checkpoint
            raise
        except Exception as error:  # Orbax raises many types
            folder = self.folder / str(step)
            raise ValueError(f"{folder} cannot be read ({in_one_line(error)}); use another step") from error

    def wait(self) -> None:
        """Waits until the current save is on disk; raises its error."""
        self._manager.wait_until_finished()

    def problem_of_save(self, step: int) -> str:
        """Waits until the step is on disk -> why it could not be saved, or an empty string. Every process must call
        it."""
        problem = "the log says why"
        try:
            self.wait()
        except Exception as error:  # Orbax raises many types
            problem = in_one_line(error)
        if on_all_processes(self.latest_step() == step):
            return ""
        self._left_unfinished = True
        return problem

    def wait_for_local(self) -> None:
        """Waits until the last local snapshot is written; an error is counted."""
        with self._counted("local snapshot"):
            if self._local is not None:
                self._local.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        with self._counted("checkpoint"):  # an error must not hide the one that ended the run
            self.wait()
        self._manager.close()
        if self._local is not None:
            self.wait_for_local()
            self._local.close()
            self._local.remove_up_to(self.latest_step() or 0)


def _has_times(path: Path) -> bool:
    """Whether Orbax can read the times of a step, which it does for all steps before anything else."""
    try:
        found = json.loads(path.read_text())
        return all(
            isinstance(found.get(name), int | None) for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs")
        )
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _sealed(step: int, trees: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    return sealed(step, meta, {name: digests(tree) for name, tree in trees.items()})


def _by_layer(tree, rows: Rows):
    """How the arrays are written: those of layers with a chunk for each layer, so that each can be read on its own."""

    def of_array(array, stack: str | None) -> ocp.SaveArgs:
        return ocp.SaveArgs() if stack is None else ocp.SaveArgs(shard_axes=tuple(range(np.ndim(rows[stack]))))

    return of_layers(of_array, tree, rows)


def _cast(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Waits for the result and deletes the input, so that at most one array exists twice."""
    if array.dtype == target.dtype:
        return array
    cast = jax.block_until_ready(jax.jit(lambda a: a.astype(target.dtype), out_shardings=target.sharding)(array))
    array.delete()
    return cast


def _is_permitted(folder: Path) -> bool:
    """Whether this user has permission to read everything in the folder."""
    return all(os.access(path, os.R_OK) for path in (folder, *folder.rglob("*")))
