"""Moments in bfloat16 and float8: the numbers of the formats, what is stored and where, and updates from it."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.config import Config, incompatibilities
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.optim.distributed import optimizer_shardings
from megajax.optim.moments import Float8Moments, from_float8, to_float8
from megajax.optim.optimizer import Optimizer
from megajax.overrides import override
from megajax.parameters import Parameter, name_of
from megajax.planning.memory import bytes_per_device
from megajax.precision import PrecisionConfig

RECORDS = {
    "kernel": Parameter(("layers", "embed", "mlp"), "matrix"),
    "bias": Parameter(("layers", "mlp"), "vector"),
    "embedding": Parameter(("vocab", "embed"), "embedding"),
}
SHAPES = {"kernel": (2, 4, 8), "bias": (2, 8), "embedding": (6, 4)}
RATE = jnp.float32(1e-2)


def tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def round_trip():
    """(moment, seed, is_square) -> (float8 values, scales, the moment restored), as NumPy arrays."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(moment, seed, is_square):
        values, scales = to_float8(moment, seed, is_square=is_square)
        return values, scales, from_float8(values, scales, is_square=is_square)

    return lambda moment, seed, is_square: jax.device_get(run(moment, np.int32(seed), is_square))


def test_float8_is_one_of_the_two_nearest_e4m3_of_each_row_and_right_on_average(round_trip):
    rng = np.random.default_rng(0)
    moment = (rng.normal(size=(64, 256)) * 10.0 ** rng.uniform(-12, 3, (64, 1))).astype(np.float32)
    moment[5] = 0.0
    found = [round_trip(moment, seed, False) for seed in range(64)]
    values, scales, _ = found[0]
    assert values.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (64, 1)
    np.testing.assert_allclose(scales, np.abs(moment).max(-1, keepdims=True) / 448, rtol=3e-7)
    scaled = np.abs(np.divide(moment, scales, where=scales > 0, out=np.zeros_like(moment)))
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # 0 to 448
    above = np.minimum(np.searchsorted(numbers, scaled * (1 - 1e-6)), 126)
    below = np.maximum(np.searchsorted(numbers, scaled * (1 + 1e-6), side="right") - 1, 0)
    for values, _, _ in found:
        magnitude = np.abs(values.astype(np.float32))
        assert np.all((magnitude == numbers[above]) | (magnitude == numbers[below]))
        assert np.all(np.sign(values.astype(np.float32)) * np.sign(moment) >= 0)
    mean = np.mean([np.abs(values.astype(np.float32)) for values, _, _ in found], 0)
    gap = np.maximum(numbers[above] - numbers[below], 2.0**-9)
    # 64 draws: a standard deviation of at most gap / 16; over all 16,384 numbers 1 / 128 of that.
    assert np.max(np.abs(mean - scaled) / gap) < 5.5 / 16
    assert abs(np.mean((mean - scaled) / gap)) < 5 / 16 / 128


def test_float8_of_second_moments_spans_2_to_the_36_and_has_no_zeros(round_trip):
    moment = np.float32([[1e-4 * 4.0**-n for n in range(22)] + [0.0]])
    restored = round_trip(moment, 1, True)[2][0]
    normal = moment[0] >= moment[0, 0] * 4.0**-14  # the root is at least 2^-6 of the format's 448
    np.testing.assert_allclose(restored[normal], moment[0][normal], rtol=(1 + 2**-3) ** 2 - 1)
    smallest = (2.0**-9 / 448) ** 2 * moment[0, 0]
    assert np.all(restored[:-1] >= smallest * (1 - 1e-5)) and restored[-1] == 0
    np.testing.assert_allclose(restored[20:-1], smallest, rtol=1e-5)


def test_float8_second_moments_fall_when_there_is_no_gradient(round_trip):
    """Rounded to nearest they would not: the root falls by 2.5 % in a step, half the distance of e4m3 is 3 %."""
    moment = np.full((1, 512), 0.1, np.float32)
    for step in range(60):
        moment = np.float32(0.95) * moment
        moment[0, 0] = 1.0  # keeps the scale
        moment = round_trip(moment, step, True)[2]
    # The mean of 511 numbers; rounding the root adds its variance to the square.
    np.testing.assert_allclose(np.mean(moment[0, 1:]), 0.1 * 0.95**60, rtol=0.3)


def test_bfloat16_moments_are_rounded_to_nearest_after_each_update():
    """AdamW, written out for one matrix, with the moments that the step before has stored."""
    config = OptimizerConfig(moments="bfloat16", clip_norm=0.0, weight_decay=0.0)
    optimizer = Optimizer(config, RECORDS)
    params = tree(0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    m = v = np.zeros(SHAPES["kernel"], np.float32)
    want = np.asarray(params["kernel"])
    for step in range(1, 4):
        params, state, _ = update(tree(step), state, params, RATE)
        g = np.asarray(tree(step)["kernel"])
        m = np.float32(config.betas[0]) * m + np.float32(1 - config.betas[0]) * g
        v = np.float32(config.betas[1]) * v + np.float32(1 - config.betas[1]) * g * g
        want = want - 1e-2 * (m / (1 - config.betas[0] ** step)) / (
            np.sqrt(v / (1 - config.betas[1] ** step)) + config.epsilon
        )
        m, v = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in (m, v))
    # One rounding of a moment to another neighbour, 2^-8, of an update of 0.01.
    np.testing.assert_allclose(params["kernel"], want, rtol=0, atol=1e-4)
    adam = next(
        leaf for leaf in jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "nu")) if hasattr(leaf, "nu")
    )
    np.testing.assert_allclose(np.asarray(adam.mu["kernel"], np.float32), m, rtol=2.0**-7)
    assert {name: leaf.dtype for name, leaf in adam.nu.items()} == {
        "kernel": jnp.bfloat16, "bias": jnp.float32, "embedding": jnp.bfloat16
    }  # fmt: skip


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["adamw", "muon", pytest.param("lion", marks=SLOW), pytest.param("sgd", marks=SLOW)])
def test_any_rule_trains_from_rounded_moments(name):
    """The first update reads zeros and so is that of float32 moments; later ones differ by the rounding."""

    def run(moments: str):
        optimizer = Optimizer(OptimizerConfig(name=name, moments=moments), RECORDS)
        update = jax.jit(optimizer.update)
        found = [tree(0)]
        state = optimizer.init(found[0])
        for step in range(1, 4):
            params, state, _ = update(tree(step), state, found[-1], RATE)
            found.append(params)
        bad = tree(4) | {"bias": jnp.full(SHAPES["bias"], jnp.nan)}
        after = update(bad, state, params, RATE)
        assert after[2]["skipped"] == 1 and bits(after[:2]) == bits((params, state))
        return found[1:], {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.shape == SHAPES["kernel"]}

    exact, dtypes = run("float32")
    assert dtypes == {"float32"}
    moved = np.mean(np.abs(exact[-1]["kernel"] - exact[0]["kernel"]))
    for moments, dtype, bound in (("bfloat16", "bfloat16", 0.02), ("float8", "float8_e4m3fn", 0.2)):
        rounded, dtypes = run(moments)
        assert dtypes == {dtype}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), rounded[0], exact[0])
        np.testing.assert_allclose(rounded[-1]["bias"], exact[-1]["bias"], rtol=1e-6, atol=1e-7)  # remains float32
        assert np.mean(np.abs(rounded[-1]["kernel"] - exact[-1]["kernel"])) < bound * moved


@pytest.mark.parametrize("zero1", [False, True])
def test_moments_and_scales_are_sharded_like_their_parameter(make_test_mesh, zero1):
    config = DecoderConfig(num_layers=2, embed_dim=256, num_heads=4, mlp_dim=512, vocab_size=512)
    model = Model(config, PrecisionConfig())
    mesh = make_test_mesh(data=2, fsdp=2, tensor=2)
    abstract, shardings = model.abstract_weights, model.shardings(mesh)
    bytes_of = {}
    for moments in ("float32", "bfloat16", "float8"):
        optimizer = Optimizer(OptimizerConfig(moments=moments, shard_over_data=zero1), model.trained)
        state = jax.eval_shape(optimizer.init, abstract)
        placed = optimizer_shardings(optimizer, abstract, shardings, mesh=mesh, shard_over_data=zero1)
        bytes_of[moments] = bytes_per_device(state, placed)
    assert isinstance(state, Float8Moments)
    named = {name_of(path): sharding.spec for path, sharding in jax.tree_util.tree_leaves_with_path(placed)}
    (scale,) = (spec for name, spec in named.items() if "scales" in name and name.endswith("nu.layers.dense.mlp.up"))
    (value,) = (spec for name, spec in named.items() if "values" in name and name.endswith("nu.layers.dense.mlp.up"))
    assert scale == P(*value[:-1], None) and "fsdp" in str(scale)
    # Norm scales and biases remain float32, and rows of 64 to 512 numbers have a scale of 4 bytes.
    assert 0.5 <= bytes_of["bfloat16"] / bytes_of["float32"] < 0.51
    assert 0.25 <= bytes_of["float8"] / bytes_of["float32"] < 0.28


def test_a_run_resumes_with_bfloat16_instead_of_float32_but_not_with_float8():
    configs = {moments: override(Config(), [f"--optimizer.moments={moments}"]) for moments in ("bfloat16", "float8")}
    assert incompatibilities(Config(), configs["bfloat16"]) == []
    assert incompatibilities(Config(), configs["float8"]) == ["optimizer.moments: float32 -> float8"]
