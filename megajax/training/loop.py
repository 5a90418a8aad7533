"""The training loop: dispatch a step, report the one before, evaluate, save, and stop when asked.

The host never waits for the step it has just dispatched: batches are put on the devices one step ahead, and metrics are
read one step late.
"""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from megajax.checkpoint.checkpointer import Checkpointer, with_shardings
from megajax.data.loader import DataConfig, Dataset, Datasets, step_batches
from megajax.mesh import MeshConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.optim.schedule import Schedule
from megajax.sharding import batch_spec
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.console import Console, format_seconds
from megajax.training.flops import find_device, utilisation
from megajax.training.metrics import MetricsWriter
from megajax.training.step import (
    LossMean,
    TrainState,
    abstract_state,
    init_state,
    make_eval_step,
    make_train_step,
    state_shardings,
)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    steps: int = 1000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 8
    """Sequences of one step over all devices."""
    microbatch_size: int | None = None
    """Sequences that one batch shard (data x fsdp x expert) computes at a time; None: all, no accumulation."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    seed: int = 1234
    """Of initial weights, data order and dropout."""
    log_every_steps: int = 10
    """Steps between two lines of metrics."""
    eval_every_steps: int = 0
    """Steps between two evaluations; 0: none."""
    eval_steps: int = 10
    """Batches of one evaluation."""
    loss_mean: LossMean = "token"
    """token: mean over all tokens of the global batch; microbatch: mean of the means of the microbatches (Megatron)."""
    batch_size_rampup: tuple[int, int, int] | None = None
    """(start, increment, samples): grow the batch to global_batch_size over so many samples."""
    exit_at_step: int | None = None
    """Save and exit cleanly at this step."""
    exit_after_minutes: float | None = None
    """Save and exit cleanly after so much time."""
    profile_steps: tuple[int, int] | None = None
    """(first, last): write a profile of these steps to run_dir/profile."""
    sample_prompt: str = ""
    """Generate a sample from this prompt when the run is finished; empty: none."""

    def check(self) -> None:
        for name in ("steps", "global_batch_size", "sequence_length", "log_every_steps", "eval_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")
        if self.eval_every_steps < 0:
            raise ValueError(f"training.eval_every_steps={self.eval_every_steps} must not be negative; 0 is never")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"training.microbatch_size={self.microbatch_size} must be at least 1, or None")
        if self.profile_steps is not None and not 0 < self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(f"training.profile_steps={self.profile_steps} must be (first, last), counted from 1")
        self.schedule(MeshConfig())

    def check_on(self, mesh: MeshConfig) -> None:
        """Raises ValueError if batch or sequence cannot be split over the mesh."""
        shards = mesh.batch_shards
        unit = shards * (self.microbatch_size or 1)
        for size in self.schedule(mesh).sizes:
            if size % unit:
                raise ValueError(
                    f"training.global_batch_size={size} is not divisible by {unit} = mesh data({mesh.data}) * fsdp("
                    f"{mesh.fsdp}) * expert({mesh.expert}) * training.microbatch_size({self.microbatch_size or 1}); "
                    f"use --training.global_batch_size={-(-size // unit) * unit}"
                )
        split = mesh.context * mesh.tensor
        if self.sequence_length % split:
            raise ValueError(
                f"training.sequence_length={self.sequence_length} is not divisible by {split} = mesh "
                f"context({mesh.context}) * tensor({mesh.tensor}); "
                f"use --training.sequence_length={-(-self.sequence_length // split) * split}"
            )

    def schedule(self, mesh: MeshConfig) -> BatchSchedule:
        microbatch = self.microbatch_size and self.microbatch_size * mesh.batch_shards
        return BatchSchedule(self.global_batch_size, microbatch, self.batch_size_rampup)

    def eval_batch_size(self, mesh: MeshConfig) -> int:
        return self.schedule(mesh)(self.steps).microbatch


@dataclasses.dataclass
class Trainer:
    """One run. All fields are what train.py built; `run` does the work."""

    config: TrainingConfig
    mesh_config: MeshConfig
    mesh: Mesh
    model: Model
    optimizer: Optimizer
    learning_rates: Schedule
    shard_over_data: bool
    datasets: Datasets
    data_config: DataConfig
    checkpointer: Checkpointer
    checkpoint_every_steps: int
    writer: MetricsWriter | None
    console: Console
    run_dir: Path
    meta: dict[str, Any]

    def run(self) -> str:
        """Trains until the last step, or until asked to stop -> "finished", "interrupted", or "already finished"."""
        with jax.set_mesh(self.mesh):
            return self._run()

    def _run(self) -> str:
        config, state = self.config, self._start()
        first = int(state.step)
        if first >= config.steps:
            return "already finished"
        if config.exit_at_step is not None and first >= config.exit_at_step:
            self.console.note(f"nothing to do: step {first} is done, training.exit_at_step={config.exit_at_step}")
            return "interrupted"
        with _StopRequest(config) as stop, _Profiler(config.profile_steps, self.run_dir, self.console) as profiler:
            return self._train(state, first, stop, profiler)

    def _train(self, state: TrainState, first: int, stop: "_StopRequest", profiler: "_Profiler") -> str:
        config, schedule = self.config, self.config.schedule(self.mesh_config)
        batches = self._batches(self.datasets.train, schedule, first, config.steps)
        step_function = jax.jit(
            make_train_step(
                self.model,
                self.optimizer,
                loss_mean=config.loss_mean,
                group=config.microbatch_size,
                seed=config.seed,
            ),
            donate_argnums=0,
            out_shardings=(state_shardings(self.model, self.optimizer, self.mesh, self.shard_over_data), None),
        )
        reporter = _Reporter(self, schedule, first)
        evaluate = self._evaluator(schedule)
        done = first
        for step, batch in enumerate(batches, start=first):
            profiler.before(step + 1)
            rate = self.learning_rates(schedule(step).first_sample / config.global_batch_size)
            state, metrics = step_function(state, batch, np.float32(rate))
            done = step + 1
            reporter.dispatched(done, metrics, rate)
            profiler.after(done, metrics)
            asked = stop.asked(done)
            if evaluate is not None and (done % config.eval_every_steps == 0 or done == config.steps):
                reporter.flush()
                reporter.evaluation(done, evaluate(state.params))
            every = self.checkpoint_every_steps
            if asked or done == config.steps or (every and done % every == 0):
                reporter.flush()
                self._save(state, schedule)
                reporter.new_window()
            if asked:
                self.console.note(f"stopping after step {done}: {asked}")
                break
        reporter.flush()
        self.checkpointer.wait()
        self.console.close()
        return "finished" if done >= config.steps else "interrupted"

    # ------------------------------------------------------------------ parts of the run

    def _start(self) -> TrainState:
        shardings = state_shardings(self.model, self.optimizer, self.mesh, self.shard_over_data)
        latest = self.checkpointer.latest_step()
        if latest is None:
            return init_state(self.model, self.optimizer, self.config.seed, self.mesh, shardings)
        target = with_shardings(abstract_state(self.model, self.optimizer), shardings)
        params, optimizer, meta = self.checkpointer.restore(latest, target.params, target.optimizer)
        self.console.note(f"resuming from step {latest} of {self.config.steps}")
        if self.writer is not None:
            self.writer.rewind(latest)
        scalar = lambda value: jax.device_put(jnp.int32(value), shardings.step)
        return TrainState(scalar(latest), scalar(meta["skipped"]), params, optimizer)

    def _save(self, state: TrainState, schedule: BatchSchedule) -> None:
        step = int(state.step)
        meta = self.meta | {
            "step": step,
            "skipped": int(state.skipped),
            "consumed_samples": schedule.num_samples(step),
        }
        self.checkpointer.save(step, state.params, state.optimizer, meta)

    def _batches(self, dataset: Dataset, schedule: Callable, start: int, stop: int) -> Iterator[dict[str, jax.Array]]:
        """Global arrays [microbatches, batch, T] of each step, put on the devices one step ahead."""
        sharding = NamedSharding(self.mesh, batch_spec())
        length = self.config.sequence_length
        names = {"tokens", "labels", "loss_mask", "positions", "segment_ids"}
        if self.data_config.cross_document_attention:
            names.remove("segment_ids")

        def rows_of(batch: int) -> np.ndarray:
            slices = sharding.addressable_devices_indices_map((1, batch, length)).values()
            return np.unique(np.concatenate([np.arange(batch)[rows] for _, rows, _ in slices]))

        def place(step: int, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
            now = schedule(step)
            rows, shape = rows_of(now.microbatch), (now.num_microbatches, now.microbatch, length)

            def part(array, index):
                wanted = np.arange(now.microbatch)[index[1]]
                return array[index[0], np.searchsorted(rows, wanted)][..., index[2]]

            make = lambda array: jax.make_array_from_callback(shape, sharding, lambda index: part(array, index))
            return {name: make(local[name]) for name in sorted(names)}

        triple = lambda step: dataclasses.astuple(schedule(step))
        local = step_batches(dataset, triple, rows_of, start_step=start, num_steps=stop, config=self.data_config)
        ahead = None
        for step, arrays in enumerate(local, start=start):
            placed = place(step, arrays)
            if ahead is not None:
                yield ahead
            ahead = placed
        if ahead is not None:
            yield ahead

    def _evaluator(self, schedule: BatchSchedule) -> Callable[[Any], dict[str, float]] | None:
        config, dataset = self.config, self.datasets.eval
        if not config.eval_every_steps or dataset is None:
            return None
        size = config.eval_batch_size(self.mesh_config)
        eval_step = jax.jit(make_eval_step(self.model))

        def evaluate(params) -> dict[str, float]:
            batches = self._batches(dataset, BatchSchedule(size, None, None), 0, config.eval_steps)
            sums = [eval_step(params, batch) for batch in batches]
            loss, tokens = np.sum(np.array(jax.device_get(sums), np.float64), 0)
            result = {"eval_loss": loss / tokens}
            if self.datasets.eval_bytes_per_token is not None:
                result["eval_bits_per_byte"] = loss / tokens / math.log(2) / self.datasets.eval_bytes_per_token
            return result

        return evaluate


class _Reporter:
    """Reads metrics one step late and turns them into lines, timed without compiling, evaluating, saving."""

    def __init__(self, trainer: Trainer, schedule: BatchSchedule, first: int):
        self._trainer, self._schedule = trainer, schedule
        self._waiting: tuple[int, dict, float] | None = None
        self._finished = first
        self._window: tuple[int, float] | None = None  # (last step before it, start time); None until compiled
        self._skipped, self._started = 0, time.perf_counter()

    def dispatched(self, step: int, metrics: dict, rate: float) -> None:
        """The step is on its way; now is the time to look at the one before."""
        self.flush()
        self._waiting = (step, metrics, rate)
        if self._window is None:  # the first step carries the compilation
            self.flush()
            seconds = time.perf_counter() - self._started
            self._trainer.console.note(f"first step, with compilation: {format_seconds(seconds)}")
            self.new_window()

    def flush(self) -> None:
        """Waits for the step before, and reports it if it is due."""
        if self._waiting is None:
            return
        (step, metrics, rate), self._waiting = self._waiting, None
        jax.block_until_ready(metrics["loss"])
        self._finished = step
        config = self._trainer.config
        if self._window is None or step % config.log_every_steps == 0 or step == config.steps:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            self._emit(self._line(step, values, rate))
            self._note_skipped(int(values["total_skipped"]))
            if self._window is not None:
                self.new_window()

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self._emit({"step": step} | values)
        self.new_window()

    def new_window(self) -> None:
        """Step times are measured from here on: what lay before was not training, or is reported."""
        self._window = (self._finished, time.perf_counter())

    def _line(self, step: int, values: dict[str, float], rate: float) -> dict[str, Any]:
        trainer, length = self._trainer, self._trainer.config.sequence_length
        names = [name for name in values if name not in ("skipped", "total_skipped")]
        device = jax.local_devices()[0]
        line = {
            "step": step,
            **{name: values[name] for name in names},
            "skipped_updates": int(values["total_skipped"]),
            "learning_rate": rate,
            "consumed_tokens": self._schedule.num_samples(step) * length,
            "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        }
        if self._window is None or self._window[0] == step:
            return line
        seconds = (time.perf_counter() - self._window[1]) / (step - self._window[0])
        per_device = self._schedule(step - 1).size * length / seconds / trainer.mesh.size
        known, model = find_device(device.device_kind), trainer.model.config
        mfu = lambda causal: utilisation(model.flops_per_token(length, causal=causal), per_device, known)
        return line | {
            "step_seconds": seconds,
            "tokens_per_second": per_device * trainer.mesh.size,
            "tokens_per_second_per_device": per_device,
            "mfu": mfu(False) if known else None,
            "mfu_causal": mfu(True) if known else None,
        }

    def _note_skipped(self, total: int) -> None:
        if total > self._skipped:
            self._trainer.console.note(f"{total - self._skipped} updates skipped: gradient not finite ({total} in all)")
        self._skipped = total

    def _emit(self, line: dict[str, Any]) -> None:
        self._trainer.console.step(line["step"], self._trainer.config.steps, line)
        if self._trainer.writer is not None:
            self._trainer.writer.write(line)


class _Profiler:
    """Traces the steps (first, last), or what this run does of them; None: nothing."""

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, console: Console):
        self._steps, self._folder, self._console = steps, run_dir / "profile", console
        self._metrics: Any = None  # of the newest step of a trace under way

    def before(self, step: int) -> None:
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and self._metrics is None:
            jax.profiler.start_trace(str(self._folder))

    def after(self, step: int, metrics: dict) -> None:
        if self._steps is not None and self._steps[0] <= step <= self._steps[1]:
            self._metrics = metrics
            if step == self._steps[1]:
                self._stop()

    def _stop(self) -> None:
        jax.block_until_ready(self._metrics)
        jax.profiler.stop_trace()
        self._metrics = None
        self._console.note(f"profile written to {self._folder}")

    def __enter__(self) -> "_Profiler":
        return self

    def __exit__(self, *_) -> None:
        if self._metrics is not None:
            self._stop()


class _StopRequest:
    """Signals, exit_at_step and exit_after_minutes; a context manager that gives the signals back.

    With several processes JAX's preemption service sees the SIGTERM of any of them and names one step for all; whoever
    wants to stop for another reason sends itself that signal.
    """

    def __init__(self, config: TrainingConfig):
        self._config, self._started = config, time.monotonic()
        self._reason = ""
        self._alone = jax.process_count() == 1
        numbers = (signal.SIGINT, signal.SIGTERM) if self._alone else (signal.SIGINT,)
        self._handlers = {number: signal.signal(number, self._received) for number in numbers}

    def __enter__(self) -> "_StopRequest":
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame) -> None:
        if self._reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._ask(f"received {signal.Signals(number).name}")

    def _ask(self, reason: str) -> None:
        self._reason = reason
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> str:
        """Why to stop after this step, or an empty string."""
        limit = self._config.exit_after_minutes
        if limit is not None and not self._reason and time.monotonic() - self._started >= 60 * limit:
            self._ask(f"training.exit_after_minutes={limit}")
        if self._config.exit_at_step is not None and step >= self._config.exit_at_step:
            return f"training.exit_at_step={self._config.exit_at_step}"
        if self._alone:
            return self._reason
        agreed = multihost_utils.reached_preemption_sync_point(step)
        return (self._reason or "a process of the run was asked to stop") if agreed else ""
