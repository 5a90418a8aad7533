"""The one table: logical axis of an array -> mesh axes. Changing a layout is changing this table.

A parameter is made by `weight`, which writes its logical axes beside it; an activation passes through `constrain`;
an operation that XLA cannot partition well runs in `manual`, where every device sees its own part. All of them read the
mesh that `jax.set_mesh` made current, and leave alone the axes over which the caller is already manual (a pipeline
stage).
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax import compat

BATCH_AXES = ("data", "fsdp", "expert")

WEIGHT_AXES: dict[str | None, tuple[str, ...]] = {
    "chunks": (),  # virtual stages of a device, see parallel/schedule.py
    "layers": ("pipeline",),
    "embed": ("fsdp", "context"),  # what splits a sequence shares the weights too
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("pipeline", "tensor"),  # all stages share the work of embedding and output layer
    "experts": ("expert",),
    "positions": ("pipeline", "tensor"),
    "head_dim": (),
    "norm": (),
}

ACTIVATION_AXES: dict[str | None, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("context", "tensor"),  # between blocks: sequence parallelism
    "time": ("context",),  # inside a block, where `tensor` splits heads or width
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("pipeline", "tensor"),
    None: (),
}


def weight(
    shape: Sequence[int], axes: Sequence[str], init: Callable, rngs: nnx.Rngs, decay: bool | None = None
) -> nnx.Param:
    """A parameter of `shape`, drawn by `init(key, shape)`, that carries its logical axes as metadata `axes`.

    decay: whether weight decay applies; by default to everything with more than one dim (Megatron's rule).
    """
    assert len(shape) == len(axes), (shape, axes)
    decay = len(shape) > 1 if decay is None else decay
    return nnx.Param(init(rngs.params(), tuple(shape)), axes=tuple(axes), decay=decay)


def weight_spec(axes: Sequence[str]) -> P:
    """PartitionSpec of a parameter with these logical axes."""
    return P(*(entry_of(WEIGHT_AXES[axis]) for axis in axes))


def local_weight_spec(axes: Sequence[str], axis_names) -> P:
    """weight_spec of these mesh axes alone: for a region that is manual over them, or over all others."""
    return P(*(entry_of(tuple(name for name in WEIGHT_AXES[axis] if name in axis_names)) for axis in axes))


def weight_shardings(params_axes, mesh: Mesh):
    """Pytree of logical axes (tuples) -> pytree of NamedSharding."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, weight_spec(axes)), params_axes, is_leaf=is_axes)


def is_axes(node) -> bool:
    """Whether a node of a pytree of logical axes is a leaf: the axes of one parameter."""
    return isinstance(node, tuple)


def batch_spec() -> P:
    """PartitionSpec of the arrays of a batch, [microbatches, batch, time]."""
    return P(None, *(entry_of(ACTIVATION_AXES[axis]) for axis in ("batch", "time")))


def entry_of(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a PartitionSpec for these mesh axes."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(entry) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def free_axes() -> dict[str, int]:
    """Axes of the current mesh that XLA partitions here, with their sizes; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
            if compat.is_auto(kind)}  # fmt: skip


def row_major(params, params_axes):
    """Arrays laid out like parameters, each part stored with its last dim contiguous.

    Reducing a gradient over fsdp along its last dim makes XLA store it transposed; the optimizer would follow, and
    transpose parameter and moments to and fro: six arrays instead of one. Where no device splits the last dim there is
    nothing to reduce along it, and XLA keeps its choice.
    """
    sizes = free_axes()

    def place(axes, x):
        spec = weight_spec(axes)
        if math.prod(sizes.get(name, 1) for name in WEIGHT_AXES[axes[-1]]) == 1:
            return x
        return manual(compat.row_major, (spec,), spec)(x)

    return jax.tree.map(place, params_axes, params, is_leaf=is_axes)


def activation_spec(shape: Sequence[int], axes: Sequence[str | None]) -> P:
    """PartitionSpec of an activation on the current mesh.

    A mesh axis that does not divide its dim is left out: one token of a decoding step cannot be split over `tensor`.
    (Training never meets this: Config.check refuses such sizes.)
    """
    sizes, spec = free_axes(), []
    for dim, axis in zip(shape, axes, strict=True):
        kept: tuple[str, ...] = ()
        for name in ACTIVATION_AXES[axis]:
            if name in sizes and dim % (math.prod(sizes[k] for k in kept) * sizes[name]) == 0:
                kept += (name,)
        spec.append(entry_of(kept))
    return P(*spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Asks XLA to lay x out as the table says for these logical axes, one a dim."""
    if not free_axes():
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(x.shape, axes))


def constrain_weights(tree, tree_axes):
    """Asks XLA to lay arrays out like parameters with these logical axes."""
    free = free_axes()
    if not free:
        return tree
    lay = lambda axes, x: jax.lax.with_sharding_constraint(x, local_weight_spec(axes, free))
    return jax.tree.map(lay, tree_axes, tree, is_leaf=is_axes)


def manual(body: Callable, in_specs, out_specs) -> Callable:
    """`body` on each device's own part of the arguments: a shard_map over every axis that is still free.

    Differentiating through it fails inside a pipeline stage (a nested shard_map), so whoever calls it gives its own
    derivative (jax.custom_vjp), whose backward pass is a `manual` again.
    """
    axes = free_axes()

    @functools.wraps(body)
    def call(*args):
        return jax.shard_map(body, axis_names=set(axes), in_specs=in_specs, out_specs=out_specs)(*args)

    return call
