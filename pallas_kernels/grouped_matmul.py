"""Grouped matmul on Hopper: rows sorted by group, times one matrix per group.

Dimensions: R rows, E groups, W matrices per group (one or two) whose results are side by side, K and N the axes of a
matrix.

    forward          out[r, w] = rows[r] @ matrices[w][g(r)]            [R, K] -> [R, W, N]
    input_gradient   d_rows[r] = sum_w d_out[r, w] @ matrices[w][g(r)].T   [R, W, N] -> [R, K]
    weight_gradient  d_matrices[w][g] = rows of g .T @ d_out[rows of g, w]   -> W arrays [E, K, N]

Products accumulate in float32. Rows after the last group give zeros, and a group without rows a zero weight gradient.

One persistent block per multiprocessor computes tiles of 128 x 256 with 64 contracted elements a step: one warpgroup
loads (TMA), two compute 64 rows of the tile each (wgmma). A group begins at any row, but TMA loads at multiples of
eight: the first tile of a group begins up to seven rows before it, and rows of other groups are masked, by the store
or, where rows are contracted, in shared memory. Consecutive tiles share rows and matrices, so that both come from L2.
"""

import dataclasses
import functools
from collections.abc import Sequence
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

NUM_SMS = 132  # of H100 SXM, H200 and GH200
STAGES = 4
ROWS, COLUMNS, STEP = 64, 256, 64  # rows of a warpgroup, columns of a tile, contracted elements of a step
ALIGNED = 8  # rows: where a tile may begin
PANEL = 16  # row tiles that are processed together, column by column
ROW_AXIS = 4  # of the registers of the layout WGMMA: rows 8 apart
PIECE_BYTES = 128  # of a row of the result, copied out at a time
GROUP, FIRST, COUNT, START, BEGIN, END, TOTAL = range(7)  # columns of the table of row tiles


def problem(contracted: int, width: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used for matrices of [contracted, width], or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    return "" if contracted % 64 == 0 and width % 64 == 0 else f"widths {contracted} and {width}"


@functools.partial(jax.jit, static_argnames="interpret")
def forward(rows_RK, matrices: Sequence[jax.Array], sizes_E, *, interpret: Any = None) -> jax.Array:
    """sizes_E: int32, rows of each group, together at most R. interpret: plgpu.InterpretGPUParams, to run on CPU."""
    num_rows, contracted = rows_RK.shape
    if num_rows % ALIGNED:
        return forward(_to_eights(rows_RK), matrices, sizes_E, interpret=interpret)[:num_rows]
    width = matrices[0].shape[2]
    plan = Products(len(matrices), contracted, width, False, rows_RK.dtype, bool(interpret))
    out_type = jax.ShapeDtypeStruct((num_rows, len(matrices), width), rows_RK.dtype)
    return _run(plan, out_type, interpret)(_row_tiles(sizes_E, num_rows), rows_RK, *matrices)


@functools.partial(jax.jit, static_argnames="interpret")
def input_gradient(d_out_RWN, matrices: Sequence[jax.Array], sizes_E, *, interpret: Any = None) -> jax.Array:
    num_rows, num_matrices, width = d_out_RWN.shape
    if num_rows % ALIGNED:
        return input_gradient(_to_eights(d_out_RWN), matrices, sizes_E, interpret=interpret)[:num_rows]
    plan = Products(num_matrices, width, matrices[0].shape[1], True, d_out_RWN.dtype, bool(interpret))
    out_type = jax.ShapeDtypeStruct((num_rows, 1, plan.width), d_out_RWN.dtype)
    run = _run(plan, out_type, interpret)
    d_out = d_out_RWN.reshape(num_rows, num_matrices * width)
    return run(_row_tiles(sizes_E, num_rows), d_out, *matrices)[:, 0]


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def weight_gradient(rows_RK, d_out_RWN, sizes_E, *, dtype: jnp.dtype, interpret: Any = None) -> tuple[jax.Array, ...]:
    num_rows, num_matrices, width = d_out_RWN.shape
    if num_rows % ALIGNED:
        rows, d_out = (_to_eights(a) for a in (rows_RK, d_out_RWN))
        return weight_gradient(rows, d_out, sizes_E, dtype=dtype, interpret=interpret)
    num_groups = sizes_E.shape[0]
    plan = WeightGradients(num_matrices, rows_RK.shape[1], width, num_groups, rows_RK.dtype, jnp.dtype(dtype))
    out_type = [jax.ShapeDtypeStruct((num_groups, rows_RK.shape[1], width), dtype)] * num_matrices
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    bounds = jnp.stack([ends_E - sizes_E, ends_E], 1)
    return tuple(_run(plan, out_type, interpret)(bounds, rows_RK, d_out_RWN))


def _row_tiles(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """int32 [row tiles, 8]: of each tile of 128 rows, its GROUP; of its panel, up to PANEL tiles of that group, the
    FIRST tile, their COUNT and START, the first row; of the group, BEGIN and END; TOTAL, the number of row tiles.

    Rows after the last group are one more group.
    """
    tile = 2 * ROWS
    num_groups = sizes_E.shape[0] + 1
    rest = num_rows - jnp.sum(sizes_E, dtype=jnp.int32)
    sizes = jnp.append(sizes_E, rest).astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    begins = ends - sizes
    aligned = begins // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -((aligned - ends) // tile), 0)
    after = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(num_rows // tile + 2 * num_groups, dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= after, 1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    before = (after - tiles)[group]
    first = before + (number - before) // PANEL * PANEL
    count = jnp.minimum(after[group] - first, PANEL)
    start = aligned[group] + (first - before) * tile
    total = jnp.full_like(number, after[-1])
    return jnp.stack([group, first, count, start, begins[group], ends[group], total, total], 1)


def _to_eights(a):
    return jnp.pad(a, [(0, -a.shape[0] % ALIGNED)] + [(0, 0)] * (a.ndim - 1))


def _swizzled(shape, dtype):
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128)))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[plgpu.Layout.WG_SPLAT(())] * 2))
def _store_split_eights(_, out_ref, values, low, high):
    """Stores rows low <= row < high, but for eight of them that begin at a multiple of eight. A thread has pairs of
    columns of two rows: one branch for each row."""
    low, high = (arith.index_cast(ir.IndexType.get(), bound.registers.item()) for bound in (low, high))
    eight = mgpu.c(ALIGNED, ir.IndexType.get())
    pairs_of_row = [[], []]
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


def _for_each_tile(total, one_tile):
    """Runs one_tile(index, iteration) -> iteration for each tile of this block. An iteration is one step of a tile,
    counted over all of them."""
    block = lax.axis_index("block")
    count = lax.div(jnp.maximum(total - block + NUM_SMS - 1, 0), NUM_SMS)
    lax.fori_loop(0, count, lambda number, iteration: one_tile(block + number * NUM_SMS, iteration), jnp.int32(0))


def _load_steps(smem, steps, iteration, copies):
    """Fills one stage per step. copies(step): (source, target of all stages) pairs.

    A step of `_compute_steps` releases the stage of the step before it, so that one product is always in flight. The
    very first one thus releases the last stage, which nobody has used: here it is waited for once more than the others.
    """

    def step(number, iteration):
        stage = lax.rem(iteration, STAGES)
        pl.when(iteration >= STAGES - 1)(lambda: plgpu.barrier_wait(smem["free"].at[stage]))
        for source, target in copies(number):
            plgpu.copy_gmem_to_smem(source, target.at[stage], smem["ready"].at[stage])
        return iteration + 1

    return lax.fori_loop(0, steps, step, iteration)


def _compute_steps(smem, first, last, iteration, product, num_products):
    """product(step, stage) starts the products of a step; steps are first <= step < last."""

    def step(number, iteration):
        stage = lax.rem(iteration, STAGES)
        plgpu.barrier_wait(smem["ready"].at[stage])
        product(number, stage)
        plgpu.wgmma_wait(num_products)
        plgpu.barrier_arrive(smem["free"].at[lax.rem(iteration + STAGES - 1, STAGES)])
        return iteration + 1

    return lax.fori_loop(first, last, step, iteration)


def _store(smem, wg, accumulators, copy):
    """Copies the results out, one piece of columns after the other; a piece is written while the one before it is being
    copied. copy(piece in shared memory, values, w, column)."""
    out = smem["out"]
    columns = out.shape[-1]
    slot = 0
    for w, acc in enumerate(accumulators):
        for column in range(0, acc.shape[1], columns):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            values = acc[:, column : column + columns].astype(out.dtype)
            out[wg, slot] = values
            plgpu.commit_smem()
            copy(out.at[wg, slot], values, w, column)
            slot = 1 - slot


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
            rows=_swizzled((2, STAGES, ROWS, STEP), self.dtype),
            matrices=_swizzled((self.side_by_side, STAGES, *matrix), self.dtype),
            out=_swizzled((2, 2, ROWS, PIECE_BYTES // self.dtype.itemsize), self.dtype),
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
                return _load_steps(smem, steps, iteration, functools.partial(copies, list(enumerate(matrices)), 0))
            each = lax.div(steps, self.num_matrices)
            for w, ref in enumerate(matrices):
                iteration = _load_steps(smem, each, iteration, functools.partial(copies, [(0, ref)], w * each))
            return iteration

        _for_each_tile(table[0, TOTAL] * self.column_tiles, one_tile)

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

                _compute_steps(smem, 0, steps, iteration, product, len(acc_refs))
                return [acc[...] for acc in acc_refs]

            accumulators = [plgpu.ACC((ROWS, self.columns), jnp.float32)] * self.side_by_side
            results = pl.run_scoped(products, *accumulators)
            self.store_rows(smem, wg, out, results, first_row, column, low, high)
            return iteration + steps

        _for_each_tile(table[0, TOTAL] * self.column_tiles, one_tile)

    def store_rows(self, smem, wg, out, results, first_row, column, low, high):
        """Rows low to high of the 64 of a warpgroup. TMA copies whole groups of eight rows; the other rows are
        stored directly."""

        def part(start, count, w, at):
            return out.at[pl.ds(pl.multiple_of(first_row + start, ALIGNED), count), w, pl.ds(column + at, STEP)]

        def copy_all(piece, _, w, at):
            plgpu.copy_smem_to_gmem(piece, part(0, ROWS, w, at))

        def copy_some(piece, values, w, at):
            for start in range(0, ROWS, ALIGNED):

                @pl.when((start >= low) & (start + ALIGNED <= high))
                def _(start=start):
                    eight = piece.at[pl.ds(start, ALIGNED)]
                    plgpu.copy_smem_to_gmem(eight, part(start, ALIGNED, w, at), commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            pl.when(column + at < self.width)(lambda: self.store_edges(part(0, ROWS, w, at), values, low, high))

        whole = (low <= 0) & (high >= ROWS)
        lax.cond(
            whole,
            lambda: _store(smem, wg, results, copy_all),
            lambda: _store(smem, wg, results, copy_some),
        )

    def store_edges(self, target, values, low, high):
        if not self.interpret:
            _store_split_eights(target, values, low, high)
            return
        for row in range(ROWS):

            @pl.when((row >= low) & (row < high))
            def _(row=row):
                target[row] = values[row]


@dataclasses.dataclass(frozen=True)
class WeightGradients:
    """weight_gradient: a tile is 128 rows of a matrix, K, and COLUMNS columns of all matrices together."""

    num_matrices: int
    contracted: int
    width: int
    num_groups: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype

    @property
    def columns(self) -> int:
        return COLUMNS // self.num_matrices

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of a matrix."""
        return -(-self.contracted // (2 * ROWS)), -(-self.width // self.columns)

    def num_steps(self, begin, end):
        start = lax.div(begin, ALIGNED) * ALIGNED
        return jnp.where(end > begin, lax.div(end - start + STEP - 1, STEP), 0)

    def scratch(self):
        return dict(
            rows=_swizzled((2, STAGES, STEP, ROWS), self.dtype),
            d_out=_swizzled((self.num_matrices, STAGES, STEP, self.columns), self.dtype),
            out=_swizzled((2, 2, ROWS, PIECE_BYTES // self.out_dtype.itemsize), self.out_dtype),
            ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2 + self.num_matrices),
            free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
        )

    def tile(self, bounds, index):
        """-> (group, first row of the matrix, first column, first row of the group, one after its last)."""
        tall, broad = self.grid
        group = lax.div(index, tall * broad)
        inside = lax.rem(index, tall * broad)
        panel = lax.div(inside, PANEL * broad)
        first = panel * PANEL
        count = jnp.minimum(tall - first, PANEL)
        inside = inside - first * broad
        row = (first + lax.rem(inside, count)) * 2 * ROWS
        return group, row, lax.div(inside, count) * self.columns, bounds[group, 0], bounds[group, 1]

    def load(self, gmem, smem):
        bounds, rows, d_out, *_ = gmem

        def one_tile(index, iteration):
            _, row, column, begin, end = self.tile(bounds, index)
            start = pl.multiple_of(lax.div(begin, ALIGNED) * ALIGNED, ALIGNED)
            columns = pl.ds(column, self.columns)

            def copies(step):
                part = pl.ds(start + step * STEP, STEP)
                left = [(rows.at[part, pl.ds(row + wg * ROWS, ROWS)], smem["rows"].at[wg]) for wg in range(2)]
                return left + [(d_out.at[part, w, columns], smem["d_out"].at[w]) for w in range(self.num_matrices)]

            return _load_steps(smem, self.num_steps(begin, end), iteration, copies)

        _for_each_tile(self.num_groups * self.grid[0] * self.grid[1], one_tile)

    def compute(self, gmem, smem, wg):
        bounds, _, _, *outs = gmem

        def one_tile(index, iteration):
            group, row, column, begin, end = self.tile(bounds, index)
            start = lax.div(begin, ALIGNED) * ALIGNED
            steps = self.num_steps(begin, end)

            def products(*acc_refs):
                def product(_, stage):
                    rows = smem["rows"].at[wg, stage]
                    for w, acc in enumerate(acc_refs):
                        plgpu.wgmma(acc, rows.transpose((1, 0)), smem["d_out"].at[w, stage])

                def edge(number, stage):
                    """The first and the last step also have rows of other groups."""
                    rows = smem["rows"].at[wg, stage]
                    row = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA)
                    row += start + number * STEP
                    values = plgpu.load(rows, (), layout=plgpu.Layout.WGMMA)
                    rows[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))
                    plgpu.commit_smem()
                    product(number, stage)

                num = len(acc_refs)
                inner = jnp.maximum(steps - 2, 0)
                after = _compute_steps(smem, 0, jnp.minimum(steps, 1), iteration, edge, num)
                after = _compute_steps(smem, 1, 1 + inner, after, product, num)
                _compute_steps(smem, 1 + inner, steps, after, edge, num)
                return [acc[...] for acc in acc_refs]

            results = pl.run_scoped(products, *[plgpu.ACC((ROWS, self.columns), jnp.float32)] * self.num_matrices)
            piece = smem["out"].shape[-1]
            matrix_rows = pl.ds(row + wg * ROWS, ROWS)

            def copy(here, _, w, at):
                plgpu.copy_smem_to_gmem(here, outs[w].at[group, matrix_rows, pl.ds(column + at, piece)])

            _store(smem, wg, results, copy)
            return iteration + steps

        _for_each_tile(self.num_groups * self.grid[0] * self.grid[1], one_tile)


def _run(plan, out_type, interpret):
    names, types = zip(*plan.scratch().items(), strict=True)

    def body(*refs):
        gmem, smem = refs[: -len(names)], dict(zip(names, refs[-len(names) :], strict=True))
        wg = lax.axis_index("wg")

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(40, action="decrease")
            plan.load(gmem, smem)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            plan.compute(gmem, smem, wg)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(types),
        grid=(NUM_SMS,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        # Where one thread reads what another one wrote, there is a commit_smem or a barrier between them.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
