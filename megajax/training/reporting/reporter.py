"""Reports the steps of the training loop without making the device wait."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from megajax.mesh.devices import find_device, utilisation
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.reporting.console import Console, format_seconds
from megajax.training.reporting.metrics import MetricsWriter


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a start of a run knows of those before it."""

    productive_seconds: float = 0.0
    """Time in the steps done before."""
    running_seconds: float = 0.0
    """Time in which the run was running."""
    losses: tuple[float, ...] = ()
    """Of the steps since the last line, whose updates were not skipped."""


@dataclasses.dataclass
class Reporter:
    """Reads metrics one step late and writes lines; times exclude compiling, evaluating and saving."""

    first: int
    """Steps done before."""
    _: dataclasses.KW_ONLY
    num_steps: int
    every_steps: int
    sequence_length: int
    schedule: BatchSchedule
    flops_per_token: Callable[..., float]
    """(sequence_length, causal=...), see Model."""
    compute_dtype: Literal["float32", "bfloat16"]
    """MFU is relative to the peak of this dtype."""
    num_devices: int
    max_consecutive_skips: int
    """This many end the run; 0: no limit."""
    carried_before: Carried
    """Of earlier starts of the run."""
    console: Console
    writer: MetricsWriter | None
    lowest_loss_scale: float = 0.0
    """LossScaleRule.lowest, where the run has a loss scale."""

    def __post_init__(self):
        carried = self.carried_before
        self._pending: tuple[int, dict, float, Future[float]] | None = None  # the last: when it ended
        # The thread of the loop may still be dispatching the next step when one ends, for half of the step or more.
        self._clock = ThreadPoolExecutor(1, "end of a step")
        self._compiled: set[tuple[int, int]] = set()  # shapes of batches
        self._is_compiling = False  # the pending step, or the next one
        # Of all steps since the last line whose update was not skipped; kept on the device: steps need not wait.
        self._losses: list[jax.Array | float] = list(carried.losses)
        self._consecutive_skips = 0
        self.productive_seconds = carried.productive_seconds
        self._running_before = max(carried.running_seconds, carried.productive_seconds)
        self._started = time.perf_counter()
        self._begin_line()
        self.restart_clock()

    def _begin_line(self) -> None:
        """What counts since the last line, without steps that included a compilation."""
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def starting(self, step: int) -> Generator[None]:
        """Wraps the dispatch of a step. The first batch of a shape compiles it; the previous step is reported before,
        so that the compilation does not count in its time."""
        batch = self.schedule(step - 1)
        shape = batch.num_microbatches, batch.microbatch
        if shape not in self._compiled:
            self.flush()
            self._compiled.add(shape)
            self._is_compiling = True
        with self.console.announced("compiling the train step") if self._is_compiling else contextlib.nullcontext():
            yield

    def dispatched(self, step: int, metrics: dict, rate: float) -> None:
        """Call after dispatching a step: reports the previous one."""
        self.flush()
        self._pending = (step, metrics, rate, self._clock.submit(_time_when_ready, metrics["loss"]))
        if self._is_compiling:
            started = self._last_end
            name = "the first step" if step == self.first + 1 else f"step {step}, the first of its batch size"
            with self.console.announced(f"running {name}"):
                jax.block_until_ready(metrics["loss"])
            self.flush()
            self.console.note(f"{name}, compilation included: {format_seconds(time.perf_counter() - started)}")
            self._is_compiling = False
            self.restart_clock()

    def flush(self) -> None:
        """Waits for the pending step, and reports it if it is due."""
        if self._pending is None:
            return
        step, metrics, rate, end = self._pending
        self._pending = None
        started = self._last_end
        self._last_end = end.result()
        if not self._is_compiling:
            self.productive_seconds += self._last_end - started
            self._seconds += self._last_end - started
            self._steps += 1
            self._samples += self.schedule(step - 1).size
        if not self._is_skipped(step, metrics):
            self._losses.append(metrics["loss"])
        self.console.progress(step, self.num_steps)
        # Not the first step after a resume: the mean of a single step would be a jump in the curve.
        if step == 1 or step % self.every_steps == 0 or step == self.num_steps:
            values = scalars(metrics)
            self._emit(self._line(step, values, rate))
            self._losses = []
            self._begin_line()

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self._emit({"step": step} | values)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Starts the time of the next step now."""
        self._last_end = time.perf_counter()

    def carried(self) -> Carried:
        """What the next start needs to know, to be saved with the state. Call `flush` before."""
        losses = tuple(float(loss) for loss in jax.device_get(self._losses))
        return Carried(self.productive_seconds, self._running_seconds(), losses)

    def goodput(self) -> float:
        """Fraction of the time in which the run was running, over all starts, that was spent in steps that are part of
        the run.

        The rest is compiling (the first step after each start, and the first with each batch size), evaluating, saving,
        and steps lost in a crash.
        """
        return min(self.productive_seconds / max(self._running_seconds(), 1e-9), 1.0)

    def _running_seconds(self) -> float:
        return self._running_before + time.perf_counter() - self._started

    def close(self) -> None:
        self.console.note(
            f"goodput: {format_seconds(self.productive_seconds)} of {format_seconds(self._running_seconds())} in steps "
            f"({self.goodput():.1%})"
        )

    def _line(self, step: int, values: dict[str, float], rate: float) -> dict[str, Any]:
        length = self.sequence_length
        names = [name for name in values if name not in ("loss", "skipped", "total_skipped")]
        device = jax.local_devices()[0]
        line = {
            "step": step,
            "loss": values["loss"],
            "mean_loss": math.fsum(jax.device_get(self._losses)) / len(self._losses) if self._losses else math.nan,
            **{name: values[name] for name in names},
            "skipped_updates": int(values["total_skipped"]),
            "learning_rate": rate,
            "consumed_tokens": self.schedule.num_samples(step) * length,
            "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
            "running_seconds": self._running_seconds(),
            "goodput": self.goodput(),
        }
        if not self._steps:
            return line
        per_device = self._samples * length / self._seconds / self.num_devices
        known = find_device(device.device_kind)

        def mfu(*, causal: bool) -> float | None:
            if known is None:
                return None
            flops = self.flops_per_token(length, causal=causal)
            return utilisation(flops, per_device, known.computing_in(self.compute_dtype))

        return line | {
            "step_seconds": self._seconds / self._steps,
            "tokens_per_second": per_device * self.num_devices,
            "tokens_per_second_per_device": per_device,
            "mfu": mfu(causal=False),
            "mfu_causal": mfu(causal=True),
        }

    def _is_skipped(self, step: int, metrics: dict) -> bool:
        """Reports a skipped update with its samples. Raises RuntimeError after too many consecutive ones.

        An overflow of gradients does not count while the loss scale can still be halved: this is how it is found.
        """
        if not int(metrics["skipped"]):
            self._consecutive_skips = 0
            return False
        loss_scale = float(metrics.get("loss_scale", 0.0))
        if math.isfinite(float(metrics["grad_norm"])) or loss_scale <= self.lowest_loss_scale:
            self._consecutive_skips += 1
        batch = self.schedule(step - 1)
        samples = f"samples {batch.first_sample} to {batch.first_sample + batch.size - 1}"
        values = f"loss {float(metrics['loss']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}"
        values += f", loss scale now {loss_scale:g}" if "loss_scale" in metrics else ""
        total = int(metrics["total_skipped"])
        self.console.note(f"step {step}: update skipped, {values}, {samples} ({total} skipped so far)")
        if self.max_consecutive_skips and self._consecutive_skips >= self.max_consecutive_skips:
            raise RuntimeError(
                f"{self._consecutive_skips} consecutive updates were skipped, up to step {step} ({values}), and "
                "nothing was saved since the last checkpoint; inspect the data of these steps, lower the learning "
                "rate, or allow more with --training.max_consecutive_skips"
            )
        return True

    def _emit(self, line: dict[str, Any]) -> None:
        self.console.step(line["step"], self.num_steps, line)
        if self.writer is not None:
            self.writer.write(line)


def _time_when_ready(array: jax.Array) -> float:
    jax.block_until_ready(array)
    return time.perf_counter()


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step on the host. A vector becomes several: expert_load/0, expert_load/1, ..."""
    found = {}
    for name, value in jax.device_get(metrics).items():
        value = np.asarray(value)
        names = [name] if value.ndim == 0 else [f"{name}/{number}" for number in range(value.size)]
        found |= zip(names, map(float, value.ravel()), strict=True)
    return found
