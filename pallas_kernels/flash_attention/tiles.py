"""Shared by forward and backward: tile sizes, ranges of unmasked tiles, masks, shared memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

MASKED_SCORE = -1e30  # log-sum-exp of a query without keys; its result is 0
LOG2E = math.log2(math.e)
BLOCK = 128  # queries per block in the forward pass


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Measured on an H100, see README.md."""

    forward_keys: int
    """Forward: keys per iteration; a block has 128 queries."""
    backward_keys: int = 128
    """Backward: keys per block: 128, 64 for each of the two warpgroups; or 64 for both, with half of the columns
    each."""
    backward_queries: int = 64
    """Backward: queries per iteration."""
    stages: int = 2
    """Backward: tiles of q in flight."""
    d_out_stages: int = 2
    forward_slots: int = 2
    """Forward: tiles of queries that fit into shared memory."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Where the heads are in the arrays of queries, keys and values."""

    queries: int
    keys: int
    """Key-value heads."""
    joined: bool = False
    """One array has all: for each key-value head the queries of its group, the keys and the values."""

    @property
    def group(self) -> int:
        return self.queries // self.keys

    def q(self, head):
        if not self.joined:
            return head
        return lax.div(head, self.group) * (self.group + 2) + lax.rem(head, self.group)

    def k(self, kv_head):
        return kv_head * (self.group + 2) + self.group if self.joined else kv_head

    def v(self, kv_head):
        return self.k(kv_head) + 1 if self.joined else kv_head


TILES = {
    64: Tiles(128, stages=3, d_out_stages=3),
    80: Tiles(128, stages=3, d_out_stages=3),
    128: Tiles(128),
    256: Tiles(64, backward_keys=64, d_out_stages=1, forward_slots=1),
}
# Heads of another width are padded to the next of these.
HEAD_DIMS = tuple(TILES)


def problem(head_dim: int, dtype: jnp.dtype) -> str:
    """Why these kernels cannot be used, or an empty string."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    return "" if head_dim in TILES else f"head dim {head_dim}"


def capped(products, scale, soft_cap):
    """-> (s, factor for the base-2 exponential, derivative of the cap or None)."""
    if soft_cap is None:
        return products, scale * LOG2E, None
    tanh = jnp.tanh(products * (scale / soft_cap))
    return soft_cap * tanh, LOG2E, 1 - tanh * tanh


def seen(key, lower, upper, wide):
    """lower <= key < upper with one comparison: negative numbers are large as unsigned integers."""
    count = jnp.maximum(upper - lower, 0).astype(jnp.uint32)
    return (key - wide(lower)).astype(jnp.uint32) < wide(count)


def extremes(bounds_BT, block):
    """Smallest and largest bound of each tile of queries, [B, tiles]."""
    batch, length = bounds_BT.shape
    tiles = jnp.pad(bounds_BT, ((0, 0), (0, -length % block)), mode="edge").reshape(batch, -1, block)
    return tiles[:, :, 0], tiles[:, :, -1]


def range_of_keys(low, high_low, low_high, high, block_k):
    """(first tile of keys, first and last unmasked for all queries, last), ends exclusive. low, high_low: lower bounds
    of the first and last query; low_high, high: their upper bounds."""

    def down(a):
        return lax.div(a, block_k)

    def up(a):
        return lax.div(a + block_k - 1, block_k)

    first = down(low)
    last = jnp.maximum(up(high), first)
    full_first = jnp.clip(up(high_low), first, last)
    return first, full_first, jnp.clip(down(low_high), full_first, last), last


def ranges_of_queries(lower_BT, upper_BT, block_q, block_k, num_keys):
    """The same for each tile of keys: int32 [B, tiles of keys, 4], tiles of queries."""
    low, high_low = extremes(lower_BT, block_q)
    low_high, high = extremes(upper_BT, block_q)
    start = jnp.arange(-(-num_keys // block_k)) * block_k

    def count(holds):
        """Number of tiles for which it holds; tiles are in order."""
        return jnp.sum(holds, 1, dtype=jnp.int32)

    first = count(high[:, :, None] <= start)
    last = jnp.maximum(count(low[:, :, None] < start + block_k), first)
    full_first = jnp.clip(count(low_high[:, :, None] < start + block_k), first, last)
    full_last = jnp.clip(count(high_low[:, :, None] <= start), full_first, last)
    return jnp.stack([first, full_first, full_last, last], -1)


def in_heads(joined_BTKGH) -> tuple[Heads, jax.Array]:
    """[B, T, K, G + 2, H] -> (its heads, the same as [B, T, K (G + 2), H])."""
    batch, length, keys, places, head_dim = joined_BTKGH.shape
    heads = Heads(keys * (places - 2), keys, joined=True)
    return heads, joined_BTKGH.reshape(batch, length, keys * places, head_dim)


def joins_batches(function):
    """Under vmap the mapped axis becomes part of the batch, the first axis of all arrays and results."""

    @functools.wraps(function)
    def call(*arrays, **options):
        mapped = jax.custom_batching.custom_vmap(functools.partial(function, **options))

        @mapped.def_vmap
        def _rule(size, is_mapped, *arrays):
            batched = (
                a if mapped else jnp.broadcast_to(a, (size, *a.shape))
                for a, mapped in zip(arrays, is_mapped, strict=True)
            )
            results = call(*(a.reshape(-1, *a.shape[2:]) for a in batched), **options)
            return tuple(a.reshape(size, -1, *a.shape[1:]) for a in results), (True,) * len(results)

        return mapped(*arrays)

    return call


def to_eights(a, axis=1, **options):
    """Pads to a multiple of 8, as TMA requires: rows of shared memory are swizzled in groups of eight."""
    return jnp.pad(a, [(0, -size % 8 if number == axis else 0) for number, size in enumerate(a.shape)], **options)


def kernel(body, out_type, scratch, blocks, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        # Where one thread reads what another one wrote, there is a commit_smem or a barrier between them, and every
        # thread arrives at a barrier itself: Pallas need not add barriers around each load and store.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
