"""RMSNorm and LayerNorm with the residual addition before them, for Hopper (Pallas, Mosaic GPU).

Forward: s = x + y; normed = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, the mean only where there is a bias
(Ba et al. 2016; without: Zhang and Sennrich 2019). Backward, with h = (s - mean) * inverse and g = d_normed * scale:
d_s = d_residual + inverse * (g - h * mean(g * h) - mean(g)), d_scale = sum over rows of d_normed * h, d_bias that of
d_normed.

Dimensions: R rows, D width. bfloat16 or float16 rows; statistics, scale and bias float32. Both directions read and
write each row once, 128 threads a row. Forward its values stay in registers, D / 128 a thread and array. Backward TMA
fetches the next rows into shared memory, from where a row is read piece by piece; a block walks over its rows with its
part of the sums for scale and bias in registers, and the sum over blocks, [blocks, D], is left to XLA. Bytes: forward
8 R D (4 without y), backward 8 R D and 4 D a block for each sum.
Refused: D that is no multiple of 128 or above 8192 (registers), see `problem`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132  # of an H100
SMEM_BYTES = 192 << 10  # of a multiprocessor, for rows that are fetched while others are worked on
LINE, PIECE = 128, 8  # elements, and lines that 128 threads take at once, 16 bytes each
MAX_WIDTH = 8192


def problem(num_rows: int, width: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used, or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    if width % 128 or width > MAX_WIDTH:
        return f"width {width}"
    return "" if num_rows % 8 == 0 else f"{num_rows} rows"


def forward(
    x_RD: jax.Array, y_RD: jax.Array | None, scale_D: jax.Array, bias_D: jax.Array | None, *, epsilon: float, **options
) -> tuple[jax.Array, jax.Array]:
    """-> (x + y, or x without y; normed), both [R, D] in x's dtype. options: of plgpu.kernel (interpret)."""
    rows, width = x_RD.shape
    blocks, load = _blocks(rows), _loader((width,))
    given = {"x": x_RD, "y": y_RD, "scale": scale_D, "bias": bias_D}
    names = [name for name, array in given.items() if array is not None]

    def body(*refs):
        inputs, (*sum_ref, normed_ref) = dict(zip(names, refs, strict=False)), refs[len(names) :]
        scale = load(inputs["scale"])
        bias = load(inputs["bias"]) if bias_D is not None else None

        def one_row(number, _):
            row = lax.axis_index("block") * (rows // blocks) + number
            total = load(inputs["x"], row)
            if y_RD is not None:
                total = (total + load(inputs["y"], row)).astype(x_RD.dtype)
                sum_ref[0][row] = total
                total = total.astype(jnp.float32)
            if bias is not None:
                total -= jnp.sum(total) / width
            normed = total * lax.rsqrt(jnp.sum(total * total) / width + epsilon) * scale
            normed_ref[row] = (normed if bias is None else normed + bias).astype(x_RD.dtype)

        lax.fori_loop(0, rows // blocks, one_row, None)

    out = jax.ShapeDtypeStruct(x_RD.shape, x_RD.dtype)
    outputs = _call(body, [out] * (1 if y_RD is None else 2), blocks, options)(*(given[name] for name in names))
    return (x_RD, *outputs) if y_RD is None else tuple(outputs)


def backward(
    s_RD: jax.Array, d_normed_RD: jax.Array, d_residual_RD: jax.Array, scale_D: jax.Array, *, centred: bool,
    epsilon: float, **options
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """-> (d_s [R, D] in s's dtype, d_scale, d_bias or None), the latter float32 [blocks, D], to be summed over blocks.

    s: what the forward normalised. centred: it was a LayerNorm, which has a bias.
    """
    rows, width = s_RD.shape
    in_lines = (width // LINE, LINE)  # of a row: TMA copies at most 256 elements along a dim
    row_bytes = 3 * 2 * width
    # As many as registers have room for, with two rows each: they hide each other's sums over threads.
    blocks_of_sm = min(4 if width <= 2048 else 3, SMEM_BYTES // (2 * row_bytes))
    blocks, stages = min(rows, NUM_SMS * blocks_of_sm), min(8, SMEM_BYTES // blocks_of_sm // row_bytes)
    pieces = [(start, min(PIECE, in_lines[0] - start)) for start in range(0, in_lines[0], PIECE)]

    def body(s_ref, d_normed_ref, d_residual_ref, scale_ref, d_s_ref, *others):
        *sum_refs, s_smem, d_normed_smem, d_residual_smem, there = others
        block = lax.axis_index("block")
        count = lax.div(rows - block + blocks - 1, blocks)  # rows block, block + blocks, ...

        def fetch(number):
            row, slot = block + number * blocks, lax.rem(number, stages)
            plgpu.copy_gmem_to_smem(s_ref.at[row], s_smem.at[slot], there.at[slot])
            plgpu.copy_gmem_to_smem(d_normed_ref.at[row], d_normed_smem.at[slot], there.at[slot])
            plgpu.copy_gmem_to_smem(d_residual_ref.at[row], d_residual_smem.at[slot], there.at[slot])

        def one_row(number, sums):
            """A row stays in shared memory and is read piece by piece: registers have no room for all of it."""
            row, slot = block + number * blocks, lax.rem(number, stages)
            plgpu.barrier_wait(there.at[slot])

            def read(ref, piece, *index):
                start, lines = piece
                return _loader((lines, LINE))(ref, (*index, pl.ds(start, lines)))

            mean = _means(([read(s_smem, piece, slot)] for piece in pieces), width)[0] if centred else 0.0

            def centred_and_product(piece):
                c = read(s_smem, piece, slot) - mean
                return c, read(d_normed_smem, piece, slot) * read(scale_ref, piece)

            def moments(piece):
                c, g = centred_and_product(piece)
                return [c * c, c * g, g] if centred else [c * c, c * g]

            variance, product, *mean_g = _means(map(moments, pieces), width)
            inverse, (mean_g,) = lax.rsqrt(variance + epsilon), mean_g or [0.0]
            along = product * inverse * inverse
            new_sums = []
            for piece, of_piece in zip(pieces, sums, strict=True):
                c, g = centred_and_product(piece)
                d_normed, (start, lines) = read(d_normed_smem, piece, slot), piece
                more = d_normed * (c * inverse), d_normed
                new_sums.append([total + new for total, new in zip(of_piece, more, strict=False)])
                d_s = read(d_residual_smem, piece, slot) + (g - c * along - mean_g) * inverse
                d_s_ref[row, pl.ds(start, lines)] = d_s.astype(s_RD.dtype)
            plgpu.commit_smem()  # all have read: the next row may come
            pl.when(number + stages < count)(lambda: fetch(number + stages))
            return new_sums

        for number in range(stages):
            pl.when(number < count)(lambda number=number: fetch(jnp.int32(number)))
        zeros = lambda lines: plgpu.layout_cast(jnp.zeros((lines, LINE), jnp.float32), _layout((lines, LINE)))
        sums = lax.fori_loop(0, count, one_row, [[zeros(lines)] * len(sum_refs) for _, lines in pieces])
        for (start, lines), of_piece in zip(pieces, sums, strict=True):
            for ref, total in zip(sum_refs, of_piece, strict=True):
                ref[block, pl.ds(start, lines)] = total

    part = jax.ShapeDtypeStruct((blocks, *in_lines), jnp.float32)
    out = [jax.ShapeDtypeStruct((rows, *in_lines), s_RD.dtype), part] + ([part] if centred else [])
    scratch = [*[plgpu.SMEM((stages, *in_lines), s_RD.dtype)] * 3, plgpu.Barrier(num_arrivals=3, num_barriers=stages)]
    options = dict(scratch_types=scratch) | options
    given = (a.reshape(rows, *in_lines) for a in (s_RD, d_normed_RD, d_residual_RD))
    outputs = _call(body, out, blocks, options)(*given, scale_D.reshape(in_lines))
    outputs = [a.reshape(-1, width) for a in outputs]
    return tuple(outputs) if centred else (*outputs, None)


def _means(pieces, width):
    """Of each value of [value, ...] for each piece. Pieces of one shape are added up before threads are."""
    totals = {}
    for values in pieces:
        before = totals.get(values[0].shape)
        totals[values[0].shape] = [a + b for a, b in zip(before, values, strict=True)] if before else values
    return [sum(map(jnp.sum, parts)) / width for parts in zip(*totals.values(), strict=True)]


def _blocks(rows: int) -> int:
    """The largest number of blocks that splits the rows evenly; eight a multiprocessor keep enough loads in flight."""
    return max(n for n in range(1, min(rows, 8 * NUM_SMS) + 1) if rows % n == 0)


def _layout(shape: tuple[int, ...]):
    """Consecutive elements of a row go to a thread by up to 16 bytes, the 128 threads side by side."""
    vector = next(v for v in (8, 4, 2, 1) if math.prod(shape) % (128 * v) == 0)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=vector)


def _loader(shape: tuple[int, ...]):
    return lambda ref, index=(): plgpu.load(ref, index, layout=_layout(shape)).astype(jnp.float32)


def _call(body, out, blocks, options):
    # What TMA writes into shared memory has its barriers; no other memory is read and written by the same kernel.
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    run = functools.partial(plgpu.kernel, out_type=out, compiler_params=params, **options)
    return run(body, grid=(blocks,), grid_names=("block",))
