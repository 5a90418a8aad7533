"""Checkpoints of a run: parameters, optimizer, position and config of one step, written together by Orbax.

A step is a directory `checkpoints/STEP/` with the items `params`, `optimizer` and `meta` (JSON). Arrays are global: any
mesh and any layout of a pipeline restores what any other saved, and serving restores `params` alone. `meta` holds a
digest of every array (checkpoint/verify.py): what does not match is not used.
"""

import dataclasses
import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from megajax.checkpoint.layout import Rows, stored_form, wanted_form
from megajax.checkpoint.verify import as_stored, differing, digests

logger = logging.getLogger("megajax")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    """Save each time so many steps are done, and at the end; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints that stay on disk; 0: all."""
    keep_every_steps: int = 0
    """Those of multiples of so many steps stay too; 0: none."""

    def check(self) -> None:
        for name in ("every_steps", "keep", "keep_every_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"checkpoint.{name}={getattr(self, name)} must not be negative")


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Never: the loop alone asks. Orbax would ask from its saving thread about a step that is long past, and JAX,
        which keeps the step it was last asked about, could then agree on a step to stop at that has gone by."""
        return False


class Checkpointer:
    """Saves in the background; use as a context manager, leaving it waits for the last save.

    config: None opens the checkpoints for reading only, and changes nothing in a run that may still be training.
    """

    def __init__(self, run_dir: str | Path, config: CheckpointConfig | None):
        writes = config is not None
        self.folder = Path(run_dir).resolve() / "checkpoints"
        self.failed_saves = self._cleared = 0
        self._manager = _Manager(
            self.folder,
            item_names=("params", "optimizer", "meta"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=(config.keep or None) if writes else None,
                keep_period=(config.keep_every_steps or None) if writes else None,
                enable_async_checkpointing=writes,
                cleanup_tmp_directories=writes,
                create=writes,
                read_only=not writes,
            ),
        )

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, params, optimizer_state, meta: dict[str, Any]) -> None:
        """Copies the arrays to the host, then writes them while training goes on. A step saved before is left alone.

        What goes wrong, at once or in the background, is logged and counted in `failed_saves`; the next one tries anew.
        """
        self.check()
        try:
            self._clear_failed()
            self._save(step, params, optimizer_state, meta)
        except Exception as error:  # a disk that is full, gone or slow: training can go on
            self._failed(error)

    def check(self) -> None:
        """Looks whether a save in the background has failed since; does not wait for one that is under way."""
        try:
            if jax.process_count() > 1:  # to wait is a matter of all of them, which need not have come as far
                self._manager.check_for_errors()
            elif not self._manager.is_saving_in_progress():
                self._manager.wait_until_finished()
        except Exception as error:
            self._failed(error)

    def _clear_failed(self) -> None:
        """Removes what failed saves have left, which may be what fills the disk, and reads again which steps are there:
        Orbax has crossed out the oldest one for each."""
        if self.failed_saves == self._cleared:
            return
        if jax.process_index() == 0:
            for unfinished in self.folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        self._manager.reload()
        self._cleared = self.failed_saves

    def _failed(self, error: Exception) -> None:
        self.failed_saves += 1
        logger.error("a checkpoint could not be saved (%d so far): %s", self.failed_saves, _in_one_line(error))

    def _save(self, step: int, params, optimizer_state, meta: dict[str, Any]) -> None:
        if step in self._manager.all_steps():
            return
        trees = dict(params=params, optimizer=optimizer_state)
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items["meta"] = ocp.args.JsonSave(meta | {"digests": {name: digests(tree) for name, tree in trees.items()}})
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore_newest(
        self, abstract_params, abstract_optimizer_state, layer_rows: Rows
    ) -> tuple[int, Any, Any, dict] | None:
        """-> (step, params, optimizer state, meta) of the newest step that is whole, or None if there is no step.

        Steps after it, which cannot be read or in which an array is not what was saved, become STEP.damaged, with a
        warning that says why. Raises ValueError if there are steps but none that is whole, and leaves all as they are.
        """
        problems: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            for attempt in range(2):  # a disk may fail once
                try:
                    restored = self.restore(step, abstract_params, abstract_optimizer_state, layer_rows)
                except (MemoryError, jax.errors.JaxRuntimeError):  # nothing that the checkpoint could be blamed for
                    raise
                except Exception as error:  # Orbax has many
                    problems[step] = _in_one_line(error)
                    logger.warning("checkpoint %d, attempt %d: %s", step, attempt + 1, problems[step])
                    continue
                problems.pop(step, None)
                for damaged, problem in problems.items():
                    logger.warning("checkpoint %d is not used: %s", damaged, problem)
                    self._set_aside(damaged)
                return step, *restored
        if problems:
            reasons = "; ".join(f"step {step}: {problem}" for step, problem in problems.items())
            raise ValueError(
                f"{self.folder}: no step can be used ({reasons}); copy a good one there, or use another --run_dir"
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
        if not _on_all_processes(problem is None):
            raise ValueError(f"{self.folder / str(step)} is damaged and cannot be renamed ({problem}); move it away")
        self._manager.reload()

    def restore(self, step: int, abstract_params, abstract_optimizer_state, layer_rows: Rows) -> tuple[Any, Any, dict]:
        """-> (params, optimizer state, meta), laid out as the shardings of the abstract trees say.

        layer_rows: which layer is in which row of these; the checkpoint says it of its own. Raises ValueError if an
        array is not what was saved.
        """
        trees = dict(params=abstract_params, optimizer=abstract_optimizer_state)
        restored, meta = self._restore(step, trees, layer_rows)
        return restored["params"], restored["optimizer"], meta

    def restore_params(self, step: int, abstract_params, layer_rows: Rows):
        return self._restore(step, dict(params=abstract_params), layer_rows)[0]["params"]

    def _restore(self, step: int, abstract: dict, wanted: Rows) -> tuple[dict, dict]:
        problem, read = None, None
        try:
            read = self._read(step, abstract, wanted)
        except Exception as error:  # Orbax has many
            problem = error
        # All processes compute what follows together, or none does.
        if not _on_all_processes(problem is None):
            raise problem or ValueError(f"another process could not read {self.folder / str(step)}")
        restored, saved, stored, meta = read
        if not saved:
            logger.warning("checkpoint %d is not verified: it was written before there were digests", step)
        wrong = [
            f"{name}{path}" for name in abstract for path in differing(saved.get(name, {}), restored[name]) if saved
        ]
        if wrong:
            raise ValueError(
                f"{self.folder / str(step)} is damaged: {', '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''} "
                f"{'is' if len(wrong) == 1 else 'are'} not what was saved; use another step"
            )
        moved = {name: wanted_form(restored[name], tree, stored, wanted) for name, tree in abstract.items()}
        return {name: jax.tree.map(_cast, moved[name], tree) for name, tree in abstract.items()}, meta

    def _read(self, step: int, abstract: dict, wanted: Rows) -> tuple[dict, dict, Rows, dict]:
        """-> (trees as they are stored, digests, rows of the layers, meta data)."""
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        as_numbered = {kind: np.arange(rows.max() + 1) for kind, rows in wanted.items()}  # before pipelines were there
        stored = {kind: np.array(rows) for kind, rows in meta.get("layer_rows", as_numbered).items()}
        saved = meta.pop("digests", {})
        forms = {
            name: as_stored(saved.get(name, {}), stored_form(tree, stored, wanted)) for name, tree in abstract.items()
        }
        items = {name: ocp.args.StandardRestore(form) for name, form in forms.items()}
        return self._manager.restore(step, args=ocp.args.Composite(**items)), saved, stored, meta

    def wait(self) -> None:
        """Until the save under way is on disk; raises what went wrong with it."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()


def _cast(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """One after the other, so that one of them is there twice."""
    if array.dtype == wanted.dtype:
        return array
    cast = jax.block_until_ready(jax.jit(lambda a: a.astype(wanted.dtype), out_shardings=wanted.sharding)(array))
    array.delete()
    return cast


def _on_all_processes(succeeded: bool) -> bool:
    """Whether it did on every process of the run."""
    if jax.process_count() == 1:
        return succeeded
    return bool(np.all(multihost_utils.process_allgather(np.array(succeeded))))


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return (
        lines[0]
        if isinstance(error, ValueError) and "is damaged" in lines[0]
        else f"{type(error).__name__}: {lines[0]}"
    )


def with_shardings(abstract, shardings):
    """Abstract arrays that restore lays out by `shardings` (both pytrees of the same structure)."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
