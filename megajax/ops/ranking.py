"""The largest of a few values, and the order of numbers of which few are different, without a sort: XLA compiles each
sort anew, in every layer, and runs a large one as tens of kernels.

Dimensions: T rows, E values of a row, N numbers below E.
"""

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.ops.choice import log_choice

FEW_ROWS = 64  # of which all pairs of values are compared: two small kernels in place of a copy, a sort and a slice
ONE_BLOCK = 2048  # numbers of which all pairs are compared
BLOCK = 512  # of more numbers, those of which all pairs are compared


def largest(values_TE: jax.Array, count: int) -> jax.Array:
    """int32 [T, count]: where the largest values of each row are, descending; the first of equal ones. float32. Of rows
    with NaN any, so that what is computed with such a value shows it."""
    if not _kernel_problem(values_TE):
        from pallas_kernels.top_k import top_k

        found_TK = compat.vary(top_k(values_TE, count), compat.varying_axes(values_TE))
    elif len(values_TE) > FEW_ROWS:
        return jax.lax.top_k(values_TE, count)[1]
    else:
        found_TK = _by_comparison(values_TE, count)
    # Values that are NaN have equal ranks, and sums of numbers may be too large.
    return jnp.minimum(found_TK, values_TE.shape[1] - 1)


def _by_comparison(values_TE: jax.Array, count: int) -> jax.Array:
    number_E = jnp.arange(values_TE.shape[1], dtype=jnp.int32)
    own_TE1 = values_TE[..., None]
    other_T1E = values_TE[:, None]
    is_before_TEE = (other_T1E > own_TE1) | ((other_T1E == own_TE1) & (number_E < number_E[:, None]))
    rank_T1E = jnp.sum(is_before_TEE, -1, dtype=jnp.int32)[:, None]
    is_chosen_TKE = rank_T1E == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(is_chosen_TKE, number_E, 0), -1)


def _kernel_problem(values_TE: jax.Array) -> str:
    """Why our kernel cannot be used, or an empty string; logs which."""
    reason = compat.mosaic_problem()
    if not reason:
        from pallas_kernels import top_k as kernel  # not at the top: only Hopper needs it, and it takes time to import

        reason = kernel.problem(values_TE.shape[1], values_TE.dtype)
    log_choice("experts of a token", f"XLA ({reason})" if reason else "our kernel (pallas_kernels/top_k.py)")
    return reason


def ends_of(numbers_N: jax.Array, length: int) -> jax.Array:
    """int32 [length]: how many numbers are at most 0, 1, ..., length - 1."""
    return jnp.sum(numbers_N[:, None] <= jnp.arange(length, dtype=jnp.int32), 0, dtype=jnp.int32)


def in_order(numbers_N: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """A counting sort -> (int32 [N]: the place of each number, from 0 to length - 1, in a stable order; int32 [length]:
    how many numbers are at most 0, 1, ..., length - 1)."""
    num_numbers = numbers_N.size
    if num_numbers <= ONE_BLOCK:
        number = jnp.arange(num_numbers, dtype=jnp.int32)
        own_N1 = numbers_N[:, None]
        is_before_NN = (numbers_N < own_N1) | ((numbers_N == own_N1) & (number < number[:, None]))
        return jnp.sum(is_before_NN, 1, dtype=jnp.int32), ends_of(numbers_N, length)
    padded = jnp.pad(numbers_N, (0, -num_numbers % BLOCK), constant_values=length)
    blocks_nB = padded.reshape(-1, BLOCK)
    every_E = jnp.arange(length, dtype=jnp.int32)
    counts_nE = jnp.sum(blocks_nB[..., None] == every_E, 1, dtype=jnp.int32)
    # Written out: a cumulative sum would be four kernels.
    block_n = jnp.arange(len(blocks_nB), dtype=jnp.int32)
    before_nE = jnp.sum(jnp.where((block_n < block_n[:, None])[..., None], counts_nE, 0), 1)
    totals_E = jnp.sum(counts_nE, 0)
    ends_E = jnp.sum(jnp.where(every_E <= every_E[:, None], totals_E, 0), 1)
    number = jnp.arange(BLOCK, dtype=jnp.int32)
    is_before_nBB = (blocks_nB[:, None] == blocks_nB[..., None]) & (number < number[:, None])
    within_nB = jnp.sum(is_before_nBB, -1, dtype=jnp.int32)
    first_nE = ends_E - totals_E + before_nE
    first_nB = jnp.take_along_axis(first_nE, jnp.minimum(blocks_nB, length - 1), 1)
    return (first_nB + within_nB).ravel()[:num_numbers], ends_E
