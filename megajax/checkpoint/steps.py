"""Which steps a run has saved, without opening any of them."""

from pathlib import Path


def find_step(run_dir: str | Path, step: int | None = None) -> int:
    """A step that is on disk, by default the newest. Raises ValueError if it is not there."""
    folder = Path(run_dir) / "checkpoints"
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    if not steps:
        raise ValueError(f"run={run_dir}: no checkpoint in {folder}; train it first with --run_dir={run_dir}")
    if step is not None and step not in steps:
        raise ValueError(f"step={step} is not in {folder}; there are {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step
