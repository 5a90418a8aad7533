"""Sharding of the optimizer state: like its parameter, or split over the mesh axis data as well (ZeRO-1); offload.

ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054): replicas of a parameter along the axis data share one copy of
its moments. Each device updates its part, and the new parameters are gathered. The moments of AdamW then take 8 / data
bytes per parameter instead of 8.
"""

import logging
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from megajax.mesh.sharding import axes_of, entry_of
from megajax.optim.optimizer import Optimizer
from megajax.parameters import name_of, parameter_of

PyTree = Any

logger = logging.getLogger("megajax")


def optimizer_shardings(
    optimizer: Optimizer,
    abstract_params: PyTree,
    param_shardings: PyTree,
    *,
    mesh: Mesh | AbstractMesh,
    shard_over_data: bool,
) -> PyTree:
    """NamedSharding for every leaf of `optimizer.init(params)`.

    Args:
        optimizer: only its `abstract_state` is used, and optimizer.offload_state.
        abstract_params: nested dict of jax.ShapeDtypeStruct.
        param_shardings: NamedShardings, same structure.
        mesh: the mesh of those shardings.
        shard_over_data: optimizer.shard_over_data.

    A leaf whose path ends with that of a parameter, and which has its shape, is sharded like the parameter (see
    `moment_shardings`), and so is one some of whose dims are 1 instead (the scales of optimizer.moments=float8, the
    second moments of NorMuon). Every other leaf is replicated, explicitly: a scalar without a sharding is restored from
    a checkpoint to one device and the next step fails. A log line names those that are not scalars. If the state is
    offloaded, leaves that belong to a parameter are kept in pinned host memory.
    """
    moments = moment_shardings(abstract_params, param_shardings, mesh=mesh, shard_over_data=shard_over_data)
    shapes = {path: param.shape for path, param in jax.tree_util.tree_leaves_with_path(abstract_params)}
    sharding_of = dict(jax.tree_util.tree_leaves_with_path(moments))
    replicated = []

    def sharding_for(path, leaf) -> NamedSharding:
        parameter = parameter_of(path, shapes)
        if parameter is not None and _is_reduced(leaf.shape, shapes[parameter]):
            axes = zip(leaf.shape, shapes[parameter], sharding_of[parameter].spec, strict=False)
            spec = (None if size == 1 < whole else entry for size, whole, entry in axes)
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
            if leaf.size > 1:
                replicated.append(f"{name_of(path)} {leaf.shape}")
        is_offloaded = optimizer.config.offload_state and parameter is not None
        return sharding.with_memory_kind("pinned_host") if is_offloaded else sharding

    shardings = jax.tree_util.tree_map_with_path(sharding_for, optimizer.abstract_state(abstract_params))
    if replicated:
        logger.warning(
            "optimizer state: replicated on every device, because they do not have the shape of a parameter: %s",
            ", ".join(replicated),
        )
    return shardings


def _is_reduced(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether an array of this shape is one of the other shape, possibly reduced over some dims, which it keeps."""
    return len(shape) == len(of) and all(size in (1, whole) for size, whole in zip(shape, of, strict=True))


def moment_shardings(
    abstract_params: PyTree, param_shardings: PyTree, *, mesh: Mesh | AbstractMesh, shard_over_data: bool
) -> PyTree:
    """NamedShardings, structure of the parameters, for a moment of each parameter.

    With `shard_over_data` each is also split over the axis data, as the innermost axis of the first dim that divides.
    Dims that are already split are tried before unsplit ones, and dim 0 comes last: it is the stack of layers for most
    parameters, and a layer's gradient should be reduced as soon as that layer is done. A parameter without a dim that
    divides, or that is already split over the axis data, keeps its own sharding.
    """
    if not shard_over_data or mesh.shape["data"] == 1:
        return param_shardings

    def add_data(param, sharding: NamedSharding) -> NamedSharding:
        spec = _split_over_data(param.shape, sharding.spec, mesh)
        return sharding if spec is None else NamedSharding(mesh, spec)

    return jax.tree.map(add_data, abstract_params, param_shardings)


def unsplit_moments(abstract_params: PyTree, param_shardings: PyTree, mesh: Mesh | AbstractMesh) -> list[str]:
    """Names of the parameters of which no dim divides by the axis data."""
    params = jax.tree_util.tree_leaves_with_path(abstract_params)
    specs = [sharding.spec for sharding in jax.tree.leaves(param_shardings)]
    found = zip(params, specs, strict=True)
    return [name_of(path) for (path, param), spec in found if _split_over_data(param.shape, spec, mesh) is None]


def _split_over_data(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """`spec` with the axis data added to one dim; None if no dim divides; `spec` itself if it already has data."""
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
