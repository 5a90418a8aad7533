"""The configuration of a run: its sections, the checks across them and the JSON format.

Nothing below this file sees the whole Config; each part receives its own section.
"""

import dataclasses
import functools
import json
import logging
import typing
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.steps import newest_meta, read_meta, saved_steps
from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.fields.ranges import check_fields
from megajax.layers.lora import LoraConfig
from megajax.mesh.config import AXES, MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import MODELS, ModelConfig
from megajax.models.model import Model
from megajax.models.pipelined import STACK
from megajax.optim.config import OptimizerConfig
from megajax.optim.groups import assigned_optimizers
from megajax.optim.optimizer import Optimizer
from megajax.parallel.schedule import make_stages
from megajax.precision import PrecisionConfig
from megajax.tasks.interface import TASKS, Task
from megajax.tasks.language import Language
from megajax.training.compiler_options import compiler_options, parse
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.metrics import LoggingConfig

logger = logging.getLogger("megajax")


KINDS = {"model": MODELS, "task": TASKS}
"""Of the sections whose class is chosen by their field `kind`."""


@functools.lru_cache(maxsize=64)
def _optimizer(config: OptimizerConfig, model: Model) -> Optimizer:
    """The same one for the same model, so that a search makes few."""
    return Optimizer(config, model.trained)


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig = DecoderConfig()
    task: Task = Language()
    lora: LoraConfig = LoraConfig()
    execution: ExecutionConfig = ExecutionConfig()
    mesh: MeshConfig = MeshConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    launch: LaunchConfig = LaunchConfig()
    run_dir: str = ""
    """Directory for all output of the run; empty: runs/NAME, with the name of the recipe."""

    def check(self) -> None:
        """Raises ValueError with one line: the field, its value, the rule, how to fix it. Touches no device."""
        check_fields(self, "--")
        self._check_sections()

    def _check_sections(self) -> None:
        self.mesh.check()
        self.data.check()
        self.checkpoint.check()
        self.logging.check()
        self.training.check()
        self.launch.check(self.training.steps)
        self.execution.check(self.mesh)
        parse(self.execution.compiler_options)
        self.checkpoint.check_evaluated(self.training.steps, self.training.eval_every_steps)
        self.optimizer.check(self.training.full_batch_steps)
        self.model.check(self.mesh, self.training.sequence_length, self.execution)
        stacks = self.model.stacks(self.execution)
        self.precision.check({name: len(layers) for name, layers in stacks.items()})
        self.lora.check(self.precision)
        self.optimizer.check_loss_scale(self.precision)
        self.task.check(self.data, self.model)
        if self.training.sample_prompt:
            self.model.check_generates()
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        if self.mesh.pipeline > 1 and [*self.model.stacks_of("body", self.execution)] != [STACK]:
            stacks = self.model.stacks(self.execution)
            raise ValueError(
                f"mesh.pipeline={self.mesh.pipeline}: a pipeline splits one stack of layers, and "
                f"model.kind={self.model.kind} has {', '.join(stacks)}; use --mesh.pipeline=1"
            )
        make_stages(self.mesh, self.model.num_stage_layers)

    def check_on(self, num_devices: int) -> "Config":
        """The config with its mesh resolved for that many devices, and its tokenizer named. Raises ValueError for sizes
        that do not divide."""
        check_fields(self, "--")
        config = self.with_steps()
        mesh = config.mesh.resolve(num_devices)
        config = dataclasses.replace(config, mesh=mesh)
        config._check_sections()
        config = dataclasses.replace(config, data=config.data_with_tokenizer())
        config.training.check_on(mesh)
        return config

    def with_steps(self) -> "Config":
        """The config with the steps of its epochs, and those between two evaluations, as numbers; after `check_fields`.
        Reads the data to count the samples. Raises ValueError if they cannot be read."""
        training = self.training
        optimizer = self.optimizer
        evaluates = self.task.reads_conversations and self.data.source == "indexed"
        if training.epochs is not None:
            num_samples = self._samples_per_epoch(evaluates)
            steps = training.steps_of(training.epochs * num_samples)
            optimizer = dataclasses.replace(optimizer, warmup_steps=min(optimizer.warmup_steps, steps // 10))
            logger.info(
                "training.steps=%d: %g epochs of %.10g samples in batches of %d; optimizer.warmup_steps=%d",
                steps, training.epochs, num_samples, training.global_batch_size, optimizer.warmup_steps,
            )  # fmt: skip
            training = dataclasses.replace(training, steps=steps, epochs=None)
        if training.eval_every_steps is None:
            every = max(training.steps // 10, 1) if evaluates else 0
            training = dataclasses.replace(training, eval_every_steps=every)
        return dataclasses.replace(self, training=training, optimizer=optimizer)

    def _samples_per_epoch(self, evaluates: bool) -> float:
        """evaluates: part of the data is held out."""
        self.task.check(self.data, self.model)
        training = self.training
        if self.data.source == "mock" or self.data.blend_changes:
            what = "data.blend_changes names steps" if self.data.blend_changes else "mock documents have no end"
            raise ValueError(f"training.epochs={training.epochs}: {what}; use --training.steps")
        evaluates = evaluates if training.eval_every_steps is None else training.eval_every_steps > 0
        amounts = Amounts(training.sequence_length, training.seed, num_train_samples=1, num_eval_samples=int(evaluates))
        sources = self.task.datasets(self.data_with_tokenizer(), self.model, amounts).sources
        return sum(source.samples_per_epoch for source in sources)

    def data_with_tokenizer(self) -> DataConfig:
        """The section `data` with its tokenizer named. Raises ValueError if the file of a recorded one does not
        exist."""
        return self.data.with_tokenizer(self.model.vocab_size, self.task.num_added_ids)

    def for_plan(self) -> "Config":
        """The config on the mesh that it names, whatever devices there are; an axis of -1 becomes 1, and data that is
        not named yet mock documents."""
        check_fields(self, "--")
        self.mesh.check()
        mesh = self.mesh.with_sizes({axis: max(size, 1) for axis, size in self.mesh.sizes().items()})
        return dataclasses.replace(self, mesh=mesh, data=self.data.for_plan()).check_on(mesh.num_devices)

    def make_model(self) -> Model:
        """The model without weights; the mesh must be resolved. Raises ValueError for frozen parameters that do not
        exist."""
        stages = make_stages(self.mesh, self.model.num_stage_layers)
        return Model(
            self.model,
            self.precision,
            self.execution,
            adapters=self.lora.transforms,
            stages=stages,
            trained=self.training.trained,
            frozen=self.training.frozen,
        )

    def make_program(self, mesh: Mesh | None = None, model: Model | None = None) -> Program:
        """The Program of the run, on the devices of `mesh`, or, for a plan, without devices.

        Raises ValueError for parameters that the mesh does not divide, and for compiler options that jaxlib refuses.
        """
        model = model or self.make_model()
        model.check_divides(self.mesh.sizes())
        optimizer = _optimizer(self.optimizer, model)
        if mesh is None:
            abstract = AbstractMesh(tuple(self.mesh.sizes().values()), AXES)
            return Program(model, self.task, optimizer, abstract, self.mesh, {})
        options = compiler_options(model, mesh, offload_state=self.optimizer.offload_state)
        return Program(model, self.task, optimizer, mesh, self.mesh, options)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "Config":
        """Raises ValueError if the text is not a config."""
        return Config.from_dict(json.loads(text))

    @staticmethod
    def from_dict(sections: Any) -> "Config":
        """Raises ValueError that names the field, for an unknown field or a value of the wrong type."""
        if not isinstance(sections, dict) or not all(isinstance(part, dict | str) for part in sections.values()):
            raise ValueError("it does not hold the sections of a config")
        config = _from_dict(Config, sections)
        check_fields(config, "--")
        return config

    @staticmethod
    def load(run_dir: str | Path, step: int | None = None) -> "Config":
        """The config that a run was started with: config.json, or that of a step if the file is missing or damaged.

        step: by default the newest one with undamaged metadata. Raises ValueError if the directory holds no run, or if
        config.json describes another model than the step.
        """
        path = Path(run_dir) / "config.json"
        found = newest_meta(run_dir) if step is None else (step, read_meta(run_dir, step))
        saved = None
        if found is not None and "config" in found[1]:
            step, meta = found
            try:
                saved = dataclasses.replace(Config.from_dict(meta["config"]), run_dir=str(run_dir))
            except ValueError as error:
                raise ValueError(
                    f"run={run_dir}: the config in step {step} cannot be read ({error}); use the version that saved it"
                ) from None
        if not path.is_file() and saved is None:
            damaged = ", and the metadata of no step can be read" if saved_steps(run_dir) else ""
            raise ValueError(f"run={run_dir}: {path} does not exist{damaged}; give the directory of a run (runs/NAME)")
        try:
            config = dataclasses.replace(Config.from_json(path.read_text()), run_dir=str(run_dir))
        except (OSError, ValueError, RecursionError) as error:
            if saved is None:
                raise ValueError(f"run={run_dir}: {path} cannot be read ({error}); use another run directory") from None
            logger.warning("run=%s: %s cannot be read (%s): using the config of step %d", run_dir, path, error, step)
            return saved
        if saved is not None and (other := incompatibilities(saved, config)):
            raise ValueError(
                f"run={run_dir}: {path} is not what step {step} was saved with ({'; '.join(other)}); correct it, or "
                "remove it to use the config of the step"
            )
        return config


def holds_run(run_dir: str | Path) -> bool:
    """Whether `Config.load` has something to read there."""
    return (Path(run_dir) / "config.json").is_file() or bool(saved_steps(run_dir))


def incompatibilities(old: Config, new: Config) -> list[str]:
    """Why a run that was started with `old` cannot resume with `new`: differences that change the meaning of the
    weights or of the optimizer state."""
    for section in KINDS:
        before = getattr(old, section).kind
        now = getattr(new, section).kind
        if before != now:
            return [f"{section}.kind: {before} -> {now}"]
    lines = differences(_fixed(old.model), _fixed(new.model), "model.") + differences(old.lora, new.lora, "lora.")
    fixed = ["precision.params:", "optimizer.name:", "training.trained:", "training.frozen:"]
    if "float8" in (old.optimizer.moments, new.optimizer.moments):  # float32 and bfloat16 have the same tree
        fixed.append("optimizer.moments:")
    if assigned_optimizers(old.optimizer.groups) != assigned_optimizers(new.optimizer.groups):
        fixed.append("optimizer.groups:")
    return lines + [line for line in differences(old, new) if line.startswith(tuple(fixed))]


def _fixed(model: Any) -> Any:
    """The config, and the configs in it, with the fields that may change on resume set to their defaults."""
    changed = {}
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.metadata.get("may_change"):
            changed[field.name] = field.default
        elif dataclasses.is_dataclass(value):
            changed[field.name] = _fixed(value)
    return dataclasses.replace(model, **changed)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Fields in which two configs differ, as 'section.field: old -> new'."""
    lines = []
    for field in dataclasses.fields(old):
        a = getattr(old, field.name)
        b = getattr(new, field.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            lines += differences(a, b, f"{prefix}{field.name}.")
        elif a != b:
            lines.append(f"{prefix}{field.name}: {a} -> {b}")
    return lines


def _from_dict(kind: Any, value: Any) -> Any:
    """The value of a field from its JSON form; check_fields validates it."""
    if isinstance(value, dict) and (kinds := {ModelConfig: MODELS, Task: TASKS}.get(kind)):
        kind = kinds.of(str(value.get("kind", kinds.default)))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"it has fields that this version does not know: {', '.join(sorted(unknown))}")
        return kind(**{field: _from_dict(hints[field], value[field]) for field in value})
    return tuple(value) if isinstance(value, list) else value
