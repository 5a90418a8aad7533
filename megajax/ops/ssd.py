"""The selective state-space recurrence of Mamba-2 in chunks of matmuls, and the causal convolution before it
(state-space duality: Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

Dimensions: B batch, T sequence, H heads of width P, G groups of R = H / G heads, N width of the state, W taps of the
convolution; J chunks of Q tokens; I pieces of the sequence (parallel/context.py), each of consecutive tokens.

A head has a state S [P, N], its group shares B and C [N] of each token:

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

Inside a chunk, with c the cumulative sum of dt A, this is attention without a softmax:

    y_q = sum over t <= q of exp(c_q - c_t) (C_q . B_t) dt_t x_t + exp(c_q) S C_q,    S the state before the chunk

so only the states between chunks are computed one after the other. Products are in x's dtype with float32 sums; dt,
decays and states are float32 (float64 for float64 inputs). The backward pass computes everything again from the
arguments: the scores of a chunk, Q numbers per token and head, are the largest arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax import compat
from megajax.ops.matmul import dot_precision
from megajax.sharding import constrain

recomputed = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)


def time_steps(dt_BTH: jax.Array, bias_H: jax.Array, limits: tuple[float, float | None]) -> jax.Array:
    """softplus(dt + bias), limited to [limits[0], limits[1]] -> float32."""
    dtype = wide(dt_BTH)
    steps = jax.nn.softplus(dt_BTH.astype(dtype) + bias_H.astype(dtype))
    low, high = limits
    return steps if (low, high) == (0.0, None) else jnp.clip(steps, low or None, high)


def ssd(
    x_BTHP: jax.Array,
    dt_BTH: jax.Array,
    a_H: jax.Array,
    b_BTGN: jax.Array,
    c_BTGN: jax.Array,
    skip_H: jax.Array,
    *,
    chunk: int,
    starts_BT: jax.Array | None = None,
    state_BHPN: jax.Array | None = None,
    pieces: Sequence[int] = (0,),
) -> tuple[jax.Array, jax.Array]:
    """-> (y [B, T, H, P] in x's dtype, the state after the last token, float32 [B, H, P, N]).

    dt: float32, after time_steps; 0 leaves the state as it is (padding). a: negative. skip: D of the equations.
    starts: bool, tokens that begin a document, with a state of zeros. state: before the first token; None: zeros.
    chunk: Q; the result does not depend on it. pieces: the number in the sequence of each stored piece of T.
    """
    run = functools.partial(_ssd, chunk=chunk, pieces=tuple(pieces))
    return recomputed(run)(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, skip_H, starts_BT, state_BHPN)


def _ssd(x, dt, a, b, c, skip, starts, state, *, chunk, pieces):
    B, T, H, P = x.shape
    G, N = b.shape[2:]
    R = H // G
    dtype = wide(x)
    length = T // len(pieces)
    chunk = min(chunk, length)

    def split(array):
        return chunks(array, len(pieces), chunk)

    x_BJQGRP = split(x).reshape(B, -1, chunk, G, R, P)
    dt_BJQGR = split(dt.astype(dtype)).reshape(B, -1, chunk, G, R)
    b_BJQGN = split(b)
    c_BJQGN = split(c)
    dot = functools.partial(jnp.einsum, precision=dot_precision(x.dtype), preferred_element_type=dtype)

    sums_BJGRQ = sums_in_chunks(dt_BJQGR * a.astype(dtype).reshape(G, R))
    dt_BJGRQ = dt_BJQGR.transpose(0, 1, 3, 4, 2)
    decays = Decays(sums_BJGRQ, None if starts is None else jnp.cumsum(split(starts.astype(jnp.int32)), 2))

    scores_BJGQT = dot("bjqgn,bjtgn->bjgqt", c_BJQGN, b_BJQGN)
    mixing_BJGRQT = scores_BJGQT[:, :, :, None] * decays.between() * dt_BJGRQ[..., None, :]
    y_BJQGRP = dot("bjgrqt,bjtgrp->bjqgrp", mixing_BJGRQT.astype(x.dtype), x_BJQGRP)
    to_end, from_start = decays.to_the_ends()

    def by_time(array):
        """[B, J, ...] -> [J / I, I, B, ...]: the order of the scan over chunks, also for the products beside it."""
        return array.reshape(B, len(pieces), -1, *array.shape[2:]).swapaxes(0, 2)

    weights = (to_end * dt_BJGRQ).transpose(0, 1, 4, 2, 3)[..., None]
    scaled = by_time((x_BJQGRP.astype(dtype) * weights).astype(x.dtype))
    added = dot("jibtgrp,jibtgn->jibgrpn", scaled, by_time(b_BJQGN))
    start = None if state is None else state.astype(dtype).reshape(B, G, R, P, N)
    before, last = _states_between(added, by_time(from_start[..., -1]), start, pieces, x.dtype)
    past = dot("jibqgn,jibgrpn->jibqgrp", by_time(c_BJQGN), before).swapaxes(0, 2).reshape(y_BJQGRP.shape)
    y_BJQGRP = y_BJQGRP + past * from_start.transpose(0, 1, 4, 2, 3)[..., None]
    y_BJQGRP = y_BJQGRP + skip.astype(dtype).reshape(G, R, 1) * x_BJQGRP.astype(dtype)
    y = y_BJQGRP.astype(x.dtype).reshape(B, len(pieces), -1, H, P)[:, :, :length]
    return y.reshape(x.shape), last.reshape(B, H, P, N)


def wide(array: jax.Array):
    """The dtype of decays, states and sums beside this array."""
    return jnp.float64 if array.dtype == jnp.float64 else jnp.float32


def chunks(array_BT: jax.Array, num_pieces: int, chunk: int) -> jax.Array:
    """[B, T, ...] -> [B, J, Q, ...]; each piece is padded to whole chunks with zeros."""
    B, T, *rest = array_BT.shape
    pieces = array_BT.reshape(B, num_pieces, T // num_pieces, *rest)
    missing = -pieces.shape[2] % chunk
    if missing:
        pieces = jnp.pad(pieces, [(0, missing) if axis == 2 else (0, 0) for axis in range(pieces.ndim)])
    return pieces.reshape(B, -1, chunk, *rest)


def sums_in_chunks(logs_BJQGR: jax.Array) -> jax.Array:
    """Cumulative sums over Q -> [B, J, G, R, Q]; as a matmul: a cumulative sum would take log(Q) passes."""
    until = jnp.asarray(np.tri(logs_BJQGR.shape[2]), logs_BJQGR.dtype)
    return jnp.einsum("bjtgr,qt->bjgrq", logs_BJQGR, until, precision=lax.Precision.HIGHEST)


class Decays(NamedTuple):
    """What is left of a state between the tokens of a chunk; 0 between documents."""

    sums_BJGRQ: jax.Array
    """Logarithms of the decays, summed up to and including each token of the chunk."""
    seen_BJQ: jax.Array | None
    """int32: documents that begin in the chunk, up to and including the token; None: none begins."""

    def between(self) -> jax.Array:
        """From the end of token t to that of token q, 0 for t > q: [B, J, G, R, Q, T]."""
        visible = jnp.asarray(np.tri(self.sums_BJGRQ.shape[-1], dtype=bool))
        if self.seen_BJQ is not None:
            visible = (visible & (self.seen_BJQ[..., :, None] == self.seen_BJQ[..., None, :]))[:, :, None, None]
        # Masked before the exponential: above the diagonal it may overflow, and its gradient would be 0 * inf.
        logs = self.sums_BJGRQ[..., :, None] - self.sums_BJGRQ[..., None, :]
        return jnp.exp(jnp.where(visible, logs, -jnp.inf))

    def to_the_ends(self) -> tuple[jax.Array, jax.Array]:
        """(from each token to the end of the chunk, from its start to each token), [B, J, G, R, Q] each."""
        to_end = jnp.exp(self.sums_BJGRQ[..., -1:] - self.sums_BJGRQ)
        from_start = jnp.exp(self.sums_BJGRQ)
        if self.seen_BJQ is not None:
            to_end = _where(self.seen_BJQ == self.seen_BJQ[..., -1:], to_end)
            from_start = _where(self.seen_BJQ == 0, from_start)
        return to_end, from_start


def _where(condition_BJQ, array_BJGRQ):
    return jnp.where(condition_BJQ[:, :, None, None], array_BJGRQ, 0.0)


def _states_between(added, decay, start, pieces, dtype):
    """-> (the state before each chunk [J / I, I, B, G, R, P, N] in this dtype, the one after the last).

    added: what a chunk adds to the state at its end; decay [J / I, I, B, G, R]: what it leaves of the state before it.
    Pieces of one sequence on several devices: each runs over its chunks once to find what its whole piece adds; these
    are gathered, two or one a device, and tell the states before all pieces.
    """
    zeros = compat.vary(jnp.zeros(added.shape[1:], added.dtype), compat.varying_axes(added))

    def after(state, chunk):
        added, decay = chunk
        return state * decay[..., None, None] + added

    def step(state, chunk):
        return after(state, chunk), state.astype(dtype)

    if len(pieces) == 1:
        last, before = lax.scan(step, zeros if start is None else start[None], (added, decay))
        return before, last[0]
    ends, _ = lax.scan(lambda state, chunk: (after(state, chunk), None), zeros, (added, decay))
    firsts, last = states_of_pieces(
        ends, jnp.prod(decay, 0), start, pieces, lambda state, left: state * left[..., None, None]
    )
    _, before = lax.scan(step, firsts, (added, decay))
    return before, last


def states_of_pieces(
    ends: jax.Array,
    decays: jax.Array,
    start: jax.Array | None,
    pieces: Sequence[int],
    decayed: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """-> (the state before each piece [I, B, G, R, P, N], the one after the last).

    ends: after each piece, from zeros, [I, B, G, R, P, N]. decays: of each piece, [I, B, G, R, ...]; decayed(state,
    decay): what a piece leaves of the state before it. start: before the first piece; None: zeros.
    """
    heads = ("kv_heads", None) if ends.shape[2] > 1 else (None, "heads")
    axes = ("batch", *heads, None, None)
    ends = constrain(ends, None, *axes)
    decays = constrain(decays, None, *axes[: decays.ndim - 1])
    state = jnp.zeros_like(ends[0]) if start is None else start
    found = [None] * len(pieces)
    for stored in np.argsort(pieces).tolist():
        found[stored] = state
        state = decayed(state, decays[stored]) + ends[stored]
    # Whole here too, so that the gradients are gathered before they are taken apart: XLA would send each by itself.
    return constrain(constrain(jnp.stack(found), None, *axes), "time", *axes), state


def ssd_step(
    x_BHP: jax.Array, dt_BH: jax.Array, a_H: jax.Array, b_BGN: jax.Array, c_BGN: jax.Array, skip_H: jax.Array,
    state_BHPN: jax.Array
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`ssd` of one token per row -> (y [B, H, P] in x's dtype, the new state, float32)."""
    dtype = state_BHPN.dtype
    heads = x_BHP.shape[1] // b_BGN.shape[1]
    b_BHN, c_BHN = (jnp.repeat(m.astype(dtype), heads, 1) for m in (b_BGN, c_BGN))
    x = x_BHP.astype(dtype)
    decay_BH = jnp.exp(dt_BH * a_H.astype(dtype))
    state = state_BHPN * decay_BH[..., None, None] + (dt_BH[..., None] * x)[..., None] * b_BHN[:, :, None]
    y = jnp.sum(state * c_BHN[:, :, None], -1) + skip_H.astype(dtype)[:, None] * x
    return y.astype(x_BHP.dtype), state


# ----------------------------------------------------------------------------- convolution


def causal_conv(
    x_BT: jax.Array,
    kernel_W: jax.Array,
    bias: jax.Array | None,
    *,
    before_BI: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """silu(sum over w of kernel_w x_(t - W + 1 + w) + bias), each channel by itself -> [B, T, *channels].

    x: [B, T, *channels]; kernel: [W, *channels]. before: [B, I, W - 1, *channels], the tokens before each piece, zeros
    before the first. segments: int32 ([B, T], before [B, I, W - 1]), ids of documents: no token reads another's.
    """

    @recomputed
    def run(x, kernel, bias, before, segments):
        pieces = x.reshape(x.shape[0], before.shape[1], -1, *x.shape[2:])
        windows = _windows(jnp.concatenate([before, pieces], 2), kernel.shape[0])
        if segments is not None:
            own, earlier = segments
            own = own.reshape(pieces.shape[:3])
            ids = _windows(jnp.concatenate([earlier, own], 2), kernel.shape[0])
            rank = (1,) * (x.ndim - 2)
            windows = [
                jnp.where((i == own).reshape(*own.shape, *rank), w, 0) for w, i in zip(windows, ids, strict=True)
            ]
        return convolved(windows, kernel, bias).reshape(x.shape)

    return run(x_BT, kernel_W, bias, before_BI, segments)


def convolved(windows: Sequence[jax.Array], kernel_W: jax.Array, bias: jax.Array | None) -> jax.Array:
    """silu(sum of windows[w] * kernel[w] + bias), in the dtype of the windows, with float32 inside. windows: W arrays
    [..., *channels], the oldest token first."""
    dtype = wide(windows[0])
    total = sum(window.astype(dtype) * tap.astype(dtype) for window, tap in zip(windows, kernel_W, strict=True))
    total = total if bias is None else total + bias.astype(dtype)
    return jax.nn.silu(total).astype(windows[0].dtype)


def _windows(joined_BIT: jax.Array, width: int) -> list[jax.Array]:
    """[B, I, W - 1 + T, ...] -> W arrays [B, I, T, ...]."""
    length = joined_BIT.shape[2] - width + 1
    return [joined_BIT[:, :, w : w + length] for w in range(width)]
