"""Low-precision formats against ml_dtypes and float64, written as loops over blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.quantization.formats import DTYPES, Format, Operand, quantize, quantize_with, rotate, to_levels

TENSOR = Format("e4m3", "tensor")
NVFP4 = Format("e2m1", "block", 16)
# Format, what shares a scale in an operand [40, 96] whose last dim is contracted, and how its scale is rounded.
FORMATS = {
    "tensor": (TENSOR, (40, 96), "bfloat16"),
    "gradient": (Format("e5m2", "tensor"), (40, 96), "bfloat16"),
    "row": (Format("e4m3", "row"), (1, 96), "bfloat16"),
    "blocks of 128": (Format("e4m3", "block", 128), (1, 128), "power of two"),
    "squares of 32": (Format("e4m3", "block", 32, is_square=True), (32, 32), "power of two"),
    "mxfp8": (Format("e4m3", "block", 32), (1, 32), "power of two"),
    "nvfp4": (NVFP4, (1, 16), "e4m3"),
    "nvfp4 squares": (Format("e2m1", "block", 16, is_square=True), (16, 16), "e4m3"),
}
ELEMENTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344),
            "e2m1": (ml_dtypes.float4_e2m1fn, 6)}  # fmt: skip


def value(operand: Operand) -> jax.Array:
    """[rows, contracted], as float32."""
    outer = jnp.float32(1) if operand.outer_scale is None else operand.outer_scale
    return operand.factor(jnp.float32) * (outer[:, None] if outer.ndim else outer)


quantized = jax.jit(lambda x, format: value(quantize(x, format, (1,))), static_argnums=1)


def sample() -> np.ndarray:
    """Blocks of very different size, one of them zero, and ties: [40, 96]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 96)) * 2.0 ** rng.integers(-6, 6, (40, 1))
    x[3, 32:64] = 0
    x[4, :16] = [448, 17, 19, 21, 27, -17, 1.0625, 1.1875, 0.5, 2.5, 5, 3.5, -1.25, 1.75, 0.25, -0.75]
    return x.astype(np.float32)


def expected(x: np.ndarray, element: str, shape: tuple[int, int], rounding: str) -> np.ndarray:
    dtype, largest = ELEMENTS[element]
    x = x.astype(np.float64)
    result = np.zeros_like(x)
    tensor_scale = np.float64(np.float32(np.abs(x).max() / 448 / 6))
    for row in range(0, x.shape[0], shape[0]):
        for column in range(0, x.shape[1], shape[1]):
            block = x[row : row + shape[0], column : column + shape[1]]
            scale = np.abs(block).max() / largest
            if scale == 0:
                continue
            if rounding == "bfloat16":  # to 8 bits, up
                unit = 2.0 ** (np.floor(np.log2(scale)) - 7)
                scale = np.ceil(scale / unit) * unit
            elif rounding == "power of two":
                scale = 2.0 ** np.ceil(np.log2(scale))
            else:
                scale = np.float64((scale / tensor_scale).astype(ml_dtypes.float8_e4m3fn)) * tensor_scale
            if scale:
                rounded = np.clip(block / scale, -largest, largest).astype(np.float32).astype(dtype)
                result[row : row + shape[0], column : column + shape[1]] = rounded.astype(np.float64) * scale
    return result


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_float64_and_ml_dtypes_give(name):
    format, shape, rounding = FORMATS[name]
    x = sample()
    # Products with float32 scales are rounded; the rounding to the format itself must agree in every element.
    np.testing.assert_allclose(quantized(x, format), expected(x, format.element, shape, rounding), rtol=3e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_spoils_only_its_own_scale_and_zeros_stay_zero(name):
    format, shape, _ = FORMATS[name]
    x = sample()
    assert not quantized(np.zeros_like(x), format).any()
    shared = np.zeros(x.shape, bool)
    is_global = format.element == "e2m1"  # by the scale of the tensor
    shared[: 40 if is_global else shape[0], : 96 if is_global else shape[1]] = True
    for infinity in (np.inf, -np.inf):
        broken = x.copy()
        broken[0, 5] = infinity
        np.testing.assert_array_equal(np.isnan(quantized(broken, format)), shared)
    broken[0, 5] = np.nan
    assert np.isnan(quantized(broken, format)[0, 5])


def test_scales_from_elsewhere_saturate_and_hide_no_infinity():
    x = np.array([[1e9, -1e9, 448.0, 464.0, 1.0]], np.float32)
    found = quantize_with(x, "e4m3", jnp.float32(1.0)).values
    np.testing.assert_array_equal(np.asarray(found, np.float32), [[448, -448, 448, 448, 1]])
    assert found.dtype == DTYPES["e4m3"]
    found = quantize_with(np.array([np.inf, -np.inf, np.nan], np.float32), "e4m3", jnp.float32(1.0)).values
    assert np.isnan(np.asarray(found, np.float32)).all()


def test_serving_rounds_as_training_does_but_saturates_infinities():
    x = np.array([500.0, -1e9, 17.0, 19.0, 2.0**-10, 1.5 * 2.0**-9, np.inf], np.float32)
    found = to_levels(x, DTYPES["e4m3"])
    assert found.tolist() == [448, -448, 16, 20, 0, 2.0**-8, 448]
    np.testing.assert_array_equal(found[:-1], quantize_with(x[:-1], "e4m3", jnp.float32(1.0)).values)
    assert to_levels(x[:4] / 4, jnp.int8).tolist() == [125, -127, 4, 5]


def test_stochastic_rounding_has_the_right_mean_and_the_same_numbers_in_every_step():
    format = Format("e2m1", "block", 16, is_stochastic=True)
    rows = np.tile(np.linspace(-6, 6, 96, dtype=np.float32), (2000, 1))
    rows[:, ::16] = 6  # in every block, so that its scale is exact
    found = np.asarray(quantized(rows, format))
    assert len(np.unique(found[:, 40])) == 2
    # The mean of 2,000 draws of steps of at most 2 has a standard deviation of at most 1 / sqrt(2000) = 0.022.
    np.testing.assert_allclose(found.mean(0), rows[0], atol=0.1)
    np.testing.assert_array_equal(found, quantized(rows, format))


def test_rotating_both_operands_keeps_their_product_and_spreads_an_outlier():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 8, 32)).astype(np.float32)
    a[:, 7] = 100
    rotated = jax.jit(lambda x: rotate(x, 1))
    np.testing.assert_allclose(rotated(a) @ rotated(b).T, a @ b.T, rtol=1e-4, atol=1e-3)
    assert np.abs(rotated(a)).max() < 30
    np.testing.assert_array_equal(rotate(a[:, :20], 1), a[:, :20])
