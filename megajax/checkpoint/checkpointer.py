"""Checkpoints of a run: parameters, optimizer, position and config of one step, written together by Orbax.

A step is a directory `checkpoints/STEP/` with the items `params`, `optimizer` and `meta` (JSON). Arrays are global: any
mesh and any layout of a pipeline restores what any other saved, and serving restores `params` alone.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from megajax.checkpoint.layout import Rows, stored_form, wanted_form

logger = logging.getLogger("megajax")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    """Save each time so many steps are done, and at the end; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints that stay on disk; 0: all."""

    def check(self) -> None:
        for name in ("every_steps", "keep"):
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
        self._manager = _Manager(
            self.folder,
            item_names=("params", "optimizer", "meta"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=(config.keep or None) if writes else None,
                enable_async_checkpointing=writes,
                cleanup_tmp_directories=writes,
                create=writes,
                read_only=not writes,
            ),
        )

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, params, optimizer_state, meta: dict[str, Any]) -> None:
        """Copies the arrays to the host, then writes them while training goes on. A step saved before is left alone."""
        if step in self._manager.all_steps():
            return
        items = dict(
            params=ocp.args.StandardSave(params),
            optimizer=ocp.args.StandardSave(optimizer_state),
            meta=ocp.args.JsonSave(meta),
        )
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, abstract_params, abstract_optimizer_state, layer_rows: Rows) -> tuple[Any, Any, dict]:
        """-> (params, optimizer state, meta), laid out as the shardings of the abstract trees say.

        layer_rows: which layer is in which row of these; the checkpoint says it of its own.
        """
        trees = dict(params=abstract_params, optimizer=abstract_optimizer_state)
        restored, meta = self._restore(step, trees, layer_rows)
        return restored["params"], restored["optimizer"], meta

    def restore_params(self, step: int, abstract_params, layer_rows: Rows):
        return self._restore(step, dict(params=abstract_params), layer_rows)[0]["params"]

    def _restore(self, step: int, abstract: dict, wanted: Rows) -> tuple[dict, dict]:
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        as_numbered = {kind: np.arange(rows.max() + 1) for kind, rows in wanted.items()}  # before pipelines were there
        stored = {kind: np.array(rows) for kind, rows in meta.get("layer_rows", as_numbered).items()}
        items = {name: ocp.args.StandardRestore(stored_form(tree, stored, wanted)) for name, tree in abstract.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return {name: wanted_form(restored[name], tree, stored, wanted) for name, tree in abstract.items()}, meta

    def wait(self) -> None:
        """Until the save under way is on disk; raises what went wrong with it."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()


def with_shardings(abstract, shardings):
    """Abstract arrays that restore lays out by `shardings` (both pytrees of the same structure)."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
