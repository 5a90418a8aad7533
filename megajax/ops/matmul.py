"""The one dense contraction of every layer: number format, accumulation and, later, quantisation are decided here."""

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Contracts the last `num_contracted` dims of x [..., *K] with the first of w [*K, *N] -> [..., *N].

    Computes in x's dtype (w is cast to it, before any gather that XLA inserts) and accumulates in float32; the result
    has x's dtype. Float32 inputs are multiplied in full float32, never TF32.
    """
    contracted = w.shape[:num_contracted]
    assert x.shape[x.ndim - num_contracted :] == contracted, (x.shape, w.shape)
    dims = tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted))
    return jax.lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())), precision=dot_precision(x.dtype))


def dot_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
