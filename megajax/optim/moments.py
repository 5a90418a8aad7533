"""Moments of an optimizer in fewer bits between updates: optimizer.moments.

An update turns them into float32, computes, and rounds the new ones. Moments of biases, norm scales and routers, which
take little memory, remain float32. For the weights see precision.params.

    bfloat16   rounded to nearest, as in Megatron's precision-aware optimizer (Transformer Engine's FusedAdam).
    float8     e4m3 (Micikevicius et al. 2022, arXiv 2209.05433) times a float32 scale for each row, the last dim of a
               parameter: its largest magnitude / 448. Of a second moment v the square root is stored: the numbers of a
               row may then be 2^18 apart in it, and so 2^36 in v. If it is too small for that it is rounded up to the
               smallest number, because 0 would make the update m / epsilon.

float8 is rounded stochastically: up with a probability that is the distance to the lower number, relative to the gap.
The root of v falls by 2.5 % in a step with beta2 0.95 and no gradient, and half the gap of e4m3 is at least 3 %, so
rounded to nearest it would never fall. Megatron rounds to nearest, stores v itself and has one scale for each tensor.

Rows and random bits do not depend on the mesh: the bits are a hash of the number, of its place in the row and of the
count of updates.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from megajax.parameters import parameter_of

PyTree = Any

MomentFormat = Literal["float32", "bfloat16", "float8"]

FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)  # 448
SMALLEST = float(jnp.finfo(FLOAT8).smallest_subnormal)  # 2^-9
SMALLEST_NORMAL = float(jnp.finfo(FLOAT8).tiny)  # 2^-6
DROPPED = 2**20 - 1  # bits of a float32's mantissa that e4m3 lacks


class Float8Moments(NamedTuple):
    values: PyTree
    """The state of the transformation, with moments in e4m3."""
    scales: PyTree
    """float32 [..., 1] for each of these moments, at its path in the state; None for other leaves."""
    count: jax.Array
    """int32: number of updates."""


def with_moments(
    transform: optax.GradientTransformation, moments: MomentFormat, rules: PyTree
) -> optax.GradientTransformation:
    """The same transformation, whose state has its moments in this format.

    rules: megajax.optim.groups.Rule of each parameter. A leaf of the state is a moment if its path ends with that of a
    matrix, an embedding or the output head.
    """
    if moments == "float32":
        return transform
    rule_of = dict(jax.tree_util.tree_leaves_with_path(rules))

    def is_rounded(path, leaf) -> bool:
        parameter = parameter_of(path, rule_of)
        return parameter is not None and rule_of[parameter].record.is_cast and leaf.dtype == jnp.float32

    if moments == "bfloat16":
        return _rounded(transform, functools.partial(_encode_bfloat16, is_rounded), _decode_bfloat16)
    return _rounded(transform, functools.partial(_encode_float8, is_rounded), _decode_float8)


def _rounded(transform: optax.GradientTransformation, encode, decode) -> optax.GradientTransformation:
    """encode: (float32 state, stored state before or None) -> stored state; decode: the opposite."""

    def init(params: PyTree) -> PyTree:
        # Otherwise XLA computes the numbers of whole parameters while it compiles: 50 s for 16 M of them.
        zeros = jax.lax.optimization_barrier(transform.init(params))
        return encode(zeros, None)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updates, new = transform.update(updates, decode(state), params)
        return updates, encode(new, state)

    return optax.GradientTransformation(init, update)


def _encode_bfloat16(is_rounded, state: PyTree, before: PyTree | None) -> PyTree:
    def encode(path, leaf):
        return leaf.astype(jnp.bfloat16) if is_rounded(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(encode, state)


def _decode_bfloat16(stored: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, stored)


def _encode_float8(is_rounded, state: PyTree, before: Float8Moments | None) -> Float8Moments:
    count = jnp.int32(0) if before is None else before.count + 1

    def encode(path, leaf):
        if not is_rounded(path, leaf):
            return leaf, None
        return to_float8(leaf, count, is_square=_is_second_moment(path))

    pairs = jax.tree_util.tree_map_with_path(encode, state)
    values, scales = (jax.tree.map(lambda _, pair, n=n: pair[n], state, pairs) for n in range(2))
    return Float8Moments(values, scales, count)


def _decode_float8(stored: Float8Moments) -> PyTree:
    def decode(path, value, scale):
        return value if scale is None else from_float8(value, scale, is_square=_is_second_moment(path))

    return jax.tree_util.tree_map_with_path(decode, stored.values, stored.scales)


def _is_second_moment(path) -> bool:
    """Of Optax's ScaleByAdamState."""
    return GetAttrKey("nu") in path


def to_float8(moment: jax.Array, seed: jax.Array, *, is_square: bool) -> tuple[jax.Array, jax.Array]:
    """float32 [..., N] -> (e4m3 [..., N], float32 scale [..., 1]), rounded stochastically.

    seed: int32 scalar, another one for each update. is_square: no element is negative, and the root is stored.
    """
    largest = jnp.max(moment if is_square else jnp.abs(moment), -1, keepdims=True)
    scale = (jnp.sqrt(largest) if is_square else largest) / LARGEST
    inverse = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, 1 / scale, 0.0)
    if is_square:
        rounded = _rounded_stochastically(jnp.sqrt(moment) * inverse, seed)
        rounded = jnp.where(moment > 0, jnp.maximum(rounded, SMALLEST), 0.0)
    else:
        scaled = moment * inverse
        rounded = jnp.where(scaled < 0, -1.0, 1.0) * _rounded_stochastically(jnp.abs(scaled), seed)
    return rounded.astype(FLOAT8), scale


def _rounded_stochastically(magnitude: jax.Array, seed: jax.Array) -> jax.Array:
    """float32 from 0 to 448 -> one of the two nearest numbers of e4m3, in float32.

    e4m3 keeps 3 of the 23 bits of a mantissa, so a random number is added to the other 20, and they are dropped. Below
    the normal numbers the gap remains that of the smallest of these, which is added before and subtracted again.
    """
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32)
    place = jax.lax.broadcasted_iota(jnp.uint32, magnitude.shape, magnitude.ndim - 1)
    random = _hash(bits, place, seed) & jnp.uint32(DROPPED)
    smallest = jnp.where(magnitude < SMALLEST_NORMAL, jnp.float32(SMALLEST_NORMAL), 0.0)
    bits = jax.lax.bitcast_convert_type(magnitude + smallest, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + random) & jnp.uint32(~DROPPED & 0xFFFFFFFF), jnp.float32)
    return jnp.minimum(rounded - smallest, LARGEST)


def _hash(bits: jax.Array, place: jax.Array, seed: jax.Array) -> jax.Array:
    """uint32 -> uint32; every bit of the arguments reaches every bit of the result (Wellons' lowbias32)."""
    h = bits ^ (place * jnp.uint32(0x85EBCA77)) ^ (seed.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def from_float8(value: jax.Array, scale: jax.Array, *, is_square: bool) -> jax.Array:
    x = value.astype(jnp.float32) * scale
    return x * x if is_square else x
