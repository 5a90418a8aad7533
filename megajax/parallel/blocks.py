"""Attention of one device of `context` to the keys of another: what its queries see there (parallel/context.py).

Dimensions: B batch, T queries and S keys of a block, N heads, K key-value heads, H head dim.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh.sharding import TIME_AXES
from megajax.ops import attention as local
from megajax.ops.attention import MASKED_SCORE
from megajax.ops.attention_backends import Backend, Options, Pairs
from megajax.ops.attention_mask import CAUSAL, FULL

(AXIS,) = TIME_AXES
ContextMethod = Literal["ring", "all_gather", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Plan:
    method: ContextMethod
    options: Options
    backend: Backend


class Blocks:
    """Attention of some queries to some keys. q_positions and k_positions are pairs: (positions in the sequence [T],
    segments [B, T] or None)."""

    def __init__(self, q, arrays, plan: Plan):
        # Without the dependence on q, the masks of all steps would be hoisted out of a scan over layers, and saved.
        arguments = (lax.axis_index(AXIS), jnp.arange(1, lax.axis_size(AXIS)), arrays, q[:1, :1, :1, :1])
        self.rank, self.steps, (self.segments, self.key, self.slopes), _ = lax.optimization_barrier(arguments)
        self.plan = plan
        self.mask = plan.options.mask
        self.chunk = q.shape[1] // 2
        self.own = self.of_rank(self.rank, self.segments)

    def of_rank(self, rank, segments):
        chunks = jnp.stack([rank, 2 * lax.axis_size(AXIS) - 1 - rank])
        return (chunks[:, None] * self.chunk + jnp.arange(self.chunk)).reshape(-1), segments

    def branch(self, source):
        """0: all these keys are outside the window, 1: keys of an earlier rank, 2: keys of a later rank."""
        nearest = (jnp.abs(self.rank - source) - 1) * self.chunk + 1
        is_visible = True if self.mask.reach is None else nearest < self.mask.reach
        return jnp.where(is_visible, jnp.where(source < self.rank, 1, 2), 0)

    def forward(self, q, k, v, q_positions, k_positions):
        """-> (out [B, T, N, H] float32, log-sum-exp [B, N, T] float32); a fully masked row has weight 0."""
        block = Block(self.plan.options, self, q, q_positions, k_positions)
        out, lse = self.plan.backend.forward(q, k, v, block)
        return out.astype(jnp.float32), lse

    def backward(self, q, k, v, out, lse, d_out, q_positions, k_positions):
        """-> gradients in float32, from the results of attention to all keys."""
        block = Block(self.plan.options, self, q, q_positions, k_positions)
        gradients = self.plan.backend.backward(q, k, v, out, lse, d_out, block)
        return tuple(a.astype(jnp.float32) for a in gradients)


@dataclasses.dataclass(frozen=True)
class Block(Pairs):
    """Some queries and some keys; of both (positions in the sequence, segments or None)."""

    blocks: Blocks
    q: jax.Array
    q_positions: tuple[jax.Array, jax.Array | None]
    k_positions: tuple[jax.Array, jax.Array | None]

    @property
    def segments(self) -> tuple[jax.Array, jax.Array] | None:
        (_, of_q), (_, of_k) = self.q_positions, self.k_positions
        return None if of_q is None or of_k is None else (of_q, of_k)

    def bounds(self):
        """The positions of the keys ascend."""
        q_index_T, _ = self.q_positions
        k_index_S, _ = self.k_positions
        chunk = self.blocks.chunk
        half = len(k_index_S) // 2 if len(k_index_S) > chunk else len(k_index_S)
        runs = [k_index_S[:half], k_index_S[half:]]  # of consecutive positions

        def before(position):
            """Number of keys at lower positions."""
            return sum(jnp.clip(position - run[0], 0, len(run)) for run in runs if len(run))

        end = self.options.mask.upper(q_index_T)
        last = len(k_index_S) if end is None else before(end)
        upper = jnp.broadcast_to(last, (self.q.shape[0], len(q_index_T)))
        lower = jnp.zeros_like(upper)
        if (first := self.options.mask.lower(q_index_T)) is not None:
            lower = jnp.broadcast_to(before(first), upper.shape)
        if self.segments is not None:
            start, end = _documents(*self.segments, num_ids=2 * lax.axis_size(AXIS) * chunk + 1)
            lower = jnp.maximum(lower, start)
            upper = jnp.minimum(upper, end)
        return lower.astype(jnp.int32), upper.astype(jnp.int32)

    def bias(self):
        mask = self.options.mask
        if self.segments is None and mask in (FULL, CAUSAL):
            # Other blocks of causal attention are seen wholly.
            return None, dict(causal=mask == CAUSAL and self.q_positions is self.k_positions, window=None)
        distance = self.q_positions[0][:, None] - self.k_positions[0]
        visible = mask.visible(distance, self.k_positions[0])
        if self.segments is not None:
            visible = visible & (self.segments[0][:, :, None] == self.segments[1][:, None])
        bias = (~visible).astype(self.q.dtype) * MASKED_SCORE
        return bias.reshape(-1, 1, *bias.shape[-2:]), dict(causal=False, window=None)

    def reference(self, q, k, v):
        options = self.options
        indices = (self.q_positions[0][None], self.k_positions[0][None])
        keep = local.dropout_mask(self.blocks.key, options.dropout, q, indices) if options.dropout > 0 else None
        how = (options.mask, options.scale, options.soft_cap)
        return local.reference_attention(q, k, v, *how, self.segments, indices, keep, self.blocks.slopes)

    def reference_gradients(self, q, k, v, out, lse, d_out):
        """The derivative of a block with its own log-sum-exp does not include the other keys: scale it by the block's
        weight in the whole, and pass the gradient of that weight to the log-sum-exp."""
        (block, block_lse), vjp = jax.vjp(self.reference, q, k, v)
        weight = jnp.exp(block_lse - lse)
        d_block = (d_out.astype(jnp.float32) * weight.swapaxes(1, 2)[..., None]).astype(block.dtype)
        difference = (block.astype(jnp.float32) - out.astype(jnp.float32)) * d_out.astype(jnp.float32)
        return vjp((d_block, weight * difference.sum(-1).swapaxes(1, 2)))


def _documents(q_ids, k_ids, num_ids):
    """int32 [B, T]: first key of each query's document and one past its last; an empty interval, still in ascending
    order, if the document has no key here. The tokens of a document are adjacent, ids are 0 to num_ids - 1."""
    index = jnp.arange(k_ids.shape[1])

    def of_row(q_ids, k_ids):
        first = jnp.full((num_ids,), k_ids.shape[0]).at[k_ids].min(index)[q_ids]
        end = jnp.zeros((num_ids,), int).at[k_ids].max(index + 1)[q_ids]
        end = lax.cummax(end)
        return jnp.minimum(first, end), end

    return jax.vmap(of_row)(q_ids, k_ids)


def first(positions, half):
    return tuple(a if a is None else a[..., :half] for a in positions)


def second(positions, half):
    return tuple(a if a is None else a[..., half:] for a in positions)
