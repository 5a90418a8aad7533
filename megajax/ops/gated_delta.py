"""The gated delta rule in chunks of matmuls (Yang, Kautz and Hatamizadeh 2024, https://arxiv.org/abs/2412.06464).

Dimensions: B batch, T sequence, H heads of width P, G groups of R = H / G heads, N width of queries and keys; J chunks
of Q tokens; I pieces of the sequence (parallel/context.py), each of consecutive tokens.

A head has a state S [P, N], its group shares the query q and the key k [N] of each token, both of length 1, the query
then divided by sqrt(N). The state forgets by a decay a, and what it holds for k moves towards the value v by the
fraction beta:

    S_t = a_t S_(t-1) + beta_t (v_t - a_t S_(t-1) k_t) k_t^T,    y_t = S_t q_t

Inside a chunk, with c the cumulative sum of log a and S the state before the chunk, let v'_t k_t^T be what token t
writes. The v' solve a triangular system, the WY form of the product of all updates:

    v'_q + beta_q sum over t < q of exp(c_q - c_t) (k_q . k_t) v'_t = beta_q (v_q - exp(c_q) S k_q)

With its solutions for the two terms on the right, v' = u - S w, and the rest is linear attention (ops/ssd.py):

    y_q = sum over t <= q of exp(c_q - c_t) (q_q . k_t) v'_t + exp(c_q) S q_q

so only the states between chunks are computed one after the other. Products are in v's dtype with float32 sums; the
system, decays and states are float32 (float64 for float64 inputs). The backward pass computes everything again from the
arguments.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax import compat
from megajax.ops.matmul import dot_precision
from megajax.ops.ssd import Decays, chunks, recomputed, states_of_pieces, sums_in_chunks, wide

EPSILON = 1e-6  # added to the squared length of queries and keys


def gated_delta(
    q_BTGN: jax.Array,
    k_BTGN: jax.Array,
    v_BTHP: jax.Array,
    log_decay_BTH: jax.Array,
    beta_BTH: jax.Array,
    *,
    chunk: int,
    starts_BT: jax.Array | None = None,
    state_BHPN: jax.Array | None = None,
    pieces: Sequence[int] = (0,),
) -> tuple[jax.Array, jax.Array]:
    """-> (y [B, T, H, P] in v's dtype, the state after the last token, float32 [B, H, P, N]).

    q, k: of any length. log_decay: log a of the equations, float32, not positive. beta: float32, 0 to 1. Both 0 leave
    the state as it is (padding). starts: bool, tokens that begin a document, with a state of zeros. state: before the
    first token; None: zeros. chunk: Q; the result does not depend on it. pieces: the number in the sequence of each
    stored piece of T.
    """
    run = functools.partial(_gated_delta, chunk=chunk, pieces=tuple(pieces))
    return recomputed(run)(q_BTGN, k_BTGN, v_BTHP, log_decay_BTH, beta_BTH, starts_BT, state_BHPN)


def _gated_delta(q, k, v, log_decay, beta, starts, state, *, chunk, pieces):
    B, T, H, P = v.shape
    G, N = k.shape[2:]
    R = H // G
    dtype = wide(v)
    length = T // len(pieces)
    chunk = min(chunk, length)
    dot = functools.partial(jnp.einsum, precision=dot_precision(v.dtype), preferred_element_type=dtype)

    def split(array):
        return chunks(array, len(pieces), chunk)

    def by_head(array_BTH):
        """[B, T, H, ...] -> [B, J, G, R, Q, ...]."""
        array = split(array_BTH.astype(dtype))
        return jnp.moveaxis(array.reshape(*array.shape[:3], G, R, *array.shape[4:]), 2, 4)

    def by_time(array):
        """[B, J, ...] -> [J / I, I, B, ...]: the order of the scan over chunks."""
        return array.reshape(B, len(pieces), -1, *array.shape[2:]).swapaxes(0, 2)

    def by_batch(array):
        """Inverse of by_time."""
        return array.swapaxes(0, 2).reshape(B, -1, *array.shape[3:])

    q_BJQGN = split(query_of(q)).astype(v.dtype)
    k_BJQGN = split(key_of(k)).astype(v.dtype)
    log_decay_BJQGR = split(log_decay.astype(dtype)).reshape(B, -1, chunk, G, R)
    seen_BJQ = None if starts is None else jnp.cumsum(split(starts.astype(jnp.int32)), 2)
    decays = Decays(sums_in_chunks(log_decay_BJQGR), seen_BJQ)
    between_BJGRQT = decays.between()
    to_end, from_start = decays.to_the_ends()

    beta_BJGRQ = by_head(beta)
    products_BJGQT = dot("bjqgn,bjtgn->bjgqt", k_BJQGN, k_BJQGN)
    system_BJGRQT = products_BJGQT[:, :, :, None] * between_BJGRQT * beta_BJGRQ[..., None]
    k_BJGRQN = k_BJQGN.astype(dtype).swapaxes(2, 3)[:, :, :, None] * from_start[..., None]
    right = jnp.concatenate([by_head(v), k_BJGRQN], -1) * beta_BJGRQ[..., None]
    # Reads the system below its diagonal only, which is 1.
    solved = lax.linalg.triangular_solve(system_BJGRQT, right, left_side=True, lower=True, unit_diagonal=True)
    u_BJGRQP, w_BJGRQN = jnp.split(solved, [P], -1)

    start = None if state is None else state.astype(dtype).reshape(B, G, R, P, N)
    of_chunks = (u_BJGRQP, w_BJGRQN.astype(v.dtype), k_BJQGN, to_end, from_start[..., -1])
    before, written, last = _states_between(*map(by_time, of_chunks), start, pieces, dot)
    scores_BJGQT = dot("bjqgn,bjtgn->bjgqt", q_BJQGN, k_BJQGN)
    mixing_BJGRQT = (scores_BJGQT[:, :, :, None] * between_BJGRQT).astype(v.dtype)
    y_BJQGRP = dot("bjgrqt,bjgrtp->bjqgrp", mixing_BJGRQT, by_batch(written))
    past_BJQGRP = dot("bjqgn,bjgrpn->bjqgrp", q_BJQGN, by_batch(before))
    y_BJQGRP = y_BJQGRP + past_BJQGRP * jnp.moveaxis(from_start, 4, 2)[..., None]
    y = y_BJQGRP.astype(v.dtype).reshape(B, len(pieces), -1, H, P)[:, :, :length]
    return y.reshape(v.shape), last.reshape(B, H, P, N)


def _states_between(u, w, k, to_end, decay, start, pieces, dot):
    """-> (the state before each chunk [J / I, I, B, G, R, P, N], v' [J / I, I, B, G, R, Q, P], both in k's dtype; the
    state after the last chunk).

    Pieces of one sequence on several devices: each runs over its chunks once, to find its state from zeros and what it
    makes of any state before it, a matrix [N, N]: that of the identity, with values of zero. These are gathered, two or
    one a device, and tell the states before all pieces.
    """
    of_chunks = (u, w, k, to_end, decay)

    def step(state, of_chunk):
        u, w, k, to_end, decay = of_chunk
        before = state.astype(k.dtype)
        written = u - dot("ibgrqn,ibgrpn->ibgrqp", w, before)
        added = dot("ibgrqp,ibqgn->ibgrpn", (written * to_end[..., None]).astype(k.dtype), k)
        return state * decay[..., None, None] + added, (before, written.astype(k.dtype))

    P, N = u.shape[-1], w.shape[-1]
    zeros = compat.vary(jnp.zeros((*u.shape[1:5], P, N), u.dtype), compat.varying_axes(u))
    if len(pieces) == 1:
        last, (before, written) = lax.scan(step, zeros if start is None else start[None], of_chunks)
        return before, written, last[0]

    identity = jnp.broadcast_to(jnp.eye(N, dtype=u.dtype), (*zeros.shape[:-2], N, N))
    both = jnp.concatenate([zeros, identity], -2)
    without_values = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, N)])
    both, _ = lax.scan(lambda state, of_chunk: (step(state, of_chunk)[0], None), both, (without_values, *of_chunks[1:]))
    ends, transitions = jnp.split(both, [P], -2)

    def decayed(state, transition):
        return jnp.einsum("bgrpn,bgrnm->bgrpm", state, transition, precision=lax.Precision.HIGHEST)

    firsts, last = states_of_pieces(ends, transitions, start, pieces, decayed)
    _, (before, written) = lax.scan(step, firsts, of_chunks)
    return before, written, last


def key_of(k: jax.Array) -> jax.Array:
    """k [..., N] divided by its length -> float32."""
    k = k.astype(wide(k))
    return k * lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + EPSILON)


def query_of(q: jax.Array) -> jax.Array:
    """q [..., N] divided by its length and by sqrt(N) -> float32."""
    return key_of(q) * q.shape[-1] ** -0.5


def gated_delta_step(
    q_BGN: jax.Array, k_BGN: jax.Array, v_BHP: jax.Array, log_decay_BH: jax.Array, beta_BH: jax.Array,
    state_BHPN: jax.Array
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`gated_delta` of one token per row -> (y [B, H, P] in v's dtype, the new state, float32)."""
    dtype = state_BHPN.dtype
    heads = v_BHP.shape[1] // k_BGN.shape[1]
    q_BHN, k_BHN = (jnp.repeat(m.astype(dtype), heads, 1) for m in (query_of(q_BGN), key_of(k_BGN)))
    decayed = state_BHPN * jnp.exp(log_decay_BH)[..., None, None]
    held_BHP = jnp.sum(decayed * k_BHN[:, :, None], -1)
    written_BHP = beta_BH[..., None] * (v_BHP.astype(dtype) - held_BHP)
    state = decayed + written_BHP[..., None] * k_BHN[:, :, None]
    return jnp.sum(state * q_BHN[:, :, None], -1).astype(v_BHP.dtype), state
