"""The saved steps of a run and their metadata, without reading their arrays."""

import json
import logging
from pathlib import Path
from typing import Any

from megajax import hub
from megajax.checkpoint.verify import unsealed

logger = logging.getLogger("megajax")


def saved_steps(run_dir: str | Path) -> list[int]:
    """Numbers of the saved steps, in ascending order."""
    folder = Path(run_dir) / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def find_step(run_dir: str | Path, step: int | None = None) -> int:
    """A step that is on disk, by default the newest. Raises ValueError if there is none."""
    folder = Path(run_dir) / "checkpoints"
    steps = saved_steps(run_dir)
    if not steps:
        raise ValueError(
            f"run={run_dir}: no checkpoint in {folder}; give the directory of a run, {hub.PREFIX}ORG/NAME for a "
            f"model of the hub, or train it first with --run_dir={run_dir}"
        )
    if step is not None and step not in steps:
        raise ValueError(f"step={step} is not in {folder}; there are {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_meta(run_dir: str | Path, step: int) -> dict[str, Any]:
    """The metadata of a step. Raises ValueError that names the file if it is damaged, or belongs to another step."""
    path = Path(run_dir) / "checkpoints" / str(step) / "meta" / "metadata"
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); use another step") from None
    return unsealed(meta, step, path)


def newest_meta(run_dir: str | Path) -> tuple[int, dict[str, Any]] | None:
    """(step, metadata) of the newest step with undamaged metadata; the log names damaged ones."""
    for step in reversed(saved_steps(run_dir)):
        try:
            return step, read_meta(run_dir, step)
        except ValueError as error:
            logger.warning("%s", error)
    return None
