"""The experts of a few tokens, as in decoding: only the matrices of the experts that are chosen are read, and tokens
need not be sorted, sent or brought back.

Dimensions: n tokens, R of them with padding, K experts per token, E experts, D model width, F width of an expert, Z
slots.

    y[t] = sum over the experts e of token t of weight[t, e] * down[e](f(gate[e] x[t]) * up[e] x[t])

Each slot is an expert for which all tokens are computed; a weight is zero where the token has not chosen the expert.
One or two tokens have a slot for each of their choices, more of them one for each expert: nothing is sorted. On
Hopper our kernel computes the products (pallas_kernels/few_rows.py). Other devices, meshes with more axes than
`tensor`, and more tokens take the way of training (layers/feed_forward/moe.py).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.mesh.current import free_axes
from megajax.ops.activation import GATED, OF_KERNEL, Activation
from megajax.ops.choice import log_choice

# Tokens that have a slot for each choice. A step of 12 layers of qwen3_30b_a3b on one H200 took 1.32 instead of 1.62 ms
# with 2 tokens, 2.08 instead of 1.99 with 8; with a slot for each expert 2.31 instead of 2.45 with 32.
MAX_BY_CHOICE = 2
ALIGNED = 8  # rows of the kernel


def problem(experts_nK: jax.Array, matrices: Sequence[jax.Array], dtype: jnp.dtype, name: Activation) -> str:
    """Why this operation cannot or should not be used, or an empty string; logs which.

    matrices: all of an expert, [E, D, F] and [E, F, D]. dtype: of the tokens.
    """
    num_tokens = experts_nK.shape[0]
    devices = math.prod(free_axes().values())
    reason = compat.mosaic_problem() or (f"{devices} devices" if devices > 1 else "")
    reason = reason or ("" if name in GATED else f"activation {name}")
    if not reason:
        # not at the top: only Hopper needs it, and it takes time to import
        from pallas_kernels import few_rows as kernel

        problems = [kernel.problem(num_tokens, matrix.shape[1], matrix.shape[2], dtype) for matrix in matrices]
        problems += [f"matrices of {matrix.dtype}" for matrix in matrices if matrix.dtype != dtype]
        if num_tokens > MAX_BY_CHOICE and experts_nK.size < matrices[0].shape[0]:
            problems.append(f"{num_tokens} tokens, which would read an expert several times")
        reason = next(filter(None, problems), "")
    choice = f"as in training ({reason})" if reason else "our kernel (pallas_kernels/few_rows.py)"
    log_choice("experts of a few tokens", choice)
    return reason


def few_tokens(
    x_nD: jax.Array, experts_nK: jax.Array, weights_nK: jax.Array, wide: Sequence[jax.Array], down_EFD: jax.Array,
    name: Activation, kernel: Any = None
) -> jax.Array:  # fmt: skip
    """-> y [n, D] in the dtype of x; sums are float32.

    experts: int32, E where a token is dropped. weights: float32. wide: gate and up, [E, D, F]. kernel: in place of
    ours, for tests.
    """
    if kernel is None:
        from pallas_kernels import few_rows as kernel
    num_tokens = x_nD.shape[0]
    num_experts = down_EFD.shape[0]
    num_rows = -(-num_tokens // ALIGNED) * ALIGNED
    groups_Z, weights_ZR = _slots(experts_nK, weights_nK, num_experts, num_rows)
    hidden_ZRF = kernel.hidden(x_nD, *wide, groups_Z, weights_ZR, function=OF_KERNEL[name])
    # As an addition of slices, which XLA fuses with what reads the sum; a reduction would be a kernel of its own.
    parts_SZnD = kernel.products(hidden_ZRF, down_EFD, groups_Z)[:, :, :num_tokens]
    sums_ZnD = functools.reduce(jnp.add, list(parts_SZnD))
    y_nD = jnp.sum(jnp.where(groups_Z[:, None, None] < num_experts, sums_ZnD, 0), 0)
    return y_nD.astype(x_nD.dtype)


def _slots(
    experts_nK: jax.Array, weights_nK: jax.Array, num_experts: int, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """-> (int32 [Z]: the expert of each slot, E of one that is not used; float32 [Z, R]: its weight for each token)."""
    num_tokens, top_k = experts_nK.shape
    if num_tokens * top_k < num_experts:
        token_Z1 = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), top_k)[:, None]
        is_own_ZR = token_Z1 == jnp.arange(num_rows, dtype=jnp.int32)
        return experts_nK.ravel(), jnp.where(is_own_ZR, weights_nK.ravel()[:, None], 0)
    every = jnp.arange(num_experts, dtype=jnp.int32)
    chosen_EnK = every[:, None, None] == experts_nK
    is_chosen_E = jnp.any(chosen_EnK, (1, 2))
    weights_En = jnp.sum(jnp.where(chosen_EnK, weights_nK, 0), 2)
    weights_ER = jnp.pad(weights_En, ((0, 0), (0, num_rows - num_tokens)))
    return jnp.where(is_chosen_E, every, num_experts), weights_ER
