"""A digest of every array of a checkpoint, that finds what was damaged on disk.

Orbax restores an array with a flipped bit without a word. So a run that saves keeps, for each array x with elements of
bits b_i at position i of the whole array,

    digest(x) = sum_i b_i (2 i + 1)   mod 2^32

in the meta data of the step. Each factor is odd, so that any single flipped bit changes the sum; sums that wrap around
are exact in any order, so that the digest is the same on every mesh. It detects errors, not attackers. Computed where
the arrays are, in one pass over their memory.
"""

import hashlib
import json
import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

logger = logging.getLogger("megajax")

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def digests(tree) -> dict[str, list]:
    """{path of an array in the tree: [its dtype, its digest]}. Every process of the run must call it."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    on_host = [name for name, leaf in leaves.items() if leaf.sharding.memory_kind != _default_memory(leaf)]
    found = _digests({name: leaf for name, leaf in leaves.items() if name not in on_host})
    for name in on_host:  # one after the other: together they may not fit on the device
        leaf = leaves[name]
        found |= _digests({name: jax.device_put(leaf, leaf.sharding.with_memory_kind(_default_memory(leaf)))})
    found = jax.device_get(found)
    return {name: [str(leaf.dtype), int(found[name])] for name, leaf in leaves.items()}


def as_stored(stored: dict[str, list], abstract):
    """Abstract arrays with the dtypes that digests name: only as they were saved can arrays be compared."""

    def choose(path, a):
        dtype, _ = stored.get(jax.tree_util.keystr(path), (a.dtype, None))
        return jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype), sharding=a.sharding)

    return jax.tree_util.tree_map_with_path(choose, abstract)


def differing(stored: dict[str, list], tree) -> list[str]:
    """Paths of the arrays in the tree whose digest is not the stored one, in their order."""
    return [name for name, value in digests(tree).items() if stored.get(name) != value]


def on_all_processes(succeeded: bool) -> bool:
    """Whether it did on every process of the run; every process must ask."""
    if jax.process_count() == 1:
        return succeeded
    return bool(np.all(multihost_utils.process_allgather(np.array(succeeded))))


def sealed(meta: dict) -> dict:
    """JSON values with a digest of their own: `layer_rows`, say, decide what the arrays mean."""
    return meta | {"sha256": _sha256(meta)}


def unsealed(meta: dict, where: Path) -> dict:
    """Raises ValueError if they are not what was sealed."""
    meta = dict(meta)
    found = meta.pop("sha256", None)
    if found is None:
        logger.warning("%s: its meta data are not verified: they were written before they had a digest", where)
    elif found != _sha256(meta):
        raise ValueError(f"{where} is damaged: its meta data are not what was saved; use another step")
    return meta


def _sha256(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _default_memory(array: jax.Array) -> str:
    return next(iter(array.sharding.device_set)).default_memory().kind


@jax.jit
def _digests(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(digest, tree)


def digest(x: jax.Array) -> jax.Array:
    """uint32 [] of an array of any shape, of a number or bool dtype of 1 to 8 bytes."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)  # 8 bytes: a last axis of 2
    strides = [math.prod(bits.shape[axis + 1 :]) % 2**32 for axis in range(bits.ndim)]
    places = [lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(s) for axis, s in enumerate(strides)]
    index = sum(places, jnp.zeros(bits.shape, jnp.uint32))
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
