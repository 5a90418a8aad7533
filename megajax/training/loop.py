"""The training loop: dispatch a step, report the previous one, evaluate, save, and stop on request.

The host never waits for the step it has just dispatched: batches are transferred one step ahead, and metrics are read
one step late.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import recorded
from megajax.data.config import DataConfig
from megajax.data.datasets import Datasets
from megajax.data.loader import BatchSource, IndexedSource
from megajax.mesh.kernels import compile_kernels
from megajax.optim.schedule import Schedule
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.batches import BatchPlacer, device_batches, step_arguments
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.training.faults.replicas import check_replicas, describe_replicas
from megajax.training.faults.stop import StopRequest
from megajax.training.faults.watchdog import Watchdog
from megajax.training.program import Program
from megajax.training.reporting.console import Console, format_count
from megajax.training.reporting.metrics import MetricsWriter
from megajax.training.reporting.profiling import Profiler
from megajax.training.reporting.reporter import Carried, Reporter
from megajax.training.run_lock import RunLock
from megajax.training.state import TrainState
from megajax.training.step import make_eval_step

logger = logging.getLogger("megajax")


class CannotGoOn(ValueError):
    """Why a run ended that had trained: its data cannot be read, or its directory is gone."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Where and what a run writes."""

    run_dir: Path
    console: Console
    writer: MetricsWriter | None
    """On process 0; None on other processes and if nothing is written."""
    meta: dict[str, Any]
    """Stored in every checkpoint: the config, the tokenizer, a record of the data."""
    running_seconds: float
    """Time in which the run was running before this start, as its last line in metrics.jsonl says."""


@dataclasses.dataclass
class Trainer:
    """One run, built by megajax/run.py: `start` returns the state, `run` trains."""

    config: TrainingConfig
    launch: LaunchConfig
    program: Program[Mesh]
    datasets: Datasets
    data_config: DataConfig
    checkpointer: Checkpointer
    starting_weights: Callable[[], dict] | None
    """Loads the weights of a new run; None: they are initialised."""
    output: Output
    watchdog: Watchdog
    lock: RunLock
    """Of the run directory."""
    own_source: BatchSource | None = None
    """What the run trains on; None: what its task makes of the datasets."""
    carried: Carried = dataclasses.field(default=Carried(), init=False)
    """As of the restored checkpoint."""
    made_at: float = dataclasses.field(default_factory=time.perf_counter, init=False)
    _lowering: threading.Thread | None = dataclasses.field(default=None, init=False)
    """Of the first step that `run` does."""

    def start(self) -> TrainState:
        """The state of the newest complete checkpoint, or a new one. Raises ValueError if there are checkpoints and
        none can be used."""
        with jax.set_mesh(self.program.mesh):
            return self._start()

    def run(self, state: TrainState) -> str:
        """Trains until the last step or a request to stop -> "finished", "interrupted", or "already finished".

        state: from `start`; it is donated. Raises CannotGoOn if the data cannot be read, after saving what was trained
        before, or if the run directory is no longer that of this run.
        """
        with jax.set_mesh(self.program.mesh):
            return self._run(state)

    def _run(self, state: TrainState) -> str:
        config = self.config
        launch = self.launch
        first = int(state.step)
        console = self.output.console
        if first >= config.steps:
            console.note(f"already finished at step {first}; --training.steps=N trains longer")
            return "already finished"
        if launch.exit_at_step is not None and first >= launch.exit_at_step:
            console.note(f"nothing to do: launch.exit_at_step={launch.exit_at_step}, and the run is at step {first}")
            return "interrupted"
        stop_request = StopRequest(launch.exit_at_step, launch.exit_after_minutes)
        with stop_request as stop, Profiler(launch.profile_steps, self.output.run_dir, console) as profiler:
            return self._train(state, first, stop, profiler)

    def _train(self, state: TrainState, first: int, stop: StopRequest, profiler: Profiler) -> str:
        config = self.config
        console = self.output.console
        schedule = config.schedule(self.program.mesh_config)
        unreadable: list[ValueError] = []
        batches = _until_unreadable(self.train_batches(first, config.steps, lambda: state.weights), unreadable)
        step_function = self.program.train_step(config)
        reporter = Reporter(
            first,
            num_steps=config.steps,
            every_steps=config.log_every_steps,
            sequence_length=config.sequence_length,
            schedule=schedule,
            flops_per_token=self.program.model.flops_per_token,
            compute_dtype=self.program.model.precision.compute,
            num_devices=self.program.mesh.size,
            max_consecutive_skips=config.max_consecutive_skips,
            carried_before=self._carried_until_now(),
            console=console,
            writer=self.output.writer,
            lowest_loss_scale=self.program.optimizer.config.loss_scale_rule.lowest,
        )
        if config.check_replicas_every_steps:
            console.note(describe_replicas(state))
        evaluate = self.evaluator()
        eval_every = config.eval_every_steps or config.steps
        done = first
        evaluation: dict[str, float] = {}
        for step, batch in enumerate(batches, start=first):
            profiler.before(step + 1)
            rate = self.learning_rate(step)
            with reporter.starting(step + 1):
                rate32 = np.float32(rate)
                if self._lowering is not None:
                    self._lowering.join()
                state, metrics = step_function(state, batch, rate32)
            done = step + 1
            reporter.dispatched(done, metrics, rate)
            profiler.after(done, metrics)
            self.watchdog.alive()
            self.checkpointer.check()
            asked = stop.asked(done, self.lock.problem())
            evaluation = {}
            if evaluate is not None and (done % eval_every == 0 or done == config.steps):
                reporter.flush()
                with console.announced("evaluating"), _collected(unreadable):
                    evaluation = evaluate(state.weights)
                reporter.evaluation(done, evaluation)
                self.watchdog.alive()
            if unreadable:
                break
            is_due = asked or done == config.steps or self.checkpointer.is_due(done)
            is_saved = is_due or self.checkpointer.local_is_due(done)
            compare_every = config.check_replicas_every_steps
            if compare_every and (is_saved or done % compare_every == 0):
                reporter.flush()
                check_replicas(state, self.program.mesh, done, self.checkpointer.latest_step())
                self.watchdog.alive()
                reporter.restart_clock()
            if is_saved:
                reporter.flush()
                save = self.checkpointer.save if is_due else self.checkpointer.save_local
                with console.announced(f"saving step {done}"):
                    self._save(save, state, schedule, reporter.carried(), evaluation.get("eval_loss"))
                self.watchdog.alive()
                reporter.restart_clock()
            if asked:
                console.note(f"stopping after step {done}: {asked}")
                break
        reporter.flush()
        if unreadable:
            self._save_before(unreadable[0], state, first, schedule, reporter.carried())
        save = self.checkpointer.save
        again = functools.partial(self._save, save, state, schedule, reporter.carried(), evaluation.get("eval_loss"))
        self._wait_until_saved(done, again)
        reporter.close()
        console.close()
        if unreadable:
            raise CannotGoOn(f"{unreadable[0]}; stopped after step {done}, which is saved")
        return "finished" if done >= config.steps else "interrupted"

    def _carried_until_now(self) -> Carried:
        """With the time that restoring or initialising took."""
        running_seconds = self.carried.running_seconds + time.perf_counter() - self.made_at
        return dataclasses.replace(self.carried, running_seconds=running_seconds)

    def _save_before(
        self, problem: ValueError, state: TrainState, first: int, schedule: BatchSchedule, carried: Carried
    ) -> None:
        """Saves what was trained before the problem. Raises CannotGoOn if that is nothing, or if the other processes of
        the run, which can read their data, are waiting in the next step."""
        done = int(state.step)
        if done == first or jax.process_count() > 1:
            raise CannotGoOn(f"{problem}; stopped after step {done}, without saving") from None
        with self.output.console.announced(f"saving step {done}"):
            self._save(self.checkpointer.save, state, schedule, carried, None)

    def _wait_until_saved(self, step: int, save_again: Callable[[], None]) -> None:
        """No later save of this run makes up for a last one that fails, so that one is tried twice. Raises
        RuntimeError."""
        problem = self._problem_of_save(step)
        if problem:
            logger.warning("the checkpoint of step %d could not be saved (%s); trying again", step, problem)
            save_again()
            problem = self._problem_of_save(step)
        if problem:
            raise RuntimeError(f"the checkpoint of step {step} could not be saved; {problem}")

    def _problem_of_save(self, step: int) -> str:
        with self.output.console.announced(f"waiting until step {step} is on disk"):
            problem = self.checkpointer.problem_of_save(step)
        self.watchdog.alive()
        return problem

    # ------------------------------------------------------------------ parts of the run

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update after `step` finished ones; during a batch ramp-up it follows the samples
        read."""
        read = self.config.schedule(self.program.mesh_config)(step).first_sample
        return self._learning_rates(read / self.config.global_batch_size)

    @functools.cached_property
    def _learning_rates(self) -> Schedule:
        return self.program.optimizer.config.make_schedule(self.config.full_batch_steps)

    def train_batches(self, start: int, stop: int, weights: Callable[[], dict]) -> Iterator[dict]:
        """The batches of steps start + 1, ..., stop. weights: those of the moment, for batches made from them."""
        schedule = self.config.schedule(self.program.mesh_config)
        return device_batches(self.source, schedule, self._placer, start=start, stop=stop, weights=weights)

    @functools.cached_property
    def source(self) -> BatchSource:
        """What the run trains on."""
        if self.own_source is not None:
            return self.own_source
        schedule = self.config.schedule(self.program.mesh_config)
        return self.program.task.source(
            self.datasets, schedule, self.data_config, self.program.model, self.program.mesh
        )

    @functools.cached_property
    def _placer(self) -> BatchPlacer:
        return BatchPlacer(self.program, self.config)

    def _start(self) -> TrainState:
        model = self.program.model
        target = self.program.abstract_state
        self._lower_beside(self.checkpointer.latest_step() or 0)
        with self.output.console.announced("restoring the newest checkpoint"):
            found = self.checkpointer.restore_newest(target.weights, target.optimizer, model.layer_rows)
        if self.output.writer is not None:
            self.output.writer.rewind(0 if found is None else found[0])
        if found is None:
            return self.initial_state()
        latest, weights, optimizer, meta = found
        if latest < self.config.steps:
            self.output.console.note(f"resuming from step {latest} of {self.config.steps}")
        self.check_samples(latest, meta)
        running = max(self.output.running_seconds, meta["running_seconds"])
        self.carried = Carried(meta["productive_seconds"], running, tuple(meta["losses"]))
        self.source.restore(meta["source"])
        return self.program.restored_state(latest, weights, optimizer, meta)

    def _lower_beside(self, first: int) -> None:
        """Starts to trace and lower the step after `first` in a thread, while this one makes the state. JAX keeps what
        was lowered for the call, and raises there what is wrong with it."""
        if first >= self.config.steps:
            return
        mesh = self.program.mesh
        step_function = self.program.train_step(self.config)
        arguments = step_arguments(self.program, self.config, first, mesh)

        def lower() -> None:
            try:
                with jax.set_mesh(mesh):
                    compile_kernels(step_function.lower(*arguments), mesh)
            except Exception as error:
                logger.info("the step is lowered when it is called: %s", type(error).__name__)

        self._lowering = threading.Thread(target=lower, name="lowers the train step")
        self._lowering.start()

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        source = "loading" if self.starting_weights else "initialising"
        with self.output.console.announced(f"{source} {format_count(self.program.model.num_parameters())} parameters"):
            weights = self.starting_weights() if self.starting_weights else None
            return self.program.first_state(self.config.seed, weights)

    def check_samples(self, step: int, meta: dict[str, Any]) -> None:
        """Raises ValueError if samples would be skipped or read twice, as after a change of the batch size."""
        expected = self.config.schedule(self.program.mesh_config).num_samples(step)
        read = meta["consumed_samples"]
        if read != expected and not self.data_config.allow_change:
            raise ValueError(
                f"training.global_batch_size={self.config.global_batch_size}, batch_size_rampup="
                f"{self.config.batch_size_rampup}: after step {step} the run has read {read} samples, and would resume "
                f"at sample {expected}; use the settings it began with, or allow it with --data.allow_change=True"
            )

    def _save(
        self,
        save: Callable,
        state: TrainState,
        schedule: BatchSchedule,
        carried: Carried,
        eval_loss: float | None,
    ) -> None:
        """save: method of the checkpointer; eval_loss: of this step, None if it was not evaluated. Raises CannotGoOn if
        the run directory is no longer that of this run."""
        try:
            self.lock.check()
        except ValueError as error:
            raise CannotGoOn(f"step {int(state.step)}: {error}") from None
        step = int(state.step)
        meta = self.output.meta | recorded(self.program.model.layer_rows)
        meta |= {
            "skipped": int(state.skipped),
            "consumed_samples": schedule.num_samples(step),
            "productive_seconds": carried.productive_seconds,
            "running_seconds": carried.running_seconds,
            "losses": carried.losses,
            "eval_loss": eval_loss,
            "source": self.source.saved(step),
        }
        if state.loss_scale is not None:
            meta["loss_scale"] = {name: value.item() for name, value in state.loss_scale._asdict().items()}
        save(step, state.weights, state.optimizer, meta)

    def evaluator(self) -> Callable[[Any], dict[str, float]] | None:
        """Function of the weights that returns the metrics of an evaluation; None if the run has none."""
        config = self.config
        dataset = self.datasets.eval
        if not config.eval_every_steps or dataset is None:
            return None
        eval_step = jax.jit(make_eval_step(self.program.model, self.program.task))
        last = config.schedule(self.program.mesh_config)(config.steps)
        # One microbatch at a time; with a pipeline a whole batch, as in training.
        batch_size = last.microbatch if self.program.model.stages is None else last.size

        def evaluate(weights) -> dict[str, float]:
            schedule = BatchSchedule(batch_size, last.microbatch, None)
            source = IndexedSource(dataset, schedule, self.data_config)
            stop = config.eval_steps * last.size // batch_size
            batches = device_batches(source, schedule, self._placer, start=0, stop=stop, weights=lambda: weights)
            sums = [eval_step(weights, batch) for batch in batches]
            totals = jax.tree.map(lambda *parts: np.sum(np.array(parts, np.float64)), *jax.device_get(sums))
            result = {f"eval_{name}": total / max(count, 1) for name, (total, count) in totals.items()}
            if self.datasets.eval_bytes_per_token is not None:
                result["eval_bits_per_byte"] = result["eval_loss"] / math.log(2) / self.datasets.eval_bytes_per_token
            return result

        return evaluate


@contextlib.contextmanager
def _collected(problems: list[ValueError]) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        problems.append(error)


def _until_unreadable(batches: Iterator[dict], problems: list[ValueError]) -> Iterator[dict]:
    """The batches up to the first that cannot be read; why not becomes an element of problems."""
    with _collected(problems):
        yield from batches
