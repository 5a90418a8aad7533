"""Overrides of a configuration: `--section.field=value` of the command line, or {"section.field": value}."""

import contextlib
import dataclasses
import logging
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from megajax.config import KINDS, Config
from megajax.data.config import DataConfig, SourceKind
from megajax.data.prepare.conversation_records import form_of
from megajax.data.prepare.hugging_face_rows import rows_of
from megajax.fields.ranges import check_fields, describe
from megajax.fields.suggestions import did_you_mean
from megajax.terminal.command_line import Option, options

logger = logging.getLogger("megajax")

SPELLED = {"true": True, "false": False, "none": None}

# Times that of a recipe that fine-tunes all parameters, at any rank (Schulman et al. 2025,
# thinkingmachines.ai/blog/lora).
LORA_LEARNING_RATE = 10

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


def override(config: Config, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
    """The config with overrides applied: `--section.field=value` arguments, or {"section.field": value}, whose values
    are texts as one types them or objects.

    Raises ValueError for the first invalid one.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(argument[2:].split("=", 1) for argument in normalised(overrides))
    recipe = config
    typed = _with_task(config, overrides)
    config = _with_source(_with_kinds(config, typed), typed)
    fields = {option.name: option for option in options(config)}
    given = {}
    for name, value in typed.items():
        if name not in fields and name in RENAMED:
            raise ValueError(f"--{name} is now --{RENAMED[name]}")
        if name not in fields:
            raise ValueError(f"--{name} is {_unknown(config, name, fields)}")
        given[name] = _read(fields[name], value)
    if given.get("training.epochs") is not None and "training.steps" in given:
        raise ValueError("--training.epochs and --training.steps both say how long the run is; leave one out")
    if "training.steps" in given:
        given["training.epochs"] = None
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


def _read(option: Option, typed: Any) -> Any:
    """The value of what was typed, or of an object: commas separate list elements; true, false and none may be lower
    case."""
    text = str(typed)
    value = SPELLED.get(text.lower(), text)
    if type(value) in option.kinds and value is not text:
        return value
    with contextlib.suppress(ValueError):
        if option.is_list:
            return option.read_type(_elements(typed))
        if not isinstance(typed, list | tuple):
            return option.read_type(text)
    raise ValueError(f"{option.name}={typed!r} is not {describe(option.hint)}")


def _elements(typed: Any) -> list[str]:
    """Of a list, or of what one types for it."""
    if isinstance(typed, list | tuple):
        return [str(part) for part in typed]
    return [part for part in str(typed).split(",") if part]


def _replaced(config: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """The config with these values, by the names of the fields that lead to them."""
    changes = {}
    for name in dict.fromkeys(path[0] for path in values):
        own = {path[1:]: value for path, value in values.items() if path[0] == name}
        changes[name] = own[()] if () in own else _replaced(getattr(config, name), own)
    return dataclasses.replace(config, **changes)


def _with_task(config: Config, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Files and datasets of conversations in --data.paths are for the task that reads them, unless a task is named."""
    if "task.kind" in given or config.task.reads_conversations or given.get("data.source", "indexed") != "indexed":
        return given
    with contextlib.suppress(ValueError, ImportError):  # what is wrong with the paths, `check` says
        data = DataConfig(paths=tuple(_elements(given.get("data.paths", ""))))
        chats = (name for name in data.datasets if form_of(dict.fromkeys(rows_of(name).columns(), True)))
        if found := data.conversations or list(chats):
            (kind,) = [kind for kind, task in KINDS["task"].all().items() if task.reads_conversations]
            logger.info("task.kind=%r, implied by data.paths=%s", kind, found[0])
            return {**given, "task.kind": kind}
    return given


def _with_kinds(config: Config, given: Mapping[str, Any]) -> Config:
    """--model.kind=NAME and --task.kind=NAME take the defaults of that kind, except for fields that both have, like
    sizes: the recipe's."""
    for section, kinds in KINDS.items():
        before = getattr(config, section)
        kind = given.get(f"{section}.kind", before.kind)
        if kind != before.kind:
            chosen = kinds.of(kind)
            names = {field.name for field in dataclasses.fields(chosen)} - {"kind"}
            common = {field.name for field in dataclasses.fields(before)} & names
            new = chosen(**{name: getattr(before, name) for name in common})
            config = dataclasses.replace(config, **{section: new})
    return config


SOURCES = {"paths": "indexed", "text": "text"}  # field of data -> the source that reads it


def _with_source(config: Config, given: Mapping[str, Any]) -> Config:
    """--data.source=NAME drops the files and the tokenizer of the recipe's own source. Without it, the source is the
    one that reads --data.paths or --data.text."""
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
    # A recipe with data of its own says how long that is trained on.
    fine_tunes = "data.paths" in overridden and config.task.default_epochs is not None and not recipe.data.paths
    if fine_tunes and "training.epochs" not in overridden:
        fitted["training.epochs"] = config.task.default_epochs
    if "optimizer.warmup_steps" not in overridden and config.optimizer.schedule != "constant":
        steps = config.optimizer.end_of_decay(config.training.full_batch_steps)
        recipe_steps = recipe.optimizer.end_of_decay(recipe.training.full_batch_steps)
        if config.optimizer.warmup_steps >= steps:
            fitted["optimizer.warmup_steps"] = int(config.optimizer.warmup_steps * steps / recipe_steps)
        elif fine_tunes:
            fitted["optimizer.warmup_steps"] = min(config.optimizer.warmup_steps, int(steps / 10))
    rates = {f"optimizer.{name}" for name in ("learning_rate", "min_learning_rate")}
    begins_lora = config.lora.rank is not None and recipe.lora.rank is None
    if begins_lora and recipe.checkpoint.start_from and overridden.isdisjoint(rates):
        fitted["optimizer.learning_rate"] = LORA_LEARNING_RATE * config.optimizer.learning_rate
        fitted["optimizer.min_learning_rate"] = LORA_LEARNING_RATE * config.optimizer.min_learning_rate
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
