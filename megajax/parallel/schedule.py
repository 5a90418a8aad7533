"""Pipeline schedules as data, computed on the host: the layers of each stage, and the table of a schedule.

P devices of `pipeline` (ranks) hold V chunks of layers each (virtual stages, Narayanan et al. 2021): chunk c of rank r
is stage c P + r of the model. The vocabulary belongs to no stage: all ranks share embedding and loss.

A row of a table is a tick: at most one forward and one backward pass on each rank, and what a rank sends is used by its
neighbour exactly one tick later. The schedule is one forward, one backward (1F1B, Narayanan et al. 2019, 2021): for M
microbatches M V + V P + P - 2 ticks, and at most V P + P - 1 chunks in flight.

Where a stage takes F forward and B backward, that is (M V + P - 1) (F + B): ticks at the start run only F, those at the
end only B. The bubble is the fraction (P - 1) / (M V + P - 1) of the time. With V > 1 the order on each rank is
Megatron-LM's; M need not be a multiple of P, but then some ranks wait in between.
"""

import dataclasses
import itertools
import re

import numpy as np

from megajax.mesh.config import MeshConfig

MAX_LAYOUT = 100_000  # letters of a layout after expanding repetitions


@dataclasses.dataclass(frozen=True)
class Stages:
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    """[V][P]: numbers of the layers of chunk c on rank r."""

    @property
    def num_chunks(self) -> int:
        return len(self.layers)

    @property
    def num_ranks(self) -> int:
        return len(self.layers[0])

    def rows(self, wanted) -> np.ndarray:
        """Layer number of each row of the stack of one kind of layer -> int32 [V, P * K]; -1 for padding.

        wanted: set of layer numbers of that kind. K: the largest number of them in any stage.
        """
        stages = [[[number for number in stage if number in wanted] for stage in chunk] for chunk in self.layers]
        most = max(len(stage) for chunk in stages for stage in chunk)
        padded = [[stage + [-1] * (most - len(stage)) for stage in chunk] for chunk in stages]
        return np.array(padded, np.int32).reshape(self.num_chunks, -1)


def make_stages(mesh: MeshConfig, num_layers: int) -> Stages | None:
    """The stages, or None without a pipeline. Without a layout, layers are spread evenly, and where they do not divide
    the first stages get one layer less, as they keep activations longest. Raises ValueError for numbers of stages and
    layers that do not match."""
    if mesh.pipeline == 1:
        return None
    num_ranks = mesh.pipeline
    num_chunks = mesh.virtual_stages
    layout = mesh.pipeline_layout
    count = num_ranks * num_chunks
    if layout:
        sizes = parse_layout(layout)
        if len(sizes) != count or sum(sizes) != num_layers:
            raise ValueError(
                f"mesh.pipeline_layout={layout} has {sum(sizes)} layers in {len(sizes)} stages; it needs "
                f"model.num_layers={num_layers} in {count} stages (mesh.pipeline={num_ranks} times "
                f"mesh.virtual_stages={num_chunks})"
            )
    elif num_layers < count:
        raise ValueError(
            f"mesh.pipeline={num_ranks} times mesh.virtual_stages={num_chunks} are {count} stages for "
            f"model.num_layers={num_layers}; use fewer, or give --mesh.pipeline_layout with empty stages"
        )
    else:
        sizes = [num_layers // count] * count
        for number in range(count - num_layers % count, count):
            sizes[number] += 1
    ends = np.cumsum(sizes)
    stages = [tuple(range(end - size, end)) for size, end in zip(sizes, ends.tolist(), strict=True)]
    return Stages(tuple(tuple(stages[c * num_ranks : (c + 1) * num_ranks]) for c in range(num_chunks)))


def parse_layout(text: str) -> list[int]:
    """Layers of each stage, from Megatron's --pipeline-model-parallel-layout: `tt|ttt|t*4|(tt|)*2t`.

    `|` separates stages, `t` is a layer, `X*n` repeats a letter or a group in parentheses. E (embedding), L (loss)
    and m (multi-token prediction) are accepted and ignored; here all stages share that work. Raises ValueError for
    anything else.
    """
    word = re.compile(r"(\(([^()]*)\)|[^()*])\*(\d{1,5})")
    plain = text.replace(" ", "").replace(",", "")
    while match := word.search(plain):
        body = match[2] if match[2] is not None else match[1]
        plain = plain[: match.start()] + body * int(match[3]) + plain[match.end() :]
        if len(plain) > MAX_LAYOUT:
            raise ValueError(f"mesh.pipeline_layout={text} is longer than {MAX_LAYOUT} letters; repeat fewer times")
    plain = plain.replace("(", "").replace(")", "")
    if unknown := set(plain) - set("EtmL|"):
        raise ValueError(
            f"mesh.pipeline_layout={text}: {min(unknown)!r} is unknown; use t for a layer, | between "
            "stages, *n to repeat"
        )
    return [stage.count("t") for stage in plain.split("|")]


@dataclasses.dataclass(frozen=True)
class Table:
    """int32 arrays; -1: nothing to do.

    [ticks, P], per rank: the microbatch, its chunk, and the slot for what its backward pass needs.
    [ticks], for all ranks together: the microbatch that is embedded, the one whose loss is computed, and the one whose
    embedding gets its gradient; the slot of the gradient of the loss until the last stage reads it.
    """

    forward: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    embed: np.ndarray
    loss: np.ndarray
    loss_slot: np.ndarray
    loss_slot_read: np.ndarray
    embed_backward: np.ndarray
    num_slots: int
    num_loss_slots: int


def make_table(num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, backward: bool = True) -> Table:
    """backward=False: only the forward passes."""
    P = num_ranks
    M = num_microbatches
    V = num_chunks
    passes = [[] for _ in range(P)]  # of each rank: (tick, is_backward, microbatch, chunk)
    for s, i, c in itertools.product(range(P), range(M), range(V)):
        before = (i // P) * P * V + i % P if V > 1 else i
        passes[s].append((s + before + c * P, 0, i, c))
        if backward:
            passes[s].append((V * P + P - 2 - s + before + (V - 1 - c) * P, 1, i, c))
    ticks = max(max(of_rank)[0] for of_rank in passes) + 1
    names = [f"{name}{column}" for name in ("forward", "backward") for column in ("", "_chunk", "_slot")]
    ranks = {name: np.full((ticks, P), -1, np.int32) for name in names}
    num_slots = 0
    for s in range(P):
        slots = _Slots()
        for tick, is_backward, i, c in sorted(passes[s]):
            slot = slots.free(i, c) if is_backward else slots.take(i, c) if backward else 0
            name = "backward" if is_backward else "forward"
            assert ranks[name][tick, s] == -1, "two passes of one kind in a tick"
            ranks[name][tick, s] = i
            ranks[f"{name}_chunk"][tick, s] = c
            ranks[f"{name}_slot"][tick, s] = slot
        num_slots = max(num_slots, slots.count)

    def first(name: str) -> np.ndarray:
        """[ticks]: the microbatch for which the first stage runs this pass, or -1."""
        return np.where(ranks[f"{name}_chunk"][:, 0] == 0, ranks[name][:, 0], -1)

    def last(name: str) -> np.ndarray:
        """[ticks]: the same for the last stage."""
        return np.where(ranks[f"{name}_chunk"][:, -1] == V - 1, ranks[name][:, -1], -1)

    loss = last("forward")
    read = last("backward")
    losses = _Slots()
    slots = np.full((2, ticks), -1, np.int32)
    for tick in range(ticks):
        if loss[tick] >= 0:
            slots[0, tick] = losses.take(loss[tick])
        if read[tick] >= 0:
            slots[1, tick] = losses.free(read[tick])
    return Table(
        **ranks, embed=first("forward"), loss=loss, loss_slot=slots[0], loss_slot_read=slots[1],
        embed_backward=first("backward"), num_slots=num_slots, num_loss_slots=losses.count,
    )  # fmt: skip


class _Slots:
    """Allocates buffer slots, as few as possible."""

    def __init__(self):
        self.count = 0
        self._unused = []
        self._owner = {}

    def take(self, *owner) -> int:
        slot = self._unused.pop() if self._unused else self.count
        self.count = max(self.count, slot + 1)
        self._owner[owner] = slot
        return slot

    def free(self, *owner) -> int:
        slot = self._owner.pop(owner)
        self._unused.append(slot)
        return slot


def bubble(num_ranks: int, num_microbatches: int, num_chunks: int) -> float:
    """Fraction of a step in which a rank waits (Narayanan et al. 2021, section 2.2)."""
    return (num_ranks - 1) / (num_microbatches * num_chunks + num_ranks - 1)
