"""The training loop: dispatch a step, report the one before, evaluate, save, and stop when asked.

The host never waits for the step it has just dispatched: batches are put on the devices one step ahead, and metrics are
read one step late.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.checkpoint.checkpointer import Checkpointer, with_shardings
from megajax.data.config import DataConfig
from megajax.data.datasets import Dataset, Datasets
from megajax.mesh import MeshConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.optim.schedule import Schedule
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.batches import device_batches
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.training.faults.replicas import check_replicas, describe_replicas
from megajax.training.faults.stop import StopRequest
from megajax.training.faults.watchdog import Watchdog
from megajax.training.reporting.console import Console
from megajax.training.reporting.metrics import MetricsWriter
from megajax.training.reporting.profiling import Profiler
from megajax.training.reporting.reporter import Reporter
from megajax.training.state import TrainState, abstract_state, init_state, state_shardings
from megajax.training.step import jit_train_step, make_eval_step


@dataclasses.dataclass
class Trainer:
    """One run. All fields are what train.py built; `run` does the work."""

    config: TrainingConfig
    launch: LaunchConfig
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
    compiler_options: dict[str, str]
    meta: dict[str, Any]
    watchdog: Watchdog
    first_started: float
    """Seconds since 1970."""
    productive_seconds: float = dataclasses.field(default=0.0, init=False)
    """Of the steps before the checkpoint that was restored (Reporter.goodput)."""

    def start(self) -> TrainState:
        """The state of the newest checkpoint that is whole, or a new one. Raises ValueError if there are checkpoints
        and none can be used."""
        with jax.set_mesh(self.mesh):
            return self._start()

    def run(self, state: TrainState) -> str:
        """Trains until the last step, or until asked to stop -> "finished", "interrupted", or "already finished".

        state: from `start`; it is used up.
        """
        with jax.set_mesh(self.mesh):
            return self._run(state)

    def _run(self, state: TrainState) -> str:
        config, first = self.config, int(state.step)
        if first >= config.steps:
            return "already finished"
        if self.launch.exit_at_step is not None and first >= self.launch.exit_at_step:
            self.console.note(f"nothing to do: step {first} is done, launch.exit_at_step={self.launch.exit_at_step}")
            return "interrupted"
        stop_request = StopRequest(self.launch.exit_at_step, self.launch.exit_after_minutes)
        with stop_request as stop, Profiler(self.launch.profile_steps, self.run_dir, self.console) as profiler:
            return self._train(state, first, stop, profiler)

    def _train(self, state: TrainState, first: int, stop: StopRequest, profiler: Profiler) -> str:
        config, schedule = self.config, self.config.schedule(self.mesh_config)
        batches, step_function = self.train_batches(first, config.steps), self.step_function()
        reporter = Reporter(
            first,
            num_steps=config.steps,
            every_steps=config.log_every_steps,
            sequence_length=config.sequence_length,
            schedule=schedule,
            flops_per_token=self.model.config.flops_per_token,
            num_devices=self.mesh.size,
            most_skipped=config.most_skipped_in_a_row,
            productive_seconds=self.productive_seconds,
            first_started=self.first_started,
            console=self.console,
            writer=self.writer,
        )
        if config.check_replicas_every_steps:
            self.console.note(describe_replicas(state))
        evaluate = self._evaluator(schedule)
        done = first
        for step, batch in enumerate(batches, start=first):
            profiler.before(step + 1)
            rate = self.learning_rates(schedule(step).first_sample / config.global_batch_size)
            state, metrics = step_function(state, batch, np.float32(rate))
            done = step + 1
            reporter.dispatched(done, metrics, rate)
            profiler.after(done, metrics)
            self.watchdog.alive()
            self.checkpointer.check()
            asked = stop.asked(done)
            evaluation: dict[str, float] = {}
            if evaluate is not None and (done % config.eval_every_steps == 0 or done == config.steps):
                reporter.flush()
                evaluation = evaluate(state.weights)
                reporter.evaluation(done, evaluation)
                self.watchdog.alive()
            every = self.checkpoint_every_steps
            is_due = asked or done == config.steps or bool(every and done % every == 0)
            is_saved, compared = is_due or self.checkpointer.local_is_due(done), config.check_replicas_every_steps
            if compared and (is_saved or done % compared == 0):
                reporter.flush()
                check_replicas(state, self.mesh, done, self.checkpointer.latest_step())
                self.watchdog.alive()
                reporter.new_window()
            if is_saved:
                reporter.flush()
                save = self.checkpointer.save if is_due else self.checkpointer.save_local
                self._save(save, state, schedule, reporter.productive_seconds, evaluation.get("eval_loss"))
                self.watchdog.alive()
                reporter.new_window()
            if asked:
                self.console.note(f"stopping after step {done}: {asked}")
                break
        reporter.flush()
        self.checkpointer.wait()
        self.watchdog.alive()
        if self.checkpointer.latest_step() != done:
            raise RuntimeError(f"the checkpoint of step {done} could not be saved: the log says why")
        reporter.close()
        self.console.close()
        return "finished" if done >= config.steps else "interrupted"

    # ------------------------------------------------------------------ parts of the run

    def step_function(self) -> Callable:
        """The jitted train step, for the current mesh."""
        return jit_train_step(
            self.model,
            self.optimizer,
            self.config,
            state_shardings(self.model, self.optimizer, self.mesh, self.shard_over_data),
            self.compiler_options,
        )

    def train_batches(self, start: int, stop: int) -> Iterator[dict]:
        """Of the steps start + 1, ..., stop."""
        return self._batches(self.datasets.train, self.config.schedule(self.mesh_config), start, stop)

    def _start(self) -> TrainState:
        shardings = state_shardings(self.model, self.optimizer, self.mesh, self.shard_over_data)
        target = with_shardings(abstract_state(self.model, self.optimizer), shardings)
        found = self.checkpointer.restore_newest(target.weights, target.optimizer, self.model.layer_rows)
        if self.writer is not None:
            self.writer.rewind(0 if found is None else found[0])
        if found is None:
            return init_state(self.model, self.optimizer, self.config.seed, self.mesh, shardings)
        latest, weights, optimizer, meta = found
        self.console.note(f"resuming from step {latest} of {self.config.steps}")
        self._check_samples(latest, meta)
        self.productive_seconds = meta.get("productive_seconds", 0.0)
        scalar = lambda value: jax.device_put(jnp.int32(value), shardings.step)
        return TrainState(scalar(latest), scalar(meta["skipped"]), *self.model.split(weights), optimizer)

    def _check_samples(self, step: int, meta: dict[str, Any]) -> None:
        """Raises ValueError if samples would be skipped or read twice, as with another batch size."""
        here = self.config.schedule(self.mesh_config).num_samples(step)
        read = meta.get("consumed_samples", here)
        if read != here and not self.data_config.allow_change:
            raise ValueError(
                f"training.global_batch_size={self.config.global_batch_size}, batch_size_rampup="
                f"{self.config.batch_size_rampup}: after step {step} the run has read {read} samples, and would go on "
                f"at sample {here}; give them as they were, or allow it with --data.allow_change=True"
            )

    def _save(
        self,
        save: Callable,
        state: TrainState,
        schedule: BatchSchedule,
        productive_seconds: float,
        eval_loss: float | None,
    ) -> None:
        """save: of the checkpointer; eval_loss: of this step, None if it was not evaluated."""
        step = int(state.step)
        meta = self.meta | {
            "layer_rows": {kind: rows.tolist() for kind, rows in self.model.layer_rows.items()},
            "step": step,
            "skipped": int(state.skipped),
            "consumed_samples": schedule.num_samples(step),
            "productive_seconds": productive_seconds,
            "eval_loss": eval_loss,
        }
        save(step, state.weights, state.optimizer, meta)

    def _batches(self, dataset: Dataset, schedule: BatchSchedule, start: int, stop: int) -> Iterator[dict]:
        return device_batches(
            dataset,
            schedule,
            start=start,
            stop=stop,
            model=self.model,
            sequence_length=self.config.sequence_length,
            mesh=self.mesh,
            config=self.data_config,
        )

    def _evaluator(self, schedule: BatchSchedule) -> Callable[[Any], dict[str, float]] | None:
        config, dataset = self.config, self.datasets.eval
        if not config.eval_every_steps or dataset is None:
            return None
        size, eval_step = config.eval_batch_size(self.mesh_config), jax.jit(make_eval_step(self.model))
        # Through a pipeline all of them go at once, as microbatches.
        at_once = 1 if self.model.stages is None else config.eval_steps

        def evaluate(weights) -> dict[str, float]:
            schedule = BatchSchedule(size * at_once, size, None)
            batches = self._batches(dataset, schedule, 0, config.eval_steps // at_once)
            sums = [eval_step(weights, batch) for batch in batches]
            loss, tokens = np.sum(np.array(jax.device_get(sums), np.float64), 0)
            result = {"eval_loss": loss / tokens}
            if self.datasets.eval_bytes_per_token is not None:
                result["eval_bits_per_byte"] = loss / tokens / math.log(2) / self.datasets.eval_bytes_per_token
            return result

        return evaluate
