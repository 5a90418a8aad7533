"""Compares the replicas of array shards on different devices, to find a device that computes incorrectly.

Each device computes a digest (checkpoint/verify.py) of its shards of parameters and optimizer state: one pass over its
memory, and eight bytes per array to the host. Replicas of a shard must have equal digests. Shards without a replica
cannot be compared.
"""

import functools
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.verify import digest

MOST_NAMED = 4


def check_replicas(state, mesh: Mesh, done: int, latest_saved: int | None) -> None:
    """Raises RuntimeError in every process if copies differ. done, latest_saved: steps."""
    lines = differing_devices(state, mesh)
    if lines:
        start = "from the beginning" if latest_saved is None else f"from the checkpoint of step {latest_saved}"
        raise RuntimeError(
            f"after step {done} copies on some devices differ from the rest: {'; '.join(lines)}; this step was not "
            f"saved, and a restart resumes {start}: test these devices, or exclude them"
        )


def describe_replicas(state) -> str:
    """One line: how much can be compared."""
    share = compared_share(state)
    if share == 0:
        return (
            "training.check_replicas_every_steps: no array has a copy on another device, so there is nothing to compare"
        )
    return f"replicas: {100 * share:.3g} % of parameters and optimizer state is replicated and will be compared"


def compared_share(tree) -> float:
    """Fraction of the bytes of the tree that is replicated."""
    leaves = jax.tree.leaves(tree)
    of_copies = sum(leaf.nbytes for leaf in leaves if len(_holders(leaf)) < leaf.sharding.num_devices)
    return of_copies / sum(leaf.nbytes for leaf in leaves)


def differing_devices(tree, mesh: Mesh) -> list[str]:
    """-> a line for each device whose copy of a shard differs from those of other devices; empty if all agree.

    tree: arrays with NamedShardings of the mesh. The majority is assumed to be right; without a majority, as with two
    copies, all devices that hold the shard are named. Every process of the run must call it, and all get the same
    result.
    """
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    found = _digests_by_device([leaf for _, leaf in named], mesh)
    row_of = {device: row for row, device in enumerate(mesh.devices.flat)}
    wrong: dict[Any, list[str]] = defaultdict(list)
    for column, (name, leaf) in enumerate(named):
        for devices in _holders(leaf):
            values = {device: tuple(found[row_of[device], column].tolist()) for device in devices}
            (most, count), *others = Counter(values.values()).most_common()
            if others:
                suspects = [device for device in devices if values[device] != most or 2 * count <= len(devices)]
                for device in suspects:
                    wrong[device].append(name)
    return [_line(device, names) for device, names in sorted(wrong.items(), key=lambda item: item[0].id)]


def _line(device, names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    where = f"process {device.process_index}, device {device.id} ({device.device_kind})"
    return f"{where}: {', '.join(names[:MOST_NAMED])}{more}"


def _holders(leaf: jax.Array) -> list[tuple]:
    """For each shard of the array, the devices that hold it."""
    return _holders_of(leaf.sharding, leaf.shape)


@functools.cache
def _holders_of(sharding, shape: tuple[int, ...]) -> list[tuple]:
    holders = defaultdict(list)
    for device, index in sharding.devices_indices_map(shape).items():
        holders[tuple((part.start, part.stop) for part in index)].append(device)
    return [tuple(devices) for devices in holders.values()]


def _digests_by_device(leaves: list[jax.Array], mesh: Mesh) -> np.ndarray:
    """uint32 [devices of the mesh, arrays, 2]."""
    on_device = [leaf.sharding.with_memory_kind(_memory(mesh)) == leaf.sharding for leaf in leaves]
    columns = {}
    resident = [number for number, is_resident in enumerate(on_device) if is_resident]
    columns |= dict(zip(resident, _digests([leaves[number] for number in resident], mesh).swapaxes(0, 1), strict=True))
    for number, is_resident in enumerate(on_device):
        if not is_resident:  # offloaded: one at a time, because all may not fit
            leaf = jax.device_put(leaves[number], leaves[number].sharding.with_memory_kind(_memory(mesh)))
            columns[number] = _digests([leaf], mesh)[:, 0]
    return np.stack([columns[number] for number in range(len(leaves))], 1)


def _memory(mesh: Mesh) -> str:
    return mesh.devices.flat[0].default_memory().kind


def _digests(leaves: list[jax.Array], mesh: Mesh) -> np.ndarray:
    shardings = [leaf.sharding for leaf in leaves]
    found = _program(mesh, tuple(named.spec for named in shardings if isinstance(named, NamedSharding)))(leaves)
    if jax.process_count() == 1:
        return np.asarray(found)
    return multihost_utils.process_allgather(found, tiled=True)


@functools.cache
def _program(mesh: Mesh, specs: tuple[P, ...]):
    """Each device computes its own digests: XLA would compute those of known replicas only once."""

    def on_one_device(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([digest(leaf) for leaf in leaves])[None]

    each = P(mesh.axis_names)
    return jax.jit(jax.shard_map(on_one_device, mesh=mesh, in_specs=(list(specs),), out_specs=each, check_vma=False))
