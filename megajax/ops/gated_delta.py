"""The gated delta rule in chunks of matmuls (Yang, Kautz and Hatamizadeh 2024, https://arxiv.org/abs/2412.06464).

Dimensions: B batch, T sequence, H heads of width P, G groups of R = H / G heads, N width of queries and keys; I pieces
of the sequence (parallel/context.py) of J chunks of Q tokens; t <= q are tokens of a chunk.

A head has a state S [P, N], its group shares the query q and the key k [N] of each token, both of length 1, the query
then divided by sqrt(N). The state forgets by a decay a, and what it holds for k moves towards the value v by the
fraction beta:

    S_t = a_t S_(t-1) + beta_t (v_t - a_t S_(t-1) k_t) k_t^T,    y_t = S_t q_t

Inside a chunk, with c the cumulative sum of log a and S the state before the chunk, let v'_t k_t^T be what token t
writes. The v' solve a triangular system, the WY form of the product of all updates:

    v'_q + beta_q sum over t < q of exp(c_q - c_t) (k_q . k_t) v'_t = beta_q (v_q - exp(c_q) S k_q)

With its solutions for the two terms on the right, v' = u - S w, and the rest is linear attention (ops/ssd.py):

    y_q = sum over t <= q of exp(c_q - c_t) (q_q . k_t) v'_t + exp(c_q) S q_q

so only the states between chunks are sequential. Products are in v's dtype with float32 sums; the system, decays and
states are float32 (float64 for float64 inputs). Arrays of chunks are [J, I, B, H, P, Q], with keys and queries repeated
for each head: with a separate dim for groups XLA's matmuls for CPUs crash (jaxlib 0.10.2). The backward pass recomputes
everything from the arguments. On Hopper the systems and the states between chunks have kernels of ours.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import compat
from megajax.mesh.current import manual
from megajax.mesh.sharding import activation_spec
from megajax.ops.choice import log_choice
from megajax.ops.matmul import dot_precision
from megajax.ops.ssd import chunks, cumulative, decays, decays_to_the_ends, recomputed, states_of_pieces, wide

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
    dtype = wide(v)
    length = T // len(pieces)
    split = functools.partial(chunks, num_pieces=len(pieces), chunk=min(chunk, length))
    dot = _dot(v)

    def of_heads(array_BTGN):
        return split(jnp.repeat(array_BTGN.astype(v.dtype), H // array_BTGN.shape[2], 2))

    q_JIBHNQ = of_heads(query_of(q))
    k_JIBHNQ = of_heads(key_of(k))
    v_JIBHPQ = split(v).astype(dtype)
    beta_JIBHQ = split(beta.astype(dtype))
    logs_JIBHQ = cumulative(split(log_decay.astype(dtype)))
    seen_JIBQ = None if starts is None else jnp.cumsum(split(starts.astype(jnp.int32)), -1)
    between_JIBHQT = decays(logs_JIBHQ[..., :, None] - logs_JIBHQ[..., None, :], seen_JIBQ)
    to_end_JIBHQ, from_start_JIBHQ = decays_to_the_ends(logs_JIBHQ, seen_JIBQ)

    system_JIBHQT = scores(k_JIBHNQ, k_JIBHNQ) * between_JIBHQT * beta_JIBHQ[..., None]
    read_JIBHNQ = k_JIBHNQ.astype(dtype) * (from_start_JIBHQ * beta_JIBHQ)[..., None, :]
    rights = (v_JIBHPQ * beta_JIBHQ[..., None, :], -read_JIBHNQ)
    u_JIBHPQ, minus_w_JIBHNQ = solved(system_JIBHQT, tuple(right.astype(v.dtype) for right in rights))

    start = None if state is None else state.astype(dtype)
    written_with_JIBHNQ = (k_JIBHNQ.astype(dtype) * to_end_JIBHQ[..., None, :]).astype(v.dtype)
    of_chunks = (u_JIBHPQ, minus_w_JIBHNQ, written_with_JIBHNQ, from_start_JIBHQ[..., -1])
    written_JIBHPQ, before_JIBHPN, last_BHPN = _states_between(of_chunks, start, pieces)
    mixing_JIBHQT = (scores(q_JIBHNQ, k_JIBHNQ) * between_JIBHQT).astype(v.dtype)
    y_JIBHPQ = dot("...pt,...qt->...pq", written_JIBHPQ, mixing_JIBHQT).astype(dtype)
    past_JIBHPQ = dot("...pn,...nq->...pq", before_JIBHPN, q_JIBHNQ).astype(dtype)
    y_JIBHPQ += past_JIBHPQ * from_start_JIBHQ[..., None, :]
    y = jnp.moveaxis(y_JIBHPQ.astype(v.dtype), (2, 1, 0, -1), (0, 1, 2, 3)).reshape(B, len(pieces), -1, H, P)
    return y[:, :, :length].reshape(v.shape), last_BHPN


def _states_between(of_chunks, start, pieces):
    """-> (v' [J, I, B, H, P, Q] and the state before each chunk [J, I, B, H, P, N], both in k's dtype; the state after
    the last chunk, float32).

    of_chunks: u, -w, k times the decays to the end of its chunk, the decays over whole chunks.
    Pieces of one sequence on several devices: a first scan over the chunks of each piece gives its final state from
    zeros, and the matrix [N, N] that it applies to the state before it, which is what becomes of the identity as a
    state, without values. Both are gathered, two or one per device, and give the state before each piece.
    """
    u, minus_w, *others = of_chunks
    dtype = wide(u)
    P = u.shape[-2]
    N = minus_w.shape[-2]
    zeros = compat.vary(jnp.zeros((*u.shape[1:-1], N), dtype), compat.varying_axes(u))
    if len(pieces) == 1:
        written, before, last = recurrence(*of_chunks, zeros if start is None else start[None])
        return written, before, last[0]

    identity = jnp.broadcast_to(jnp.eye(N, dtype=dtype), (*zeros.shape[:-2], N, N))
    without_values = jnp.pad(u, [(0, 0)] * (u.ndim - 2) + [(0, N), (0, 0)])
    *_, ends = recurrence(without_values, minus_w, *others, jnp.concatenate([zeros, identity], -2))
    ends, transitions = jnp.split(ends, [P], -2)

    def left(state, transition):
        return jnp.einsum("...pn,...nm->...pm", state, transition, precision=lax.Precision.HIGHEST)

    # As groups of one head.
    start = None if start is None else start[:, :, None]
    firsts, last = states_of_pieces(ends[:, :, :, None], transitions[:, :, :, None], start, pieces, left)
    written, before, _ = recurrence(*of_chunks, firsts[:, :, :, 0])
    return written, before, last[:, :, 0]


@jax.custom_vjp
def recurrence(
    x_JPQ: jax.Array, first_JNQ: jax.Array, second_JNQ: jax.Array, decay_J: jax.Array, start_PN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """written = x + S first, then S' = decay S + written second^T, for each of J chunks -> (written [J, ..., P, Q] and
    S before each chunk [J, ..., P, N], both in first's dtype, the last S).

    x, first, second: [J, ..., P or N, Q] in one dtype. decay [J, ...], start [..., P, N]: float32 (float64). The
    gradient is the same recurrence from the last chunk to the first, with first and second exchanged.
    """
    return _recurrence(x_JPQ, first_JNQ, second_JNQ, decay_J, None, start_PN)


def _recurrence(x, first, second, decay, added, start, *, reverse=False):
    """added: [J, ..., P, N], added to S' of each chunk, or None."""
    from pallas_kernels import recurrence as kernel  # not at the top: it takes time to import

    rows, width = start.shape[-2:]
    reason = compat.mosaic_problem() or kernel.problem(rows, width, x.shape[-1], x.dtype)
    log_choice(
        "states of chunks", f"a loop of XLA ({reason})" if reason else "our kernel (pallas_kernels/recurrence.py)"
    )
    run = _by_scan if reason else _by_kernel
    return run(x, first, second, decay, added, start, reverse=reverse)


def _by_scan(x, first, second, decay, added, start, *, reverse):
    dot = functools.partial(_dot(first), preferred_element_type=decay.dtype)

    def step(state, of_chunk):
        x, first, second, decay, added = of_chunk
        before = state.astype(first.dtype)
        written = (x.astype(decay.dtype) + dot("...pn,...nq->...pq", before, first)).astype(first.dtype)
        state = state * decay[..., None, None] + dot("...pq,...nq->...pn", written, second)
        if added is not None:
            state += added.astype(decay.dtype)
        return state, (written, before)

    last, (written, before) = lax.scan(step, start, (x, first, second, decay, added), reverse=reverse)
    return written, before, last


def _by_kernel(x, first, second, decay, added, start, *, reverse):
    """x: [J, I, B, H, P, Q]."""

    def body(*arrays):
        from pallas_kernels import recurrence as kernel

        of_chunks = [array.reshape(array.shape[0], -1, *array.shape[4:]) for array in arrays[:-1]]
        flat = arrays[-1].reshape(-1, *arrays[-1].shape[3:])
        *given, decay = of_chunks[:4]
        added = of_chunks[4] if len(of_chunks) > 4 else None
        written, before, last = kernel.recurrence(*given, decay, added, flat, reverse=reverse)
        shapes = (arrays[0].shape, (*arrays[0].shape[:-1], last.shape[-1]), arrays[-1].shape)
        return tuple(array.reshape(shape) for array, shape in zip((written, before, last), shapes, strict=True))

    arrays = [array for array in (x, first, second, decay, added, start) if array is not None]
    heads = ("time", "batch", "heads")
    of_chunk = activation_spec(x.shape, (None, *heads, None, None))
    of_head = activation_spec(decay.shape, (None, *heads))
    of_start = activation_spec(start.shape, (*heads, None, None))
    specs = [of_chunk] * 3 + [of_head] + [of_chunk] * (len(arrays) - 5) + [of_start]
    # In the kernel carries of loops vary over other axes than what they start with.
    return manual(body, tuple(specs), (of_chunk, of_chunk, of_start), check_vma=False)(*arrays)


def _recurrence_forward(x, first, second, decay, start):
    written, before, last = _recurrence(x, first, second, decay, None, start)
    return (written, before, last), (first, second, decay, written, before)


def _recurrence_backward(saved, gradients):
    first, second, decay, written, before = saved
    d_written, d_before, d_last = gradients
    d_x, d_after, d_start = _recurrence(d_written, second, first, decay, d_before, d_last, reverse=True)
    dot = _dot(first)
    d_first = dot("...pn,...pq->...nq", before, d_x)
    d_second = dot("...pn,...pq->...nq", d_after, written)
    d_decay = jnp.sum(before.astype(decay.dtype) * d_after.astype(decay.dtype), (-2, -1))
    return d_x, d_first, d_second, d_decay, d_start


recurrence.defvjp(_recurrence_forward, _recurrence_backward)


@jax.custom_vjp
def solved(system_QT: jax.Array, rights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The x [..., M, Q] of x + x L^T = right for each right [..., M, Q], in its dtype.

    system: [..., Q, Q], of which L is what is below the diagonal, float32 (float64); its inverse is as precise, and
    rounded to the dtype of the rights for the products.
    """
    return _solved(system_QT, rights)[0]


def _solved(system, rights):
    inverted = _inverse(system, rights[0].dtype)
    dot = _dot(inverted)
    found = tuple(dot("...mt,...qt->...mq", right, inverted) for right in rights)
    return found, (inverted, found)


def _solved_backward(saved, gradients):
    inverted, found = saved
    dot = _dot(inverted)
    d_rights = tuple(dot("...mq,...qt->...mt", each, inverted) for each in gradients)
    d_systems = [scores(*pair) for pair in zip(d_rights, found, strict=True)]
    return -jnp.tril(sum(d_systems), -1), d_rights


solved.defvjp(_solved, _solved_backward)


@jax.custom_vjp
def scores(a_NQ: jax.Array, b_NT: jax.Array) -> jax.Array:
    """[..., N, Q], [..., N, T] -> the products of their columns [..., Q, T], float32 (float64). Their gradient is
    rounded to the dtype of the arguments for the products with these."""
    return _dot(a_NQ)("...nq,...nt->...qt", a_NQ, b_NT, preferred_element_type=wide(a_NQ))


def _scores_forward(a, b):
    return scores(a, b), (a, b)


def _scores_backward(saved, gradient):
    a, b = saved
    dot = _dot(a)
    gradient = gradient.astype(a.dtype)
    return dot("...nt,...qt->...nq", b, gradient), dot("...nq,...qt->...nt", a, gradient)


scores.defvjp(_scores_forward, _scores_backward)


def _dot(array: jax.Array):
    """einsum of arrays of this one's dtype."""
    return functools.partial(jnp.einsum, precision=dot_precision(array.dtype))


def _inverse(system_JIBHQT, dtype):
    """In this dtype."""
    from pallas_kernels import triangular as kernel

    reason = compat.mosaic_problem() or kernel.problem(system_JIBHQT.shape[-1], dtype)
    log_choice("systems of chunks", f"XLA ({reason})" if reason else "our kernel (pallas_kernels/triangular.py)")
    if reason:
        return inverse(system_JIBHQT).astype(dtype)

    def body(system):
        return kernel.inverse(system.reshape(-1, *system.shape[-2:])).reshape(system.shape)

    spec = activation_spec(system_JIBHQT.shape, (None, "time", "batch", "heads", None, None))
    return manual(body, spec, spec, check_vma=False)(system_JIBHQT)


def inverse(system: jax.Array) -> jax.Array:
    """The inverse of unit lower triangular matrices [..., Q, Q]; only what is below the diagonal is read.

    By halves, in log2(Q) steps: the inverse of [[A, 0], [C, B]] has -B^-1 C A^-1 below. JAX's triangular_solve can
    deadlock on CPUs (jaxlib 0.10.2): it waits for threads of the pool that it occupies itself.
    """
    size = system.shape[-1]
    if size == 1:
        return jnp.ones_like(system)
    if size % 2:
        padded = jnp.pad(system, [(0, 0)] * (system.ndim - 2) + [(0, 1), (0, 1)])
        return inverse(padded)[..., :size, :size]
    half = size // 2
    halves = jnp.concatenate([system[..., :half, :half], system[..., half:, half:]])
    first, second = jnp.split(inverse(halves), 2)
    below = -_product(second, _product(system[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([upper, jnp.concatenate([below, second], -1)], -2)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def key_of(k: jax.Array) -> jax.Array:
    """k [..., N] divided by its length, float32."""
    k = k.astype(wide(k))
    return k * lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + EPSILON)


def query_of(q: jax.Array) -> jax.Array:
    """q [..., N] divided by its length and by sqrt(N), float32."""
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
