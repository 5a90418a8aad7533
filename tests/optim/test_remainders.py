"""Weights in bfloat16 with their remainders are float32 weights: to the bit, with every update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.optim.config import OptimizerConfig
from megajax.optim.optimizer import Optimizer
from megajax.optim.remainders import WithRemainders, joined, split, unpacked
from megajax.parameters import Parameter

RECORDS = {
    "matrix": Parameter(axes=("embed", "mlp"), role="matrix"),
    "bias": Parameter(axes=("mlp",), role="vector"),
}
SHAPES = {"matrix": (16, 32), "bias": (32,)}


def test_any_finite_number_is_split_to_the_nearest_and_joined_to_itself():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    upper = np.arange(0, 2**16, 7, dtype=np.uint32) << 16
    edges = [upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    numbers = np.concatenate([bits, *edges]).view(np.float32)
    numbers = numbers[np.abs(numbers) < float(jnp.finfo(jnp.bfloat16).max)]  # NaN, too, is not below it
    rounded, remainder = jax.jit(split)(numbers)
    assert (rounded.dtype, remainder.dtype) == (jnp.bfloat16, jnp.uint16)
    nearest = np.asarray(jnp.asarray(numbers).astype(jnp.bfloat16), np.float64)
    wide = numbers.astype(np.float64)
    np.testing.assert_array_equal(np.abs(np.asarray(rounded, np.float64) - wide), np.abs(nearest - wide))
    np.testing.assert_array_equal(jax.jit(joined)(rounded, remainder).view(np.uint32), numbers.view(np.uint32))


def random_tree(seed: int, scale: float) -> dict:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "changes", [{}, {"name": "muon"}, {"moments": "bfloat16", "name": "lion"}, {"offload_state": True}]
)
def test_updates_are_those_of_float32_weights_to_the_bit(changes):
    """Far smaller ones than a bfloat16 weight could take, a skipped one among them."""
    optimizer = Optimizer(OptimizerConfig(**changes), RECORDS)
    update = jax.jit(optimizer.update)
    params = {"matrix": random_tree(0, 1.0)["matrix"].astype(jnp.bfloat16), "bias": random_tree(0, 1.0)["bias"]}
    params32 = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    state, state32 = optimizer.init(params), optimizer.init(params32)
    assert isinstance(state, WithRemainders) and not isinstance(state32, WithRemainders)
    for step in range(5):
        grads = random_tree(1 + step, float("nan") if step == 2 else 1.0)
        forms = jax.tree.map(lambda a: (a.shape, a.dtype), (params, state))
        params, state, _ = update(grads, state, params, jnp.float32(1e-5))
        assert jax.tree.map(lambda a: (a.shape, a.dtype), (params, state)) == forms
        params32, state32, _ = update(grads, state32, params32, jnp.float32(1e-5))
        weights = unpacked(*jax.device_get((params, state.remainders)))
        jax.tree.map(np.testing.assert_array_equal, (weights, state.state), (params32, state32))
    assert params["matrix"].dtype == jnp.bfloat16
    start = random_tree(0, 1.0)["matrix"].astype(jnp.bfloat16).astype(jnp.float32)
    moved = np.abs(weights["matrix"] - start)
    assert moved.min() > 0 and moved.max() < 1e-4
