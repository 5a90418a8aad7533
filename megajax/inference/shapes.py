"""Few shapes for all lengths: every program is compiled for one shape of its arrays, and what is shorter is padded.

Dimensions: B rows, T tokens.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from megajax.mesh.sharding import BATCH_AXES
from megajax.models.model import Model
from megajax.parallel.context import sequence_order

MIN_LENGTH = 32  # smallest T of a batch of texts
BATCH_TOKENS = 16_384  # B * T of a batch, over all devices


def sizes(smallest: int, largest: int, factor: int = 2) -> list[int]:
    """smallest, smallest * factor, ..., largest."""
    powers = itertools.takewhile(lambda size: size < largest, (smallest * factor**n for n in itertools.count()))
    return [*powers, largest]


def fitting(count: int, sizes: Sequence[int]) -> int:
    """The smallest one that is large enough."""
    return next(size for size in sizes if size >= count)


def power_of_two(count: int) -> int:
    """The smallest one that is large enough."""
    return 1 << (count - 1).bit_length()


class TextBatch(NamedTuple):
    numbers: list[int]
    """Of the texts in its first rows."""
    shape: tuple[int, int]
    """(B, T)."""


def text_batches(
    lengths: Sequence[int], mesh: Mesh, longest: int | None, batch_tokens: int = BATCH_TOKENS, most_rows: int = 2**31
) -> Iterator[TextBatch]:
    """Texts of similar length share a batch; the longest come first, so that memory runs out early if it does.

    T is a power of two times what the mesh divides, or `longest`, what the model reads (None: unlimited). B is what
    batch_tokens hold, and for few texts a power of two, of each shard of the batch; a text that is longer is alone in
    its shard. most_rows: of a shard.
    """
    unit = 2 * mesh.shape["context"] * mesh.shape["tensor"]
    smallest, largest = (-(-length // unit) * unit for length in (MIN_LENGTH, longest or 0))
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)

    def rounded(length: int) -> int:
        size = smallest * power_of_two(-(-length // smallest))
        return min(size, max(largest, smallest)) if longest is not None else size

    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for length, found in itertools.groupby(numbers, key=lambda number: rounded(lengths[number])):
        group = list(found)
        wanted = power_of_two(-(-len(group) // shards))
        rows = max(1, min(wanted, most_rows, batch_tokens // (length * shards))) * shards
        for start in range(0, len(group), rows):
            yield TextBatch(group[start : start + rows], (rows, length))


def laid_out(arrays: dict[str, np.ndarray], model: Model, mesh: Mesh) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """-> (arrays [B, T] with `positions`, in the order in which `context` splits T; index in T of each token)."""
    shape = next(iter(arrays.values())).shape
    length = shape[1]
    longest = model.config.max_length or length
    positions_BT = np.broadcast_to(np.minimum(np.arange(length, dtype=np.int32), longest - 1), shape)
    order = sequence_order(length, mesh.shape["context"], model.execution.context_attention)
    return {name: a[:, order] for name, a in (arrays | {"positions": positions_BT}).items()}, np.argsort(order)
