"""Attention over a sequence split by `context`: a ring, gathered keys and values, or an all-to-all over the heads.

Dimensions: B batch, T queries and S keys of a block, N heads, K key-value heads, H head dim; C devices of `context`.

The first two split the sequence into 2 C chunks and give device i the chunks i and 2 C - 1 - i (zigzag), so that every
device does the same amount of work in causal attention. The loader puts tokens, labels, positions and segments into
this order once (`sequence_order`). A device attends to its own keys, and then to those of every other device r in turn:
with r < i all its queries attend to the first chunk of keys, with r > i its second chunk of queries attends to all
keys, and fully masked blocks are skipped. Without a causal mask all its queries attend to all keys. The results are
merged by their log-sum-exps (Liu et al. 2023, https://arxiv.org/abs/2310.01889; Brandon et al. 2023,
https://arxiv.org/abs/2311.09431).

    ring         keys and values, and later their gradients, are sent around the ring while the current ones are used
    all_gather   every device gathers them first: fewer, larger messages, all keys and values in memory
    all_to_all   whole sequences, split heads (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): ops/attention.py
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import axis_size, free_axes, is_inside_pipeline, manual
from megajax.mesh.sharding import activation_spec, constrain
from megajax.ops import attention as local
from megajax.ops.attention import MASKED_SCORE
from megajax.ops.attention_backends import BackendName, Inputs, Options, choose
from megajax.ops.attention_mask import Mask
from megajax.ops.choice import log_choice
from megajax.parallel.blocks import AXIS, Blocks, ContextMethod, Plan, first, second


def sequence_order(length: int, num_ranks: int, method: ContextMethod) -> np.ndarray:
    """Permutation, int32 [length]: the position in the sequence of the token stored at each index. length: a multiple
    of 2 * num_ranks."""
    if num_ranks == 1 or method == "all_to_all":
        return np.arange(length, dtype=np.int32)
    chunks = np.arange(length, dtype=np.int32).reshape(2 * num_ranks, -1)
    return np.concatenate([chunks[[i, 2 * num_ranks - 1 - i]].ravel() for i in range(num_ranks)])


def current_order(length: int, method: ContextMethod) -> np.ndarray:
    """sequence_order on the current mesh."""
    return sequence_order(length, axis_size(AXIS), method)


def current_pieces(method: ContextMethod) -> tuple[int, ...]:
    """The number in the sequence of each stored piece: sequence_order consists of this many pieces of equal length, of
    consecutive tokens. A recurrent layer passes its state from piece to piece in the order of their numbers."""
    num_ranks = axis_size(AXIS)
    num_pieces = num_ranks if num_ranks == 1 or method == "all_to_all" else 2 * num_ranks
    return tuple(sequence_order(num_pieces, num_ranks, method).tolist())


def before_pieces(array_BT: jax.Array, count: int, pieces: Sequence[int], axes: Sequence[str | None]) -> jax.Array:
    """[B, T, ...] -> [B, I, count, ...]: the last tokens of the piece before each piece of T (current_pieces), zeros
    before the first. axes: logical axes of the further dims."""
    split = array_BT.reshape(array_BT.shape[0], len(pieces), -1, *array_BT.shape[2:])
    ends = constrain(split[:, :, -count:], "batch", None, None, *axes)
    stored = {number: index for index, number in enumerate(pieces)}
    nothing = jnp.zeros_like(ends[:, 0])
    found = [ends[:, stored[number - 1]] if number else nothing for number in pieces]
    # Whole here too, so that the gradients are gathered before they are taken apart: XLA would send each by itself, and
    # inside a pipeline stage such messages wait for the other stages.
    whole = constrain(jnp.stack(found, 1), "batch", None, None, *axes)
    return constrain(whole, "batch", "time", None, *axes)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    method: ContextMethod,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    blocks: jax.Array | None = None,
    indices: tuple[jax.Array, jax.Array] | None = None,
    dropout: tuple[float, tuple[jax.Array, jax.Array]] | None = None,
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    joined: jax.Array | None = None,
    backend: BackendName = "auto",
    deterministic: bool = False,
) -> jax.Array:
    """ops.attention.attention, also if `context` splits the sequence; q, k, v are then in sequence_order.

    In a pipeline, `ring` gathers keys and values.

    indices: given if a cache holds all keys; the sequence is not split then.
    """
    whole = functools.partial(
        local.attention, q_BTNH, k_BSKH, v_BSKH, mask=mask, scale=scale, soft_cap=soft_cap, segments=segments,
        dropout=dropout, slopes=slopes, sinks=sinks, backend=backend, deterministic=deterministic
    )  # fmt: skip
    if indices is not None or free_axes().get(AXIS, 1) == 1:
        return whole(indices=indices, blocks=blocks, bias=bias, joined=joined)
    assert bias is None, "a bias is for whole sequences"
    if method == "all_to_all":
        return whole(over_heads=True, blocks=blocks)
    assert blocks is None, "blocks are for whole sequences"
    if method == "ring" and is_inside_pipeline():
        # A ppermute involves all devices of the mesh, and a stage that does not execute it in this tick does not take
        # part: on CPU the others would wait for it forever. A gather involves only the devices of one stage.
        method = "all_gather"
    log_choice("attention over context", method)
    rate, key = dropout or (0.0, None)
    options = Options(mask, scale, soft_cap, rate, deterministic)
    has = dict(is_packed=segments is not None, has_slopes=slopes is not None, has_sinks=sinks is not None)
    inputs = Inputs.of(options, q_BTNH, k_BSKH, v_BSKH, is_split=True, **has)
    key = None if key is None else (jax.random.key_data(key[0]), key[1])
    arrays = (None if segments is None else segments[0], key, slopes)
    return _attention(q_BTNH, k_BSKH, v_BSKH, sinks, arrays, Plan(method, options, choose(inputs, backend)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, k, v, sinks, arrays, plan):
    return _forward(q, k, v, sinks, arrays, plan)[0]


def _specs(q, k, arrays):
    queries = activation_spec(q.shape, ("batch", "time", "heads", None))
    keys = activation_spec(k.shape, ("batch", "time", "kv_heads", None))
    segments, key, _ = arrays
    heads = P(queries[2])
    others = (None if segments is None else P(*queries[:2]), None if key is None else P(), heads)
    return queries, keys, P(queries[0], queries[2], queries[1]), heads, others


def _forward(q, k, v, sinks, arrays, plan):
    queries, keys, lse_spec, heads, others = _specs(q, k, arrays)
    body = functools.partial(_forward_body, plan=plan)
    out, lse = manual(body, (queries, keys, keys, heads, others), (queries, lse_spec))(q, k, v, sinks, arrays)
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks, out, lse, arrays)


def _backward(plan, residuals, d_out):
    q, k, v, sinks, out, lse, arrays = residuals
    queries, keys, lse_spec, heads, others = _specs(q, k, arrays)
    body = functools.partial(_backward_body, plan=plan, lse_spec=lse_spec)
    run = manual(body, (queries, keys, keys, heads, queries, lse_spec, queries, others), (queries, keys, keys, heads))
    return *run(q, k, v, sinks, out, lse, d_out, arrays), None


_attention.defvjp(_forward, _backward)


# ----------------------------------------------------------------------------- one device


def _forward_body(q, k, v, sinks, arrays, *, plan: Plan):
    blocks = Blocks(q, arrays, plan)
    others = _Others(blocks.rank, (k, v, blocks.segments), plan)
    out, lse = blocks.forward(q, k, v, blocks.own, blocks.own)

    def step(carry, j):
        (out, lse), sent = carry
        (k, v, segments), sent = others.receive(sent, j)
        theirs = blocks.of_rank(others.source(j), segments)
        half = k.shape[1] // 2

        def earlier():
            return blocks.forward(q, k[:, :half], v[:, :half], blocks.own, first(theirs, half))

        def all_pairs():
            return blocks.forward(q, k, v, blocks.own, theirs)

        def later():
            new, new_lse = blocks.forward(q[:, half:], k, v, second(blocks.own, half), theirs)
            return _pad_front(new, 0.0), _pad_front(new_lse, MASKED_SCORE, axis=2)

        def merged(block):
            new, new_lse = block()
            total = jnp.logaddexp(lse, new_lse)

            def weight(part):
                return jnp.exp(part - total).swapaxes(1, 2)[..., None]

            return out * weight(lse) + new * weight(new_lse), total

        if not plan.options.mask.is_causal:
            return (merged(all_pairs), sent), None
        branches = [lambda: (out, lse), lambda: merged(earlier), lambda: merged(later)]
        return (lax.switch(blocks.branch(others.source(j)), branches), sent), None

    ((out, lse), _), _ = lax.scan(step, ((out, lse), others.start()), blocks.steps)
    out, lse = local.with_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _backward_body(q, k, v, sinks, out, lse, d_out, arrays, *, plan, lse_spec):
    blocks = Blocks(q, arrays, plan)
    others = _Others(blocks.rank, (k, v, blocks.segments), plan)
    half = k.shape[1] // 2
    d_q, d_k, d_v = blocks.backward(q, k, v, out, lse, d_out, blocks.own, blocks.own)

    def step(carry, j):
        d_q, sums, sent = carry
        (k, v, segments), sent = others.receive(sent, j)
        received = others.receive_sums(sums, j)  # in flight while the block is computed
        theirs = blocks.of_rank(others.source(j), segments)

        def earlier():
            arguments = (out, lse, d_out, blocks.own, first(theirs, half))
            new_q, *new = blocks.backward(q, k[:, :half], v[:, :half], *arguments)
            return d_q + new_q, *map(_pad_back, new)

        def all_pairs():
            new_q, *new = blocks.backward(q, k, v, out, lse, d_out, blocks.own, theirs)
            return d_q + new_q, *new

        def later():
            arguments = (out[:, half:], lse[..., half:], d_out[:, half:], second(blocks.own, half), theirs)
            new_q, *new = blocks.backward(q[:, half:], k, v, *arguments)
            return d_q + _pad_front(new_q, 0.0), *new

        zeros = tuple(map(jnp.zeros_like, received))
        branches = [lambda: (d_q, *zeros), earlier, later]
        is_causal = plan.options.mask.is_causal
        d_q, *new = lax.switch(blocks.branch(others.source(j)), branches) if is_causal else all_pairs()
        new = tuple(a + b for a, b in zip(received, new, strict=True))
        return (d_q, others.keep_sums(sums, new, j), sent), None

    start = (d_q, others.start_sums((d_k, d_v)), others.start())
    (d_q, sums, _), _ = lax.scan(step, start, blocks.steps)
    d_sinks = local.gradient_of_sinks(sinks, out, lse, d_out, lse_spec)
    return d_q.astype(q.dtype), *(d.astype(k.dtype) for d in others.return_sums(sums)), d_sinks


class _Others:
    """Receives the keys and values of the other devices one after the other, and returns their gradients.

    Step j handles those of rank i - j. A ring sends the data of step j + 1 before step j is computed.
    """

    def __init__(self, rank, own: tuple, plan: Plan):
        self.is_ring = plan.method == "ring"
        self.rank = rank
        self.own = own

    def source(self, j):
        return (self.rank - j) % lax.axis_size(AXIS)

    def start(self):
        if self.is_ring:
            return _rotate(self.own)
        return jax.tree.map(lambda a: lax.all_gather(a, AXIS), self.own)

    def receive(self, sent, j):
        """-> (keys, values and segments for step j, data from which the next step receives)."""
        if self.is_ring:
            return sent, _rotate(sent)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, self.source(j), 0, False), sent), sent

    def start_sums(self, own):
        """Gradients [B, S, K, H] float32 of the own keys and values, before other devices add theirs."""
        if self.is_ring:
            return own

        def at_own_rank(a):
            return jnp.zeros((lax.axis_size(AXIS), *a.shape), a.dtype).at[self.rank].set(a)

        return tuple(compat.vary(at_own_rank(a), compat.varying_axes(a)) for a in own)

    def receive_sums(self, sums, j):
        if self.is_ring:
            return _rotate(sums)
        return tuple(lax.dynamic_index_in_dim(a, self.source(j), 0, False) for a in sums)

    def keep_sums(self, sums, new, j):
        if self.is_ring:
            return new
        return tuple(lax.dynamic_update_index_in_dim(a, b, self.source(j), 0) for a, b in zip(sums, new, strict=True))

    def return_sums(self, sums):
        if self.is_ring:
            return _rotate(sums)
        return tuple(lax.psum_scatter(a, AXIS, scatter_dimension=0) for a in sums)


def _rotate(tree):
    """Sends to the next rank."""
    count = lax.axis_size(AXIS)
    return lax.ppermute(tree, AXIS, [(i, (i + 1) % count) for i in range(count)])


def _pad_front(a, value: float, axis: int = 1):
    """Doubles the length along `axis`, padding at the front."""
    low = [a.shape[axis] if i == axis else 0 for i in range(a.ndim)]
    return lax.pad(a, jnp.array(value, a.dtype), [(n, 0, 0) for n in low])


def _pad_back(a):
    return lax.pad(a, jnp.array(0, a.dtype), [(0, a.shape[1] if i == 1 else 0, 0) for i in range(a.ndim)])
