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

    Trees of moments follow their parameter (see `moment_shardings`), in pinned memory of the host if offloaded.
    Everything else is a scalar and is replicated explicitly: a scalar without a sharding comes back from a checkpoint
    on one device and the next step fails.
    """
    moments = moment_shardings(abstract_params, param_shardings, mesh=mesh, shard_over_data=shard_over_data)
    if optimizer.config.offload_state:
        moments = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), moments)
    structure = jax.tree.structure(abstract_params)
    replicated = NamedSharding(mesh, PartitionSpec())

    def is_moments(node: PyTree) -> bool:
        return jax.tree.structure(node) == structure

    state = jax.eval_shape(optimizer.init, abstract_params)
    return jax.tree.map(lambda node: moments if is_moments(node) else replicated, state, is_leaf=is_moments)


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
            kept.append(jax.tree_util.keystr(path, simple=True, separator="."))
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
