"""The experts of a few tokens, as in decoding: only the matrices of the experts that are chosen are read, and tokens
need not be sorted, sent or brought back.

Dimensions: n tokens, R of them with padding, K experts per token, E experts, D model width, F width of an expert, W
matrices before the activation, Z slots.

    y[t] = sum over the experts e of token t of weight[t, e] * down[e](activation(wide[e] x[t]))

Each slot is an expert for which all tokens are computed; a weight is zero where the token has not chosen the expert.
One or two tokens have a slot for each of their choices, more of them one for each expert: nothing is sorted. On
Hopper our kernel computes the products (pallas_kernels/few_rows.py). Other devices, meshes of several, and more tokens
take the way of training (layers/feed_forward/moe.py).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.mesh.current import free_axes
from megajax.ops.activation import Activation, activate
from megajax.ops.choice import log_choice

# Tokens that have a slot for each choice. A step of 12 layers of qwen3_30b_a3b on one H200 took 1.32 instead of 1.62 ms
# with 2 tokens, 2.08 instead of 1.99 with 8; with a slot for each expert 2.31 instead of 2.45 with 32.
MAX_BY_CHOICE = 2


def problem(experts_nK: jax.Array, matrices: Sequence[jax.Array], dtype: jnp.dtype) -> str:
    """Why this operation cannot or should not be used, or an empty string; logs which.

    matrices: all of an expert, [E, D, F] and [E, F, D]. dtype: of the tokens.
    """
    num_tokens = experts_nK.shape[0]
    devices = math.prod(free_axes().values())
    reason = compat.mosaic_problem() or (f"{devices} devices" if devices > 1 else "")
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
    name: Activation, products=None
) -> jax.Array:  # fmt: skip
    """-> y [n, D] in the dtype of x; sums are float32.

    experts: int32, E where a token is dropped. weights: float32. wide: W of [E, D, F]. products: in place of the
    kernel's, for tests.
    """
    from pallas_kernels import few_rows as kernel

    products = products or kernel.products
    num_tokens = x_nD.shape[0]
    num_experts = down_EFD.shape[0]
    groups_Z, weights_Zn = _slots(experts_nK, weights_nK, num_experts)
    padding = -num_tokens % kernel.ALIGNED
    x_RD = jnp.pad(x_nD, ((0, padding), (0, 0)))
    weights_Z1R = jnp.pad(weights_Zn, ((0, 0), (0, padding)))[:, None]

    found = products(x_RD[None], wide, groups_Z)
    wide_ZFWR = jnp.stack([_sum_of_parts(of_matrix_SZFR) for of_matrix_SZFR in found], 2)
    hidden_ZFR = activate(wide_ZFWR, name)
    # Where the weight is zero, the products may be anything.
    hidden_ZFR = jnp.where(weights_Z1R != 0, hidden_ZFR * weights_Z1R, 0).astype(x_nD.dtype)
    sums_ZDR = _sum_of_parts(products(hidden_ZFR.swapaxes(1, 2), [down_EFD], groups_Z)[0])
    y_DR = jnp.sum(jnp.where(groups_Z[:, None, None] < num_experts, sums_ZDR, 0), 0)
    return y_DR.T[:num_tokens].astype(x_nD.dtype)


def _slots(experts_nK: jax.Array, weights_nK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """-> (int32 [Z]: the expert of each slot, E of one that is not used; float32 [Z, n]: its weight for each token)."""
    num_tokens, top_k = experts_nK.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if num_tokens * top_k < num_experts:
        is_own = jnp.repeat(token, top_k)[:, None] == token
        return experts_nK.ravel(), jnp.where(is_own, weights_nK.ravel()[:, None], 0)
    every = jnp.arange(num_experts, dtype=jnp.int32)
    chosen_EnK = every[:, None, None] == experts_nK
    is_chosen_E = jnp.any(chosen_EnK, (1, 2))
    return jnp.where(is_chosen_E, every, num_experts), jnp.sum(jnp.where(chosen_EnK, weights_nK, 0), 2)


def _sum_of_parts(products_SZNR: jax.Array) -> jax.Array:
    """As an addition of slices, which XLA fuses with what reads the sum; a reduction would be a kernel of its own."""
    return functools.reduce(jnp.add, list(products_SZNR))
