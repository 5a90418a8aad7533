"""When checkpoints are saved, and which of them are kept."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax import hub
from megajax.fields.ranges import NonNegativeInt


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
    """Fast local directory on each machine (/dev/shm, NVMe) for two snapshots, in addition to the checkpoints; empty:
    none."""
    local_every_steps: NonNegativeInt = 0
    """Steps between local snapshots."""

    start_from: str = ""
    """Start a new run from the weights of this run (its newest step, or RUN/checkpoints/STEP) or Hugging Face folder,
    with new optimizer state, at step 0; empty: from random weights."""
    start_fresh: tuple[str, ...] = ()
    """Parameters that start_from does not load, as shell patterns of their names: they are initialised (an adapter, a
    head of another size) or, if this model does not have them, ignored."""

    start_towers_from: tuple[str, ...] = ()
    """With start_from, in a model that reads images or sound: take the encoder of each from one of these Hugging Face
    folders, of a CLIP, a SigLIP, a SigLIP 2, a model with one of them, or a Whisper; empty: from start_from."""

    def source(self) -> tuple[Path, int | None]:
        """start_from as (run directory, step or None for the newest)."""
        path = Path(hub.local(self.start_from)).resolve()
        if path.parent.name == "checkpoints" and path.name.isdecimal():
            return path.parents[1], int(path.name)
        return path, None

    def check(self) -> None:
        if bool(self.local_dir) != bool(self.local_every_steps):
            raise ValueError(
                f"checkpoint.local_dir={self.local_dir!r} with checkpoint.local_every_steps={self.local_every_steps}: "
                "local snapshots need both; give both or neither"
            )
        if self.start_towers_from and not self.start_from:
            raise ValueError(
                f"checkpoint.start_towers_from={','.join(self.start_towers_from)} needs weights of the text; set "
                "--checkpoint.start_from"
            )
        if self.start_fresh and not self.start_from:
            raise ValueError(
                f"checkpoint.start_fresh={','.join(self.start_fresh)} has no effect without weights to start from; set "
                "--checkpoint.start_from, or use --checkpoint.start_fresh="
            )
        if self.local_every_steps and self.every_steps and self.local_every_steps % self.every_steps == 0:
            raise ValueError(
                f"checkpoint.local_every_steps={self.local_every_steps} is a multiple of checkpoint.every_steps="
                f"{self.every_steps}, so each of these steps is a checkpoint anyway; use a smaller number"
            )

    def check_evaluated(self, training_steps: int, eval_every_steps: int | None) -> None:
        """Raises ValueError if keep_best is set, but no saved step is evaluated. eval_every_steps: None if it is not
        known yet."""
        if not self.keep_best or eval_every_steps is None:
            return
        if not eval_every_steps:
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} needs evaluations, but training.eval_every_steps=0; "
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
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(
                f"checkpoint.local_dir={self.local_dir} cannot be written ({existing} is not a writable directory); "
                "use another, such as --checkpoint.local_dir=/dev/shm"
            )


class Kept:
    """Orbax's preservation policy: which checkpoints are kept."""

    def __init__(self, config: CheckpointConfig):
        self._config = config
        self._eval_losses: dict[int, float] = {}

    def evaluated(self, step: int, meta: dict[str, Any]) -> None:
        """Records the step's eval_loss, if its metadata has one."""
        loss = meta.get("eval_loss")
        if loss is not None and math.isfinite(loss):
            self._eval_losses[step] = loss

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        config = self._config
        kept = set(steps[-config.keep :])  # all for 0
        if config.keep_every_steps:
            kept |= {step for step in steps if step % config.keep_every_steps == 0}
        evaluated = [step for step in steps if step in self._eval_losses]
        kept |= set(sorted(evaluated, key=lambda step: (self._eval_losses[step], -step))[: config.keep_best])
        return [checkpoint.step in kept for checkpoint in checkpoints]
