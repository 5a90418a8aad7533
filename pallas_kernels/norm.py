"""RMSNorm and LayerNorm fused with the preceding residual addition, and RMSNorm of a gated array, for Hopper (Pallas,
Mosaic GPU).

Forward: s = x + y; normed = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, with the mean only if there is a
bias (Ba et al. 2016; without: Zhang and Sennrich 2019). Backward, with h = (s - mean) * inverse and g = d_normed *
scale: d_s = d_residual + inverse * (g - h * mean(g * h) - mean(g)), d_scale = sum over rows of d_normed * h, d_bias =
sum over rows of d_normed.

Gated (Dao and Gu 2024): s = x * silu(y), which is not stored; each of G groups of rows has a scale of its own, [G, D].
Then d_x = d_s * silu(y), d_y = d_s * x * silu'(y).

Dimensions: R rows, D width; row r belongs to group r modulo G. bfloat16 or float16 rows; statistics, scale and bias
float32. Both directions read and write each row once. The warpgroups of a block, 1, 2 or 4 of 128 threads, share a row;
each has a part of its columns. In the forward pass their values stay in registers. In the backward pass TMA prefetches
rows into shared memory, from which a row is read piece by piece; a block loops over its rows, of one group, with scale
and its partial sums for scale and bias in registers, and the sum over blocks, [blocks, D], is left to XLA. Bytes:
forward 8 R D (4 without y, 6 gated), backward 8 R D (10 gated) and 4 D per block for each sum.
Refused: D that is not a multiple of 128, above 12288, or not split into at most 32 columns per thread, see `problem`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels import reductions
from pallas_kernels.reductions import strided
from pallas_kernels.registers import load_as

NUM_SMS = 132  # of an H100
SMEM_BYTES = 216 << 10  # of a multiprocessor, for prefetched rows
LINE = 128  # elements
PIECE = 8  # lines that 128 threads load at once, 16 bytes each
MAX_WIDTH = 12288
# Target number of columns per thread; in the backward pass registers have room for twice as many.
FORWARD = 64
BACKWARD = 16


def problem(num_rows: int, width: int, dtype: jnp.dtype, num_groups: int = 1) -> str:
    """Why these kernels cannot be used, or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    if width % LINE or width > min(MAX_WIDTH, 2 * BACKWARD * 128 * _warpgroups(width, BACKWARD)):
        return f"width {width}"
    if num_groups > NUM_SMS:
        return f"{num_groups} groups"
    return "" if num_rows % 8 == 0 else f"{num_rows} rows"


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))  # lowered once for all layers
def forward(
    x_RD: jax.Array,
    y_RD: jax.Array | None,
    scale_D: jax.Array,
    bias_D: jax.Array | None,
    *,
    epsilon: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """-> (x + y, or x without y; normed), both [R, D] in x's dtype. interpret: plgpu.InterpretGPUParams, to run on
    CPU."""
    found = _forward({"x": x_RD, "y": y_RD, "scale": scale_D[None], "bias": bias_D}, False, epsilon, interpret)
    return (x_RD, found[0]) if y_RD is None else (found[0], found[1])


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def gated_forward(
    x_RD: jax.Array, gate_RD: jax.Array, scale_GD: jax.Array, *, epsilon: float, interpret: Any = None
) -> jax.Array:
    """-> the norm of x * silu(gate), [R, D] in x's dtype."""
    (normed,) = _forward({"x": x_RD, "y": gate_RD, "scale": scale_GD, "bias": None}, True, epsilon, interpret)
    return normed


def _forward(given: dict[str, jax.Array | None], gated: bool, epsilon: float, interpret: Any) -> list[jax.Array]:
    """-> [the sum, if there is one, the normed rows]."""
    x_RD = given["x"]
    assert x_RD is not None
    rows, width = x_RD.shape
    blocks = _blocks(rows)
    warpgroups = _warpgroups(width, FORWARD)
    shape = (warpgroups, width // warpgroups)
    load = _loader(shape[1:])
    arrays = {name: array.reshape(*array.shape[:-1], *shape) for name, array in given.items() if array is not None}
    num_groups = arrays["scale"].shape[0]
    has_bias = "bias" in arrays
    has_sum = "y" in arrays and not gated

    def body(*refs):
        inputs = dict(zip(arrays, refs, strict=False))
        *sum_ref, normed_ref, parts = refs[len(arrays) :]
        group = lax.axis_index("warpgroup")
        only_scale: Any = load(inputs["scale"], (0, group)) if num_groups == 1 else None
        bias = load(inputs["bias"], group) if has_bias else None

        def one_row(number, _):
            row = lax.axis_index("block") * (rows // blocks) + number
            scale = only_scale if num_groups == 1 else load(inputs["scale"], (lax.rem(row, num_groups), group))

            def mean(i, value):
                return _means([[value]], width, parts, (lax.rem(number, 2), i), interpret)[0]

            total = load(inputs["x"], (row, group))
            if gated:
                total *= _silu(load(inputs["y"], (row, group)))[0]
            if has_sum:
                total = (total + load(inputs["y"], (row, group))).astype(x_RD.dtype)
                sum_ref[0][row, group] = total
                total = total.astype(jnp.float32)
            if bias is not None:
                total -= mean(0, total)
            normed = total * lax.rsqrt(mean(1, total * total) + epsilon) * scale
            normed_ref[row, group] = (normed if bias is None else normed + bias).astype(x_RD.dtype)

        lax.fori_loop(0, rows // blocks, one_row, None)

    out = [jax.ShapeDtypeStruct((rows, *shape), x_RD.dtype)] * (2 if has_sum else 1)
    outputs = _call(body, out, [], 1, blocks, warpgroups, interpret)(*arrays.values())
    return [a.reshape(x_RD.shape) for a in outputs]


@functools.partial(jax.jit, static_argnames=("centred", "epsilon", "interpret"))
def backward(
    s_RD: jax.Array, d_normed_RD: jax.Array, d_residual_RD: jax.Array, scale_D: jax.Array, *, centred: bool,
    epsilon: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """-> (d_s [R, D] in s's dtype, d_scale, d_bias or None), the latter float32 [blocks, D], to be summed over blocks.

    s: the array that the forward pass normalised. centred: it was a LayerNorm, which has a bias.
    """
    rows, width = s_RD.shape
    kernel = _Backward(rows, width, s_RD.dtype, centred, epsilon, interpret)
    d_s, d_scale, *d_bias = kernel((s_RD, d_normed_RD, d_residual_RD), scale_D[None])
    return d_s, d_scale, d_bias[0] if centred else None


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def gated_backward(
    x_RD: jax.Array, gate_RD: jax.Array, d_normed_RD: jax.Array, scale_GD: jax.Array, *, epsilon: float,
    interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """-> (d_x, d_gate, [R, D] in x's dtype, d_scale, float32 [blocks / G, G, D], to be summed over blocks)."""
    rows, width = x_RD.shape
    kernel = _Backward(rows, width, x_RD.dtype, False, epsilon, interpret, num_groups=scale_GD.shape[0])
    d_x, d_gate, d_scale = kernel((x_RD, d_normed_RD, gate_RD), scale_GD)
    return d_x, d_gate, d_scale.reshape(-1, *scale_GD.shape)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The kernel of the backward pass for `rows` rows of `width` columns."""

    rows: int
    width: int
    dtype: jnp.dtype
    centred: bool
    epsilon: float
    interpret: Any
    num_groups: int = 0
    """Of a gated array; 0: it is not gated."""

    def __call__(self, arrays: tuple[jax.Array, ...], scale_GD: jax.Array) -> list[jax.Array]:
        """arrays: s (x of a gated array), d_normed, and d_residual or the gate."""
        rows = jax.ShapeDtypeStruct((self.rows, *self.shape), self.dtype)
        part = jax.ShapeDtypeStruct((self.blocks, *self.shape), jnp.float32)
        out = [rows] * (2 if self.num_groups else 1) + [part] * (2 if self.centred else 1)
        ready = plgpu.Barrier(num_arrivals=3, num_barriers=self.stages)
        scratch = [*[plgpu.SMEM((self.stages, *self.shape), self.dtype)] * 3, ready]
        call = _call(self.body, out, scratch, 3, self.blocks, self.warpgroups, self.interpret)
        found = call(*(a.reshape(self.rows, *self.shape) for a in arrays), scale_GD.reshape(-1, *self.shape))
        return [a.reshape(-1, self.width) for a in found]

    @property
    def warpgroups(self) -> int:
        return _warpgroups(self.width, BACKWARD)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a row: TMA copies at most 256 elements along a dim."""
        return (self.warpgroups, self.width // LINE // self.warpgroups, LINE)

    @property
    def blocks_of_sm(self) -> int:
        """As many as registers have room for, 512 threads: they hide the latency of each other's reductions."""
        return max(1, min(4 // self.warpgroups, 4 * BACKWARD * 128 // self.width))

    @property
    def blocks(self) -> int:
        most = min(self.rows, NUM_SMS * self.blocks_of_sm)
        return most // self.num_groups * self.num_groups if self.num_groups else most  # each has rows of one group

    @property
    def stages(self) -> int:
        """Rows that are in shared memory at a time."""
        return min(8, SMEM_BYTES // self.blocks_of_sm // (3 * 2 * self.width))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first line, number of lines) of the pieces that a row is read in."""
        lines = self.shape[1]
        return [(start, min(PIECE, lines - start)) for start in range(0, lines, PIECE)]

    def body(self, s_ref, d_normed_ref, other_ref, scale_ref, d_s_ref, *others):
        """Of one warpgroup of a block."""
        *out_refs, s_smem, d_normed_smem, other_smem, ready, parts = others
        gate_refs, sum_refs = (out_refs[:1], out_refs[1:]) if self.num_groups else ([], out_refs)
        block = lax.axis_index("block")
        group = lax.axis_index("warpgroup")
        pieces = self.pieces
        count = lax.div(self.rows - block + self.blocks - 1, self.blocks)  # rows block, block + blocks, ...

        def fetch(number):
            """Issued by one warpgroup for all, because each of its threads arrives at the barrier."""

            @pl.when(jnp.logical_and(group == 0, number < count))
            def _():
                row = block + number * self.blocks
                slot = lax.rem(number, self.stages)
                for ref, smem in ((s_ref, s_smem), (d_normed_ref, d_normed_smem), (other_ref, other_smem)):
                    plgpu.copy_gmem_to_smem(ref.at[row], smem.at[slot], ready.at[slot])

        def read(ref, piece, *index):
            start, lines = piece
            return _loader((lines, LINE))(ref, (*index, group, pl.ds(start, lines)))

        scale = {piece: read(scale_ref, piece, lax.rem(block, max(self.num_groups, 1))) for piece in pieces}

        def one_row(number, sums):
            """A row stays in shared memory and is read piece by piece, as registers have no room for all of it."""
            row = block + number * self.blocks
            slot = lax.rem(number, self.stages)

            def means(i, values):
                return _means(map(values, pieces), self.width, parts, (lax.rem(number, 2), i), self.interpret)

            plgpu.barrier_wait(ready.at[slot])
            mean = means(0, lambda piece: [read(s_smem, piece, slot)])[0] if self.centred else 0.0

            def centred(piece):
                s = read(s_smem, piece, slot)
                return s * _silu(read(other_smem, piece, slot))[0] if self.num_groups else s - mean

            def moments(piece):
                c = centred(piece)
                g = read(d_normed_smem, piece, slot) * scale[piece]
                return [c * c, c * g, g] if self.centred else [c * c, c * g]

            variance, product, *mean_g = means(1, moments)
            fetch(number + self.stages - 1)  # into the slot of the previous row, which all have read
            inverse = lax.rsqrt(variance + self.epsilon)
            (mean_g,) = mean_g or [0.0]
            along = product * inverse * inverse
            new_sums = []
            for piece, of_piece in zip(pieces, sums, strict=True):
                c = centred(piece)
                d_normed = read(d_normed_smem, piece, slot)
                more = d_normed * (c * inverse), d_normed
                new_sums.append([total + new for total, new in zip(of_piece, more, strict=False)])
                d_s = (d_normed * scale[piece] - c * along - mean_g) * inverse
                other = read(other_smem, piece, slot)
                if self.num_groups:
                    activated, slope = _silu(other)
                    for ref in gate_refs:
                        ref[row, group, pl.ds(*piece)] = (d_s * read(s_smem, piece, slot) * slope).astype(self.dtype)
                    d_s *= activated
                else:
                    d_s += other
                d_s_ref[row, group, pl.ds(*piece)] = d_s.astype(self.dtype)
            _release(self.interpret)
            return new_sums

        for number in range(self.stages - 1):
            fetch(jnp.int32(number))
        zeros = [_zeros((lines, LINE)) for _, lines in pieces]
        sums = lax.fori_loop(0, count, one_row, [[zero] * len(sum_refs) for zero in zeros])
        for piece, of_piece in zip(pieces, sums, strict=True):
            for ref, total in zip(sum_refs, of_piece, strict=True):
                ref[block, group, pl.ds(*piece)] = total


def _silu(x):
    """-> (silu(x), its derivative)."""
    sigmoid = 1 / (1 + jnp.exp(-x))
    activated = x * sigmoid
    return activated, sigmoid + activated * (1 - sigmoid)


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), strided(shape))


def _means(pieces, width, parts, slot, interpret):
    """The mean of each value, over the pieces and the threads of all warpgroups. pieces: [value, ...] per piece."""
    values = [list(value) for value in zip(*pieces, strict=True)]
    return [total * (1 / width) for total in reductions.reduced(values, parts, slot, interpret)]


def _release(interpret):
    """Allows TMA to overwrite what this thread has read, once a barrier has told the thread that issues it."""
    if interpret:
        plgpu.commit_smem()
    else:
        plgpu.inline_mgpu()(_fence)()


def _fence(_):
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def _warpgroups(width: int, columns: int) -> int:
    """The fewest warpgroups with at most `columns` columns of a row per thread; if impossible, the most that divide
    the row."""
    fit = [n for n in (1, 2, 4) if width % (LINE * n) == 0]
    return next((n for n in fit if width <= columns * 128 * n), fit[-1])


def _blocks(rows: int) -> int:
    """The largest number of blocks that divides the rows; eight per multiprocessor keep enough loads in flight."""
    return max(n for n in range(1, min(rows, 8 * NUM_SMS) + 1) if rows % n == 0)


def _loader(shape: tuple[int, ...]):
    def load(ref, index):
        return load_as(ref.at[index], strided(shape)).astype(jnp.float32)

    return load


def _call(body, out, scratch, values, blocks, warpgroups, interpret):
    """values: the maximum number of means that `_means` computes at once."""
    # TMA's writes into shared memory and the sums have their own barriers; no other memory is read and written.
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    parts = reductions.scratch(values, warpgroups)
    grid = dict(grid=(blocks,), grid_names=("block",), num_threads=warpgroups, thread_name="warpgroup")
    return plgpu.kernel(
        body, out_type=out, scratch_types=[*scratch, parts], compiler_params=params, interpret=interpret, **grid
    )
