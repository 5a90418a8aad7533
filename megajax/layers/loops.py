"""Which consecutive layers a scan can run: repetitions of a pattern."""

import dataclasses
from collections.abc import Sequence

from megajax.layers.layer import StackedConfig


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers first, first + 1, ...: a pattern of `period` layers, repeated `steps` times."""

    first: int
    period: int
    steps: int

    def layers_of(self, configs: Sequence[StackedConfig], kind: str) -> int:
        """Number of its layers of this kind."""
        return sum(config.kind == kind for config in configs[self.first : self.first + self.period * self.steps])


def loops_of(configs: Sequence[StackedConfig], offset: int = 0) -> list[Loop]:
    """Splits layers, numbered from `offset`, into consecutive loops, greedily: each takes the pattern whose repetition
    covers the most layers, the shortest on ties. A layer that starts no repetition is a loop of one step."""
    loops: list[Loop] = []
    first = 0
    while first < len(configs):
        rest = tuple(configs[first:])
        periods = range(1, len(rest) // 2 + 1)
        repeated = [Loop(offset + first, period, _repetitions(rest, period)) for period in periods]
        best = max(repeated, key=lambda loop: loop.period * loop.steps if loop.steps > 1 else 0, default=None)
        loops.append(best if best and best.steps > 1 else Loop(offset + first, 1, 1))
        first += loops[-1].period * loops[-1].steps
    return loops


def _repetitions(configs: tuple, period: int) -> int:
    """How many times the first `period` configs repeat from the start."""
    pattern = configs[:period]
    count = 1
    while configs[count * period : (count + 1) * period] == pattern:
        count += 1
    return count
