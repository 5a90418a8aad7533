"""Gated activations for Hopper (Pallas, Mosaic GPU): of the rows of experts, times the routing weight of each row; and
the backward pass of those of other layers, whose weights are 1, or which are not gated: d_x = d_hidden * f'(x).

    forward     hidden = f(gate) * up * weight
    backward    d_gate = d_hidden * weight * up * f'(gate);  d_up = d_hidden * weight * f(gate);
                d_weight = sum over the row of d_hidden * f(gate) * up

Dimensions: R rows, F their width; gate and up are side by side, [R, 2, F]. bfloat16 or float16; all between loads and
stores is float32. Rows from `count` on are empty: they are not read, and their results are zero.
Each direction reads and writes everything once: 6 R F bytes forward, 10 R F backward, where XLA's fusion of the
backward pass reads gate and d_hidden again for d_up, one element per thread, and everything a third time for d_weight.
A block is a warpgroup, which loops over rows and within a row over pieces of 1,024 columns, 16 bytes per thread and
load; it has no shared memory but the few bytes of the sum.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.reductions import strided
from pallas_kernels.registers import load_as

NUM_SMS = 132  # of H100 SXM, H200 and GH200
BLOCKS_PER_SM = 8
LINE = 128  # elements
PIECE = 8  # lines that 128 threads load at once, 16 bytes each
MIN_ROWS = NUM_SMS * BLOCKS_PER_SM  # fewer do not fill the GPU


def _silu(x):
    sigmoid = 1 / (1 + jnp.exp(-x))
    value = x * sigmoid
    return value, sigmoid + value * (1 - sigmoid)


def _gelu_tanh(x):
    twice = 2 * math.sqrt(2 / math.pi)
    cubic = 0.044715
    sigmoid = 1 / (1 + jnp.exp(-twice * x * (1 + cubic * x * x)))  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    value = x * sigmoid
    return value, sigmoid + value * (1 - sigmoid) * twice * (1 + 3 * cubic * x * x)


# erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p z), for z >= 0; off by 1.5e-7 at most (Abramowitz and Stegun
# 1964, 7.1.26).
ERFC_P = 0.3275911
ERFC = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _gelu(x):
    density = jnp.exp(-0.5 * x * x)  # of the normal distribution, times sqrt(2 pi)
    t = 1 / (1 + ERFC_P * math.sqrt(0.5) * jnp.abs(x))
    polynomial = functools.reduce(lambda sum_, a: (sum_ + a) * t, reversed(ERFC), 0.0)
    tail = 0.5 * polynomial * density
    cumulative = jnp.where(x > 0, 1 - tail, tail)
    return x * cumulative, cumulative + x * density * (1 / math.sqrt(2 * math.pi))


FUNCTIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
"""x -> (f(x), its derivative), float32."""


def problem(num_rows: int, width: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used, or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    if width % LINE:
        return f"width {width}"
    return f"{num_rows} rows" if num_rows < MIN_ROWS else ""


@functools.partial(jax.jit, static_argnames=("function", "interpret"))  # lowered once for all layers
def forward(
    wide_R2F: jax.Array, weights_R: jax.Array, count: jax.Array, *, function: str, interpret: Any = None
) -> jax.Array:
    """-> hidden [R, F] in the dtype of wide. weights: float32. count: int32 scalar, rows that are not empty."""
    rows, _, width = wide_R2F.shape
    f = FUNCTIONS[function]

    def body(count_ref, wide_ref, weights_ref, hidden_ref):
        def one_row(row):
            weight = weights_ref[row]

            def one_piece(piece, _):
                gate = _load(wide_ref, row, 0, piece)
                up = _load(wide_ref, row, 1, piece)
                hidden_ref[row, piece] = (f(gate)[0] * up * weight).astype(wide_R2F.dtype)

            _for_each_piece(width, one_piece, lambda lines: None)

        def empty_row(row):
            _clear(hidden_ref.at[row])

        _for_each_row(rows, count_ref[0], one_row, empty_row)

    out = jax.ShapeDtypeStruct((rows, width // LINE, LINE), wide_R2F.dtype)
    run = _call(body, out, rows, interpret)
    return run(count.reshape(1), _in_lines(wide_R2F), weights_R).reshape(rows, width)


@functools.partial(jax.jit, static_argnames=("function", "interpret"))
def backward(
    wide_R2F: jax.Array, weights_R: jax.Array, count: jax.Array, d_hidden_RF: jax.Array, *, function: str,
    interpret: Any = None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-> (d_wide [R, 2, F] in the dtype of wide, d_weights [R] float32)."""
    rows, _, width = wide_R2F.shape
    f = FUNCTIONS[function]

    def body(count_ref, wide_ref, weights_ref, d_hidden_ref, d_wide_ref, d_weights_ref):
        def one_row(row):
            weight = weights_ref[row]

            def one_piece(piece, total):
                gate = _load(wide_ref, row, 0, piece)
                up = _load(wide_ref, row, 1, piece)
                d_hidden = _load(d_hidden_ref, row, piece)
                activated, slope = f(gate)
                d_wide_ref[row, 0, piece] = (d_hidden * up * weight * slope).astype(wide_R2F.dtype)
                d_wide_ref[row, 1, piece] = (d_hidden * activated * weight).astype(wide_R2F.dtype)
                return total + d_hidden * activated * up

            totals = _for_each_piece(width, one_piece, _zeros)
            d_weights_ref[row] = sum(map(jnp.sum, totals))

        def empty_row(row):
            _clear(d_wide_ref.at[row, 0])
            _clear(d_wide_ref.at[row, 1])
            d_weights_ref[row] = jnp.float32(0)

        _for_each_row(rows, count_ref[0], one_row, empty_row)

    out = [
        jax.ShapeDtypeStruct((rows, 2, width // LINE, LINE), wide_R2F.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    ]
    run = _call(body, out, rows, interpret)
    d_wide, d_weights_R = run(count.reshape(1), _in_lines(wide_R2F), weights_R, _in_lines(d_hidden_RF))
    return d_wide.reshape(wide_R2F.shape), d_weights_R


@functools.partial(jax.jit, static_argnames=("function", "with_sums", "interpret"))
def unweighted_backward(
    wide_RWF: jax.Array, d_hidden_RF: jax.Array, *, function: str, with_sums: bool = False, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """-> (d_wide [R, W, F] in the dtype of wide, of rows that are all filled and have no weights; with_sums: its sum
    over the rows, the gradient of a bias, [W, F] float32). W: 2 (gate, up), or 1 of an activation that is not gated.

    With sums a block computes a piece of each of its rows before the next piece, so that it keeps the sums of one piece
    in registers.
    """
    rows, parts, width = wide_RWF.shape
    f = FUNCTIONS[function]
    blocks = _blocks(rows)

    def body(wide_ref, d_hidden_ref, d_wide_ref, *sums_refs):
        block = lax.axis_index("block")

        def write(row, piece) -> list[jax.Array]:
            """Writes the gradients of a piece of a row -> the same in float32."""
            d_hidden = _load(d_hidden_ref, row, piece)
            activated, slope = f(_load(wide_ref, row, 0, piece))
            found = [d_hidden * slope]
            if parts == 2:
                found = [found[0] * _load(wide_ref, row, 1, piece), d_hidden * activated]
            for part, d_part in enumerate(found):
                d_wide_ref[row, part, piece] = d_part.astype(wide_RWF.dtype)
            return found

        def one_row(row):
            def one_piece(piece, _):
                write(row, piece)

            _for_each_piece(width, one_piece, lambda lines: None)

        def one_piece_of_each_row(piece, _):
            def add(number, sums):
                found = write(block + number * blocks, piece)
                return [total + d_part for total, d_part in zip(sums, found, strict=True)]

            sums = lax.fori_loop(0, _rows_of(block, rows), add, [_zeros(piece.size)] * parts)
            for part, total in enumerate(sums):
                sums_refs[0][block, part, piece] = total

        if with_sums:
            _for_each_piece(width, one_piece_of_each_row, lambda lines: None)
        else:
            _for_each_row(rows, rows, one_row, lambda row: None)

    lines = width // LINE
    out = [jax.ShapeDtypeStruct((rows, parts, lines, LINE), wide_RWF.dtype)]
    if with_sums:
        out.append(jax.ShapeDtypeStruct((blocks, parts, lines, LINE), jnp.float32))
    d_wide, *sums = _call(body, out, rows, interpret)(_in_lines(wide_RWF), _in_lines(d_hidden_RF))
    return d_wide.reshape(wide_RWF.shape), jnp.sum(sums[0], 0).reshape(parts, width) if with_sums else None


def _for_each_row(rows: int, count, one_row: Callable, empty_row: Callable) -> None:
    """Calls one_row(row) for the rows of this block below `count`, and empty_row(row) for the others."""
    block = lax.axis_index("block")
    blocks = _blocks(rows)

    def visit(number, _):
        row = block + number * blocks
        pl.when(row < count)(lambda: one_row(row))
        pl.when(row >= count)(lambda: empty_row(row))

    lax.fori_loop(0, _rows_of(block, rows), visit, None)


def _rows_of(block, rows: int):
    """How many rows a block has: every `blocks`-th."""
    return lax.div(rows - block + _blocks(rows) - 1, _blocks(rows))


def _clear(lines_ref) -> None:
    """Writes zeros to the lines of a row."""

    def one_piece(piece, _):
        lines_ref[piece] = _zeros(piece.size).astype(lines_ref.dtype)

    _for_each_piece(lines_ref.shape[0] * LINE, one_piece, lambda lines: None)


def _for_each_piece(width: int, one_piece: Callable, start: Callable) -> list:
    """Folds one_piece(lines of the piece, carry) over the pieces of a row -> the carries of the whole pieces and of the
    rest, each of which begins with start(lines)."""
    lines = width // LINE
    whole = lines // PIECE
    carries = []
    if whole:

        def step(number, carry):
            return one_piece(pl.ds(number * PIECE, PIECE), carry)

        carries.append(lax.fori_loop(0, whole, step, start(PIECE)))
    if lines % PIECE:
        rest = lines % PIECE
        carries.append(one_piece(pl.ds(whole * PIECE, rest), start(rest)))
    return carries


def _load(ref, *index) -> jax.Array:
    """The lines index[-1] as float32; each thread holds up to 16 consecutive bytes."""
    return load_as(ref.at[index], strided((index[-1].size, LINE))).astype(jnp.float32)


def _zeros(lines: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((lines, LINE), jnp.float32), strided((lines, LINE)))


def _in_lines(array: jax.Array) -> jax.Array:
    return array.reshape(*array.shape[:-1], -1, LINE)


def _blocks(rows: int) -> int:
    return min(rows, BLOCKS_PER_SM * NUM_SMS)


def _call(body: Callable, out, rows: int, interpret):
    # No two threads access the same memory but in the sum, which has barriers of its own.
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    grid = dict(grid=(_blocks(rows),), grid_names=("block",))
    return plgpu.kernel(body, out_type=out, compiler_params=params, interpret=interpret, **grid)
