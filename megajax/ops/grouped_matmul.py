"""Grouped matmul: rows sorted by group, times one matrix per group.

Dimensions: R rows, K contracted width, N result width, E groups (the experts of a device).
Rows are sorted by group, and `sizes` says how many each group has; rows after the last group give zeros.

Each device has its own rows (parallel/expert.py) and the matrices of its experts. `tensor` splits the width of rows,
both outside the experts ("embed") and inside ("mlp"): "embed" is gathered before a product that contracts it, and a
product that results in "embed" is reduce-scattered. Matrices are gathered over the axes that share the weights.

Without a kernel, products are computed tile by tile: a tile is a block of rows times the matrix of one group that has
rows in it; there are at most R / block + E. The loop ends at the last row of the last group, so empty rows at the end
cost nothing. On a GPU `lax.ragged_dot` would multiply every row with every matrix.
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from megajax import compat
from megajax.current_mesh import free_axes, manual
from megajax.ops.matmul import Float32Gradient, Weight, dot_precision
from megajax.sharding import ACTIVATION_AXES, SHARING_AXES, WEIGHT_AXES, local_weight_spec, rows_spec

logger = logging.getLogger("megajax")

MIN_BLOCK, MAX_BLOCK = 16, 512  # rows of a tile
(TENSOR,) = WEIGHT_AXES["mlp"]


def reference(rows_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """-> [R, N] in the dtype of the rows; the definition, on one device."""
    return lax.ragged_dot(rows_RK, matrices_EKN.astype(rows_RK.dtype), sizes_E, precision=dot_precision(rows_RK.dtype))


def grouped_matmul(
    rows_RK: jax.Array, weights: Sequence[Weight], sizes_E: jax.Array, axes: tuple[str, str]
) -> jax.Array:
    """The products of the rows of each group with its matrices, side by side -> [R, len(weights), N].

    Args:
        rows_RK: laid out by `rows_spec` with the first of `axes`; the result has the second.
        weights: [E, K, N] each, of the same shape, with the axes ("experts", *axes).
        sizes_E: int32, rows per group, concatenated over devices.
        axes: ("embed", "mlp"), or ("mlp", "embed") and one weight.

    Computes in the dtype of the rows and accumulates in float32, as ops/matmul.py does; the gradient of a weight is
    summed over devices in the same dtype, unless the weight is a Float32Gradient.
    """
    is_wide = isinstance(weights[0], Float32Gradient)
    arrays = tuple(w.array if is_wide else w for w in weights)
    assert axes == ("embed", "mlp") or (axes == ("mlp", "embed") and len(arrays) == 1), (axes, len(arrays))
    _log_choice(compat.mesh_platform())
    return _grouped_matmul(rows_RK, arrays, sizes_E, (axes, is_wide))


@functools.cache
def _log_choice(platform: str) -> None:
    slow = ", which is slow: there is no GPU kernel yet" if platform != "cpu" else ""
    logger.info("grouped matmul: XLA, a loop over tiles%s", slow)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(rows_RK, weights, sizes_E, options):
    return _forward(rows_RK, weights, sizes_E, options)[0]


def _specs(axes, num_weights):
    """-> specs of (rows, weights, sizes), spec of the result."""
    weight = local_weight_spec(("experts", *axes), free_axes())
    given = (rows_spec(axes[0]), (weight,) * num_weights, rows_spec())
    return given, rows_spec(None, axes[1])


def _forward(rows_RK, weights, sizes_E, options):
    axes, _ = options
    given, result = _specs(axes, len(weights))

    def body(rows_RK, weights, sizes_E):
        matrices_EKN = _gathered(weights, rows_RK.dtype, axes)
        out_RN = matmul(_whole(rows_RK, axes[0]), matrices_EKN, sizes_E)
        return _split(out_RN, axes[1]).reshape(rows_RK.shape[0], len(weights), -1)

    return manual(body, given, result)(rows_RK, weights, sizes_E), (rows_RK, weights, sizes_E)


def _backward(options, residuals, d_out_RWN):
    rows_RK, weights, sizes_E = residuals
    axes, is_wide = options
    given, result = _specs(axes, len(weights))

    def body(rows_RK, weights, sizes_E, d_out_RWN):
        d_out_RN = _whole(d_out_RWN.reshape(d_out_RWN.shape[0], -1), axes[1])
        matrices_EKN = _gathered(weights, rows_RK.dtype, axes)
        d_rows_RK = _split(matmul(d_out_RN, matrices_EKN, sizes_E, transposed=True), axes[0])
        d_matrices_EKN = weight_gradient(_whole(rows_RK, axes[0]), d_out_RN, sizes_E)
        d_matrices_EKN = d_matrices_EKN.astype(jnp.float32 if is_wide else rows_RK.dtype)
        return d_rows_RK, _reduced(d_matrices_EKN, weights, axes)

    run = manual(body, (*given, result), given[:2])
    d_rows_RK, d_weights = run(rows_RK, weights, sizes_E, d_out_RWN)
    return d_rows_RK, tuple(d.astype(w.dtype) for d, w in zip(d_weights, weights, strict=True)), None


_grouped_matmul.defvjp(_forward, _backward)


def _whole(rows, axis: str):
    return lax.all_gather(rows, TENSOR, axis=1, tiled=True) if axis == "embed" else rows


def _split(rows, axis: str):
    return lax.psum_scatter(rows, TENSOR, scatter_dimension=1, tiled=True) if axis == "embed" else rows


def _gathered(weights, dtype, axes):
    """The gathered weights side by side: [E, K, N], with N of all weights together."""
    joined = jnp.stack([w.astype(dtype) for w in weights], 2)
    whole = lax.all_gather(joined, SHARING_AXES, axis=1 if axes[0] == "embed" else 3, tiled=True)
    return whole.reshape(*whole.shape[:2], -1)


def _reduced(d_matrices_EKN, weights, axes):
    """The gradient of each weight, summed over devices and laid out like the weight."""
    d = d_matrices_EKN.reshape(*d_matrices_EKN.shape[:2], len(weights), -1)
    d = lax.psum_scatter(d, SHARING_AXES, scatter_dimension=1 if axes[0] == "embed" else 3, tiled=True)
    held = (*WEIGHT_AXES["experts"], *SHARING_AXES)
    d = lax.psum(d, tuple(axis for axis in ACTIVATION_AXES["rows"] if axis not in held))
    return tuple(d[:, :, number] for number in range(len(weights)))


# ----------------------------------------------------------------------------- one device


def matmul(rows_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """As reference. transposed: rows [R, N] times the transposed matrices -> [R, K]."""
    tiles = _Tiles(rows_RK.shape[0], sizes_E)
    contracted = 1 if transposed else 0
    width = matrices_EKN.shape[1 if transposed else 2]

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


def weight_gradient(rows_RK: jax.Array, d_out_RN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Gradient of the matrices: float32 [E, K, N]."""
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
