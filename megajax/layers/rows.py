"""The rows of stacked arrays, with gradients that XLA computes without sums of padded arrays."""

import functools
import itertools

import jax

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
