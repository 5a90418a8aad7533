"""Checks the disk space of a run directory before anything is compiled."""

import shutil
import tempfile
from pathlib import Path

import jax

from megajax.training.reporting.console import format_bytes
from megajax.training.run_lock import raise_together
from megajax.training.state import TrainState


def check_room(run_dir: Path, abstract: TrainState, last_step: int) -> None:
    """Raises ValueError, on all processes, unless run_dir/checkpoints is writable and has space for one checkpoint, or
    already has that of the last step. Removes leftovers of interrupted saves; the caller holds the run's lock.

    The space needed is the size of all parameters and optimizer state before compression.
    """
    refusal = None
    if jax.process_index() == 0:
        try:
            if not (run_dir / "checkpoints" / str(last_step)).is_dir():
                _check_room(run_dir / "checkpoints", abstract)
        except ValueError as error:
            refusal = error
    raise_together(run_dir, refusal)


def _check_room(folder: Path, abstract: TrainState) -> None:
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for unfinished in folder.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); use another --run_dir") from None
    needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((abstract.params, abstract.optimizer)))
    if free < needed:
        if is_new:
            folder.rmdir()
        raise ValueError(
            f"{folder}: a checkpoint needs {format_bytes(needed)}, and {format_bytes(free)} are free; free some space, "
            "or use another --run_dir"
        )
