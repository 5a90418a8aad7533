"""A digest of every array of a checkpoint, which detects damage on disk.

Orbax restores an array with a flipped bit without an error. So a save records, for each array x whose element at
position i of the whole array has the bits b_i, two numbers in the metadata of the step:

    digest_k(x) = sum_i mix_k(b_i xor (a_k i + c_k))   mod 2^32,   k = 0, 1

mix_k is a bijection of 32 bits in which every bit of the input changes each bit of the output with a probability of
about a half. So a single damaged element always changes the digest, and any other damage (pairs of flipped signs,
swapped elements) goes unnoticed with a probability of about 2^-64. Modular sums are exact in any order, so the digest
is the same on every mesh. It detects errors, not attacks. It is computed on the devices, in one pass over the arrays.

Source of mix_k: the finalizer of MurmurHash3 (Appleby, github.com/aappleby/smhasher) and lowbias32 (Wellons,
nullprogram.com/blog/2018/07/31).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

T = TypeVar("T")

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
# For each of the two numbers: a, c, and the shifts and factors of mix. Both a are odd.
_LANES = (
    (np.uint32(0x9E3779B1), np.uint32(0x85157AF5), ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)),
    (np.uint32(0x85EBCA77), np.uint32(0x27D4EB2F), ((16, 0x7FEB352D), (15, 0x846CA68B), 16)),
)


def digests(tree) -> dict[str, list]:
    """{path of an array in the tree: [its dtype, its digest]}, JSON values. Every process of the run must call it."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    on_host = [name for name, leaf in leaves.items() if leaf.sharding.memory_kind != _default_memory(leaf)]
    found = _all({name: leaf for name, leaf in leaves.items() if name not in on_host})
    for name in on_host:  # one after the other: together they may not fit on the device
        leaf = leaves[name]
        on_device = jax.device_put(leaf, leaf.sharding.with_memory_kind(_default_memory(leaf)))
        found |= _all({name: on_device})
    found = jax.device_get(found)
    return {name: [str(leaf.dtype), found[name].tolist()] for name, leaf in leaves.items()}


def as_stored(stored: dict[str, list], abstract):
    """Abstract arrays with the dtypes recorded with the digests: arrays can be compared only in the saved dtype."""

    def choose(path, a):
        dtype, _ = stored.get(jax.tree_util.keystr(path), (a.dtype, None))
        return jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype), sharding=a.sharding)

    return jax.tree_util.tree_map_with_path(choose, abstract)


def damaged_arrays(stored: dict[str, dict[str, list]], trees: dict[str, Any]) -> str:
    """Says which arrays differ from the stored digests, of {item: tree}; an empty string if none does."""
    wrong = [
        f"{item}{path}"
        for item, tree in trees.items()
        for path, value in digests(tree).items()
        if stored.get(item, {}).get(path) != value
    ]
    if not wrong:
        return ""
    more = " ..." if len(wrong) > 4 else ""
    return f"{', '.join(wrong[:4])}{more} {'is' if len(wrong) == 1 else 'are'} not what was saved"


def on_all_processes(succeeded: bool) -> bool:
    """Whether `succeeded` is true on every process of the run; every process must call it."""
    if jax.process_count() == 1:
        return succeeded
    return bool(np.all(multihost_utils.process_allgather(np.array(succeeded))))


def on_each_process(read: Callable[[], T]) -> T:
    """What `read` returns; raises its error, and on the processes where it succeeded ValueError if it failed on another
    one: what follows is a computation of all processes, so all of them take part or none."""
    try:
        found = read()
    except Exception:
        on_all_processes(False)
        raise
    if not on_all_processes(True):
        raise ValueError("another process could not read it, and says why")
    return found


def sealed(step: int, meta: dict[str, Any], digests: dict[str, dict]) -> dict[str, Any]:
    """The JSON metadata of a step, with a digest of its own, because for example its `layer_rows` determine what the
    arrays mean.

    digests: {item: `digests` of its tree}.
    """
    meta = meta | {"step": step, "digests": digests}
    return meta | {"sha256": _sha256(meta)}


def unsealed(meta: Any, step: int, where: Path) -> dict[str, Any]:
    """The metadata of `sealed`, checked. Raises ValueError if it is damaged, or that of another step."""
    if not isinstance(meta, dict):
        raise ValueError(f"{where} is damaged: it does not hold an object {{...}}; use another step")
    missing = [name for name in ("step", "digests", "sha256") if name not in meta]
    if missing:
        raise ValueError(f"{where} is damaged: it has no {', '.join(missing)}; use another step")
    meta = dict(meta)
    if meta.pop("sha256") != _sha256(meta):
        raise ValueError(f"{where} is damaged: its metadata is not what was saved; use another step")
    if meta["step"] != step:
        raise ValueError(f"{where} is damaged: it belongs to step {meta['step']}, not {step}; use another step")
    return meta


def _sha256(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _default_memory(array: jax.Array) -> str:
    return next(iter(array.sharding.device_set)).default_memory().kind


@jax.jit
def _all(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jax.jit(digest), tree)  # traced once for each shape


def digest_of_pieces(pieces: Iterable[np.ndarray]) -> list[int]:
    """The digest of a whole array; pieces: its parts in the order of memory, on the host."""
    sums = []
    first = 0
    for piece in pieces:
        sums.append(np.asarray(_digest_from(piece.reshape(-1), np.uint32(first % 2**32))))
        first += piece.size
    return np.stack(sums).sum(0, dtype=np.uint32).tolist()


@jax.jit
def _digest_from(x: jax.Array, first: jax.Array) -> jax.Array:
    return digest(x, first)


def digest(x: jax.Array, first: int | jax.Array = 0) -> jax.Array:
    """uint32 [2] of an array of any shape, of a number or bool dtype of 1 to 8 bytes.

    first: the position of its first element in the whole array, of which the digest is the sum of those of its parts.
    """
    bits, index = _words(x, first)
    mixed = tuple(_mix(bits ^ (index * scale + offset), *constants) for scale, offset, constants in _LANES)
    zeros = (np.uint32(0),) * len(mixed)
    # One reduction for both: two reductions would read the array twice.
    sums = lax.reduce(mixed, zeros, lambda a, b: tuple(map(jnp.add, a, b)), tuple(range(bits.ndim)))
    return jnp.stack(sums)


def _mix(h: jax.Array, first: tuple[int, int], second: tuple[int, int], last: int) -> jax.Array:
    for shift, factor in (first, second):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(last))


def _words(x: jax.Array, first: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> (the bits of each element, its position in the array), uint32; 8-byte elements become two of 4 bytes."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)  # 8 bytes: a last axis of 2
    strides = [math.prod(bits.shape[axis + 1 :]) % 2**32 for axis in range(bits.ndim)]
    offsets = [lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(s) for axis, s in enumerate(strides)]
    start = jnp.uint32(first) * np.uint32(bits.size // max(x.size, 1))
    return bits, sum(offsets, jnp.full(bits.shape, start))
