"""The rows of stacked arrays, with gradients that XLA computes without sums of padded arrays."""

import dataclasses
import functools
import itertools
from typing import Any

import jax

from megajax.mesh.sharding import one_value

MAX_PADDED = 4  # operands of a concatenation that XLA gives to an emitter of its own (see `unstack`)


@jax.custom_vjp
def unstack(tree) -> tuple:
    """Pytree of arrays [n, ...] -> n pytrees of arrays [...].

    The gradient is the concatenation of the layers' gradients. With plain indexing it would be a sum of n zero-padded
    arrays, and every XLA fusion that reads it would evaluate n terms per element. Up to MAX_PADDED layers it is that
    sum all the same: XLA has an emitter for concatenations of so few arrays that writes a single result, and the
    optimizer would read the gradients three times, for the parameters and for each moment.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(count))


def _stacked(*layers: jax.Array) -> jax.Array | None:
    """Arrays [...] -> [n, ...]; None: integers have no gradient."""
    if layers[0].dtype == jax.dtypes.float0:
        return None
    if len(layers) > MAX_PADDED:
        return jax.numpy.stack(layers)
    zero = layers[0].dtype.type(0)
    around = [(0, 0, 0)] * layers[0].ndim
    rows = [
        jax.lax.pad(layer[None], zero, [(number, len(layers) - 1 - number, 0), *around])
        for number, layer in enumerate(layers)
    ]
    return functools.reduce(jax.numpy.add, rows)


unstack.defvjp(
    lambda tree: (unstack(tree), None),
    lambda _, gradients: (jax.tree.map(_stacked, *gradients),),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Row:
    """A row of stacked arrays, to be read inside of a function that is recomputed.

    What such a function is given is kept from the forward to the backward pass, behind an optimization barrier or by a
    loop. A row would be copied for that, in the dtype in which it is stored; stacked arrays are there anyway.
    """

    stacked: Any
    """Pytree of arrays [n, ...]."""
    number: int = dataclasses.field(metadata=dict(static=True))
    like: Any = None
    """The row from `unstack`, to which the gradient goes; None: it goes to `stacked`."""

    def read(self):
        """-> pytree of arrays [...]."""
        rows = jax.tree.map(functools.partial(_row, self.number), self.stacked)
        return rows if self.like is None else jax.tree.map(_with_gradient_to, self.like, rows)


def rows_of(tree) -> list[Row]:
    """Pytree of arrays [n, ...] -> its n rows."""
    stacked = jax.lax.stop_gradient(tree)
    return [Row(stacked, number, like) for number, like in enumerate(unstack(tree))]


def _row(number: int, stacked: jax.Array) -> jax.Array:
    if stacked.dtype != jax.numpy.float32:
        return stacked[number]
    # If XLA knew which row, it would round all rows to the dtype of the matmul before it takes one, in each recomputed
    # layer again, and copy the row for some matmuls.
    number = jax.lax.optimization_barrier(jax.numpy.int32(number))
    return jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False)


@jax.custom_vjp
def _with_gradient_to(like: jax.Array, row: jax.Array) -> jax.Array:
    """The row, whose gradient is that of `like`."""
    return one_value(row)


_with_gradient_to.defvjp(
    lambda like, row: (_with_gradient_to(like, row), None),
    lambda _, gradient: (gradient, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_rows(tree, sizes: tuple[int, ...]) -> tuple:
    """Pytree of arrays [sum(sizes), ...] -> for each size a pytree of arrays [size, ...]. As for `unstack`, the
    gradient is one concatenation."""
    if len(sizes) == 1:
        return (tree,)
    ends = list(itertools.accumulate(sizes))
    return tuple(
        jax.tree.map(lambda a, start=end - size, end=end: a[start:end], tree)
        for size, end in zip(sizes, ends, strict=True)
    )


def _join_rows(sizes, _, gradients):
    def join(*parts: jax.Array) -> jax.Array | None:
        return None if parts[0].dtype == jax.dtypes.float0 else jax.numpy.concatenate(parts)

    return (jax.tree.map(join, *gradients),)


split_rows.defvjp(lambda tree, sizes: (split_rows(tree, sizes), None), _join_rows)
