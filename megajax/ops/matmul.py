"""The dense contraction used by every layer: number format, accumulation and, later, quantisation are chosen here."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.ops import four_bits
from megajax.ops.joining import join, split
from megajax.parameters import is_in_8_bits, observe_arrays
from megajax.quantization.weights import QuantizedWeight

logger = logging.getLogger("megajax")

MIN_JOINED_ROWS = 512
JOINED_MULTIPLE = 64
"""Of the columns of matrices that XLA multiplies the same rows by in one product, without copying them
(inference/device/compiler_options.py)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float32Gradient:
    """A weight whose gradient is returned, and summed over devices, in float32 (precision.gradient_reduce).

    A layer passes it to this file like an array.
    """

    array: jax.Array

    def __getitem__(self, key: EllipsisType) -> "Float32Gradient":
        assert key is Ellipsis, key
        return self

    def reshape(self, shape: Sequence[int]) -> "Float32Gradient":
        return Float32Gradient(self.array.reshape(shape))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedWeight:
    """A weight whose products return statistics as the gradients of `seen`, in place of a loss (calibration)."""

    array: jax.Array
    seen: Any
    """Float32 arrays with the shapes of the statistics."""
    given: Any
    """Arrays that the statistics depend on."""
    statistics: Callable[[jax.Array, jax.Array, Any], Any] = dataclasses.field(metadata=dict(static=True))
    """(x [R, K], weight [K, N], given) -> statistics of a product."""

    def __getitem__(self, key: EllipsisType) -> "ObservedWeight":
        assert key is Ellipsis, key
        return self

    def reshape(self, shape: Sequence[int]) -> "ObservedWeight":
        return dataclasses.replace(self, array=self.array.reshape(shape))

    def multiply(self, x: jax.Array, num_contracted: int) -> jax.Array:
        num_inputs = math.prod(self.array.shape[:num_contracted])
        found = self.statistics(x.reshape(-1, num_inputs), self.array.reshape(num_inputs, -1), self.given)
        return matmul(observe_arrays(x, self.seen, found), self.array, num_contracted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedWeight:
    """A matrix that is stored side by side with others which multiply the same input, for programs that only read them:
    the first of them has all of them, and the others have none. Only `matmul_side_by_side` takes it."""

    weight: jax.Array | QuantizedWeight | None

    @staticmethod
    def of(weights: Sequence["Weight"], shape: Sequence[int], axis: int) -> "tuple[JoinedWeight, ...] | None":
        """In the shape in which matmul_side_by_side gets them. None: they cannot be joined, as they have different
        formats or inputs that are rounded with a scale of each."""
        reshaped = [w.reshape(shape) for w in weights]
        arrays = [w for w in reshaped if isinstance(w, jax.Array)]
        quantized = [w for w in reshaped if isinstance(w, QuantizedWeight)]
        whole = None
        if len(arrays) == len(weights) and len({w.dtype for w in arrays}) == 1:
            whole = jnp.concatenate(arrays, axis)
        elif len(quantized) == len(weights):
            whole = QuantizedWeight.joined(quantized, axis)
        return None if whole is None else (JoinedWeight(whole), *[JoinedWeight(None)] * (len(weights) - 1))

    def __getitem__(self, key: EllipsisType) -> "JoinedWeight":
        assert key is Ellipsis, key
        return self

    def reshape(self, shape: Sequence[int]) -> "JoinedWeight":
        """It has the shape of the product already."""
        return self


Weight = jax.Array | Float32Gradient | QuantizedWeight | ObservedWeight | JoinedWeight


def changed(w: Weight, change: Callable[[jax.Array], jax.Array]) -> Weight:
    """The weight with its matrix changed; a quantised one becomes float32, as the log says."""
    if isinstance(w, Float32Gradient | ObservedWeight):
        return dataclasses.replace(w, array=change(w.array))
    if isinstance(w, QuantizedWeight):
        _log_whole()
        return change(w.matrix())
    assert isinstance(w, jax.Array), type(w)
    return change(w)


@functools.cache
def _log_whole() -> None:
    logger.warning(
        "transforms that change a quantised matrix multiply by it in float32; merge them first, with megajax.convert."
        "export"
    )


def matmul(x: jax.Array, w: Weight, num_contracted: int = 1, outputs: P | None = None) -> jax.Array:
    """Contracts the last `num_contracted` dims of x [..., *K] with the first of w [*K, *N] -> [..., *N].

    outputs: how the mesh splits the dims N, for matrices in 4 bits, whose kernel XLA cannot split.

    Computes in x's dtype (w is cast to it, before any gather that XLA inserts) and accumulates in float32; the result
    has x's dtype, and so has the gradient of w, unless w is a Float32Gradient. Float32 inputs are multiplied in full
    float32, never TF32. An array in 8 bits is frozen: levels, whose scale is applied to the product.
    """
    if isinstance(w, Float32Gradient):
        return _with_float32_gradient(x, (w.array,), 0, num_contracted)
    if isinstance(w, QuantizedWeight) and w.is_in_4_bits:
        return four_bits.matmul(x, w, num_contracted, outputs)
    if isinstance(w, QuantizedWeight | ObservedWeight):
        return w.multiply(x, num_contracted)
    assert not isinstance(w, JoinedWeight)
    if is_in_8_bits(w):
        return _with_levels(x, w, num_contracted)
    contracted = w.shape[:num_contracted]
    assert x.shape[x.ndim - num_contracted :] == contracted, (x.shape, w.shape)
    dims = tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted))
    return jax.lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())), precision=dot_precision(x.dtype))


def matmul_side_by_side(
    x: jax.Array, weights: Sequence[Weight], axis: int, *, has_gradient: bool = True, outputs: P | None = None
) -> jax.Array:  # fmt: skip
    """[matmul(x, w) for w in weights] joined along `axis` of the weights, computed as one product.

    weights: [D, ...], with equal shapes except along `axis` (D is 0), which must not be a dim that the mesh splits. The
    gradient of x is then one product too, instead of a sum of several. Without a gradient, and with few rows, they are
    separate products: joining the weights copies them. JoinedWeights are one product. outputs: as for `matmul`.
    """
    if isinstance(weights[0], JoinedWeight):
        assert weights[0].weight is not None
        return matmul(x, weights[0].weight, 1, outputs)
    wide = tuple(w.array for w in weights if isinstance(w, Float32Gradient))
    plain = [w for w in weights if isinstance(w, jax.Array)]
    is_alone = not has_gradient or len(weights) not in (len(wide), len(plain))
    if is_alone or math.prod(x.shape[:-1]) < MIN_JOINED_ROWS:
        return jnp.concatenate([matmul(x, w, 1, outputs) for w in weights], x.ndim - 2 + axis)
    if wide:
        return _with_float32_gradient(x, wide, axis, 1)
    if all(w.dtype == plain[0].dtype and is_in_8_bits(w) for w in plain):
        return matmul(x, jnp.concatenate(plain, axis))
    return matmul(x, join([w.astype(x.dtype) for w in plain], axis))


@jax.custom_vjp
def matmul_in_parts(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., K] bfloat16, w [K, N] float32 -> x w in float32; the gradient of w is as exact.

    A float32 number is the sum of three in bfloat16, so this is one product on tensor cores, of which each term is
    exact, in place of one in float32, for which x would be converted. The gradient of x is bfloat16, so two parts of
    both factors are enough for it.
    """
    return _sum_of_parts(_product(x, jnp.concatenate(_in_bfloat16(w, 3), 1), (x.ndim - 1,), (0,), jnp.float32))


def _in_parts_backward(inputs: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = inputs
    d_high, d_middle, d_low = _in_bfloat16(d_out, 3)
    w_high, w_middle = _in_bfloat16(w, 2)
    d_twice = jnp.concatenate([d_high, d_middle, d_high], -1)
    w_twice = jnp.concatenate([w_high, w_high, w_middle], 1)
    d_x = _product(d_twice, w_twice, (x.ndim - 1,), (1,), x.dtype)
    rows = tuple(range(x.ndim - 1))
    d_parts = jnp.concatenate([d_high, d_middle, d_low], -1)
    return d_x, _sum_of_parts(_product(x, d_parts, rows, rows, jnp.float32))


matmul_in_parts.defvjp(lambda x, w: (matmul_in_parts(x, w), (x, w)), _in_parts_backward)


def _in_bfloat16(x: jax.Array, count: int) -> list[jax.Array]:
    """Parts whose sum is x, the largest first, without what is left after `count` of them."""
    parts = []
    rest = x
    for _ in range(count):
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)  # XLA leaves out a cast there and back
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def _product(
    x: jax.Array, y: jax.Array, of_x: Sequence[int], of_y: Sequence[int], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Over the dims of_x and of_y."""
    return jax.lax.dot_general(x, y, ((of_x, of_y), ((), ())), preferred_element_type=dtype)


def _sum_of_parts(side_by_side: jax.Array) -> jax.Array:
    high, middle, low = jnp.split(side_by_side, 3, -1)
    return high + (middle + low)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_levels(x: jax.Array, levels: jax.Array, num_contracted: int) -> jax.Array:
    """The backward pass casts the levels again: a copy in x's dtype that lived until then would undo the saving."""
    return matmul(x, levels.astype(x.dtype), num_contracted)


def _levels_backward(num_contracted: int, levels: jax.Array, d_out: jax.Array):
    levels, d_out = jax.lax.optimization_barrier((levels, d_out))  # or XLA would take the copy of the forward pass
    outputs = tuple(range(num_contracted, levels.ndim))
    dims = (tuple(range(d_out.ndim - len(outputs), d_out.ndim)), outputs), ((), ())
    d_x = jax.lax.dot_general(d_out, levels.astype(d_out.dtype), dims, precision=dot_precision(d_out.dtype))
    return d_x, None


_with_levels.defvjp(lambda x, levels, count: (_with_levels(x, levels, count), levels), _levels_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _with_float32_gradient(x: jax.Array, weights: tuple[jax.Array, ...], axis: int, num_contracted: int) -> jax.Array:
    """matmul of x with the weights joined along `axis`; the gradient of x has x's dtype, those of weights float32."""
    return matmul(x, _joined(x, weights, axis), num_contracted)


def _forward(x, weights, axis, num_contracted):
    return _with_float32_gradient(x, weights, axis, num_contracted), (x, weights)


def _backward(axis, num_contracted, residuals, d_out):
    x, weights = residuals
    _, of_x = jax.vjp(lambda x: matmul(x, _joined(x, weights, axis), num_contracted), x)
    rows = tuple(range(x.ndim - num_contracted))
    d_weight = jax.lax.dot_general(
        x, d_out, ((rows, rows), ((), ())), precision=dot_precision(x.dtype), preferred_element_type=jnp.float32
    )
    return *of_x(d_out), split(d_weight, axis, tuple(w.shape[axis] for w in weights))


_with_float32_gradient.defvjp(_forward, _backward)


def _joined(x, weights, axis):
    return join([w.astype(x.dtype) for w in weights], axis) if len(weights) > 1 else weights[0]


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [..., *N] + bias [*N] -> x's dtype. The gradient of the bias is summed in float32.

    Automatic differentiation would sum it in x's dtype: in bfloat16 a sum of 1,024 rows was off by 22 % on an H100
    (tests/gpu/test_norm.py), because the sum stops growing once a row is smaller than its last bit.
    """
    return x + bias.astype(x.dtype)


def add_bias_gradient(bias: jax.Array, d_out: jax.Array) -> jax.Array:
    """Of the bias, like it."""
    rows = tuple(range(d_out.ndim - bias.ndim))
    return d_out.astype(jnp.float32).sum(rows).astype(bias.dtype)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias), lambda bias, d: (d, add_bias_gradient(bias, d)))


def dot_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
