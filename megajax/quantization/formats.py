"""Low-precision number formats: what an operand of a matmul is rounded to, in training and in serving.

In training a format is an element type and the part of the operand that shares a scale: the tensor, a row (all elements
that one result contracts), or a block of it. The contracted dims are given, because a format is defined along them: an
array that two products contract along different dims is quantised twice.

    element  values                                    used with
    e4m3     4 significant bits, up to 448             tensor, row, blocks of 128 (DeepSeek-V3) or 32 (MXFP8)
    e5m2     3 significant bits, up to 57344           tensor, for gradients
    e2m1     0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives  blocks of 16 (NVFP4)

Rounding is to the nearest, ties to even, and saturates. An infinity makes all elements that share its scale NaN, and a
NaN remains, so that neither is hidden from the loss.

Serving (quantization/weights.py, 8-bit pages) rounds in the same way to levels of int8 and e4m3, except that infinities
saturate, and its scales are those of vLLM: plain float32, where training rounds them up so that they are exact factors.

FP8: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433. Blocks of 128: DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 3.3. MXFP8: OCP Microscaling Formats 1.0, with scales rounded up
(https://arxiv.org/abs/2506.08027). NVFP4: https://arxiv.org/abs/2509.25149.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Element = Literal["e4m3", "e5m2", "e2m1"]

DTYPES = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}


def largest(dtype: jnp.dtype) -> float:
    """The largest level that is used of a dtype of 8 bits: 127, 448 or 57344."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


LARGEST = {element: largest(dtype) for element, dtype in DTYPES.items()} | {"e2m1": 6.0}
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; also the scale of zeros
HADAMARD_SIZE = 16
# Signs of the random rotation: fixed, so that both operands, all devices and all steps use the same.
HADAMARD_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, 1, -1, -1, -1, 1, -1, 1, -1, 1], np.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    element: Element
    scaled: Literal["tensor", "row", "block"]
    """What shares a scale."""
    block: int = 0
    """Elements per block along the last contracted dim; a block ends with the dim."""
    is_square: bool = False
    """Blocks extend as far along the last of the other dims: the same scales whichever of the two is contracted."""
    is_stochastic: bool = False
    """Round up with a probability of the remainder, so that the mean is right (for gradients)."""


class Operand(NamedTuple):
    """An array that is values * scale * outer_scale, whose product with another is computed without outer_scale."""

    values: jax.Array
    """FP8, or in the compute dtype if blocks already include their scales."""
    scale: jax.Array | None = None
    """float32 scalar, exact in bfloat16: cuBLASLt applies it to FP8 values."""
    outer_scale: jax.Array | None = None
    """float32: a scalar, or one per row (the dims that are not contracted)."""

    def factor(self, dtype: jnp.dtype) -> jax.Array:
        """What is multiplied. XLA recognises the conversion and the scale, and multiplies in FP8 where it can."""
        values = self.values.astype(dtype)
        return values if self.scale is None else values * self.scale.astype(dtype)


def to_levels(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x [...] in a dtype of 8 bits, rounded to the nearest level, ties to even; beyond the largest level x saturates,
    where a cast to FP8 gives NaN."""
    x = _saturated(x, dtype)
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def scale_of(x: jax.Array, dtype: jnp.dtype, dims: Sequence[int]) -> jax.Array:
    """float32: what one level of this dtype stands for if the largest x is the largest level, with `dims` reduced to
    size 1; 1 where all of x is 0."""
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), tuple(dims), keepdims=True) / largest(dtype)
    return jnp.where(scale > 0, scale, 1)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """float32 scalar; of the whole array, on all devices."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(x: jax.Array, format: Format, contracted: Sequence[int]) -> Operand:
    """x, bfloat16 or float32, as an operand of a product that contracts these dims."""
    if format.scaled == "tensor":
        return quantize_with(x, format.element, largest_magnitude(x) / LARGEST[format.element])
    if format.scaled == "row":
        amax = jnp.max(jnp.abs(x), tuple(contracted), keepdims=True).astype(jnp.float32)
        scale = _rounded_up(amax / LARGEST[format.element], bits=16)
        return Operand(_cast(x, scale, format.element), outer_scale=jnp.squeeze(scale, tuple(contracted)))
    return _quantize_blocks(x, format, contracted)


def quantize_with(x: jax.Array, element: Element, scale: jax.Array) -> Operand:
    """x as multiples of one scale, float32, which is rounded up to bfloat16. Larger values saturate, but infinities
    become NaN."""
    scale = _rounded_up(scale, bits=16)
    return Operand(_cast(x, scale, element), scale)


def rotate(x: jax.Array, dim: int) -> jax.Array:
    """Random Hadamard transform along blocks of 16 of a dim: orthogonal, so rotating both operands of a product along
    the contracted dim leaves it unchanged, but spreads outliers over their block. x unchanged if 16 does not divide it.
    """
    if x.shape[dim] % HADAMARD_SIZE:
        return x
    matrix = jnp.asarray(HADAMARD_SIGNS[:, None] * _hadamard(HADAMARD_SIZE), x.dtype)
    blocks = x.reshape(*x.shape[:dim], -1, HADAMARD_SIZE, *x.shape[dim + 1 :])
    rotated = jax.lax.dot_general(blocks, matrix, (((dim + 1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(rotated, -1, dim + 1).reshape(x.shape)


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(np.float32(size))


def _quantize_blocks(x: jax.Array, format: Format, contracted: Sequence[int]) -> Operand:
    others = [dim for dim in range(x.ndim) if dim not in contracted]
    dims = (contracted[-1], others[-1]) if format.is_square else (contracted[-1],)
    blocks, inner = _split(x.astype(jnp.float32), dims, format.block)
    amax = jnp.max(jnp.abs(blocks), inner, keepdims=True)
    scale = amax / LARGEST[format.element]
    if format.element != "e2m1":
        scale = _rounded_up(scale, bits=23)
        rounded = _cast(blocks, scale, format.element).astype(jnp.float32)
        return Operand(_joined(rounded * scale, x.shape, inner).astype(x.dtype))
    tensor_scale = jnp.maximum(jnp.max(scale) / LARGEST["e4m3"], SMALLEST_SCALE)
    scale = (scale / tensor_scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    scaled = jnp.where(scale == 0, 0.0, blocks / (jnp.where(scale == 0, 1.0, scale) * tensor_scale))
    uniform = jax.random.uniform(_key_of(tensor_scale), scaled.shape) if format.is_stochastic else None
    rounded = _round_e2m1(scaled, uniform)
    return Operand(_joined(rounded * scale, x.shape, inner).astype(x.dtype), outer_scale=tensor_scale)


def _split(x: jax.Array, dims: Sequence[int], size: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits each of these dims into (blocks, size), with zeros at the end -> (blocks, dims within the blocks)."""
    padding = [(0, -length % size if dim in dims else 0) for dim, length in enumerate(x.shape)]
    shape: list[int] = []
    inner = []
    for dim, length in enumerate(x.shape):
        if dim in dims:
            shape += [-(-length // size), size]
            inner.append(len(shape) - 1)
        else:
            shape.append(length)
    return jnp.pad(x, padding).reshape(shape), tuple(inner)


def _joined(blocks: jax.Array, shape: Sequence[int], inner: Sequence[int]) -> jax.Array:
    """The opposite of `_split`."""
    padded: list[int] = []
    for dim, length in enumerate(blocks.shape):
        if dim in inner:
            padded[-1] *= length
        else:
            padded.append(length)
    return blocks.reshape(padded)[tuple(slice(length) for length in shape)]


def _cast(x: jax.Array, scale: jax.Array, element: Element) -> jax.Array:
    dtype = DTYPES[element]
    saturated = _saturated(x.astype(jnp.float32) * (1 / scale), dtype)
    return jnp.where(jnp.isinf(x), jnp.nan, saturated).astype(dtype)


def _saturated(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.clip(x, -largest(dtype), largest(dtype))


def _rounded_up(scale: jax.Array, bits: int) -> jax.Array:
    """Rounds float32 up so that the lowest `bits` bits are zero: 16 for a bfloat16, 23 for a power of two.

    By arithmetic on the bits, because XLA may remove a conversion to bfloat16 and back.
    """
    low = 2**bits - 1
    scale = jnp.maximum(scale, SMALLEST_SCALE)
    number = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    up = jax.lax.bitcast_convert_type((number + jnp.uint32(low)) & jnp.uint32(~low & 0xFFFFFFFF), jnp.float32)
    return jnp.where(jnp.isfinite(scale), up, scale)


def _round_e2m1(x: jax.Array, uniform: jax.Array | None) -> jax.Array:
    """float32 rounded to e2m1, in float32; NaN remains. uniform: numbers in [0, 1) for stochastic rounding."""
    magnitude = jnp.minimum(jnp.abs(x), LARGEST["e2m1"])
    spacing = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude / spacing
    whole = jnp.round(steps) if uniform is None else jnp.floor(steps + uniform)
    return jnp.sign(x) * jnp.minimum(whole * spacing, LARGEST["e2m1"])


def _key_of(scale: jax.Array) -> jax.Array:
    """A key for the random numbers of a tensor from its scale, so that no key is passed through the layers and a step
    stays reproducible on every mesh."""
    return jax.random.key(jax.lax.bitcast_convert_type(scale, jnp.uint32))
