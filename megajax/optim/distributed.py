"""Where the optimizer state lies: beside its parameter, or split over the mesh axis data as well (ZeRO-1); on the host.

ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054): the copies of a parameter along the axis data need only one
copy of its moments between them. Each device updates its part, and the new parameters are gathered. The moments of
AdamW then take 8 / data bytes a parameter instead of 8.
"""

import logging
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.optim.optimizer import Optimizer
from megajax.parameters import name_of, parameter_of
from megajax.sharding import axes_of, entry_of

PyTree = Any

logger = logging.getLogger("megajax")


def optimizer_shardings(
    optimizer: Optimizer, abstract_params: PyTree, param_shardings: PyTree, *, mesh: Mesh, shard_over_data: bool
) -> PyTree:
    """NamedSharding for every leaf of `optimizer.init(params)`.

    Args:
        optimizer: only its `init` is used, on shapes, and optimizer.offload_state.
        abstract_params: nested dict of jax.ShapeDtypeStruct.
        param_shardings: NamedShardings, same structure.
        mesh: the mesh of those shardings.
        shard_over_data: optimizer.shard_over_data.

    A leaf whose path ends with that of a parameter, and which has its shape, lies like the parameter (see
    `moment_shardings`). Every other one is on all devices, explicitly: a scalar without a sharding comes back from a
    checkpoint on one device and the next step fails. A log line names those that are no scalars. What belongs to a
    parameter lies in pinned memory of the host if the state is offloaded.
    """
    moments = moment_shardings(abstract_params, param_shardings, mesh=mesh, shard_over_data=shard_over_data)
    shapes = {path: param.shape for path, param in jax.tree_util.tree_leaves_with_path(abstract_params)}
    sharding_of = dict(jax.tree_util.tree_leaves_with_path(moments))
    copied = []

    def place(path, leaf) -> NamedSharding:
        parameter = parameter_of(path, shapes)
        if parameter is not None and shapes[parameter] == leaf.shape:
            sharding = sharding_of[parameter]
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
            if leaf.size > 1:
                copied.append(f"{name_of(path)} {leaf.shape}")
        is_offloaded = optimizer.config.offload_state and parameter is not None
        return sharding.with_memory_kind("pinned_host") if is_offloaded else sharding

    shardings = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, abstract_params))
    if copied:
        logger.warning(
            "optimizer state: every device holds the whole of %s: it does not have the shape of a parameter",
            ", ".join(copied),
        )
    return shardings


def moment_shardings(abstract_params: PyTree, param_shardings: PyTree, *, mesh: Mesh, shard_over_data: bool) -> PyTree:
    """NamedShardings, structure of the parameters, for a moment of each parameter.

    With `shard_over_data` each is split over the axis data too, as the innermost axis of the first dim that divides.
    Dims that are split already are tried before whole ones, and dim 0 comes last: it is the stack of layers for most
    parameters, and a layer's gradient should be reduced when that layer is done. A parameter where no dim divides, or
    that the axis data splits already, keeps its own sharding.
    """
    if not shard_over_data or mesh.shape["data"] == 1:
        return param_shardings
    kept = []

    def add_data(path, param, sharding: NamedSharding) -> NamedSharding:
        spec = _split_over_data(param.shape, sharding.spec, mesh)
        if spec is None:
            kept.append(name_of(path))
            return sharding
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(add_data, abstract_params, param_shardings)
    if kept:
        logger.warning(
            "optimizer.shard_over_data: no dim divides by mesh.data=%d for %s; their moments stay whole along data",
            mesh.shape["data"],
            ", ".join(kept),
        )
    return shardings


def _split_over_data(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec | None:
    """`spec` with the axis data added to one dim; None where none divides; `spec` itself where data is in it."""
    axes_of_dim = [axes_of(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    if any("data" in axes for axes in axes_of_dim):
        return spec
    for dim in sorted(range(len(shape)), key=lambda dim: (dim == 0, not axes_of_dim[dim], dim)):
        num_parts = mesh.shape["data"]
        for axis in axes_of_dim[dim]:
            num_parts *= mesh.shape[axis]
        if shape[dim] % num_parts == 0:
            axes_of_dim[dim] = (*axes_of_dim[dim], "data")
            return PartitionSpec(*(entry_of(axes) for axes in axes_of_dim))
    return None
