"""What the kernels share: persistent blocks, a pipeline of loads and products, and the copy of the results."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132  # of H100 SXM, H200 and GH200
STAGES = 4
ROWS, COLUMNS, STEP = 64, 256, 64  # rows of a warpgroup, columns of a tile, contracted elements of a step
ALIGNED = 8  # rows: where a tile may begin
PANEL = 16  # row tiles that are processed together, column by column
PIECE_BYTES = 128  # of a row of the result, copied out at a time


def for_each_tile(total, one_tile):
    """Runs one_tile(index, iteration) -> iteration for each tile of this block. An iteration is one step of a tile,
    counted over all of them."""
    block = lax.axis_index("block")
    count = lax.div(jnp.maximum(total - block + NUM_SMS - 1, 0), NUM_SMS)
    lax.fori_loop(0, count, lambda number, iteration: one_tile(block + number * NUM_SMS, iteration), jnp.int32(0))


def load_steps(smem, steps, iteration, copies):
    """Fills one stage per step. copies(step): (source, target of all stages) pairs.

    A step of `compute_steps` releases the stage of the step before it, so that one product is always in flight. The
    very first one thus releases the last stage, which nobody has used: here it is waited for once more than the others.
    """

    def step(number, iteration):
        stage = lax.rem(iteration, STAGES)
        pl.when(iteration >= STAGES - 1)(lambda: plgpu.barrier_wait(smem["free"].at[stage]))
        for source, target in copies(number):
            plgpu.copy_gmem_to_smem(source, target.at[stage], smem["ready"].at[stage])
        return iteration + 1

    return lax.fori_loop(0, steps, step, iteration)


def compute_steps(smem, first, last, iteration, product, num_products):
    """product(step, stage) starts the products of a step; steps are first <= step < last."""

    def step(number, iteration):
        stage = lax.rem(iteration, STAGES)
        plgpu.barrier_wait(smem["ready"].at[stage])
        product(number, stage)
        plgpu.wgmma_wait(num_products)
        plgpu.barrier_arrive(smem["free"].at[lax.rem(iteration + STAGES - 1, STAGES)])
        return iteration + 1

    return lax.fori_loop(first, last, step, iteration)


def store(smem, wg, accumulators, copy):
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


def run(plan, out_type, interpret):
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
