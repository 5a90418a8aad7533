"""Moments of an optimizer in fewer bits between updates: optimizer.moments.

An update turns them into float32, computes, and rounds the new ones to the nearest number of the format, as Megatron's
precision-aware optimizer does; nothing is rounded at random. Moments of biases, norm scales and routers, which take
little memory, remain float32, and so do the weights (precision.params).

    bfloat16   as it is: 8 bits of precision and the range of float32.
    float8     e4m3 (Micikevicius et al. 2022, arXiv 2209.05433) times a float32 scale for each row, the last dim of a
               parameter: its largest magnitude / 448. Of a second moment v the square root is stored: the numbers of a
               row may then be 2^18 apart in it, and so 2^36 in v. If it is too small for that it is rounded up to the
               smallest number, because 0 would make the update m / epsilon.

Megatron (Transformer Engine's FusedAdam) stores v itself and has one scale for each tensor. A row is a part of a
parameter whatever the mesh, so the numbers do not depend on it.
"""

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


class Float8Moments(NamedTuple):
    values: PyTree
    """The state of the transformation, with moments in e4m3."""
    scales: PyTree
    """float32 [..., 1] for each of these moments, at its path in the state; None for other leaves."""


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

    encode, decode = (_encode_bfloat16, _decode_bfloat16) if moments == "bfloat16" else (_encode_float8, _decode_float8)

    def init(params: PyTree) -> PyTree:
        return encode(transform.init(params), is_rounded)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, state = transform.update(updates, decode(state), params)
        return updates, encode(state, is_rounded)

    return optax.GradientTransformation(init, update)


def _encode_bfloat16(state: PyTree, is_rounded) -> PyTree:
    def encode(path, leaf):
        return leaf.astype(jnp.bfloat16) if is_rounded(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(encode, state)


def _decode_bfloat16(state: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, state)


def _encode_float8(state: PyTree, is_rounded) -> Float8Moments:
    def encode(path, leaf):
        return to_float8(leaf, is_square=_is_second_moment(path)) if is_rounded(path, leaf) else (leaf, None)

    pairs = jax.tree_util.tree_map_with_path(encode, state)
    return Float8Moments(*(jax.tree.map(lambda _, pair, n=n: pair[n], state, pairs) for n in range(2)))


def _decode_float8(state: Float8Moments) -> PyTree:
    def decode(path, value, scale):
        return value if scale is None else from_float8(value, scale, is_square=_is_second_moment(path))

    return jax.tree_util.tree_map_with_path(decode, *state)


def _is_second_moment(path) -> bool:
    """Of Optax's ScaleByAdamState."""
    return GetAttrKey("nu") in path


def to_float8(moment: jax.Array, *, is_square: bool) -> tuple[jax.Array, jax.Array]:
    """float32 [..., N] -> (e4m3 [..., N], float32 scale [..., 1]). is_square: no element is negative, and the square
    root is stored."""
    x = jnp.sqrt(moment) if is_square else moment
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / LARGEST
    scaled = jnp.where(scale > 0, x / scale, 0.0)
    if is_square:
        scaled = jnp.where(x > 0, jnp.maximum(scaled, SMALLEST), 0.0)
    return jnp.clip(scaled, -LARGEST, LARGEST).astype(FLOAT8), scale


def from_float8(value: jax.Array, scale: jax.Array, *, is_square: bool) -> jax.Array:
    x = value.astype(jnp.float32) * scale
    return x * x if is_square else x
