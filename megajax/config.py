"""The configuration of a run: its sections, the checks across them, the command line and the JSON format.

Nothing below this file sees the whole Config; each part receives its own section.
"""

import contextlib
import dataclasses
import json
import logging
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.steps import newest_meta, read_meta, saved_steps
from megajax.data.config import DataConfig, SourceKind
from megajax.fields.ranges import check_fields, describe
from megajax.fields.suggestions import did_you_mean
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
from megajax.terminal.command_line import Option, options
from megajax.training.compiler_options import compiler_options, parse
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.metrics import LoggingConfig

logger = logging.getLogger("megajax")


KINDS = {"model": MODELS, "task": TASKS}
"""Of the sections whose class is chosen by their field `kind`."""


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig = DecoderConfig()
    task: Task = Language()
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
        mesh = self.mesh.resolve(num_devices)
        config = dataclasses.replace(self, mesh=mesh)
        config._check_sections()
        config = dataclasses.replace(config, data=config.data_with_tokenizer())
        config.training.check_on(mesh)
        return config

    def data_with_tokenizer(self) -> DataConfig:
        """The section `data` with its tokenizer named. Raises ValueError if the file of a recorded one does not
        exist."""
        return self.data.with_tokenizer(self.model.vocab_size, self.task.num_added_ids)

    def for_plan(self) -> "Config":
        """The config on the mesh that it names, whatever devices there are; an axis of -1 becomes 1."""
        check_fields(self, "--")
        self.mesh.check()
        mesh = self.mesh.with_sizes({axis: max(size, 1) for axis, size in self.mesh.sizes().items()})
        return dataclasses.replace(self, mesh=mesh).check_on(mesh.num_devices)

    def make_model(self) -> Model:
        """The model without weights; the mesh must be resolved. Raises ValueError for frozen parameters that do not
        exist."""
        stages = make_stages(self.mesh, self.model.num_stage_layers)
        return Model(
            self.model,
            self.precision,
            self.execution,
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
        optimizer = Optimizer(self.optimizer, model.trained)
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
    lines = differences(_fixed(old.model), _fixed(new.model), "model.")
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


# ----------------------------------------------------------------------------- command line

SPELLED = {"true": True, "false": False, "none": None}


def override(config: Config, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
    """The config with overrides applied: `--section.field=value` arguments, or {"section.field": value}.

    Raises ValueError for the first invalid one.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"--{name}={_as_typed(value)}" for name, value in overrides.items()]
    arguments = normalised(overrides)
    recipe = config
    config, arguments = _with_kinds(config, arguments)
    config = _with_source(config, arguments)
    fields = {option.name: option for option in options(config)}
    given = {}
    for argument in arguments:
        name, _, value = argument[2:].partition("=")
        if name not in fields and name in RENAMED:
            raise ValueError(f"--{name} is now --{RENAMED[name]}")
        if name not in fields:
            raise ValueError(f"--{name} is {_unknown(config, name, fields)}")
        given[name] = _read(fields[name], value)
    config = _replaced(config, {fields[name].path: value for name, value in given.items()})
    return _fitted(recipe, config, set(given)) if given else config


def _unknown(config: Config, name: str, fields: Iterable[str]) -> str:
    """What is wrong with a name that no field has: another kind of model or task has it, or it is mistyped."""
    section = name.split(".")[0]
    if section in KINDS:
        kinds = [
            kind
            for kind, chosen in KINDS[section].all().items()
            if name in {option.name for option in options(chosen(), f"{section}.")}
        ]
        if kinds:
            return (
                f"a field of {section}.kind={' and '.join(kinds)}, not of {section}.kind="
                f"{getattr(config, section).kind}; leave it out"
            )
    return "unknown" + (did_you_mean(name, fields, "--") or "; --help shows all fields")


def _read(option: Option, text: str) -> Any:
    """The value of what was typed: commas separate list elements; true, false and none may be lower case."""
    value = SPELLED.get(text.lower(), text)
    if type(value) in option.kinds and value is not text:
        return value
    try:
        return option.read_type([part for part in text.split(",") if part] if option.is_list else text)
    except ValueError:
        raise ValueError(f"{option.name}={text!r} is not {describe(option.hint)}") from None


def _replaced(config: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """The config with these values, by the names of the fields that lead to them."""
    changes = {}
    for name in dict.fromkeys(path[0] for path in values):
        own = {path[1:]: value for path, value in values.items() if path[0] == name}
        changes[name] = own[()] if () in own else _replaced(getattr(config, name), own)
    return dataclasses.replace(config, **changes)


def _with_kinds(config: Config, arguments: list[str]) -> tuple[Config, list[str]]:
    """--model.kind=NAME and --task.kind=NAME take the defaults of that kind, except for fields that both have, like
    sizes: the recipe's."""
    for section, kinds in KINDS.items():
        flag = f"--{section}.kind"
        for argument in arguments:
            name, _, kind = argument.partition("=")
            before = getattr(config, section)
            if name == flag and kind != before.kind:
                chosen = kinds.of(kind)
                names = {field.name for field in dataclasses.fields(chosen)} - {"kind"}
                common = {field.name for field in dataclasses.fields(before)} & names
                new = chosen(**{name: getattr(before, name) for name in common})
                config = dataclasses.replace(config, **{section: new})
        arguments = [argument for argument in arguments if not argument.startswith(f"{flag}=")]
    return config, arguments


SOURCES = {"paths": "indexed", "text": "text"}  # field of data -> the source that reads it


def _with_source(config: Config, arguments: list[str]) -> Config:
    """--data.source=NAME drops the files and the tokenizer of the recipe's own source. Without it, the source is the
    one that reads --data.paths or --data.text."""
    given = dict(argument[2:].split("=", 1) for argument in arguments)
    implied = [(field, source) for field, source in SOURCES.items() if given.get(f"data.{field}")]
    source = given.get("data.source", config.data.source)
    if "data.source" not in given and len(implied) == 1:
        ((field, source),) = implied
        if source != config.data.source:
            logger.info("data.source=%r, implied by data.%s (the recipe has %r)", source, field, config.data.source)
    for kind in typing.get_args(SourceKind):
        if source == kind != config.data.source:
            return dataclasses.replace(config, data=config.data.of_source(kind))
    return config


def _fitted(recipe: Config, config: Config, overridden: set[str]) -> Config:
    """The config with values of the recipe adapted to the overrides, each reported in the log.

    overridden: 'section.field' of the overrides, which are never changed.
    """
    check_fields(config, "--")
    fitted: dict[str, Any] = {}
    free = [f"mesh.{axis}" for axis, size in config.mesh.sizes().items() if size == -1]
    if not overridden.isdisjoint(free):  # it takes the rest of the devices instead of that of the recipe
        fitted |= {field: 1 for field in free if field not in overridden}
    if "optimizer.warmup_steps" not in overridden and config.optimizer.schedule != "constant":
        steps = config.optimizer.end_of_decay(config.training.full_batch_steps)
        recipe_steps = recipe.optimizer.end_of_decay(recipe.training.full_batch_steps)
        if config.optimizer.warmup_steps >= steps:
            fitted["optimizer.warmup_steps"] = int(config.optimizer.warmup_steps * steps / recipe_steps)
    chooses_data = not overridden.isdisjoint({"data.source", "data.paths", "data.tokenizer"})
    if chooses_data and "model.vocab_size" not in overridden:
        with contextlib.suppress(ValueError, OSError):  # what is wrong with the data, `check` says
            num_ids = config.task.num_token_ids(config.data, config.model.vocab_size)
            if num_ids > config.model.vocab_size:
                fitted["model.vocab_size"] = num_ids
    if chooses_data and "training.sample_prompt" not in overridden and _is_no_text(config):
        fitted["training.sample_prompt"] = ""
    for field, value in fitted.items():
        section, name = field.split(".")
        part = getattr(config, section)
        if value != getattr(part, name):
            logger.info("%s=%r, adapted to the overrides (the recipe has %r)", field, value, getattr(part, name))
            config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{name: value})})
    return config


def _is_no_text(config: Config) -> bool:
    """Whether it trains on mock documents, or on files whose tokenizer is unknown."""
    with contextlib.suppress(ValueError, OSError):
        tokenizer = config.data_with_tokenizer().tokenizer
        return config.data.source == "mock" or tokenizer.startswith("null:")
    return False


def _as_typed(value: Any) -> str:
    """What one types for a value."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def normalised(arguments: Iterable[str]) -> list[str]:
    """Joins every override into one '--section.field=value' with underscores."""
    joined: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            joined.append(name.replace("-", "_").replace("__", "--", 1) + equals + value)
        elif joined and joined[-1].startswith("--"):
            joined[-1] += ("," if "=" in joined[-1] else "=") + argument
        else:
            raise ValueError(f"argument {argument!r} is not understood; write --section.field=value")
    for argument in joined:
        if "=" not in argument:
            raise ValueError(f"{argument} has no value; write {argument}=VALUE")
    return joined


# ----------------------------------------------------------------------------- JSON


# What one types instead of names that fields once had.
RENAMED = {
    f"model.{name}": f"execution.{name}"
    for name in (
        "scan_layers", "recompute", "recompute_every", "offload", "attention_backend", "context_attention",
        "deterministic",
    )
} | {
    f"training.{name}": f"launch.{name}"
    for name in ("exit_at_step", "exit_after_minutes", "hang_minutes", "max_restarts", "profile_steps")
} | {
    f"data.{name}": f"task.{name}"
    for name in (
        "kind", "mask_probability", "cross_document_attention", "reset_positions", "mask_document_end", "fim_rate",
        "fim_spm_rate", "fim_tokens", "on_misfit",
    )
} | {
    "model.z_loss": "training.z_loss",
    "model.label_smoothing": "training.label_smoothing",
    "training.compiler_options": "execution.compiler_options",
    "training.most_skipped_in_a_row": "training.max_consecutive_skips",
    "optimizer.most_grad_norm": "optimizer.skip_grad_norm_above",
    "model.recompute_modules": "execution.recompute=MODULES",
    "execution.recompute_modules": "execution.recompute=MODULES",
    "model.moe.router.softmax_first": "model.moe.router.score=softmax_all",
    "model.qk_norm_scope": "model.qk_norm=all_heads",
    "model.bias": "model.biases=NAMES",
    "model.qkv_bias": "model.biases=qkv,NAMES",
    "model.attention_out_bias": "model.biases=attention_out,NAMES",
    "model.mlp_bias": "model.biases=mlp,NAMES",
    "model.norm_bias": "model.biases=norm,NAMES",
    "model.head_bias": "model.biases=head,NAMES",
    "model.norm_zero_centered": "model.norm=layernorm_1p or rmsnorm_1p",
    "model.full_attention_every": "model.pattern=w5f",
    "model.no_rope_every": "model.pattern=f3n",
    "model.moe.layers": "model.pattern",
    "model.moe.router.sequence_aux_loss": "model.moe.router.aux_loss_scope=sequence",
    "model.moe.router.global_aux_loss": "model.moe.router.aux_loss_scope=batch",
    "optimizer.beta1": "optimizer.betas=BETA1,BETA2",
    "optimizer.beta2": "optimizer.betas=BETA1,BETA2",
    "data.weights": "data.paths=WEIGHT,PATH,...",
    "data.eval_weights": "data.eval_paths=WEIGHT,PATH,...",
    "model.moe.router.num_groups": "model.moe.router.groups=GROUPS,GROUPS_PER_TOKEN",
    "model.moe.router.top_groups": "model.moe.router.groups=GROUPS,GROUPS_PER_TOKEN",
    "model.rope.short_factors": "model.rope.factors",
    "model.rope.long_factors": "model.rope.factors",
    "model.rope.truncate": "model.rope.scaling=yarn_exact",
    "optimizer.wsd_style": "optimizer.schedule=wsd_STYLE",
} | {f"model.rope.{name}": "model.rope.ramp=LOW,HIGH" for name in ("low_frequency", "high_frequency")} | {
    f"model.rope.{name}": "model.rope.ramp=SLOW,FAST" for name in ("beta_slow", "beta_fast")
}  # fmt: skip


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
