"""Whatever value a field is given: the run can be checked and planned in bounded time, or one line refuses the value
with the name of the field."""

import contextlib
import dataclasses
import functools
import itertools
import math
import signal
from typing import Annotated, Literal

import numpy as np
import pytest

from megajax.config import Config
from megajax.fields.ranges import NonNegativeFloat, PositiveInt, Range, check_fields
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig
from megajax.models.interface import MODELS
from megajax.models.model import Model
from megajax.models.tower import TowerConfig
from megajax.parallel.schedule import make_stages
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import plan_device
from megajax.planning.step_time import step_times
from megajax.tasks.interface import task_of
from megajax.training.config import TrainingConfig

NUMBERS = [
    -(10**400), -(10**20), -1, 0, 1, 2, 3, 10_000, 2**16, 2**31 - 1, 2**31, 10**20, 10**400,
    -math.inf, -1e30, -0.5, -0.0, 1e-310, 1e-50, 0.5, 0.99999999999, 1.0, 1.0000001, 1e30, 1e39, 1e308, math.inf,
    math.nan,
]  # fmt: skip
TEXTS = [
    "", "x", "-1", "nan", "null:99999999999999999999", "t*99999|t*99999", "((t*9999)*9999)*9999", "* weight_decay=inf",
]  # fmt: skip
VALUES = [*NUMBERS, *TEXTS, None, True, (), {}, [1]]


OTHERS = {
    "decoder": dict(position="rope"),
    "hybrid": dict(
        position="rope",
        pattern="MG",
        mamba=MambaConfig(head_dim=8, num_groups=1),
        delta_net=DeltaNetConfig(value_head_dim=8),
    ),
    "t5": dict(num_decoder_layers=2, head_dim=4, decoder_length=8),
    "retro": dict(retrieval_layers=(1,), chunk_length=16),
    "multimodal": dict(
        position="rope", image_token=50, vision=TowerConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32)
    ),
}


def base_config(kind: str, pipeline: int) -> Config:
    """A family with its defaults, made small where it has the decoder's names for sizes."""
    small = dict(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64) | OTHERS.get(kind, {})
    chosen = MODELS.of(kind)
    model = chosen(**{field.name: small[field.name] for field in dataclasses.fields(chosen) if field.name in small})
    return Config(
        model=model,
        task=task_of(model),
        mesh=MeshConfig(pipeline=pipeline),
        training=TrainingConfig(global_batch_size=8, sequence_length=16, microbatch_size=1 if pipeline > 1 else None),
    )


def leaves(config, prefix: str = ""):
    """Names of all fields that are not configs themselves."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        yield from leaves(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else [prefix + field.name]


def with_value(config, name: str, value):
    first, _, rest = name.partition(".")
    return dataclasses.replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def section_of(config, name: str):
    """The config that has the field."""
    return functools.reduce(getattr, name.split(".")[:-1], config)


def num_devices(mesh: MeshConfig) -> int:
    return math.prod(size for size in mesh.sizes().values() if type(size) is int and size > 0)


def values_for(current) -> list:
    """VALUES, and for a tuple also tuples with each of them."""
    length = len(current) if isinstance(current, tuple) and current else 1
    tuples = [(value,) * length for value in VALUES] + [(1, 1, value) for value in VALUES]
    return VALUES + tuples if isinstance(current, tuple | None) else VALUES


@contextlib.contextmanager
def at_most(seconds: int):
    """Of processor time, so that a busy machine fails nothing."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@functools.cache
def model_of(model, precision, execution, stages, trained, frozen) -> Model:
    """As Config.make_model; making one takes 0.1 s, and most values change nothing about it."""
    return Model(model, precision, execution, stages=stages, trained=trained, frozen=frozen)


def plan(config: Config) -> None:
    stages = make_stages(config.mesh, config.model.num_stage_layers)
    patterns = config.training.trained, config.training.frozen
    model = model_of(config.model, config.precision, config.execution, stages, *patterns)
    program = config.make_program(model=model)
    memory, host = memory_per_device(program, config.training)
    assert sum(memory.values()) > 0
    assert 0 < step_times(program, config.training, plan_device("h100"), host).step < math.inf
    assert 0 < model.flops_per_token(config.training.sequence_length, causal=True) < math.inf
    schedule = config.optimizer.make_schedule(config.training.full_batch_steps)
    assert all(0 <= schedule(step) < math.inf for step in (0, 1, config.training.steps))
    assert Config.from_json(config.to_json()) == config


def families() -> list[str]:
    """Of the package, with mock data; tests register others."""
    with contextlib.suppress(ValueError):
        MODELS.of("")
    found = [kind for kind, one in MODELS.all().items() if one.__module__.startswith("megajax.")]
    return [kind for kind in found if kind != "bert"]


def extremes(values: list) -> list:
    """The largest of the numbers, and one of the others."""
    numbers = sorted(value for value in values if type(value) in (int, float))
    others = [value for value in values if value not in numbers]
    return [*numbers[-1:], *others[-1:]]


def check_field(base: Config, name: str) -> None:
    accepted = []
    for value in values_for(functools.reduce(getattr, name.split("."), base)):
        config = with_value(base, name, value)
        try:
            check_fields(section_of(config, name))  # check_on does this with all fields, and most values end here
            config = config.check_on(num_devices(config.mesh))
        except ValueError as refusal:
            assert "\n" not in str(refusal) and name.split(".")[-1] in str(refusal), (name, value)
        else:
            accepted.append(value)
    for value in extremes(accepted):
        config = with_value(base, name, value)
        try:
            plan(config.check_on(num_devices(config.mesh)))
        except ValueError as refusal:  # the model knows the names of parameters
            known_by_name = ("training.trained", "training.frozen", "optimizer.groups")
            assert name in known_by_name and name in str(refusal), (name, value)


# The other sections are those of every family.
SECTIONS = {(kind, 1): "model." for kind in families()} | {("decoder", 1): "", ("decoder", 2): ("mesh.", "training.")}


@pytest.mark.parametrize("kind, pipeline", [
    ("decoder", 1),
    *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in families() if kind != "decoder"),
    pytest.param("decoder", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_any_value_is_planned_or_refused_by_name_in_one_line(kind, pipeline):
    base = base_config(kind, pipeline)
    plan(base.check_on(pipeline))
    for name in leaves(base):
        if name.startswith(SECTIONS[kind, pipeline]):
            with at_most(30):
                check_field(base, name)


# All numbers that a field has nothing to say about are allowed by the test above.
NONSENSE = {
    "model.vocab_multiple": 999_999_999, "model.mamba.dt_min": 2.0**31, "model.mamba.dt_max": 1e30,
    "model.norm_epsilon": 2.0**31, "model.init_std": 1e30, "model.embedding_multiplier": 1e30, "model.mtp_loss": 1e30,
    "model.rope.base": 1e30, "model.rope.factor": 1e30, "model.rope.attention_factor": 1e30,
    "model.moe.router.z_loss": 1e30, "optimizer.learning_rate": 1e30, "optimizer.epsilon": 1e30,
    "optimizer.weight_decay": 1e30, "training.z_loss": 1e30, "execution.expert_buffer": 1e30,
    "launch.cpu_devices": 2**31 - 1, "mesh.tensor": 0, "mesh.data": -2,
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_by_name_in_one_line_for_a_run_and_for_a_plan(name):
    base = base_config("hybrid" if "mamba" in name else "decoder", 1)
    config = with_value(base, name, NONSENSE[name])
    for use in (config.check, config.for_plan):
        with pytest.raises(ValueError, match=f"^{name}=[^\n]* must be [^\n]*$"):
            use()


@pytest.mark.parametrize("scaling", ["none", "linear", "dynamic", "llama3", "yarn", "yarn_exact", "longrope"])
def test_any_rotary_embedding_that_is_accepted_has_finite_frequencies(scaling):
    factors = (1.0,) * 8 if scaling == "longrope" else ()
    base = RopeConfig(scaling=scaling, factors=factors + factors)
    for name, value in itertools.product(leaves(base), VALUES):
        config = with_value(base, name, value)
        try:
            check_fields(config)
            config.check(16)
        except ValueError as refusal:
            assert name in str(refusal)
        else:
            with np.errstate(all="raise", under="ignore"):
                assert np.all(np.isfinite(config.inverse_frequencies(16))) and math.isfinite(config.concentration)


def test_a_number_that_is_not_finite_in_config_json_is_refused():
    text = Config().to_json().replace('"learning_rate": 0.0003', '"learning_rate": Infinity')
    with pytest.raises(ValueError, match="^optimizer.learning_rate=inf must be a finite number .*; use --optimizer."):
        Config.from_json(text).check()


@dataclasses.dataclass(frozen=True)
class Example:
    count: PositiveInt = 1
    share: Annotated[float, Range(above=0, at_most=1)] | None = None
    shares: tuple[NonNegativeFloat, NonNegativeFloat] = (1.0, 0.0)
    names: tuple[str, ...] = ()
    mode: Literal["slow", "fast"] = "fast"


@pytest.mark.parametrize("changes, rule", [
    (dict(count=0), "count=0 must be a whole number (int32), at least 1; use --part.count=1"),
    (dict(count=2**31), "count=2147483648 must be a whole number (int32), at least 1; use --part.count=1"),
    (dict(count=True), "count=True must be a whole number (int32), at least 1; use --part.count=1"),
    (dict(share=1e-50), "share=1e-50 must be a finite number (float32), above 0 and at most 1, or None"),
    (dict(shares=(1.0, -1.0)), "shares=(1.0, -1.0) must be 2 finite numbers (float32), separated by commas, at least 0;"
                               " use --part.shares=1.0,0.0"),
    (dict(names=("a", 1)), "names=('a', 1) must be a list of texts, separated by commas; use --part.names="),
    (dict(mode="idle"), "mode='idle' must be one of slow, fast; use --part.mode=fast"),
])  # fmt: skip
def test_a_refusal_says_field_value_rule_and_way_out(changes, rule):
    with pytest.raises(ValueError) as refusal:
        check_fields(Example(**changes), "--part.")
    assert str(refusal.value) == f"part.{rule}"


def test_whole_numbers_are_numbers_and_none_is_allowed_where_it_says_so():
    check_fields(Example(count=2**31 - 1, share=1, shares=(1, 0), names=("a", "b")))
