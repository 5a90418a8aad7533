"""The mesh of the moment: the only implicit context that layers and operations read.

`jax.set_mesh` makes a mesh current (compat.py reads from it what kind of device it has). Inside a region that is manual
over some of its axes (a stage of a pipeline) XLA partitions the others alone: the free axes. Without a mesh the program
runs on one device, and every axis has size 1.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax import compat
from megajax.mesh import AXES

_ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def has_mesh() -> bool:
    """Whether there is a mesh whose axes are not all manual: only then can XLA be asked for a layout."""
    return jax.sharding.get_abstract_mesh().empty is False and bool(free_axes())


def free_axes() -> dict[str, int]:
    """Axes that XLA partitions here, with their sizes."""
    mesh = _mesh()
    return {name: size for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
            if compat.is_auto(kind)}  # fmt: skip


def axis_size(axis: str) -> int:
    """Of an axis of the whole mesh, manual or free."""
    return _mesh().shape.get(axis, 1)


def is_inside_pipeline() -> bool:
    """Whether only some devices run this program at a time: the stages of a pipeline take turns."""
    return axis_size("pipeline") > 1


def manual(body: Callable, in_specs, out_specs) -> Callable:
    """`body` on each device's own part of the arguments: a shard_map over every axis that is still free.

    Differentiating through it fails inside a pipeline stage (a nested shard_map), so whoever calls it gives its own
    derivative (jax.custom_vjp), whose backward pass is a `manual` again.
    """
    given = dict(axis_names=set(free_axes()), in_specs=in_specs, out_specs=out_specs)
    if jax.sharding.get_abstract_mesh().empty:
        # Compiled, because only then may a mesh name no devices: the arrays stay on theirs.
        return jax.jit(jax.shard_map(body, mesh=_ONE_DEVICE, **given))

    @functools.wraps(body)
    def call(*args):
        return jax.shard_map(body, **given)(*args)

    return call


def _mesh() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    return _ONE_DEVICE if mesh.empty else mesh
