"""A grid that stays: one block a multiprocessor, which takes one tile after the other, and loads the next one while it
still computes.

Each tile goes to the block that is free first (an atomic addition), as tiles take differently long: dealt out before,
packed documents would take up to 1.6 times as long. They are taken in order, so a tile may wait for what an earlier one
does, however many blocks the chip has room for.
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
L2_BYTES = 32 * 2**20  # of 50 MiB
FIRST, FULL_FIRST, FULL_LAST, LAST, NUMBER, SEQUENCE, HEAD, ZERO = range(8)  # of tile_smem


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _count(_, counter_ref, before_ref):
    """before_ref[0] = counter++, for a warpgroup."""
    mgpu.warpgroup_barrier()  # all have read the one before
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        add = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
        integer, pointer = ir.IntegerType.get_signless(32), utils.memref_ptr(counter_ref)
        before = llvm.inline_asm(integer, [pointer], add, "=r,l", has_side_effects=True)
        memref.store(before, before_ref, [mgpu.c(0, ir.IndexType.get())])
    mgpu.warpgroup_barrier()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Sequence by sequence, those heads together that fit into L2, tile by tile, head by head."""

    batch: int
    heads: int
    tiles: int
    bytes_of_head: int
    group: int = 1
    """Heads that share these bytes."""
    last_first: bool = False
    """Of the tiles."""
    interpret: Any = None

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.tiles

    @property
    def blocks(self) -> int:
        return min(NUM_SMS, self.count)

    @property
    def scratch(self) -> tuple:
        """What this tile is, the number of the next one, whether the first is written, and read by both warpgroups."""
        numbers = plgpu.SMEM((8,), jnp.int32), plgpu.SMEM((1,), jnp.int32)
        return *numbers, plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)

    def _tile(self, index, ranges_ref):
        """-> as tile_smem has it."""
        groups = self.heads // self.group
        fit = lambda n: groups % n == 0 and n * self.bytes_of_head <= L2_BYTES
        together = self.group * max(filter(fit, range(1, groups + 1)), default=1)
        index = jnp.minimum(index, self.count - 1)
        outer, inner = lax.div(index, together * self.tiles), lax.rem(index, together * self.tiles)
        b = lax.div(outer, self.heads // together)
        head = lax.rem(outer, self.heads // together) * together + lax.rem(inner, together)
        number = lax.div(inner, together)
        number = self.tiles - 1 - number if self.last_first else number
        # The sum drops the marks of jax.shard_map, which a loop does not keep in its carry.
        return *(ranges_ref[b, number, i] + 0 for i in range(4)), number, b, head

    def load(self, refs, ranges_ref, load):
        """For the warpgroup that loads. load(passed, tile): yields when the tile may replace the one before, and again
        where there is time to take the next one; passed: sum of LAST - FIRST of those before."""
        tile_smem, before_smem, there, free = refs
        counter = None if self.interpret else pl.get_global(plgpu.SemaphoreType.REGULAR)

        def take(index):
            if self.interpret:  # knows no atomic additions
                return index + self.blocks
            _count(counter, before_smem)
            return before_smem[0]

        def write(turn, numbers):
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(free))
            for i, number in numbers:
                tile_smem[i] = number
            plgpu.barrier_arrive(there)

        def one(carry):
            turn, passed, index, tile = carry
            steps = load(passed, tile)
            next(steps)
            write(turn, enumerate((*tile, 0)))
            next(steps)
            index = take(index)
            after = self._tile(index, ranges_ref)
            next(steps, None)
            return turn + 1, passed + tile[LAST] - tile[FIRST], index, after

        first = take(lax.axis_index("block") - self.blocks)
        zero = jnp.int32(0)
        turn, *_ = lax.while_loop(lambda c: c[2] < self.count, one, (zero, zero, first, self._tile(first, ranges_ref)))
        write(turn, [(SEQUENCE, -1)])

    def compute(self, refs, compute, carry):
        """For those that compute. compute(carry) -> carry arrives at `free` when it needs tile_smem no more."""
        tile_smem, _, there, _ = refs

        def next_tile():
            plgpu.barrier_wait(there)
            return tile_smem[SEQUENCE] + 0

        def one(state):
            carry = compute(state[1])
            return next_tile(), carry

        return lax.while_loop(lambda state: state[0] >= 0, one, (next_tile(), carry))[1]
