"""The products of ops/grouped_matmul.py by XLA, on one device, tile by tile; pallas_kernels/grouped_matmul has the
same functions.

Dimensions: R rows, K contracted width, N result width, W matrices per group, E groups.

A tile is a block of rows times the matrix of one group that has rows in it; there are at most R / block + E. The loop
ends at the last row of the last group, so empty rows at the end cost nothing. On a GPU `lax.ragged_dot` would multiply
every row with every matrix.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import compat
from megajax.ops.matmul import dot_precision

MIN_BLOCK, MAX_BLOCK = 16, 512  # rows of a tile


def forward(rows_RK: jax.Array, matrices: Sequence[jax.Array], sizes_E: jax.Array) -> jax.Array:
    """-> [R, W, N] in the dtype of the rows. matrices: W of [E, K, N]."""
    out_RN = _matmul(rows_RK, _side_by_side(matrices), sizes_E, contracted=0)
    return out_RN.reshape(rows_RK.shape[0], len(matrices), -1)


def input_gradient(d_out_RWN: jax.Array, matrices: Sequence[jax.Array], sizes_E: jax.Array) -> jax.Array:
    """-> [R, K], summed over the matrices."""
    d_out_RN = d_out_RWN.reshape(d_out_RWN.shape[0], -1)
    return _matmul(d_out_RN, _side_by_side(matrices), sizes_E, contracted=1)


def weight_gradient(
    rows_RK: jax.Array, d_out_RWN: jax.Array, sizes_E: jax.Array, *, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """-> W of [E, K, N]."""
    d_out_RN = d_out_RWN.reshape(d_out_RWN.shape[0], -1)
    d_EKN = _weight_gradient(rows_RK, d_out_RN, sizes_E).astype(dtype)
    return tuple(jnp.split(d_EKN, d_out_RWN.shape[1], axis=2))


def _side_by_side(matrices: Sequence[jax.Array]) -> jax.Array:
    return matrices[0] if len(matrices) == 1 else jnp.concatenate(matrices, 2)


def _matmul(rows_RK, matrices_EKN, sizes_E, *, contracted: int) -> jax.Array:
    """contracted: the axis of a matrix, 0 or 1."""
    tiles = _Tiles(rows_RK.shape[0], sizes_E)
    width = matrices_EKN.shape[2 - contracted]

    def step(number, out_RN):
        block, group, in_group_B1 = tiles.tile(number)
        matrix = lax.dynamic_index_in_dim(matrices_EKN, group, keepdims=False)
        product_BN = lax.dot_general(
            tiles.rows_of(rows_RK, block), matrix, (((1,), (contracted,)), ((), ())),
            precision=dot_precision(rows_RK.dtype),
        )  # fmt: skip
        product_BN = jnp.where(in_group_B1, product_BN, tiles.rows_of(out_RN, block))
        return lax.dynamic_update_slice_in_dim(out_RN, product_BN, block * tiles.block, 0)

    return tiles.loop(step, jnp.zeros((tiles.padded, width), rows_RK.dtype), rows_RK, matrices_EKN)[: rows_RK.shape[0]]


def _weight_gradient(rows_RK, d_out_RN, sizes_E) -> jax.Array:
    """float32 [E, K, N]."""
    tiles = _Tiles(rows_RK.shape[0], sizes_E)

    def step(number, sums_EKN):
        block, group, in_group_B1 = tiles.tile(number)
        group_rows = jnp.where(in_group_B1, tiles.rows_of(rows_RK, block), 0)
        product_KN = lax.dot_general(
            group_rows, tiles.rows_of(d_out_RN, block), (((0,), (0,)), ((), ())),
            precision=dot_precision(rows_RK.dtype), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return sums_EKN.at[group].add(product_KN)

    shape = (sizes_E.shape[0], rows_RK.shape[1], d_out_RN.shape[1])
    return tiles.loop(step, jnp.zeros(shape, jnp.float32), rows_RK, d_out_RN)


class _Tiles:
    """Pairs of a block of rows and a group that has rows in it, in the order of the rows."""

    def __init__(self, num_rows: int, sizes_E: jax.Array):
        num_groups = sizes_E.shape[0]
        power = max(num_rows // num_groups, 1).bit_length() - 1
        self.block = min(max(2**power, MIN_BLOCK), MAX_BLOCK)
        self.padded = -(-num_rows // self.block) * self.block
        self.ends_E = jnp.cumsum(sizes_E)
        self.starts_E = self.ends_E - sizes_E
        blocks_E = (self.ends_E - 1) // self.block - self.starts_E // self.block + 1
        self.last_tile_E = jnp.cumsum(jnp.where(sizes_E > 0, blocks_E, 0))
        self.first_tile_E = self.last_tile_E - jnp.where(sizes_E > 0, blocks_E, 0)

    def tile(self, number):
        """-> (block, group, bool [block, 1]: whether each row of the block belongs to the group)."""
        group = jnp.searchsorted(self.last_tile_E, number, side="right")
        block = self.starts_E[group] // self.block + number - self.first_tile_E[group]
        places_B = block * self.block + jnp.arange(self.block, dtype=jnp.int32)
        in_group_B = (places_B >= self.starts_E[group]) & (places_B < self.ends_E[group])
        return block, group, in_group_B[:, None]

    def rows_of(self, rows, block):
        return lax.dynamic_slice_in_dim(self._pad(rows), block * self.block, self.block)

    def _pad(self, rows):
        missing = self.padded - rows.shape[0]
        return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows

    def loop(self, step, start, *operands):
        """fori_loop over the tiles. operands: arrays that the steps read, which may vary over mesh axes."""
        axes = frozenset().union(*(compat.varying_axes(a) for a in (*operands, self.ends_E)))
        return lax.fori_loop(0, self.last_tile_E[-1], step, compat.vary(start, axes))
