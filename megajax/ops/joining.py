"""Arrays side by side, by kernels that XLA vectorises.

XLA's kernel for a concatenation moves one element per thread, 2 bytes in bfloat16, at half of the bandwidth of an H100
(jaxlib 0.10.2 and 0.11.2). Arrays of one place each are therefore chosen by `select`s: each of them is read once for
each place, from the cache but for the first time, four elements at a time. In a stage of a pipeline XLA exchanges parts
of what is selected by a permutation, in which all devices would have to take part, so there they are concatenated.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.mesh.current import is_inside_pipeline

MAX_CHOSEN = 4  # arrays; more reads from the cache would take longer than what is saved


def join(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """The concatenation of arrays of one dtype, whose shapes differ along `axis` (not negative) only."""
    return _join(tuple(parts), axis, tuple(part.shape[axis] for part in parts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _join(parts: tuple[jax.Array, ...], axis: int, sizes: tuple[int, ...]) -> jax.Array:
    *others, joined = parts
    if len(parts) > MAX_CHOSEN or set(sizes) != {1} or axis == joined.ndim - 1 or is_inside_pipeline():
        return jnp.concatenate(parts, axis)
    places = np.arange(len(parts)).reshape(-1, *[1] * (joined.ndim - 1 - axis))
    for place, part in enumerate(others):
        joined = jnp.where(places == place, part, joined)
    return joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split(joined: jax.Array, axis: int, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The arrays of these sizes along `axis` of which `join` makes this one."""
    return tuple(jnp.split(joined, np.cumsum(sizes)[:-1].tolist(), axis))


_join.defvjp(
    lambda parts, axis, sizes: (_join(parts, axis, sizes), None),
    lambda axis, sizes, _, d_joined: (split(d_joined, axis, sizes),),
)
split.defvjp(
    lambda joined, axis, sizes: (split(joined, axis, sizes), None),
    lambda axis, sizes, _, d_parts: (_join(tuple(d_parts), axis, sizes),),
)
