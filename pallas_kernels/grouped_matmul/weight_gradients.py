"""The gradients of the matrices."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from pallas_kernels.registers import load_as
from pallas_kernels.shared_memory import swizzled


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
            rows=swizzled((2, STAGES, STEP, ROWS), self.dtype),
            d_out=swizzled((self.num_matrices, STAGES, STEP, self.columns), self.dtype),
            out=swizzled((2, 2, ROWS, PIECE_BYTES // self.out_dtype.itemsize), self.out_dtype),
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

            return load_steps(smem, self.num_steps(begin, end), iteration, copies)

        for_each_tile(self.num_groups * self.grid[0] * self.grid[1], one_tile)

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
                    values = load_as(rows, plgpu.Layout.WGMMA)
                    rows[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))
                    plgpu.commit_smem()
                    product(number, stage)

                num = len(acc_refs)
                inner = jnp.maximum(steps - 2, 0)
                after = compute_steps(smem, 0, jnp.minimum(steps, 1), iteration, edge, num)
                after = compute_steps(smem, 1, 1 + inner, after, product, num)
                compute_steps(smem, 1 + inner, steps, after, edge, num)
                return [acc[...] for acc in acc_refs]

            results = pl.run_scoped(products, *[plgpu.ACC((ROWS, self.columns), jnp.float32)] * self.num_matrices)
            piece = smem["out"].shape[-1]
            matrix_rows = pl.ds(row + wg * ROWS, ROWS)

            def copy(here, _, w, at):
                plgpu.copy_smem_to_gmem(here, outs[w].at[group, matrix_rows, pl.ds(column + at, piece)])

            store(smem, wg, results, copy)
            return iteration + steps

        for_each_tile(self.num_groups * self.grid[0] * self.grid[1], one_tile)
