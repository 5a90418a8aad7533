"""Where the numbers of a run go: metrics.jsonl always, TensorBoard and Weights & Biases if asked.

metrics.jsonl is the record that scripts and the resume logic rely on: one JSON object a line, flushed at once. A logged
step has step, loss, grad_norm, learning_rate, consumed_tokens, step_seconds, tokens_per_second,
tokens_per_second_per_device, mfu, mfu_causal, peak_memory_bytes, goodput; an evaluation has step, eval_loss and, where
the data is text, eval_bits_per_byte. A number that is not finite is null.

step_seconds is the mean of the steps since the line before, and the speeds are the tokens of those steps over their
time. A step that was compiled is none of them: the first after a start, and the first with each batch size.

goodput is the seconds of the steps that are part of the run (step_seconds of each, over all starts) divided by the
seconds since the run was first started (the first line of starts.jsonl). What counts in the second number only:
compiling, the first step after a start and the first with each batch size, evaluating, saving, steps that were lost to
a crash and done again, and all time in which the run was not running, be it a crash or a pause that somebody wanted.
"""

import dataclasses
import importlib.util
import json
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger("megajax")


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics are written besides run_dir/metrics.jsonl."""

    tensorboard: bool = True
    """Write scalars to run_dir/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty: not used."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline keeps the run in run_dir/wandb until `wandb sync`."""

    def check(self) -> None:
        """Raises ValueError if a package that is asked for is missing; call before any device is touched."""
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"logging.wandb_project={self.wandb_project!r} needs the package wandb, which is not installed; "
                "pip install 'megajax[wandb]' or leave logging.wandb_project empty"
            )


class MetricsWriter:
    """Writes the metrics of one run; only process 0 makes one.

    Args:
        run_dir: the run directory; made if it is not there.
        config: the logging section.
        run_config: the resolved config as plain JSON values, shown by Weights & Biases.
    """

    def __init__(self, run_dir: str | os.PathLike, config: LoggingConfig, run_config: dict):
        config.check()
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._path = self._run_dir / "metrics.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard = None
        self._first_new_step: int | None = None
        self._wandb = _start_wandb(self._run_dir, config, run_config) if config.wandb_project else None

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends one line; `metrics` holds `step` and numbers (Python, NumPy or JAX scalars)."""
        if "step" not in metrics:
            raise ValueError(f"metrics {sorted(metrics)} lack step; every line of metrics.jsonl carries its step")
        record = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        step = record.pop("step")
        scalars = {name: value for name, value in record.items() if isinstance(value, int | float)}
        if self._config.tensorboard:
            self._open_tensorboard()
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def rewind(self, step: int) -> None:
        """Drops what lies after `step`, so that a run resumed there has one line a step.

        Replaces metrics.jsonl as a whole: a crash leaves the old file or the new one. A last line that a crash cut off
        goes too. TensorBoard hides the later points; Weights & Biases keeps the first value it saw for a step.
        """
        self._file.close()
        kept, dropped = [], 0
        for line in self._path.read_text(encoding="utf-8").splitlines():
            if step_of(line) <= step:
                kept.append(line + "\n")
            else:
                dropped += 1
        if dropped:
            temporary = self._path.with_suffix(".jsonl.new")
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
            logger.info("metrics.jsonl: dropped %d lines after step %d", dropped, step)
        self._file = self._path.open("a", encoding="utf-8")
        self._first_new_step = step + 1

    def close(self) -> None:
        """Flushes and closes every writer."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _open_tensorboard(self) -> None:
        if self._tensorboard is None:
            # tensorboardX costs half a second to import, which `--help` and `--plan` need not pay.
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self._run_dir / "tensorboard"), purge_step=self._first_new_step, flush_secs=30
            )


def _start_wandb(run_dir: Path, config: LoggingConfig, run_config: dict):
    """A Weights & Biases run that a resumed training continues: its id is kept in run_dir/wandb_id."""
    import wandb

    id_path = run_dir / "wandb_id"
    if not id_path.exists():
        id_path.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project=config.wandb_project,
        mode=config.wandb_mode,
        dir=str(run_dir),
        name=run_dir.name,
        id=id_path.read_text(),
        resume="allow",
        config=run_config,
    )


def _plain(value: Any) -> Any:
    """A JSON value for a Python, NumPy or JAX scalar; None for NaN and infinities."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def step_of(line: str) -> float:
    """Step of a line of metrics.jsonl; infinite for a line that is cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
