"""Rotary frequencies equal Megatron's (tests/oracles/numbers.npz), and the rotation is one."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.attention.rope import RopeConfig, apply_rope, rope_tables
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig

ORACLE = np.load(Path(__file__).parents[2] / "oracles" / "numbers.npz")
HUGGING_FACE = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face.npz")  # make_hugging_face.py
FLOAT32 = 3e-7  # Megatron's frequencies are float32: a few units in the last place
YARN = RopeConfig(scaling="yarn", factor=40.0, original_length=4096)


def positions(length):
    return jnp.arange(length, dtype=jnp.int32)[None]


def heads(length, head_dim=16):
    return jax.random.normal(jax.random.key(0), (1, length, 2, head_dim))


def test_frequencies_equal_megatrons():
    plain, llama3 = RopeConfig(), RopeConfig(base=500_000.0, scaling="llama3")
    np.testing.assert_allclose(plain.inverse_frequencies(64), ORACLE["rope/base10000_dim64_inv_freq"], rtol=FLOAT32)
    wanted = ORACLE["rope/llama3_base500000_dim64_inv_freq"]
    np.testing.assert_allclose(llama3.inverse_frequencies(64), wanted, rtol=FLOAT32)
    assert not np.allclose(wanted, RopeConfig(base=500_000.0).inverse_frequencies(64))


def test_yarn_angles_equal_megatrons():
    """Angles only: mscale = mscale_all_dim makes the oracle's concentration 1; ours is the paper's (equation 22)."""
    wanted = ORACLE["rope/yarn40_dim64_angles_8"][:, 0, 0, :32]
    angles = np.arange(8)[:, None] * YARN.inverse_frequencies(64)
    np.testing.assert_allclose(angles, wanted, rtol=FLOAT32)
    assert YARN.concentration == pytest.approx(0.1 * math.log(40) + 1)
    cos, sin = rope_tables(YARN, 64, positions(8))
    np.testing.assert_allclose(cos[0], YARN.concentration * np.cos(wanted), atol=1e-6)
    np.testing.assert_allclose(sin[0], YARN.concentration * np.sin(wanted), atol=1e-6)


LONGROPE = dict(scaling="longrope", factor=8.0, original_length=1024,
                factors=(1.0, 1.1, 1.5, 2.0, 1.0, 2.0, 4.0, 8.0))  # fmt: skip
MSCALE = (0.07 * math.log(8) + 1) / (0.1 * math.log(8) + 1)  # of mscale over that of mscale_all_dim


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("linear", RopeConfig(scaling="linear")),
        ("dynamic", RopeConfig(scaling="dynamic", original_length=1024, length=4096)),
        ("yarn", RopeConfig(scaling="yarn", original_length=1024)),
        ("yarn_mscale", RopeConfig(scaling="yarn", original_length=1024, attention_factor=MSCALE)),
        ("longrope_short", RopeConfig(**LONGROPE)),
        ("longrope_long", RopeConfig(**LONGROPE, length=1025)),
    ],
)
def test_scalings_equal_those_of_transformers(name, config):
    config.check(8)
    *frequencies, factor = HUGGING_FACE[f"rope/{name}"]
    np.testing.assert_allclose(config.inverse_frequencies(8), frequencies, rtol=FLOAT32)
    assert config.concentration == pytest.approx(factor, rel=FLOAT32)


def test_length_up_to_the_original_one_changes_nothing():
    dynamic = RopeConfig(scaling="dynamic", original_length=1024, length=100)
    np.testing.assert_array_equal(dynamic.inverse_frequencies(8), RopeConfig().inverse_frequencies(8))


def test_interleaved_is_the_rotation_of_the_same_pairs_elsewhere():
    x = heads(6)
    tables = rope_tables(RopeConfig(fraction=0.5), 16, positions(6))
    places = np.array([0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)])  # of a pair's two entries, side by side
    turned = apply_rope(x[..., places], *tables, interleaved=True)
    np.testing.assert_array_equal(turned, apply_rope(x, *tables)[..., places])


def test_local_layers_have_another_base_and_no_scaling():
    config = RopeConfig(base=1e6, scaling="linear", factor=8.0, fraction=0.5, local_base=100.0)
    np.testing.assert_array_equal(
        config.local.inverse_frequencies(64), RopeConfig(base=100.0, fraction=0.5).inverse_frequencies(64)
    )
    assert RopeConfig(scaling="linear").local == RopeConfig(scaling="linear")


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_training_beyond_the_length_that_sets_the_wavelengths_is_refused(scaling):
    factors = dict(factors=(1.0,) * 4 + (2.0,) * 4) if scaling == "longrope" else {}
    rope = RopeConfig(scaling=scaling, original_length=16, **factors)
    check = lambda rope, length: DecoderConfig(
        num_heads=4, embed_dim=32, position="rope", rope=rope
    ).check(MeshConfig(), length, ExecutionConfig())  # fmt: skip
    check(rope, 16)
    with pytest.raises(ValueError, match="sequence_length=17 is longer than the 16 .*; use --model.rope.length=17"):
        check(rope, 17)
    check(dataclasses.replace(rope, length=17), 17)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="model.rope.factors has 8 numbers; .* each of the 8 pairs"):
        RopeConfig(**LONGROPE).check(16)
    with pytest.raises(ValueError, match="model.rope.factors has 1 numbers; .* otherwise none"):
        RopeConfig(factors=(1.0,)).check(16)
    with pytest.raises(
        ValueError, match="model.rope.length=9 is read with model.rope.scaling=dynamic or longrope, not"
    ):
        RopeConfig(length=9).check(16)


def test_no_stretch_means_no_scaling():
    for scaling in ("linear", "llama3", "yarn"):
        config = RopeConfig(scaling=scaling, factor=1.0)
        np.testing.assert_allclose(config.inverse_frequencies(64), RopeConfig().inverse_frequencies(64), rtol=1e-12)
        assert config.concentration == 1.0


def test_rotation_keeps_norms():
    x = heads(50)
    turned = apply_rope(x, *rope_tables(RopeConfig(), 16, positions(50)))
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6)

    def halves(a):
        return a[..., :8] ** 2 + a[..., 8:] ** 2

    np.testing.assert_allclose(halves(turned), halves(x), rtol=1e-5)  # each pair is (i, i + R / 2), turned by itself


def test_products_depend_on_the_distance_only():
    config, query, key = RopeConfig(fraction=0.5), heads(1), heads(1)[:, :, ::-1]

    def product(query_place, key_place):
        def turn(x, place):
            return apply_rope(x, *rope_tables(config, 16, jnp.full((1, 1), place, jnp.int32)))

        return jnp.sum(turn(query, query_place) * turn(key, key_place), -1)

    # At positions of a thousand a float32 angle is exact to 6e-5, and so is the product.
    np.testing.assert_allclose(product(1003, 1000), product(3, 0), atol=1e-3)
    np.testing.assert_allclose(product(10, 7), product(3, 0), atol=1e-5)
    assert np.abs(product(4, 0) - product(3, 0)).max() > 0.01


def test_fraction_leaves_the_rest_untouched():
    x = heads(6)
    tables = rope_tables(RopeConfig(fraction=0.5), 16, positions(6))
    turned = apply_rope(x, *tables)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(turned[..., :8], apply_rope(x[..., :8], *tables))
    # The rotated part has the frequencies of a head that is that wide.
    np.testing.assert_array_equal(tables, rope_tables(RopeConfig(), 8, positions(6)))


def test_tables_follow_the_positions_and_keep_the_dtype():
    packed = jnp.array([[0, 1, 2, 0, 1]], jnp.int32)
    cos, sin = rope_tables(RopeConfig(), 8, packed)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (1, 5, 4)
    np.testing.assert_array_equal(cos[:, :2], cos[:, 3:])
    assert apply_rope(heads(5, 8).astype(jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_ends_of_a_scaling_that_are_not_in_order_are_refused():
    with pytest.raises(ValueError, match="model.rope.ramp=4.0,4.0 must ascend; --model.rope.ramp=1.0,4.0 is usual"):
        RopeConfig(scaling="llama3", ramp=(4.0, 4.0)).check(64)
    with pytest.raises(
        ValueError, match="model.rope.ramp=1.0,4.0 is read with .*=llama3 or yarn or yarn_exact, not linear"
    ):
        RopeConfig(scaling="linear", ramp=(1.0, 4.0)).check(64)
