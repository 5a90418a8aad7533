"""megajax as a library: the API of `import megajax`, for notebooks and programs (docs/library.md).

The parts of train.py and infer.py, for one process. Dimensions: B batch, T sequence.
"""

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

import configs
from megajax import hub
from megajax import run as runs
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.steps import find_step
from megajax.config import Config
from megajax.data.datasets import Datasets
from megajax.evaluation.perplexity import perplexity_of
from megajax.evaluation.text_model import TextModel
from megajax.inference.device.weights import restore_weights
from megajax.inference.engine import Engine
from megajax.inference.load import OpenedModel, open_model
from megajax.inference.shapes import laid_out, text_batches
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import make_mesh
from megajax.mesh.processes import use_compilation_cache
from megajax.models.model import Model
from megajax.overrides import override
from megajax.planning.plan import plan_device
from megajax.planning.search import search as searched
from megajax.planning.summary import Plan
from megajax.training.batch_schedule import Batch, BatchSchedule
from megajax.training.batches import BatchPlacer
from megajax.training.faults.watchdog import Watchdog
from megajax.training.reporting.metrics import read_metrics
from megajax.training.reporting.reporter import scalars
from megajax.training.state import TrainState
from megajax.training.step import make_eval_step
from megajax.weights.hugging_face.folder import is_folder
from megajax.weights.sources import SavedStep, Source

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about every directory that is only read

Overrides = Iterable[str] | Mapping[str, Any]
Loss = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


def recipes() -> dict[str, str]:
    """Name -> one-line description of each recipe, the values of --config."""
    return {name: text.splitlines()[0] for name, text in configs.docstrings().items()}


def recipe(name: str, overrides: Overrides = ()) -> Config:
    """The configuration of a recipe, with overrides: {"training.steps": 100} or ["--training.steps=100"].

    Raises ValueError for an unknown name or field, or an invalid value.
    """
    return override(configs.recipe(name), overrides)


def load_run(run_dir: str | Path, overrides: Overrides = (), devices: Sequence[jax.Device] | None = None) -> "Run":
    """A run that has been started before, with its saved configuration.

    Overrides apply on top: {"mesh.data": 1, "mesh.fsdp": 4} for another mesh. Raises ValueError if the directory holds
    no run.
    """
    if is_folder(run_dir):
        raise ValueError(
            f'run_dir={run_dir} is a Hugging Face folder, not a run; megajax.recipe("hugging_face:{run_dir}") is the '
            "recipe to train it, and megajax.Run(...) runs it"
        )
    return Run(override(Config.load(run_dir), overrides), devices)


class Run:
    """A configuration on devices: mesh, model, data, single train steps, or `train` for the whole run.

    Only `train` writes to the run directory. Datasets and compiled functions are created on first use. Where `state` is
    optional, the default is the newest checkpoint in the run directory.

    Args:
        config: from `recipe`, or the name of a recipe; one mesh axis may be -1.
        devices: devices of the mesh; default: all of this process.

    Raises ValueError for a configuration that is inconsistent or does not fit the devices.
    """

    def __init__(self, config: Config | str, devices: Sequence[jax.Device] | None = None):
        if jax.process_count() > 1:
            raise ValueError(f"megajax.Run supports one process, not {jax.process_count()}; use train.py")
        devices = jax.devices() if devices is None else list(devices)
        config = recipe(config) if isinstance(config, str) else config
        config.check()
        self.config = config.check_on(len(devices))
        self.mesh: Mesh = make_mesh(self.config.mesh, devices)
        self.program = self.config.make_program(self.mesh)
        use_compilation_cache()
        self._engine: Engine | None = None
        self._losses: dict[Loss, Any] = {}

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"Run({self.config.run_dir}: {self.model.num_parameters():,} parameters; {axes})"

    @property
    def model(self) -> Model:
        return self.program.model

    @functools.cached_property
    def datasets(self) -> Datasets:
        """Training and evaluation samples, and the tokenizer."""
        return runs.load_data(self.config)

    # ------------------------------------------------------------------ single steps

    def init(self) -> TrainState:
        """The state before the first step, on the mesh, with new weights from training.seed."""
        return self.program.first_state(self.config.training.seed)

    def restore(self, step: int | None = None) -> TrainState:
        """The state after a step that the run has saved (default: the newest), on this mesh.

        Raises ValueError if it is missing or damaged.
        """
        step = find_step(self.config.run_dir, step)
        target = self.program.abstract_state
        with jax.set_mesh(self.mesh), Checkpointer(self.config.run_dir, None) as checkpointer:
            found = checkpointer.restore(step, target.weights, target.optimizer, self.model.layer_rows)
            weights, optimizer, meta = found
            return self.program.restored_state(step, weights, optimizer, meta)

    def batch(self, step: int = 0) -> dict[str, np.ndarray]:
        """The batch of the step after `step` finished ones: {name: NumPy array [B, T]}; for a decoder tokens, labels,
        positions and segment_ids (int32) and loss_mask (float32)."""
        now = self.config.training.schedule(self.config.mesh)(step)
        return _stacked(self.datasets.train, range(now.first_sample, now.first_sample + now.size))

    def eval_batch(self, number: int = 0) -> dict[str, np.ndarray]:
        """A batch of held-out samples. Raises ValueError if training.eval_every_steps is 0."""
        if self.datasets.eval is None:
            raise ValueError("training.eval_every_steps=0: there are no evaluation samples; set it, for example to 100")
        size = self.config.training.global_batch_size
        return _stacked(self.datasets.eval, range(number * size, (number + 1) * size))

    def step(
        self, state: TrainState, batch: Mapping[str, np.ndarray], learning_rate: float | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step -> (the new state, metrics: loss, grad_norm, learning_rate, ...).

        `state` is donated and can no longer be read. batch: as returned by `batch`, with any B that
        training.microbatch_size and the mesh divide. learning_rate: default: that of the schedule.
        """
        done = int(state.step)
        rate = self._learning_rate(done) if learning_rate is None else learning_rate
        step = self.program.train_step(self.config.training)
        with jax.set_mesh(self.mesh):
            state, metrics = step(state, self._placed(batch, accumulate=True), np.float32(rate))
        return state, scalars(metrics) | {"learning_rate": float(rate)}

    def loss(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> float:
        """Mean cross-entropy per token, in nats, without dropout and regularisers; does not change the state."""
        with jax.set_mesh(self.mesh):
            total, tokens = self._eval_step(state.weights, self._placed(batch, accumulate=False))["loss"]
        return float(total) / float(tokens)

    def value_and_grad(self, loss: Loss, state: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[float, dict]:
        """A loss of your own -> (its value, its gradients in the structure of state.params, on the mesh).

        loss: (logits float32 [B, T, V], batch) -> scalar, in jax.numpy; without dropout. batch: as in `step`. Raises
        ValueError for a pipeline, and for a model that predicts no next token.
        """
        self._check_logits()
        if loss not in self._losses:

            def of_params(params, state, batch):
                return loss(_logits(self.model, state._replace(params=params).weights, batch), batch)

            self._losses[loss] = jax.jit(jax.value_and_grad(of_params))
        with jax.set_mesh(self.mesh):
            placed = {name: array[0] for name, array in self._placed(batch, accumulate=False).items()}
            value, gradients = self._losses[loss](state.params, state._replace(optimizer=None), placed)
        return float(value), gradients

    # ------------------------------------------------------------------ texts and tokens

    def logits(self, tokens: Sequence[int] | Sequence[Sequence[int]], state: TrainState | None = None) -> np.ndarray:
        """float32 [T, V] of one sequence of tokens, [B, T, V] of several of the same length: before the token after
        each. Raises ValueError for more tokens than the model reads, a pipeline, and a model that predicts no next
        token."""
        self._check_logits()
        given = np.asarray(tokens, np.int32)
        tokens_BT = np.atleast_2d(given)
        size, length = tokens_BT.shape
        most = self.model.config.max_length
        if not given.size or (most is not None and length > most):
            raise ValueError(f"tokens: {length} in a sequence; the model reads 1 to {most or 'any number'}")
        ((_, (rows, padded)),) = text_batches([length] * size, self.mesh, most, batch_tokens=2**62)
        padded_BT = np.zeros((rows, max(padded, length)), np.int32)
        padded_BT[:size, :length] = tokens_BT
        batch, index_T = laid_out({"tokens": padded_BT}, self.model, self.mesh)
        with jax.set_mesh(self.mesh):
            found = np.asarray(self._forward(self._weights(state), batch))
        return found[:size, index_T[:length], : self.model.config.vocab_size].reshape(*given.shape, -1)

    def perplexity(self, texts: str | Sequence[str], state: TrainState | None = None) -> dict[str, float]:
        """loss (nats per token), perplexity, bits_per_byte, and how many documents, tokens and bytes were read, as
        `megajax evaluate` computes them. Each text is a document, of any length. Raises ValueError for a pipeline."""
        self._check_logits()
        opened = open_model(self.config.run_dir, self.config.mesh) if state is None else self._in_memory(state)
        return perplexity_of(TextModel(opened), [texts] if isinstance(texts, str) else texts).metrics()

    def evaluate(self, state: TrainState | None = None) -> dict[str, float]:
        """The evaluation of training on training.eval_steps held-out batches: eval_loss, eval_bits_per_byte, ...

        Raises ValueError if training.eval_every_steps is 0.
        """
        with runs.make_trainer(self.config, self.program, self.datasets, Watchdog(0)) as trainer:
            evaluate = trainer.evaluator()
            if evaluate is None:
                raise ValueError("training.eval_every_steps=0: the run has no held-out samples; set it, to 100 say")
            with jax.set_mesh(self.mesh):
                return evaluate(self._weights(state))

    # ------------------------------------------------------------------ whole runs

    def train(self, on_metrics: Callable[[dict[str, Any]], None] | None = None, batches: Iterable | None = None) -> str:
        """Trains as train.py does, or resumes -> "finished", "interrupted" or "already finished".

        Prints its progress; writes checkpoints and metrics to the run directory. Uses all devices of this process.
        on_metrics: is called with each line of metrics.jsonl as it comes; what it raises ends the run. batches: what to
        train on instead of the data of the config: an iterable of texts, of rows with a `text`, or of batches as
        `batch` returns them. Given again, from its beginning, it resumes where it was.
        """
        covers_all = self.mesh.devices.flatten().tolist() == jax.devices()
        return runs.train(self.config, self.program if covers_all else None, on_metrics, batches)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in the run directory: step, loss, ..., or step, eval_loss."""
        return [record for _, record in read_metrics(Path(self.config.run_dir) / "metrics.jsonl") if record]

    def generate(self, prompts: str | Sequence[str], state: TrainState | None = None, **sampling: Any) -> list[str]:
        """The text that follows each prompt.

        state: the weights to use; default: the newest checkpoint in the run directory. sampling: max_tokens,
        temperature, top_k, top_p, seed, stop (megajax/inference/tokens/sampling.py). Raises ValueError for a pipeline.
        """
        settings = Sampling(**sampling)
        settings.check()
        self._check_no_pipeline()
        if state is None:
            source = SavedStep(self.config.run_dir)
            tokenizer = source.tokenizer()
            weights = restore_weights(source, self.model, self.mesh, "auto")
            start_ids = getattr(tokenizer, "start_ids", ()) if source.is_foreign else ()
        else:
            tokenizer = self.datasets.tokenizer
            weights = state.weights
            start_ids = ()
        if self._engine is None:
            self._engine = Engine(self.model, weights, self.mesh, tokenizer, start_ids=start_ids)
        self._engine.use(weights)  # its programs do not depend on the weights
        return self._engine.generate([prompts] if isinstance(prompts, str) else prompts, settings)

    def plan(self, device: str = "h100") -> Plan:
        """Memory and speed of this run on the same number of GPUs: h100, h200, a100 or b200."""
        return plan(self.config, device)

    # ------------------------------------------------------------------ parts

    def _check_no_pipeline(self) -> None:
        if self.model.stages is not None:
            raise ValueError(
                f"mesh.pipeline={self.config.mesh.pipeline}: only training supports pipelines; use another mesh"
            )

    def _check_logits(self) -> None:
        self._check_no_pipeline()
        self.model.config.check_generates()

    def _weights(self, state: TrainState | None) -> dict:
        return (self.restore() if state is None else state).weights

    def _in_memory(self, state: TrainState) -> OpenedModel:
        source = cast(Source, types.SimpleNamespace(config=self.config, is_foreign=False))
        return _InMemory(source, self.model, self.mesh, self.datasets.tokenizer, (), params=state.weights)

    @functools.cached_property
    def _forward(self):
        return jax.jit(functools.partial(_logits, self.model))

    @functools.cached_property
    def _eval_step(self):
        return jax.jit(make_eval_step(self.model, self.config.task))

    @functools.cached_property
    def _placer(self) -> BatchPlacer:
        return BatchPlacer(self.program, self.config.training)

    def _learning_rate(self, step: int) -> float:
        training = self.config.training
        read = training.schedule(self.config.mesh)(step).first_sample
        return self.config.optimizer.make_schedule(training.full_batch_steps)(read / training.global_batch_size)

    def _placed(self, batch: Mapping[str, np.ndarray], *, accumulate: bool) -> dict[str, jax.Array]:
        """Arrays on the mesh, [microbatches, B, T]. accumulate: split into microbatches of training.microbatch_size."""
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        shape = self._batch_shape(arrays, accumulate)

        def split(array: np.ndarray) -> np.ndarray:
            return array.reshape(shape.num_microbatches, shape.microbatch, *array.shape[1:])

        return self._placer.place(shape, {name: split(array) for name, array in arrays.items()})

    def _batch_shape(self, arrays: dict[str, np.ndarray], accumulate: bool) -> Batch:
        wanted = self._placer.arrays
        if missing := wanted.keys() - arrays.keys():
            raise ValueError(f"the batch has no {', '.join(sorted(missing))}; batch(0) shows what the model reads")
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the arrays of the batch differ in their first dim: {sizes}")
        size = next(iter(sizes.values()))
        microbatch = self.config.training.microbatch_size if accumulate or self.model.stages else None
        shards = self.config.mesh.batch_shards
        unit = shards * (microbatch or 1)
        if size % unit:
            raise ValueError(
                f"a batch of {size} is not divisible by {unit} = {shards} (mesh data * fsdp * expert) * "
                f"{microbatch or 1} (training.microbatch_size); use {-(-size // unit) * unit} sequences"
            )
        return BatchSchedule(size, microbatch and unit, None)(0)


def _logits(model: Model, weights: dict, batch: Mapping[str, jax.Array]) -> jax.Array:
    """float32 [B, T, V]."""
    module = model.module(weights)
    return module.token_logits(module.hidden(dict(batch))[0])


@dataclasses.dataclass(frozen=True)
class _InMemory(OpenedModel):
    params: dict = dataclasses.field(default_factory=dict)

    def restore(self, replaced: dict | None = None, *, joins: bool = False) -> dict:
        return self.params


def _stacked(dataset, indices: range) -> dict[str, np.ndarray]:
    samples = [dataset[index] for index in indices]
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def plan(config: Config | str, device: str = "h100") -> Plan:
    """Estimates memory and speed of a run, without a GPU; a mesh axis of -1 counts as 1.

    config: from `recipe`, or the name of a recipe: of hugging_face:ORG/NAME no weights are downloaded then. device:
    h100, h200, a100 or b200. Activations are estimated; `train.py --plan` compiles the step where it can. Raises
    ValueError for an inconsistent configuration, and for an unknown device.
    """
    gpu = plan_device(device)
    with hub.without_weights():
        config = (recipe(config) if isinstance(config, str) else config).for_plan()
        title = f"plan of {config.run_dir.removeprefix('runs/')}"
        return Plan.of(title, config.make_program(), config.training, gpu)


def search(config: Config, num_devices: int, device: str = "h100") -> list[Config]:
    """The config on each mesh of that many GPUs that fits, with the microbatch size and the recomputation that are
    predicted to be fastest there; the fastest mesh first. `plan` tells more of each.

    Raises ValueError for an inconsistent configuration, and if no such mesh can run it.
    """
    found = searched(config.with_steps(), num_devices, plan_device(device))
    return [candidate.config for candidate in found.best]
