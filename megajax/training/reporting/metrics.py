"""Metrics of a run: metrics.jsonl always, TensorBoard and Weights & Biases if configured.

metrics.jsonl is the record that scripts and the resume logic rely on: one JSON object per line, flushed at once. A
logged step has step, loss, mean_loss, grad_norm, learning_rate, consumed_tokens, step_seconds, tokens_per_second,
tokens_per_second_per_device, mfu, mfu_causal, peak_memory_bytes, running_seconds, goodput; an evaluation has step,
eval_loss and, where the data is text, eval_bits_per_byte. A number that is not finite is null.

loss is that of the step, bitwise identical in a resumed run. mean_loss is the mean over the steps since the previous
line, without skipped updates; it is what the console and the plots show.

step_seconds is the mean over the steps since the previous line, and the speeds are the tokens of those steps divided by
their time. Steps that include a compilation do not count: the first after a start, and the first with each batch size.

running_seconds is the time in which the run was running, over all starts, without the time between them. goodput is
the part of it that was spent in steps that are part of the run. The rest is compiling (the first step after a start and
the first with each batch size), evaluating, saving, and steps lost in a crash and repeated.
"""

import dataclasses
import importlib.util
import itertools
import json
import logging
import math
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megajax.training.reporting.best_effort import Appender, BestEffort
from megajax.training.run_lock import RunLock

logger = logging.getLogger("megajax")
# Tags in TensorBoard, in groups. `loss` is the training loss in the run's own files and the evaluation loss in eval/,
# so that one chart shows both. Metrics that a model adds are in the group `model`.
TRAINING_TAGS = {
    "mean_loss": "loss",
    "loss": "loss/of_the_step",
    **{name: f"optimizer/{name}" for name in ("grad_norm", "learning_rate", "skipped_updates", "loss_scale")},
    **{name: f"throughput/{name}" for name in (
        "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "mfu_causal", "goodput",
    )},
    "consumed_tokens": "progress/consumed_tokens",
    "running_seconds": "progress/running_seconds",
    "peak_memory_bytes": "memory/peak_memory_bytes",
}  # fmt: skip
EVALUATION_TAGS = {"eval_loss": "loss", "eval_bits_per_byte": "loss/bits_per_byte"}


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where to write metrics besides run_dir/metrics.jsonl."""

    tensorboard: bool = True
    """Write scalars and the config to run_dir/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty: not used. WANDB_MODE=offline keeps the run in run_dir/wandb until
    `wandb sync`."""

    def check(self) -> None:
        """Raises ValueError if a required package is missing; call before any device is used."""
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"logging.wandb_project={self.wandb_project!r} needs the package wandb, which is not installed; "
                "pip install 'megajax[wandb]' or leave logging.wandb_project empty"
            )


Listener = Callable[[dict[str, Any]], None]


class MetricsWriter:
    """Writes the metrics of one run, on process 0 only.

    A failed write, for example on a full disk, does not end the run: it is reported once and retried with the next
    line.

    Args:
        run_dir: the run directory; created if necessary.
        config: the logging section.
        run_config: the resolved config as plain JSON values, shown by TensorBoard and Weights & Biases.
        lock: nothing is written once it has a problem; None: it is not asked.
        listener: is called with each line, before it is written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        config: LoggingConfig,
        run_config: dict,
        lock: RunLock | None = None,
        listener: Listener | None = None,
    ):
        config.check()
        self._listener = listener
        self._lock = lock
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._path = self._run_dir / "metrics.jsonl"
        self._file = Appender(self._path)
        folder = self._run_dir / "tensorboard"
        self._tensorboard = TensorBoardFile(folder, run_config), TensorBoardFile(folder / "eval")
        self._tensorboard_thread = ThreadPoolExecutor(1, "TensorBoard")
        """Importing tensorboardX takes seconds where PyTorch is installed, for which no step should wait."""
        self._wandb = _start_wandb(self._run_dir, config, run_config) if config.wandb_project else None
        self._writes_metrics = BestEffort(str(self._path))
        self._writes_tensorboard = BestEffort(f"TensorBoard, {self._run_dir / 'tensorboard'}")
        self._writes_wandb = BestEffort("Weights & Biases")

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends one line; `metrics` holds `step` and numbers (Python, NumPy or JAX scalars)."""
        if "step" not in metrics:
            raise ValueError(f"metrics {sorted(metrics)} lack step; every line of metrics.jsonl carries its step")
        if self._lock is not None and self._lock.problem():  # the file may be that of another run
            return
        record = {name: _plain(value) for name, value in metrics.items()}
        if self._listener is not None:
            self._listener(dict(record))
        with self._writes_metrics:
            self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        step = record.pop("step")
        scalars = {name: value for name, value in record.items() if isinstance(value, int | float)}
        if self._config.tensorboard:
            self._tensorboard_thread.submit(self._write_tensorboard, scalars, step)
        if self._wandb is not None:
            with self._writes_wandb:
                self._wandb.log(scalars, step=step)

    def _write_tensorboard(self, scalars: dict[str, float], step: int) -> None:
        evaluation = {tag: scalars[name] for name, tag in EVALUATION_TAGS.items() if name in scalars}
        training = {
            TRAINING_TAGS.get(name, f"model/{name}"): value
            for name, value in scalars.items()
            if name not in EVALUATION_TAGS
        }
        with self._writes_tensorboard:
            for file, values in zip(self._tensorboard, (training, evaluation), strict=True):
                if values:
                    file.write(values, step)

    def rewind(self, step: int) -> None:
        """Drops the lines after `step`, so that a resumed run has one line per step.

        Replaces metrics.jsonl atomically. An incomplete last line is dropped; other lines that cannot be read are moved
        to metrics.jsonl.damaged, and so is a file that cannot be read at all. TensorBoard hides the later points;
        Weights & Biases keeps the first value it saw for a step.
        """
        for file in self._tensorboard:
            file.first_new_step = step + 1
        with self._writes_metrics:
            try:
                lines = list(read_metrics(self._path))
            except OSError as error:
                names = (self._damaged_path.with_suffix(f".damaged{number or ''}") for number in itertools.count())
                aside = next(path for path in names if not path.exists())
                logger.warning("%s cannot be read (%s): moved to %s", self._path, error, aside.name)
                self._path.replace(aside)
                return
            self._keep_up_to(step, lines)

    def _keep_up_to(self, step: int, lines: list[tuple[bytes, dict[str, Any] | None]]) -> None:
        damaged = [line for line, record in lines if record is None and line.endswith(b"\n")]
        kept = [line.rstrip(b"\n") + b"\n" for line, record in lines if record is not None and record["step"] <= step]
        if kept == [line for line, _ in lines]:
            return
        if damaged:
            logger.warning("%s: %d damaged lines moved to %s", self._path, len(damaged), self._damaged_path.name)
            with self._damaged_path.open("ab") as file:
                file.writelines(damaged)
        temporary = self._path.with_suffix(".jsonl.new")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        dropped = len(lines) - len(kept) - len(damaged)
        if dropped:
            logger.info("metrics.jsonl: dropped the lines after step %d (%d)", step, dropped)

    @property
    def _damaged_path(self) -> Path:
        return self._path.with_suffix(".jsonl.damaged")

    def close(self) -> None:
        """Waits until all is written, and finishes the Weights & Biases run."""
        self._tensorboard_thread.shutdown()
        if self._wandb is not None:
            with self._writes_wandb:
                self._wandb.finish()


class TensorBoardFile:
    """One event file in the format of tensorboardX, created with the first value.

    The writer of tensorboardX passes events to a thread that dies on the first error, and the run would then wait for
    it forever.
    """

    def __init__(self, folder: Path, run_config: dict | None = None):
        """run_config: written as text; None: not written."""
        self.first_new_step: int | None = None
        """TensorBoard hides points of other files from this step on."""
        self._folder = folder
        self._run_config = run_config
        self._file: Appender | None = None

    def write(self, scalars: dict[str, float], step: int) -> None:
        # tensorboardX costs half a second to import, which `--help` and `--plan` need not pay.
        from tensorboardX.summary import scalar

        if self._file is None:
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._file = Appender(self._folder / name, self._beginning())
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        self._file.append(_tensorboard_record(step=step, summary={"value": values}))

    def _beginning(self) -> bytes:
        from tensorboardX.summary import text

        records = _tensorboard_record(file_version="brain.Event:2")
        if self.first_new_step is not None:
            records += _tensorboard_record(step=self.first_new_step, session_log={"status": "START"})
        if self._run_config is not None:
            config = f"```\n{json.dumps(self._run_config, indent=2)}\n```"
            records += _tensorboard_record(step=self.first_new_step or 0, summary=text("config", config))
        return records


def _tensorboard_record(**event: Any) -> bytes:
    """An event of now as a TFRecord: length, its CRC, data, its CRC."""
    from tensorboardX.record_writer import masked_crc32c

    messages = importlib.import_module("tensorboardX.proto.event_pb2")  # its classes are made by the import
    data = messages.Event(wall_time=time.time(), **event).SerializeToString()
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + crcs[0] + data + crcs[1]


def _start_wandb(run_dir: Path, config: LoggingConfig, run_config: dict):
    """A Weights & Biases run that a resumed run continues: its id is stored in run_dir/wandb_id."""
    wandb = importlib.import_module("wandb")
    id_path = run_dir / "wandb_id"
    if not id_path.exists():
        id_path.write_text(uuid.uuid4().hex[:12])
    try:
        return wandb.init(
            project=config.wandb_project,
            dir=str(run_dir),
            name=run_dir.name,
            id=id_path.read_text(),
            resume="allow",
            config=run_config,
        )
    except wandb.Error as error:  # nobody is logged in
        message = str(error).partition("\n")[0]
        raise ValueError(
            f"logging.wandb_project={config.wandb_project}: {message}; run wandb login, or set WANDB_MODE=offline"
        ) from None


def _plain(value: Any) -> Any:
    """A JSON value for a Python, NumPy or JAX scalar; None for NaN and infinities."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields (line, object) for each line of metrics.jsonl; the object is None for a line that is not a JSON object
    with an integer `step`: truncated by a crash, or damaged. A missing file has no lines. Raises OSError if the file
    cannot be read."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield line, record if isinstance(record, dict) and type(record.get("step")) is int else None


def running_seconds(path: Path) -> float:
    """running_seconds of the last line of metrics.jsonl that has it; 0 if none has or the file cannot be read."""
    try:
        found = [record.get("running_seconds") for _, record in read_metrics(path) if record is not None]
    except OSError:
        return 0.0
    return max((seconds for seconds in found if isinstance(seconds, int | float)), default=0.0)
