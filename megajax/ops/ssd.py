"""The selective state-space recurrence of Mamba-2 in chunks of matmuls (state-space duality: Dao and Gu 2024,
https://arxiv.org/abs/2405.21060).

Dimensions: B batch, T sequence, H heads of width P, G groups of R = H / G heads, N width of the state; I pieces of the
sequence (parallel/context.py) of J chunks of Q tokens; t <= q are tokens of a chunk.

A head has a state S [P, N], its group shares B and C [N] of each token:

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

Inside a chunk, with c the cumulative sum of dt A, this is attention without a softmax:

    y_q = sum over t <= q of exp(c_q - c_t) (C_q . B_t) dt_t x_t + exp(c_q) S C_q,    S the state before the chunk

and the states before all chunks follow from what each chunk adds to its state in the same way, with chunks for tokens.
Operands and results of these products are in x's dtype, as are their gradients, with float32 sums inside; dt, decays
and final states are float32 (float64 for float64 inputs). Arrays of chunks are [J, I, B, G, R, P, Q]: every product is
then a batch of matrices with a constant stride, as cuBLAS needs it, and only x, y and their gradients are transposed.
The backward pass recomputes everything from the arguments: the largest arrays are the weights of the tokens of a
chunk, Q numbers per token and head.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.mesh.sharding import constrain
from megajax.ops.matmul import dot_precision

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
    split = functools.partial(chunks, num_pieces=len(pieces), chunk=min(chunk, length))
    dot = functools.partial(jnp.einsum, precision=dot_precision(x.dtype))

    x_JIBGRPQ = split(x.reshape(B, T, G, R, P))
    dt_JIBGRQ = split(dt.astype(dtype).reshape(B, T, G, R))
    b_JIBGNQ = split(b)
    c_JIBGNQ = split(c)
    logs_JIBGRQ = cumulative(dt_JIBGRQ * a.astype(dtype).reshape(G, R, 1))
    seen_JIBQ = None
    if starts is not None:
        seen_JIBQ = jnp.cumsum(split(starts.astype(jnp.int32)), -1)  # starts in the chunk so far

    scores_JIBGQT = dot("...nq,...nt->...qt", c_JIBGNQ, b_JIBGNQ, preferred_element_type=dtype)
    between_JIBGRQT = decays(logs_JIBGRQ[..., :, None] - logs_JIBGRQ[..., None, :], seen_JIBQ)
    mixing_JIBGRQT = scores_JIBGQT[:, :, :, :, None] * between_JIBGRQT * dt_JIBGRQ[..., None, :]
    # By token, so that the gradient is summed in the same pass as those of the decays.
    skip_JIBGRQ = lax.optimization_barrier(jnp.broadcast_to(skip.astype(dtype).reshape(G, R, 1), dt_JIBGRQ.shape))
    mixing_JIBGRQT += skip_JIBGRQ[..., None] * jnp.eye(dt_JIBGRQ.shape[-1], dtype=dtype)
    y_JIBGRPQ = dot("...pt,...qt->...pq", x_JIBGRPQ, mixing_JIBGRQT.astype(x.dtype))

    to_end_JIBGRQ, from_start_JIBGRQ = decays_to_the_ends(logs_JIBGRQ, seen_JIBQ)
    weights_JIBGRQ = to_end_JIBGRQ * dt_JIBGRQ
    scaled_JIBGRPQ = (x_JIBGRPQ.astype(dtype) * weights_JIBGRQ[..., None, :]).astype(x.dtype)
    added_JIBGRPN = dot("...rpt,...nt->...rpn", scaled_JIBGRPQ, b_JIBGNQ)
    start = None if state is None else state.astype(dtype).reshape(B, G, R, P, N)
    seen_JIB = None if seen_JIBQ is None else seen_JIBQ[..., -1]
    before_JIBGRPN, last = _states_between(added_JIBGRPN, logs_JIBGRQ[..., -1], seen_JIB, start, pieces)
    past_JIBGRPQ = dot("...rpn,...nq->...rpq", before_JIBGRPN, c_JIBGNQ)

    y_JIBGRPQ = y_JIBGRPQ.astype(dtype) + past_JIBGRPQ.astype(dtype) * from_start_JIBGRQ[..., None, :]
    y = jnp.moveaxis(y_JIBGRPQ.astype(x.dtype), (2, 1, 0, -1), (0, 1, 2, 3)).reshape(B, len(pieces), -1, H, P)
    return y[:, :, :length].reshape(x.shape), last.reshape(B, H, P, N)


def wide(array: jax.Array):
    """The dtype of sums, decays and states beside this array."""
    return jnp.float64 if array.dtype == jnp.float64 else jnp.float32


def chunks(array_BT: jax.Array, num_pieces: int, chunk: int) -> jax.Array:
    """[B, T, ...] -> [J, I, B, ..., Q]; each piece is padded to whole chunks with zeros."""
    B, T, *rest = array_BT.shape
    pieces = array_BT.reshape(B, num_pieces, T // num_pieces, *rest)
    missing = -pieces.shape[2] % chunk
    if missing:
        pieces = jnp.pad(pieces, [(0, missing) if axis == 2 else (0, 0) for axis in range(pieces.ndim)])
    return jnp.moveaxis(pieces.reshape(B, num_pieces, -1, chunk, *rest), (0, 1, 2, 3), (2, 1, 0, -1))


def cumulative(array: jax.Array) -> jax.Array:
    """Sums over the last dim up to each index, as a matmul: a cumulative sum would take log(Q) passes."""
    until = jnp.asarray(np.tri(array.shape[-1]), array.dtype)
    return jnp.einsum("...t,qt->...q", array, until, precision=lax.Precision.HIGHEST)


def decays(sums_QT, seen_Q):
    """exp(sums) for t <= q of the same document, else 0, [J, I, B, heads, Q, T]. sums: logarithms of the decays, summed
    over the tokens after t up to q; seen: [J, I, B, Q], the number of starts up to each token."""
    visible = jnp.asarray(np.tri(sums_QT.shape[-1], dtype=bool))
    if seen_Q is not None:
        visible = visible & (seen_Q[..., :, None] == seen_Q[..., None, :])
        visible = jnp.expand_dims(visible, range(seen_Q.ndim - 1, sums_QT.ndim - 2))
    # Masked before the exponential: above the diagonal it may overflow, and its gradient would be 0 * inf.
    return jnp.exp(jnp.where(visible, sums_QT, -jnp.inf))


def decays_to_the_ends(logs_JIBGRQ: jax.Array, seen_JIBQ: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(from each token to the end of its chunk, from the start of the chunk to each token), 0 across documents."""
    to_end_JIBGRQ = jnp.exp(logs_JIBGRQ[..., -1:] - logs_JIBGRQ)
    from_start_JIBGRQ = jnp.exp(logs_JIBGRQ)
    if seen_JIBQ is not None:
        to_end_JIBGRQ = _where(seen_JIBQ == seen_JIBQ[..., -1:], to_end_JIBGRQ)
        from_start_JIBGRQ = _where(seen_JIBQ == 0, from_start_JIBGRQ)
    return to_end_JIBGRQ, from_start_JIBGRQ


def _where(condition_JIBQ, array_JIBGRQ):
    return jnp.where(jnp.expand_dims(condition_JIBQ, range(3, array_JIBGRQ.ndim - 1)), array_JIBGRQ, 0.0)


def _states_between(added_JIBGRPN, logs_JIBGR, seen_JIB, start_BGRPN, pieces):
    """-> (the state before each chunk [J, I, B, G, R, P, N] in the dtype of `added`, the one after the last, float32).

    added: what a chunk adds to the state at its end; logs: the sum of dt A over it; seen: the starts in it. The states
    before all chunks are one product of `added` with a matrix [K, K] of the decays between chunks, K = J + 1: the first
    row and column belong to the state before the first chunk. It is quadratic in the number of chunks; for 131,072
    tokens on a device, in chunks of 128, it has 13 % of the FLOPs of the projections of mamba2_2p7b.
    Pieces of one sequence on several devices: the final state of each piece, from zeros, is gathered, two or one per
    device, which gives the state before each piece.
    """
    dtype = logs_JIBGR.dtype
    logs_IBGRK = _with_start(logs_JIBGR)
    seen_IBK = None if seen_JIB is None else jnp.cumsum(_with_start(seen_JIB), -1)
    # Summed from each chunk on: a difference of sums over the whole sequence would lose digits.
    is_later_KK = jnp.asarray(~np.tri(logs_IBGRK.shape[-1], dtype=bool))
    sums_IBGRKK = cumulative(jnp.where(is_later_KK, logs_IBGRK[..., None, :], 0.0)).swapaxes(-1, -2)
    decays_KKIBGR = jnp.moveaxis(decays(sums_IBGRKK, seen_IBK), (-2, -1), (0, 1))

    before_JIBGRPN = _weighted_sums(decays_KKIBGR[:-1, 1:].astype(added_JIBGRPN.dtype), added_JIBGRPN)
    ends_IBGRPN = jnp.sum(decays_KKIBGR[-1, 1:, ..., None, None] * added_JIBGRPN.astype(dtype), 0)
    if start_BGRPN is None and len(pieces) == 1:
        return before_JIBGRPN, ends_IBGRPN[0]

    def left(state_BGRPN, decay_BGR):
        return state_BGRPN * decay_BGR[..., None, None]

    firsts_IBGRPN, last_BGRPN = states_of_pieces(ends_IBGRPN, decays_KKIBGR[-1, 0], start_BGRPN, pieces, left)
    from_firsts_JIBGRPN = decays_KKIBGR[:-1, 0, ..., None, None] * firsts_IBGRPN
    return (before_JIBGRPN.astype(dtype) + from_firsts_JIBGRPN).astype(added_JIBGRPN.dtype), last_BGRPN


def _with_start(array_J: jax.Array) -> jax.Array:
    """[J, ...] -> [..., 1 + J], beginning with 0."""
    array = jnp.moveaxis(array_J, 0, -1)
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(1, 0)])


@jax.custom_vjp
def _weighted_sums(weights_KJIBGR: jax.Array, states_JIBGRPN: jax.Array) -> jax.Array:
    """sum over j of weights_kj * states_j -> [K, I, B, G, R, P, N]."""
    dims = (((1,), (0,)), ((2, 3, 4, 5), (1, 2, 3, 4)))
    out = lax.dot_general(weights_KJIBGR, states_JIBGRPN, dims, precision=dot_precision(states_JIBGRPN.dtype))
    return jnp.moveaxis(out, 4, 0)


def _weighted_sums_forward(weights_KJIBGR, states_JIBGRPN):
    return _weighted_sums(weights_KJIBGR, states_JIBGRPN), (weights_KJIBGR, states_JIBGRPN)


def _weighted_sums_backward(residuals, d_KIBGRPN):
    """Automatic differentiation would give the gradient of the states with J as the last dim: two more transposes."""
    weights_KJIBGR, states_JIBGRPN = residuals
    precision = dot_precision(states_JIBGRPN.dtype)
    d_weights = jnp.einsum("kibgrpn,jibgrpn->kjibgr", d_KIBGRPN, states_JIBGRPN, precision=precision)
    return d_weights, _weighted_sums(weights_KJIBGR.swapaxes(0, 1), d_KIBGRPN)


_weighted_sums.defvjp(_weighted_sums_forward, _weighted_sums_backward)


def states_of_pieces(
    ends_IBGRPN: jax.Array,
    transitions_IBGR: jax.Array,
    start_BGRPN: jax.Array | None,
    pieces: Sequence[int],
    left: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """-> (the state before each piece [I, B, G, R, P, N], the one after the last).

    ends: the state after each piece, from zeros. left(state, transition): what is left of the state before a piece at
    its end. transitions: [I, B, G, R, ...]. start: the state before the first piece; None: zeros.
    """
    heads = ("kv_heads", None) if ends_IBGRPN.shape[2] > 1 else (None, "heads")
    axes = ("batch", *heads, None, None)
    ends = constrain(ends_IBGRPN, None, *axes)
    transitions = constrain(transitions_IBGR, None, *axes[: transitions_IBGR.ndim - 1])
    state = jnp.zeros_like(ends[0]) if start_BGRPN is None else start_BGRPN
    found = {}
    for stored in np.argsort(pieces).tolist():
        found[stored] = state
        state = left(state, transitions[stored]) + ends[stored]
    # Whole here too, so that the gradients are gathered before they are taken apart: XLA would send each by itself.
    states = jnp.stack([found[stored] for stored in sorted(found)])
    return constrain(constrain(states, None, *axes), "time", *axes), state


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
