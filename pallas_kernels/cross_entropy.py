"""Cross-entropy of rows of logits and its gradient by them, for Hopper (Pallas, Mosaic GPU).

    z = multiplier * product;  lse = log(sum over the vocabulary of exp(z))
    d_product = multiplier * (weight * (1 + 2 * z_loss * lse) * exp(z - lse) - weight * [column = label])

Dimensions: C rows, V columns, of which the first `vocab_size` are tokens and the others padding, whose gradient is
zero. Products and sums float32; the gradient bfloat16 or float16.
A block computes row after row, each twice: from its beginning to its end for the maximum and the sum (online: Milakov
and Gimelshein 2018, https://arxiv.org/abs/1805.02867), and back for the gradient. The four warpgroups of the block
share a step of 4,096 columns. TMA writes the steps into a ring of slots in shared memory, as many as fit: of longer
rows only the last 53,248 columns stay there for the second pass, and the others are fetched again. The next row is
prefetched into each slot as the second pass frees it.
Bytes: 6 C V + 4 C max(0, V - 53,248), where XLA's three fusions move 14 C V.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import reductions
from pallas_kernels.registers import load_as

NUM_SMS = 132  # of H100 SXM, H200 and GH200
WARPGROUPS = 4
LINE = 128  # columns
LINES = 8  # of a warpgroup in a step, 32 bytes per thread
STEP = WARPGROUPS * LINES * LINE
SLOTS = 13  # 208 KiB
LEAST = -1e30  # below every logit, and finite, so that the difference of two of them is a number


def problem(width: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used, or an empty string. dtype: of the gradient."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    return f"width {width}" if width % LINE or width < STEP else ""


@functools.partial(jax.jit, static_argnames=("vocab_size", "multiplier", "z_loss", "dtype", "interpret"))
def value_and_gradient(
    products_CV: jax.Array, labels_C: jax.Array, weights_C: jax.Array, *, vocab_size: int, multiplier: float,
    z_loss: float, dtype: Any, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-> (lse float32 [C], d_products [C, V] in dtype). products, weights: float32; labels: int32, -1 for none."""
    rows, width = products_CV.shape
    blocks = min(rows, NUM_SMS)
    steps = pl.cdiv(width, STEP)
    slots = min(steps, SLOTS)
    scale = multiplier * math.log2(math.e)  # exp2 is one instruction

    def body(products_ref, labels_ref, weights_ref, lse_ref, d_products_ref, ring, ready, parts):
        block = lax.axis_index("block")
        group = lax.axis_index("warpgroup")
        count = lax.div(rows - block + blocks - 1, blocks)
        column = LINE * _iota(0) + _iota(1)

        def first_column(step):
            """Of this warpgroup. The last pieces end with the row; columns of theirs that belong to pieces before are
            not added again, and get the same gradient twice."""
            return jnp.minimum(step * STEP + group * LINES * LINE, width - LINES * LINE)

        def lines_of(step):
            return pl.ds(lax.div(first_column(step), LINE), LINES)

        def slot_of(number, step):
            """Odd rows use the slots in reverse, the order in which the previous row frees them."""
            slot = lax.rem(step, slots)
            return jnp.where(lax.rem(number, 2) == 0, slot, slots - 1 - slot)

        def fetch(number, step):
            slot = slot_of(number, step)
            source = products_ref.at[block + number * blocks, lines_of(step)]
            plgpu.copy_gmem_to_smem(source, ring.at[slot, group], ready.at[slot])

        def over_threads(array, slot, kind):
            return reductions.reduced([[array]], parts, slot, interpret, kind, _layout)

        def one_row(number, _):
            row = block + number * blocks
            label = labels_ref[row]
            weight = weights_ref[row]

            def logits(step):
                """In units of log 2; of padding -inf."""
                values = load_as(ring.at[slot_of(number, step), group], _layout()) * scale
                return jnp.where(column < vocab_size - first_column(step), values, -jnp.inf)

            def add(step, carry):
                most, total = carry
                plgpu.barrier_wait(ready.at[slot_of(number, step)])
                first = step * STEP + group * LINES * LINE
                values = jnp.where(column >= first - first_column(step), logits(step), -jnp.inf)

                @pl.when(step + slots < steps)
                def _():
                    plgpu.commit_smem()
                    fetch(number, step + slots)

                new_most = jnp.maximum(most, values)
                return new_most, total * jnp.exp2(most - new_most) + jnp.exp2(values - new_most)

            most, total = lax.fori_loop(0, steps, add, (_filled(LEAST), _filled(0.0)))
            parity = lax.rem(number, 2)
            (top,) = over_threads(most, (parity, 0), "max")
            (total,) = over_threads(total * jnp.exp2(most - top), (parity, 1), "sum")
            lse = (top + jnp.log2(total)) * math.log(2)
            factor = multiplier * weight * (1.0 + 2.0 * z_loss * lse) / total

            def write(steps_before, _):
                step = steps - 1 - steps_before

                @pl.when(step < steps - slots)
                def _():
                    plgpu.barrier_wait(ready.at[slot_of(number, step)])

                values = logits(step)
                plgpu.commit_smem()

                @pl.when(step >= slots)
                def _():
                    fetch(number, step - slots)

                @pl.when(jnp.logical_and(step < slots, number + 1 < count))
                def _():
                    fetch(number + 1, slots - 1 - step)

                d_values = jnp.exp2(values - top) * factor
                d_values -= jnp.where(column == label - first_column(step), multiplier * weight, 0.0)

                @pl.when(step * STEP + group * LINES * LINE < width)
                def _():
                    d_products_ref[row, lines_of(step)] = d_values.astype(dtype)

            lax.fori_loop(0, steps, write, None)

            @pl.when(group == 0)
            def _():
                lse_ref[row] = lse

        for step in range(slots):
            fetch(jnp.int32(0), jnp.int32(step))
        lax.fori_loop(0, count, one_row, None)

    out = [
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows, width // LINE, LINE), dtype),
    ]
    ring = plgpu.SMEM((slots, WARPGROUPS, LINES, LINE), jnp.float32)
    ready = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots)
    # TMA's writes and the reductions have their own barriers; no other memory is read and written.
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
    grid = dict(grid=(blocks,), grid_names=("block",), num_threads=WARPGROUPS, thread_name="warpgroup")
    run = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[ring, ready, reductions.scratch(1, WARPGROUPS)],
        compiler_params=params,
        interpret=interpret,
        **grid,
    )
    lse_C, d_products = run(products_CV.reshape(rows, -1, LINE), labels_C, weights_C)
    return lse_C, d_products.reshape(products_CV.shape)


def _layout(shape: tuple[int, ...] = (LINES, LINE)):
    """16 consecutive bytes of float32 per thread; the 128 threads are adjacent."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=4)


def _iota(dim: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (LINES, LINE), dim, layout=_layout())


def _filled(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((LINES, LINE), value, jnp.float32), _layout())
