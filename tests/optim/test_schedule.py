"""Schedules are Megatron-LM's, number for number. tests/oracles/numbers.npz: made with Megatron Core 0.20.0."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.mesh.config import MeshConfig
from megajax.optim.config import OptimizerConfig
from megajax.training.config import TrainingConfig
from megajax.training.loop import Trainer

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "numbers.npz")
META = json.loads(str(ORACLE["lr/meta"]))
STEPS = META["decay"]


def make_schedule(**changes):
    is_wsd = changes.get("schedule", "cosine").startswith("wsd")
    fields = dict(
        learning_rate=META["max_lr"],
        min_learning_rate=META["min_lr"],
        warmup_steps=META["warmup"],
        wsd_decay_steps=META["wsd_decay"] if is_wsd else 0,
    )
    return OptimizerConfig(**fields | changes).make_schedule(STEPS)


@pytest.mark.parametrize(
    "key, style",
    [
        ("constant", "constant"),
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("inverse-square-root", "inverse_square_root"),
        ("WSD-exponential", "wsd"),
        ("WSD-linear", "wsd_linear"),
        ("WSD-cosine", "wsd_cosine"),
        ("WSD-minus_sqrt", "wsd_minus_sqrt"),
    ],
)
def test_schedule_equals_megatron(key, style):
    schedule = make_schedule(schedule=style)
    expected = ORACLE[f"lr/{key}"]
    ours = [schedule(step) for step in range(len(expected))]
    # Both sides are float64; 1e-12 leaves room for another order of the same few operations, nothing more.
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse_square_root", "wsd"])
def test_fractional_steps_lie_between_their_neighbours(style):
    schedule = make_schedule(schedule=style)
    for step in range(0, STEPS, 7):
        low, high = sorted((schedule(step), schedule(step + 1)))
        assert low <= schedule(step + 0.37) <= high


def test_no_warm_up_starts_at_the_peak():
    assert make_schedule(warmup_steps=0, schedule="cosine")(0) == META["max_lr"]
    assert make_schedule(warmup_steps=0, schedule="inverse_square_root")(0) == META["max_lr"]


def test_decay_steps_default_to_the_length_of_the_run():
    assert make_schedule()(STEPS) == pytest.approx(META["min_lr"], rel=1e-12)
    assert make_schedule(decay_steps=2 * STEPS)(STEPS) > META["min_lr"]


def test_a_rampup_of_the_batch_ends_at_the_minimum_with_megatrons_rate_at_every_sample():
    training = TrainingConfig(steps=190, global_batch_size=1024, batch_size_rampup=(32, 32, 60_000))
    schedule, optimizer = training.schedule(MeshConfig()), OptimizerConfig(warmup_steps=10)
    optimizer.check(training.full_batch_steps)
    trainer = object.__new__(Trainer)
    trainer.config = training
    trainer.program = SimpleNamespace(mesh_config=MeshConfig(), optimizer=SimpleNamespace(config=optimizer))
    # Megatron-LM counts samples: --lr-decay-samples is --train-samples if it is not given.
    samples = schedule.num_samples(training.steps)
    in_samples = dataclasses.replace(optimizer, warmup_steps=10 * 1024).make_schedule(samples)
    rates = [trainer.learning_rate(step) for step in range(training.steps)]
    expected = [in_samples(schedule(step).first_sample) for step in range(training.steps)]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=0)
    assert trainer.learning_rate(training.steps) == pytest.approx(3e-5, rel=1e-12)
    assert rates[-1] == pytest.approx(3e-5, rel=0.05)  # one update before the end
    assert trainer.learning_rate(training.steps + 1) == 3e-5


def test_without_a_rampup_the_run_is_as_long_as_its_steps():
    assert TrainingConfig(steps=12_345, global_batch_size=7).full_batch_steps == 12_345


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(learning_rate=1e-6), "optimizer.min_learning_rate"),
        (dict(warmup_steps=STEPS), f"optimizer.warmup_steps={STEPS}"),
        (dict(schedule="wsd", wsd_decay_steps=0), "optimizer.wsd_decay_steps=0"),
        (dict(schedule="wsd", wsd_decay_steps=95), "optimizer.wsd_decay_steps=95"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_with_field_and_value(changes, field):
    with pytest.raises(ValueError, match=field):
        make_schedule(**changes)


def test_constant_schedule_ignores_the_minimum_and_the_length():
    schedule = make_schedule(schedule="constant", min_learning_rate=1.0, warmup_steps=STEPS)
    assert schedule(10 * STEPS) == META["max_lr"]
