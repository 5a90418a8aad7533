"""Which keys each query sees: masks, combined by & (both) and | (either).

    CAUSAL & window(4096)                   a query sees itself and the 4095 keys before it
    CAUSAL | first(32)                      prefix: the first 32 keys are seen by all queries
    CAUSAL & (window(4096) | first(4))      the window, and the first keys too (Xiao et al. 2023, attention sinks)

A mask is a union of intervals of positions in the sequence for each query, so & and | always give another one. Segments
of packed documents are arrays, which restrict it further. Kernels compute what is one interval per query; the plain
formula computes the rest, and the log says so.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Interval(NamedTuple):
    """The keys j that query i sees: i - window < j <= i + ahead, and j < first. Each limit may be infinite; ahead is 0
    otherwise."""

    window: float = math.inf
    ahead: float = math.inf
    first: float = math.inf

    def visible(self, distance: jax.Array, key: jax.Array) -> jax.Array:
        seen = jnp.full_like(distance, True, bool) if self.ahead == math.inf else distance >= 0
        if self.window < math.inf:
            seen &= distance < self.window
        return seen if self.first == math.inf else seen & (key < self.first)

    def upper(self, query: jax.Array) -> jax.Array | None:
        """One past the last position that is seen; None: no limit."""
        if self.ahead == math.inf:
            return None if self.first == math.inf else jnp.full_like(query, self.first)
        return query + 1 if self.first == math.inf else jnp.minimum(query + 1, self.first)

    def __str__(self) -> str:
        limits = {"causal": self.ahead, f"window {self.window}": self.window, f"first {self.first}": self.first}
        return " and ".join(name for name, limit in limits.items() if limit < math.inf) or "full"


@dataclasses.dataclass(frozen=True)
class Mask:
    """Hashable, and equal if the intervals are; part of the program."""

    intervals: tuple[Interval, ...]
    """None is within another one. By descending window."""

    @staticmethod
    def union(intervals: Iterable[Interval]) -> "Mask":
        found = set(intervals)

        def is_within(one: Interval, other: Interval) -> bool:
            return one != other and all(a <= b for a, b in zip(one, other, strict=True))

        return Mask(tuple(sorted((one for one in found if not any(is_within(one, b) for b in found)), reverse=True)))

    def __and__(self, other: "Mask") -> "Mask":
        return Mask.union(Interval(*map(min, a, b)) for a in self.intervals for b in other.intervals)

    def __or__(self, other: "Mask") -> "Mask":
        return Mask.union((*self.intervals, *other.intervals))

    def __str__(self) -> str:
        return " or ".join(map(str, reversed(self.intervals)))

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key after itself."""
        return all(interval.ahead == 0 for interval in self.intervals)

    @property
    def is_interval(self) -> bool:
        """Whether each query sees one interval of keys, from `lower` to `upper`."""
        return len({interval.window for interval in self.intervals}) == 1

    @property
    def reach(self) -> int | None:
        """Last keys, its own included, of those up to itself that a query may see; None: all."""
        window = self.intervals[0].window
        return None if window == math.inf else int(window)

    def visible(self, distance: jax.Array, key: jax.Array) -> jax.Array:
        """bool, of queries that are `distance` positions after the keys at the positions `key`, which broadcasts."""
        return functools.reduce(jnp.logical_or, (interval.visible(distance, key) for interval in self.intervals))

    def lower(self, query: jax.Array) -> jax.Array | None:
        """First position that the query at a position may see, perhaps before the sequence; None: no limit."""
        return None if self.reach is None else query + 1 - self.reach

    def upper(self, query: jax.Array) -> jax.Array | None:
        """One past the last position that the query at a position may see, perhaps after the sequence; None: no
        limit."""
        uppers = [upper for interval in self.intervals if (upper := interval.upper(query)) is not None]
        return functools.reduce(jnp.maximum, uppers) if len(uppers) == len(self.intervals) else None

    def mean_keys(self, length: int) -> float:
        """Keys that a query of a sequence sees, on average."""
        # The number is linear in the query between those where a limit begins to matter.
        limits = {0, length}
        for window, first in itertools.product((i.window for i in self.intervals), (i.first for i in self.intervals)):
            limits |= {place for place in (window, first, window + first) if place < length}
        around = np.array(sorted({min(max(place + step, 0), length - 1) for place in limits for step in (-1, 0, 1)}))
        seen = self._num_keys(around, length)
        inner = (np.diff(around) - 1) * (seen[:-1] + seen[1:]) / 2
        return float(seen.sum() + inner.sum()) / length

    def _num_keys(self, query: np.ndarray, length: int) -> np.ndarray:
        """Keys that the queries at these positions see."""
        total = end = np.zeros(query.shape)
        for interval in self.intervals:  # by ascending lower bound
            upper = np.minimum(np.minimum(query + 1 + interval.ahead, interval.first), length)
            total = total + np.maximum(upper - np.maximum(query + 1 - interval.window, end), 0)
            end = np.maximum(end, upper)
        return total


FULL = Mask((Interval(),))
CAUSAL = Mask((Interval(ahead=0),))


def window(size: int | None) -> Mask:
    """A query sees its own key and the size - 1 before it, and those after it; None: all."""
    return FULL if size is None else Mask((Interval(window=size),))


def first(size: int) -> Mask:
    """The first keys of the sequence."""
    return Mask((Interval(first=size),))
