"""When checkpoints are saved, and which of them stay."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.ranges import NonNegativeInt


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: NonNegativeInt = 1000
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: NonNegativeInt = 3
    """Keep the newest N checkpoints; 0: all."""
    keep_every_steps: NonNegativeInt = 0
    """Also keep the checkpoints of every N-th step; 0: none."""
    keep_best: NonNegativeInt = 0
    """Also keep the N best by eval_loss, of the checkpoints whose step was evaluated; 0: none."""
    local_dir: str = ""
    """Fast directory on each machine (/dev/shm, NVMe) for two snapshots, beside the checkpoints; empty: none."""
    local_every_steps: NonNegativeInt = 0
    """Steps between two local snapshots."""

    start_from: str = ""
    """Begin a new run with the weights of this run (its newest step, or RUN/checkpoints/STEP), new optimizer state and
    step 0; empty: with random weights."""
    start_fresh: tuple[str, ...] = ()
    """Parameters not taken from start_from, by shell patterns of their names: they are initialised (an adapter, a head
    of another size) or, if this model does not have them, left out."""

    def source(self) -> tuple[Path, int | None]:
        """Of start_from -> (run directory, step or None for the newest)."""
        path = Path(self.start_from).resolve()
        if path.parent.name == "checkpoints" and path.name.isdecimal():
            return path.parents[1], int(path.name)
        return path, None

    def check(self) -> None:
        if bool(self.local_dir) != bool(self.local_every_steps):
            raise ValueError(
                f"checkpoint.local_dir={self.local_dir!r} with checkpoint.local_every_steps={self.local_every_steps}: "
                "local snapshots need both; give the other one too, or neither"
            )
        if self.local_every_steps and self.every_steps and self.local_every_steps % self.every_steps == 0:
            raise ValueError(
                f"checkpoint.local_every_steps={self.local_every_steps} is a multiple of checkpoint.every_steps="
                f"{self.every_steps}, so each would be a checkpoint anyway; use a smaller number"
            )

    def check_evaluated(self, training_steps: int, eval_every_steps: int) -> None:
        """Raises ValueError if the best checkpoints are wanted, but their steps are never evaluated."""
        if not self.keep_best:
            return
        if not eval_every_steps:
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} needs evaluations, training.eval_every_steps=0 disables them; "
                f"use --training.eval_every_steps={self.every_steps or training_steps}"
            )
        if 0 < self.every_steps < training_steps <= math.lcm(self.every_steps, eval_every_steps):
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best}: no step before the last is both saved and evaluated with "
                f"checkpoint.every_steps={self.every_steps} and training.eval_every_steps={eval_every_steps}; "
                f"use --training.eval_every_steps={self.every_steps}"
            )

    def check_local_dir(self) -> None:
        """Raises ValueError if this machine cannot write its snapshots."""
        if not self.local_dir:
            return
        folder = Path(self.local_dir).absolute()
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"checkpoint.local_dir={self.local_dir} cannot be written ({there} is not a directory that can be); "
                "use another, such as --checkpoint.local_dir=/dev/shm"
            )


class Kept:
    """Which checkpoints stay, as Orbax asks for it (a preservation policy)."""

    def __init__(self, config: CheckpointConfig):
        self._config = config
        self._eval_losses: dict[int, float] = {}

    def evaluated(self, step: int, meta: dict[str, Any]) -> None:
        """Takes note of the step's eval_loss, if its meta data have one."""
        loss = meta.get("eval_loss")
        if loss is not None and math.isfinite(loss):
            self._eval_losses[step] = loss

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        config = self._config
        stay = set(steps[-config.keep :])  # all for 0
        if config.keep_every_steps:
            stay |= {step for step in steps if step % config.keep_every_steps == 0}
        evaluated = [step for step in steps if step in self._eval_losses]
        stay |= set(sorted(evaluated, key=lambda step: (self._eval_losses[step], -step))[: config.keep_best])
        return [checkpoint.step in stay for checkpoint in checkpoints]
