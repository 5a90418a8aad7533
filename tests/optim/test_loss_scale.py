"""The sequence of scales is that of Megatron-LM's DynamicGradScaler, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config
from megajax.optim.loss_scale import LossScale, LossScaleRule
from megajax.overrides import override


@pytest.fixture(scope="module")
def run():
    """(rule, one letter per step: o overflow, . none) -> the scale after each step."""
    after = jax.jit(LossScale.after, static_argnums=2)

    def scales(rule: LossScaleRule, steps: str) -> list[float]:
        state = LossScale.initial(rule)
        found = []
        for step in steps:
            state = after(state, jnp.bool(step == "o"), rule)
            found.append(float(state.scale))
        return found

    return scales


# Written down from Megatron's class: hysteresis counts overflows since the last growth, consecutive or not, and is
# restored by growth alone; the step after which the scale grows is the growth_interval-th without overflow.
@pytest.mark.parametrize(
    "rule, steps, scales",
    [
        ((16, 1, 3, 2), "o.o.oo", [16, 16, 8, 8, 4, 2]),
        ((16, 1, 3, 2), "o...o..o", [16, 16, 16, 32, 32, 32, 32, 16]),
        ((16, 1, 3, 2), "..o...", [16, 16, 16, 16, 16, 32]),
        ((4, 1.5, 2, 1), "oooo..o", [2, 1.5, 1.5, 1.5, 1.5, 3, 1.5]),
        ((16, 1, 3, 3), "oooo", [16, 16, 8, 4]),
        ((16, 1, 0, 2), "ooo....o", [16] * 8),
        ((16, 1, 1, 1), "..o.", [32, 64, 32, 64]),
    ],
    ids=["later_overflows", "growth", "counts_again", "minimum", "hysteresis", "constant", "every_step"],
)
def test_scales_are_those_of_megatron(run, rule, steps, scales):
    assert run(LossScaleRule(*rule), steps) == scales


def test_the_default_starts_at_megatrons_2_to_the_32_and_tolerates_one_overflow(run):
    rule = Config().optimizer.loss_scale_rule
    assert rule == (2.0**32, 1.0, 1000, 2)
    assert run(rule, "ooo") == [2.0**32, 2.0**31, 2.0**30]


def test_gradients_are_divided_by_the_scale_in_float32():
    state = LossScale.of(2.0**32, 0, 2)
    unscaled = state.unscaled({"w": jnp.float32([2.0**20, -1.0, jnp.inf])})["w"]
    np.testing.assert_array_equal(unscaled, np.float32([2.0**-12, -(2.0**-32), np.inf]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--optimizer.loss_scale=1,2,1000,2"], "optimizer.loss_scale=1,2,1000,2: the minimum"),
        (["--optimizer.loss_scale=0,1,1000,2"], "optimizer.loss_scale"),
        (["--precision.recipe=fp16", "--precision.compute=float32"], "precision.recipe=fp16 with precision.compute="),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        override(Config(), arguments).check()
