"""The matmul of a layer whose operands are rounded to a low-precision format (precision.recipe), and its derivative.

Three products, each of which quantises its operands along the dims that it contracts:

    y  = x w        x along K, w along K
    dx = dy w^T     dy along N, w along N
    dw = x^T dy     x and dy along the rows

A tensor with one scale is quantised once for both of its products; with smaller blocks, once for each. Accumulation is
in float32, and x, w and dy themselves are not changed: the optimizer updates the float32 weight.

The products are written as conversions of FP8 values to the compute dtype, times a scale, multiplied. XLA turns this
into FP8 matmuls of cuBLASLt on Hopper (without its Triton matmuls, training/compiler_options.py), and gathers the FP8
values; elsewhere it multiplies the converted values, and the result is the same but for the rounding of the sums.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.mesh.sharding import between_blocks, constrain
from megajax.ops.matmul import Float32Gradient, Weight, dot_precision
from megajax.precision import Recipe
from megajax.quantization.formats import LARGEST, Format, Operand, largest_magnitude, quantize, quantize_with, rotate

logger = logging.getLogger("megajax")

FP8_CAPABILITY = 8.9  # of the first GPUs with FP8 matmuls (Ada)


@dataclasses.dataclass(frozen=True)
class Formats:
    """The formats of x, w and dy in a recipe."""

    input: Format
    weight: Format
    gradient: Format
    rotates: bool = False
    """Rotate the operands of the weight's gradient (quantize.rotate)."""

    @property
    def is_emulated(self) -> bool:
        """Whether the matmuls themselves are in the compute dtype: cuBLASLt on Hopper has no scales of blocks."""
        return self.input.scaled == "block"


_TENSOR = Formats(Format("e4m3", "tensor"), Format("e4m3", "tensor"), Format("e5m2", "tensor"))
_ROW = Format("e4m3", "row")
_BLOCK = Format("e4m3", "block", 128)
_MX = Format("e4m3", "block", 32)
_NV = Format("e2m1", "block", 16)

FORMATS: dict[Recipe, Formats] = {
    "fp8": _TENSOR,
    "fp8_rowwise": Formats(_ROW, _ROW, _ROW),
    "fp8_blockwise": Formats(_BLOCK, dataclasses.replace(_BLOCK, is_square=True), _BLOCK),
    "mxfp8": Formats(_MX, _MX, _MX),
    "nvfp4": Formats(
        _NV, dataclasses.replace(_NV, is_square=True), dataclasses.replace(_NV, is_stochastic=True), rotates=True
    ),
}


@dataclasses.dataclass(frozen=True)
class _Options:
    recipe: Recipe
    axis: int
    num_contracted: int
    gathered: tuple[bool, bool]
    has_float32_gradient: bool

    @property
    def formats(self) -> Formats:
        return FORMATS[self.recipe]


def low_precision_matmul(
    x: jax.Array,
    weights: Sequence[Weight],
    axis: int,
    num_contracted: int,
    recipe: Recipe,
    gathered: tuple[bool, bool],
) -> jax.Array:
    """Contracts the last `num_contracted` dims of x [..., *K] with the first of w [*K, *N], the weights joined along
    `axis` -> [..., *N] in x's dtype.

    Gradients of weights are computed in x's dtype, those of a Float32Gradient in float32. gathered: whether x, and
    whether dy, are [B, T, D] of the residual stream, which `tensor` splits: they are gathered after rounding.
    """
    log_format(recipe, x.dtype)
    options = _Options(recipe, axis, num_contracted, gathered, isinstance(weights[0], Float32Gradient))
    return _matmul(x, tuple(w.array if isinstance(w, Float32Gradient) else w for w in weights), options)


def log_format(recipe: Recipe, compute: jnp.dtype) -> None:
    """Logs once what a recipe does here."""
    _log_format(recipe, compat.mesh_platform(), jnp.dtype(compute).name)


@functools.cache
def _log_format(recipe: Recipe, platform: str, compute: str) -> None:
    capability = compat.compute_capability()
    if FORMATS[recipe].is_emulated:
        how = f"emulated: operands are rounded, then multiplied in {compute}, which takes longer than bf16"
    elif platform == "cpu" or (capability is not None and capability < FP8_CAPABILITY):
        how = f"no FP8 matmuls here: operands are rounded, then multiplied in {compute}"
    else:
        how = "FP8 matmuls of cuBLASLt"
    logger.info("precision.recipe=%s: %s", recipe, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weights, options):
    return _forward(x, weights, options)[0]


def _forward(x, weights, options):
    of_x = _dims(x.ndim - options.num_contracted, x.ndim)
    of_w = _dims(options.num_contracted)
    x_operand = _quantized([x], 0, options.formats.input, of_x)
    w_operand = _quantized(weights, options.axis, options.formats.weight, of_w)
    y = product(_gathered(x_operand, options.gathered[0]), of_x, w_operand, of_w, x.dtype, x.dtype)
    if options.gathered[1]:
        y = between_blocks(y)
    # XLA would make a GELU part of the FP8 matmul, which cuBLASLt does not offer: the program would not compile.
    y = jax.lax.optimization_barrier(y)
    kept = x_operand if options.formats.input.scaled == "tensor" else x
    return y, (kept, weights)


def _backward(options, residuals, dy):
    kept, weights = residuals
    of_w = _dims(options.num_contracted, weights[0].ndim)
    num_rows = dy.ndim - len(of_w)
    of_dy = _dims(num_rows, dy.ndim)
    rows = _dims(num_rows)
    dy_operand = _gathered(_quantized([dy], 0, options.formats.gradient, of_dy), options.gathered[1])
    w_operand = _quantized(weights, options.axis, options.formats.weight, of_w)
    dx = product(dy_operand, of_dy, w_operand, of_w, dy.dtype, dy.dtype)
    if options.gathered[0]:
        dx = constrain(dx, "batch", "time", None)
    if isinstance(kept, Operand):
        x_operand = kept
    else:
        x, dy = [rotate(a, num_rows - 1) if options.formats.rotates else a for a in (kept, dy)]
        x_operand = quantize(x, options.formats.input, rows)
        dy_operand = quantize(dy, options.formats.gradient, rows)
    dtype = jnp.float32 if options.has_float32_gradient else dy.dtype
    x_operand = _gathered(x_operand, options.gathered[0])
    dw = product(x_operand, rows, _gathered(dy_operand, options.gathered[1]), rows, dy.dtype, dtype)
    ends = [sum(w.shape[options.axis] for w in weights[: n + 1]) for n in range(len(weights) - 1)]
    return dx, tuple(d.astype(w.dtype) for d, w in zip(jnp.split(dw, ends, options.axis), weights, strict=True))


_matmul.defvjp(_forward, _backward)


def _quantized(parts: Sequence[jax.Array], axis: int, format: Format, contracted: tuple[int, ...]) -> Operand:
    """The operand of the parts joined along `axis`."""
    if format.scaled != "tensor":
        return quantize(_joined(parts, axis), format, contracted)
    scale = functools.reduce(jnp.maximum, map(largest_magnitude, parts)) / LARGEST[format.element]
    # Joined after rounding: it is FP8 that XLA writes and reads again.
    operands = [quantize_with(part, format.element, scale) for part in parts]
    return operands[0]._replace(values=_joined([operand.values for operand in operands], axis))


def _gathered(operand: Operand, is_split: bool) -> Operand:
    if not is_split:
        return operand
    return operand._replace(values=constrain(operand.values, "batch", "time", None))


def _joined(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def product(
    a: Operand, a_dims: Sequence[int], b: Operand, b_dims: Sequence[int], compute: jnp.dtype, dtype: jnp.dtype
) -> jax.Array:
    """Contracts these dims of the operands, in the compute dtype -> [*dims of a, *dims of b] in dtype."""
    factors = a.factor(compute), b.factor(compute)
    y = jax.lax.dot_general(
        *factors, ((a_dims, b_dims), ((), ())), precision=dot_precision(compute), preferred_element_type=dtype
    )
    if a.outer_scale is None or b.outer_scale is None:
        return y
    others = b.values.ndim - len(b_dims)
    outer = a.outer_scale.reshape(*a.outer_scale.shape, *(1,) * others) if a.outer_scale.ndim else a.outer_scale
    return (y * outer * b.outer_scale).astype(dtype)


def _dims(*bounds: int) -> tuple[int, ...]:
    return tuple(range(*bounds))
