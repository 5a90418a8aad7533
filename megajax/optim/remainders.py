"""float32 weights as bfloat16 ones and the 16 bits that these leave out: precision.params=bfloat16.

The model reads the bfloat16 numbers; the optimizer keeps the remainders, joins both and computes in float32, so that no
update is lost. Together they take the memory of float32 weights, and no step has to round them for its matmuls. So does
Megatron's precision-aware optimizer with --store-param-remainders (Transformer Engine's FusedAdam).

A weight is rounded to nearest, and up where two are as near, so that the highest bit of the remainder tells whether it
was rounded up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class WithRemainders(NamedTuple):
    state: PyTree
    """Of the optimizer."""
    remainders: PyTree
    """The lower 16 bits of each bfloat16 parameter, uint16, and None for the others."""


def has_remainders(params: PyTree) -> bool:
    return any(param.dtype == jnp.bfloat16 for param in jax.tree.leaves(params))


def packed(weights: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    """float32 weights -> (parameters, remainders). like: arrays with the dtypes of the parameters."""
    pairs = jax.tree.map(lambda a, param: split(a) if param.dtype == jnp.bfloat16 else (a, None), weights, like)
    params, remainders = (jax.tree.map(lambda _, pair, n=n: pair[n], weights, pairs) for n in range(2))
    return params, remainders


def unpacked(params: PyTree, remainders: PyTree) -> PyTree:
    """What `packed` returned -> float32 weights."""
    return jax.tree.map(lambda a, rest: a if rest is None else joined(a, rest), params, remainders)


def split(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finite float32 -> (bfloat16, uint16)."""
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint32)
    upper = (bits + jnp.uint32(0x8000)) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16), bits.astype(jnp.uint16)


def joined(weight: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 number of which `split` made these."""
    lower = remainder.astype(jnp.uint32)
    upper = jax.lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32) - (lower >> 15)
    return jax.lax.bitcast_convert_type(upper << 16 | lower, jnp.float32)
