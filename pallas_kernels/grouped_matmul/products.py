"""The products of rows with the matrix of their group, and their gradient for the rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.grouped_matmul.steps import (
    ALIGNED,
    COLUMNS,
    PANEL,
    PIECE_BYTES,
    ROWS,
    STAGES,
    STEP,
    compute_steps,
    for_each_tile,
    load_steps,
    store,
)
from pallas_kernels.shared_memory import swizzled

ROW_AXIS = 4  # of the registers of the layout WGMMA: rows 8 apart
GROUP, FIRST, COUNT, START, BEGIN, END, TOTAL = range(7)  # columns of the table of row tiles


def row_tiles(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """int32 [row tiles, 8]: of each tile of 128 rows, its GROUP; of its panel, up to PANEL tiles of that group, the
    FIRST tile, their COUNT and START, the first row; of the group, BEGIN and END; TOTAL, the number of row tiles.

    Rows after the last group are one more group.
    """
    tile = 2 * ROWS
    num_groups = sizes_E.shape[0] + 1
    ends_E = _running_sums(sizes_E.astype(jnp.int32))
    ends = jnp.append(ends_E, num_rows)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_E])
    aligned = begins // ALIGNED * ALIGNED
    tiles = jnp.where(ends > begins, -((aligned - ends) // tile), 0)
    after = _running_sums(tiles)
    number = jnp.arange(num_rows // tile + 2 * num_groups, dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= after, 1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    before = (after - tiles)[group]
    first = before + (number - before) // PANEL * PANEL
    count = jnp.minimum(after[group] - first, PANEL)
    start = aligned[group] + (first - before) * tile
    total = jnp.full_like(number, after[-1])
    return jnp.stack([group, first, count, start, begins[group], ends[group], total, total], 1)


def _running_sums(a_E: jax.Array) -> jax.Array:
    """The cumulative sum, as one kernel instead of three."""
    number_E = jnp.arange(a_E.size)
    return jnp.sum(jnp.where(number_E <= number_E[:, None], a_E, 0), 1, dtype=a_E.dtype)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[plgpu.Layout.WG_SPLAT(())] * 2))
def _store_split_eights(_, out_ref, values, low, high):
    """Stores rows low <= row < high, but for eight of them that begin at a multiple of eight. A thread has pairs of
    columns of two rows: one branch for each row."""
    low, high = (arith.index_cast(ir.IndexType.get(), bound.registers.item()) for bound in (low, high))
    eight = mgpu.c(ALIGNED, ir.IndexType.get())
    pairs_of_row: list[list[Any]] = [[], []]
    places = zip(values.layout.thread_idxs(values.shape), np.ndindex(values.registers.shape), strict=True)
    for place, register in places:
        pairs_of_row[register[ROW_AXIS]].append((place, values.registers[register]))

    def compare(predicate, a, b):
        return arith.cmpi(getattr(arith.CmpIPredicate, predicate), a, b)

    for pairs in pairs_of_row:
        row = pairs[0][0][0]
        first = arith.muli(arith.divui(row, eight), eight)
        inside = arith.andi(compare("sge", row, low), compare("slt", row, high))
        split = arith.ori(compare("slt", first, low), compare("sgt", arith.addi(first, eight), high))
        with utils.when(arith.andi(inside, split)):
            for place, pair in pairs:
                vector.store(pair, out_ref, place)


@dataclasses.dataclass(frozen=True)
class Products:
    """forward and input_gradient. The contracted axis of the rows holds all matrices if `transposed`, the columns of
    the results if not."""

    num_matrices: int
    contracted: int  # of one matrix
    width: int  # of the results, of one matrix
    transposed: bool
    dtype: jnp.dtype
    interpret: bool

    @property
    def side_by_side(self) -> int:
        """Results of a tile."""
        return 1 if self.transposed else self.num_matrices

    @property
    def columns(self) -> int:
        return COLUMNS // self.side_by_side

    @property
    def steps(self) -> int:
        return self.contracted // STEP * (self.num_matrices if self.transposed else 1)

    @property
    def column_tiles(self) -> int:
        return -(-self.width // self.columns)

    def scratch(self):
        matrix = (self.columns, STEP) if self.transposed else (STEP, self.columns)
        return dict(
            rows=swizzled((2, STAGES, ROWS, STEP), self.dtype),
            matrices=swizzled((self.side_by_side, STAGES, *matrix), self.dtype),
            out=swizzled((2, 2, ROWS, PIECE_BYTES // self.dtype.itemsize), self.dtype),
            ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2 + self.side_by_side),
            free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
        )

    def tile(self, table, index):
        """-> (row of the table, first row of the tile, column)."""
        any_tile = lax.div(index, self.column_tiles)
        first, count = table[any_tile, FIRST], table[any_tile, COUNT]
        inside = index - first * self.column_tiles
        start = table[any_tile, START] + lax.rem(inside, count) * 2 * ROWS
        return any_tile, pl.multiple_of(start, ALIGNED), lax.div(inside, count) * self.columns

    def num_steps(self, table, any_tile, num_groups):
        return jnp.where(table[any_tile, GROUP] < num_groups, self.steps, 0)

    def load(self, gmem, smem):
        table, rows, *matrices, _ = gmem
        num_groups = matrices[0].shape[0]

        def one_tile(index, iteration):
            any_tile, start, column = self.tile(table, index)
            group = jnp.minimum(table[any_tile, GROUP], num_groups - 1)
            columns = pl.ds(column, self.columns)

            def copies(refs, before, step):
                """refs: (w, matrices) to load; before: steps of the rows before the first one."""
                part = pl.ds((before + step) * STEP, STEP)
                left = [(rows.at[pl.ds(start + wg * ROWS, ROWS), part], smem["rows"].at[wg]) for wg in range(2)]
                part = pl.ds(step * STEP, STEP)
                where = (group, columns, part) if self.transposed else (group, part, columns)
                return left + [(ref.at[where], smem["matrices"].at[w]) for w, ref in refs]

            steps = self.num_steps(table, any_tile, num_groups)
            if not self.transposed:
                return load_steps(smem, steps, iteration, functools.partial(copies, list(enumerate(matrices)), 0))
            each = lax.div(steps, self.num_matrices)
            for w, ref in enumerate(matrices):
                iteration = load_steps(smem, each, iteration, functools.partial(copies, [(0, ref)], w * each))
            return iteration

        for_each_tile(table[0, TOTAL] * self.column_tiles, one_tile)

    def compute(self, gmem, smem, wg):
        table, _, *matrices, out = gmem
        num_groups = matrices[0].shape[0]

        def one_tile(index, iteration):
            any_tile, start, column = self.tile(table, index)
            first_row = start + wg * ROWS
            steps = self.num_steps(table, any_tile, num_groups)
            low = table[any_tile, BEGIN] - first_row
            high = table[any_tile, END] - first_row

            def products(*acc_refs):
                def product(_, stage):
                    for w, acc in enumerate(acc_refs):
                        matrix = smem["matrices"].at[w, stage]
                        matrix = matrix.transpose((1, 0)) if self.transposed else matrix
                        plgpu.wgmma(acc, smem["rows"].at[wg, stage], matrix)

                compute_steps(smem, 0, steps, iteration, product, len(acc_refs))
                return [acc[...] for acc in acc_refs]

            accumulators = [plgpu.ACC((ROWS, self.columns), jnp.float32)] * self.side_by_side
            results = pl.run_scoped(products, *accumulators)
            self.store_rows(smem, wg, out, results, first_row, column, low, high)
            return iteration + steps

        for_each_tile(table[0, TOTAL] * self.column_tiles, one_tile)

    def store_rows(self, smem, wg, out, results, first_row, column, low, high):
        """Rows low to high of the 64 of a warpgroup. TMA copies whole groups of eight rows; the other rows are
        stored directly."""

        def part(start, count, w, at):
            return out.at[pl.ds(pl.multiple_of(first_row + start, ALIGNED), count), w, pl.ds(column + at, STEP)]

        def copy_all(piece, _, w, at):
            plgpu.copy_smem_to_gmem(piece, part(0, ROWS, w, at))

        def copy_some(piece, values, w, at):
            def copy_eight(number, _):
                start = pl.multiple_of(number * ALIGNED, ALIGNED)

                @pl.when((start >= low) & (start + ALIGNED <= high))
                def _():
                    eight = piece.at[pl.ds(start, ALIGNED)]
                    plgpu.copy_smem_to_gmem(eight, part(start, ALIGNED, w, at), commit_group=False)

            lax.fori_loop(0, ROWS // ALIGNED, copy_eight, None)
            plgpu.commit_smem_to_gmem_group()
            pl.when(column + at < self.width)(lambda: self.store_edges(part(0, ROWS, w, at), values, low, high))

        is_whole = (low <= 0) & (high >= ROWS)

        def copy(*piece):
            lax.cond(is_whole, lambda: copy_all(*piece), lambda: copy_some(*piece))

        store(smem, wg, results, copy)

    def store_edges(self, target, values, low, high):
        if not self.interpret:
            _store_split_eights(target, values, low, high)
            return
        for row in range(ROWS):

            @pl.when((row >= low) & (row < high))
            def _(row=row):
                target[row] = values[row]
