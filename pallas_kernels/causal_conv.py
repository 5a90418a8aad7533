"""The causal convolution of state space layers, each channel by itself, with SiLU, for Hopper (Pallas, Mosaic GPU).

    total_t = sum over back of kernel_(W - 1 - back) x_(t - back) + bias,    out_t = silu(total_t)

over 0 <= back < W, without tokens of other documents. With g_t = d_out_t silu'(total_t):

    d_x_t = sum over back of kernel_(W - 1 - back) g_(t + back)
    d_kernel_(W - 1 - back) = sum over t of g_t x_(t - back)

Dimensions: S sequences of T tokens, C channels, W taps. bfloat16 or float16; all between loads and stores is float32.
A block is a warpgroup with up to 256 channels, two of a thread; it goes through a tile of tokens with the W - 1 tokens
before in registers, and loads eight tokens before it uses the first. In the backward pass a tile ends W - 1 tokens
later, because its last gradients need them, and has its own part of the sums for kernel and bias; XLA adds the parts.
Bytes: 4 S T C forward, 6 S T C backward, and 4 (W + 1) C per tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.reductions import strided
from pallas_kernels.registers import load_as

LINE = 128  # channels
LINES = (2, 1)  # of a block, the most that divide the channels
AT_ONCE = 8  # tokens that are loaded together
TILES = (64, 32, 16, 8)  # tokens of a block, the most that divide a sequence
MAX_TAPS = 4


def problem(length: int, channels: int, taps: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used for sequences [length, channels], or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    if channels % LINE:
        return f"{channels} channels"
    if not 2 <= taps <= MAX_TAPS:
        return f"{taps} taps"
    return f"{length} tokens" if length % AT_ONCE else ""


class Inputs(NamedTuple):
    x_STC: Any
    kernel_WC: Any
    """float32."""
    bias_C: Any
    """float32, or None."""
    before_SWC: Any
    """The W - 1 tokens before each sequence."""
    ids_ST: Any
    """int32, of documents; None: each sequence is one."""
    ids_before_SW: Any


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all layers
def forward(inputs: Inputs, *, interpret: Any = None) -> jax.Array:
    """-> [S, T, C] in the dtype of x."""
    x = inputs.x_STC

    def body(block: "_Block", out_ref):
        def tokens(number, window):
            start = block.start + number * AT_ONCE
            loaded = [block.token(start + i) for i in range(AT_ONCE)]
            for i, token in enumerate(loaded):
                total = block.total([*window, token])
                out_ref[block.sequence, start + i, block.lines] = (total / (1 + jnp.exp(-total))).astype(x.dtype)
                window = [*window, token][1:]
            return window

        lax.fori_loop(0, block.size // AT_ONCE, tokens, block.window())

    (out,) = _call(body, inputs, [], [_in_lines(x)], interpret)
    return out.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("interpret",))
def backward(
    inputs: Inputs, d_out_STC: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """-> (d_x, d_before, d_kernel, d_bias), the latter two float32."""
    x = inputs.x_STC
    num_sequences, length, channels = x.shape
    num_taps = inputs.kernel_WC.shape[0]
    has_bias = inputs.bias_C is not None

    def body(block: "_Block", d_out_ref, d_x_ref, d_before_ref, *sum_refs):
        def gradients(window, pending, d_out):
            """-> (the gradients of the tokens of the window, all but the oldest not complete, and of the sums)."""
            total = block.total(window)
            sigmoid = 1 / (1 + jnp.exp(-total))
            g = d_out * (sigmoid + total * sigmoid * (1 - sigmoid))
            visible = [block.if_same(token, window[-1], g) for token in window]
            found = [d + tap * g for d, tap, g in zip([*pending, block.zeros], block.taps, visible, strict=True)]
            more = [g * token.row for g, token in zip(visible, window, strict=True)]
            return found, more + [g] * has_bias

        def store(t, gradient):
            d_x_ref[block.sequence, t, block.lines] = gradient.astype(x.dtype)

        def tokens(number, carry):
            window, pending, sums = carry
            start = block.start + number * AT_ONCE
            loaded = [(block.token(start + i), block.load(d_out_ref, start + i)) for i in range(AT_ONCE)]
            for i, (token, d_out) in enumerate(loaded):
                window = [*window, token]
                (oldest, *pending), more = gradients(window, pending, d_out)
                sums = [total + new for total, new in zip(sums, more, strict=True)]
                t = start + i - (num_taps - 1)
                if i >= num_taps - 1:
                    store(t, oldest)
                else:  # for the first tokens of a tile this one is in another tile, or before the sequence
                    pl.when(number > 0)(functools.partial(store, t, oldest))

                    @pl.when((number == 0) & (block.start == 0))
                    def _(i=i, oldest=oldest):
                        d_before_ref[block.sequence, i, block.lines] = oldest.astype(x.dtype)

                window = window[1:]
            return window, pending, sums

        nothing = [block.zeros] * (num_taps - 1), [block.zeros] * (num_taps + has_bias)
        carry = lax.fori_loop(0, block.size // AT_ONCE, tokens, (block.window(), *nothing))
        window, pending, sums = carry
        end = block.start + block.size
        for i in range(num_taps - 1):
            t = jnp.minimum(end + i, length - 1)
            d_out = block.where(end + i < length, block.load(d_out_ref, t), block.zeros)
            window = [*window, block.token(t)]
            (oldest, *pending), _ = gradients(window, pending, d_out)
            store(end + i - (num_taps - 1), oldest)
            window = window[1:]
        d_kernel_ref, *d_bias_ref = sum_refs
        for tap, total in enumerate(sums[:num_taps]):
            d_kernel_ref[block.sequence, block.tile, tap, block.lines] = total
        for ref in d_bias_ref:
            ref[block.sequence, block.tile, block.lines] = sums[-1]

    parts = (num_sequences, length // _tile_size(length))
    sums = [(*parts, num_taps, channels)] + [(*parts, channels)] * has_bias
    out = [_in_lines(x), _in_lines(inputs.before_SWC)]
    out += [_in_lines(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in sums]
    d_x, d_before, d_kernel, *d_bias = _call(body, inputs, [d_out_STC], out, interpret)
    d_kernel_WC = d_kernel.sum((0, 1)).reshape(inputs.kernel_WC.shape)
    d_bias_C = d_bias[0].sum((0, 1)).reshape(channels) if has_bias else None
    return d_x.reshape(x.shape), d_before.reshape(inputs.before_SWC.shape), d_kernel_WC, d_bias_C


class _Token(NamedTuple):
    row: jax.Array
    """Its channels in this block, float32."""
    id: Any
    """Of its document; None: there is only one."""


class _Block:
    """What a block reads."""

    def __init__(self, refs: Inputs, size: int, num_lines: int):
        """size: tokens of a tile."""
        self.size = size
        self.sequence = lax.axis_index("sequence")
        self.tile = lax.axis_index("tile")
        self.start = self.tile * size
        self.lines = pl.ds(lax.axis_index("columns") * num_lines, num_lines)
        self._refs = refs
        self._num_taps = refs.kernel_WC.shape[0]
        self._layout = strided((num_lines, LINE))
        self.zeros = plgpu.layout_cast(jnp.zeros((num_lines, LINE), jnp.float32), self._layout)
        self.taps = [self._load(refs.kernel_WC, tap) for tap in range(self._num_taps)]
        """From the oldest token's to the newest's."""
        self._bias = None if refs.bias_C is None else self._load(refs.bias_C)

    def _load(self, ref, *index) -> jax.Array:
        return load_as(ref.at[*index, self.lines], self._layout).astype(jnp.float32)

    def load(self, ref, t) -> jax.Array:
        return self._load(ref, self.sequence, t)

    def token(self, t) -> _Token:
        ids = self._refs.ids_ST
        return _Token(self.load(self._refs.x_STC, t), None if ids is None else ids[self.sequence, t])

    def window(self) -> list[_Token]:
        """The tokens before the first one of the tile."""
        return [self._earlier(number) for number in range(self._num_taps - 1)]

    def _earlier(self, number: int) -> _Token:
        refs = self._refs
        inside = self.token(jnp.maximum(self.start - (self._num_taps - 1) + number, 0))
        is_first = self.start == 0
        row = self.where(is_first, self.load(refs.before_SWC, number), inside.row)
        if refs.ids_before_SW is None:
            return _Token(row, None)
        return _Token(row, jnp.where(is_first, refs.ids_before_SW[self.sequence, number], inside.id))

    def if_same(self, token: _Token, other: _Token, value: jax.Array) -> jax.Array:
        """The value if both tokens are of one document, else zeros."""
        return value if token.id is None or token is other else self.where(token.id == other.id, value, self.zeros)

    def total(self, window: list[_Token]) -> jax.Array:
        """Of the newest token."""
        rows = [self.if_same(token, window[-1], token.row) for token in window]
        terms = [tap * row for tap, row in zip(self.taps, rows, strict=True)]
        return functools.reduce(jnp.add, terms if self._bias is None else [*terms, self._bias])

    def where(self, condition: jax.Array, value: jax.Array, other: jax.Array) -> jax.Array:
        """condition: a scalar."""
        every = plgpu.layout_cast(jnp.broadcast_to(condition, value.shape), self._layout)
        return jnp.where(every, value, other)


def _call(body: Callable, inputs: Inputs, others: list[jax.Array], out: list, interpret: Any) -> list[jax.Array]:
    """body: called with a _Block and the references of the other arrays and of the results."""
    num_sequences, length, channels = inputs.x_STC.shape
    size = _tile_size(length)
    num_lines = next(lines for lines in LINES if channels % (lines * LINE) == 0)
    arrays = dict(inputs._asdict())
    given = {
        name: array if name.startswith("ids") else _in_lines(array)
        for name, array in arrays.items()
        if array is not None
    }

    def block(*refs):
        of_inputs = dict.fromkeys(arrays) | dict(zip(given, refs, strict=False))
        body(_Block(Inputs(**of_inputs), size, num_lines), *refs[len(given) :])

    run = plgpu.kernel(
        block,
        out_type=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in out],
        grid=(num_sequences, length // size, channels // (num_lines * LINE)),
        grid_names=("sequence", "tile", "columns"),
        # No two threads access the same memory.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return run(*given.values(), *map(_in_lines, others))


def _tile_size(length: int) -> int:
    return next(size for size in TILES if length % size == 0)


def _in_lines(array):
    shape = (*array.shape[:-1], array.shape[-1] // LINE, LINE)
    return jax.ShapeDtypeStruct(shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else array.reshape(shape)
