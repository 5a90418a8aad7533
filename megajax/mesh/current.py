"""The current mesh, and the mailboxes of its GPUs: the only implicit context that layers and operations read.

`jax.set_mesh` makes a mesh current (compat.py reads the device type from it). Inside a region that is manual over some
of its axes (a pipeline stage) XLA partitions only the others: the free axes. Without a mesh the program runs on one
device, and every axis has size 1.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax.mesh import compat
from megajax.mesh.config import AXES

_ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def has_mesh() -> bool:
    """Whether there is a mesh with axes that are not manual: only then is a sharding constraint possible."""
    return jax.sharding.get_abstract_mesh().empty is False and bool(free_axes())


def free_axes() -> dict[str, int]:
    """Axes that XLA partitions here, with their sizes."""
    mesh = _mesh()
    return {name: size for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
            if compat.is_auto(kind)}  # fmt: skip


def axis_size(axis: str) -> int:
    """Size of an axis of the whole mesh, manual or free."""
    return _mesh().shape.get(axis, 1)


def is_inside_pipeline() -> bool:
    """Whether only some devices run this program at a time, as in a pipeline, whose stages take turns."""
    return axis_size("pipeline") > 1


def manual(body: Callable, in_specs, out_specs, *, check_vma: bool = True) -> Callable:
    """Runs `body` on each device's shard of the arguments: a shard_map over every axis that is still free; where none
    is, the arguments are those of this device already.

    Differentiating through it fails inside a pipeline stage (a nested shard_map), so callers define their own
    derivative (jax.custom_vjp), whose backward pass is another `manual`. check_vma: as in jax.shard_map.
    """
    if not free_axes():
        return body
    specs = dict(axis_names=set(free_axes()), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    if jax.sharding.get_abstract_mesh().empty:
        # Under jit, because only there may a mesh be without devices: the arrays remain where they are.
        return jax.jit(jax.shard_map(body, mesh=_ONE_DEVICE, **specs))

    @functools.wraps(body)
    def call(*args):
        return jax.shard_map(body, **specs)(*args)

    return call


def _mesh() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    return _ONE_DEVICE if mesh.empty else mesh


_addresses: ContextVar[jax.Array | None] = ContextVar("addresses of mailboxes", default=None)


def mailbox_addresses() -> jax.Array | None:
    """Of the GPUs of the mesh, if what is traced here sums in mailboxes (ops/mailboxes.py)."""
    return _addresses.get()


@contextlib.contextmanager
def exchanging(addresses: jax.Array | None) -> Generator[None]:
    """What is traced within uses these mailboxes, unless addresses is None. With them sequences are whole on all GPUs:
    a sum that leaves each of them a part would be followed by a gather."""
    token = _addresses.set(addresses)
    try:
        yield
    finally:
        _addresses.reset(token)
