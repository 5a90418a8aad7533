"""The one dense contraction of every layer: number format, accumulation and, later, quantisation are decided here."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

MIN_JOINED_ROWS = 512


def matmul(x: jax.Array, w: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Contracts the last `num_contracted` dims of x [..., *K] with the first of w [*K, *N] -> [..., *N].

    Computes in x's dtype (w is cast to it, before any gather that XLA inserts) and accumulates in float32; the result
    has x's dtype. Float32 inputs are multiplied in full float32, never TF32.
    """
    contracted = w.shape[:num_contracted]
    assert x.shape[x.ndim - num_contracted :] == contracted, (x.shape, w.shape)
    dims = tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted))
    return jax.lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())), precision=dot_precision(x.dtype))


def matmul_side_by_side(x: jax.Array, weights: Sequence[jax.Array], axis: int) -> jax.Array:
    """[matmul(x, w) for w in weights] joined along `axis` of the weights, computed as one product.

    weights: [D, ...], equal but for their size along `axis` (counted with D as 0), which must not be a dim that the
    mesh splits. One product makes x's gradient in one go too, instead of as a sum of several. With few rows
    (decoding) the time is that of reading the weights, and joining them would read them twice.
    """
    if math.prod(x.shape[:-1]) < MIN_JOINED_ROWS:
        return jnp.concatenate([matmul(x, w) for w in weights], x.ndim - 2 + axis)
    return matmul(x, jnp.concatenate([w.astype(x.dtype) for w in weights], axis))


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [..., *N] + bias [*N] -> x's dtype. The gradient of the bias is summed in float32.

    Automatic differentiation would sum it in x's dtype: in bfloat16 a sum of 1,024 rows was off by 22 % on an H100
    (tests/gpu/test_norm.py), as the sum stops growing when a row is smaller than its last bit.
    """
    return x + bias.astype(x.dtype)


def _add_bias_backward(bias, d_out):
    rows = tuple(range(d_out.ndim - bias.ndim))
    return d_out, d_out.astype(jnp.float32).sum(rows).astype(bias.dtype)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias), _add_bias_backward)


def dot_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
