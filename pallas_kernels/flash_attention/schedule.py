"""A grid that stays: one block a multiprocessor, which takes one tile after the other, and loads the next one while it
still computes.

Each tile goes to the block that has loaded all of its own first (an atomic addition), as tiles take differently long:
dealt out before they take up to 1.6 times as long, taken a tile earlier 1.2 times. They are taken in order, so a tile
may wait for what an earlier one does, however many blocks the chip has room for.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

NUM_SMS = 132  # of H100 SXM, H200 and GH200; on a chip with fewer some blocks find nothing left
L2_BYTES = 50 * 2**20
FIRST, FULL_FIRST, FULL_LAST, LAST, NUMBER, SEQUENCE, HEAD, ZERO = range(8)  # of tile_smem


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _count(_, counter_ref, before_ref):
    """before_ref[0] = counter++, for a warpgroup."""
    mgpu.warpgroup_barrier()  # all have read the one before
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        add = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
        integer = ir.IntegerType.get_signless(32)
        pointer = utils.memref_ptr(counter_ref)
        before = llvm.inline_asm(integer, [pointer], add, "=r,l", has_side_effects=True)
        memref.store(before, before_ref, [mgpu.c(0, ir.IndexType.get())])
    mgpu.warpgroup_barrier()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of tiles: sequence by sequence, and there heads one beside the other, as they have equally much to do;
    where L2 cannot hold what they all read, head by head, and there sequences one beside the other (README.md)."""

    batch: int
    heads: int
    tiles: int
    bytes_of_head: int
    """What the tiles of a head all read, and add to."""
    slots: int = 2
    """Tiles of which shared memory has the numbers, and what `load` puts beside them: two, and the next one is there
    before this one ends."""
    last_first: bool = False
    """Of the tiles."""
    interpret: Any = None

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.tiles

    @property
    def head_by_head(self) -> bool:
        return self.heads * self.bytes_of_head > 2 * L2_BYTES

    @property
    def blocks(self) -> int:
        return min(NUM_SMS, self.count)

    @property
    def scratch(self) -> tuple:
        """Numbers of tiles, number of the next one, whether a slot is written, whether neither warpgroup needs it."""
        numbers = plgpu.SMEM((self.slots, 8), jnp.int32), plgpu.SMEM((1,), jnp.int32)
        there = plgpu.Barrier(num_barriers=self.slots)
        free = plgpu.Barrier(num_arrivals=2, num_barriers=self.slots)
        return *numbers, there, free

    def _tile(self, index, ranges):
        """-> as tile_smem has it."""
        index = jnp.minimum(index, self.count - 1)
        inside = self.batch if self.head_by_head else self.heads
        outer = lax.div(index, self.tiles * inside)
        inner = lax.rem(index, inside)
        number = lax.rem(lax.div(index, inside), self.tiles)
        b, head = (inner, outer) if self.head_by_head else (outer, inner)
        number = self.tiles - 1 - number if self.last_first else number
        # The sum drops the marks of jax.shard_map, which a loop does not keep in its carry.
        return *(n + 0 for n in ranges(b, number)), number, b, head

    def load(self, refs, ranges, load):
        """For the warpgroup that loads. ranges(b, number): (first, first full, last full, last) of a tile.
        load(slot, passed, tile); passed: sum of LAST - FIRST of those before."""
        tile_smem, before_smem, there, free = refs
        counter = None if self.interpret else pl.get_global(plgpu.SemaphoreType.REGULAR)

        def take(index):
            if self.interpret:  # knows no atomic additions
                return index + self.blocks
            _count(counter, before_smem)
            return before_smem[0]

        def write(turn, numbers):
            slot = lax.rem(turn, self.slots)
            pl.when(turn >= self.slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            for i, number in numbers:
                tile_smem[slot, i] = number
            plgpu.barrier_arrive(there.at[slot])
            return slot

        def one(carry):
            turn, passed, index, tile = carry
            load(write(turn, enumerate((*tile, 0))), passed, tile)
            index = take(index)
            return turn + 1, passed + tile[LAST] - tile[FIRST], index, self._tile(index, ranges)

        first = take(lax.axis_index("block") - self.blocks)
        zero = jnp.int32(0)
        turn, *_ = lax.while_loop(lambda c: c[2] < self.count, one, (zero, zero, first, self._tile(first, ranges)))
        write(turn, [(SEQUENCE, -1)])

    def compute(self, refs, compute, carry):
        """For those that compute. compute(slot, carry) -> carry arrives at `free` of the slot when it is needed no
        more."""
        tile_smem, _, there, _ = refs

        def wait_for(turn):
            slot = lax.rem(turn, self.slots)
            plgpu.barrier_wait(there.at[slot])
            return turn, tile_smem[slot, SEQUENCE] + 0

        def one(state):
            turn, _, carry = state
            carry = compute(lax.rem(turn, self.slots), carry)
            return *wait_for(turn + 1), carry

        return lax.while_loop(lambda state: state[1] >= 0, one, (*wait_for(jnp.int32(0)), carry))[2]
