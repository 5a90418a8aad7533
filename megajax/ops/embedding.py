"""Vocabulary-parallel embedding lookup (Shoeybi et al. 2019, section 3).

Dimensions: B batch, T sequence, V vocabulary, D model width, P devices of `fsdp` and `context` that split the tokens,
d = D / (fsdp * context). A device holds [V / (pipeline * tensor), d] of the table. Over `pipeline` and `tensor` each
device looks up the tokens of its part of the vocabulary and the results are summed; with sequence parallelism the sum
over `tensor` is a reduce-scatter. Over `fsdp` and `context` each device looks up its part of D for the tokens of all
devices, and an all-to-all joins the parts: gathering the table and reducing its gradient would send V / T times as
much. XLA's own gather on such a table aborts inside a pipeline stage.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import SEQUENCE_AXES, WEIGHT_AXES, activation_spec, axes_of, local_weight_spec, split_dim
from megajax.ops.mailboxes import is_summed, summed

TABLE_AXES = WEIGHT_AXES["vocab"]
WIDTH_AXES = WEIGHT_AXES["embed"]
SUMMED_WHOLE = tuple(axis for axis in TABLE_AXES if axis not in SEQUENCE_AXES)


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the table for int32 tokens -> [B, T, D] in `dtype`, sharded as batch, sequence.

    The gradient of the table is summed in float32. Tokens outside [0, V) give a row of zeros and no gradient.
    """
    return _embed(table_VD, tokens_BT, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embed(table_VD, tokens_BT, dtype):
    return _forward(table_VD, tokens_BT, dtype)[0]


def _forward(table_VD, tokens_BT, dtype):
    shape = (*tokens_BT.shape, table_VD.shape[1])
    tokens_spec = activation_spec(tokens_BT.shape, ("batch", "time"))
    out_spec = activation_spec(shape, ("batch", "sequence", None))
    other_axes, token_axes = _width_axes(tokens_spec)
    scattered = split_dim(out_spec, tokens_spec)
    in_mailboxes = scattered is None and is_summed(shape, dtype)

    def body(table_Vd, tokens_BT):
        tokens_PBT = _tokens_of_all(tokens_BT, token_axes)
        local, inside = _local_rows(tokens_PBT, table_Vd.shape[0])
        rows_PBTd = jnp.where(inside[..., None], table_Vd[jnp.where(inside, local, 0)].astype(dtype), 0)
        if scattered is not None:
            rows_PBTd = lax.psum_scatter(rows_PBTd, SEQUENCE_AXES, scatter_dimension=1 + scattered, tiled=True)
            rows_PBTd = lax.psum(rows_PBTd, SUMMED_WHOLE)
        elif in_mailboxes:
            rows_PBTd = summed(rows_PBTd)
        else:
            rows_PBTd = lax.psum(rows_PBTd, TABLE_AXES)
        if token_axes:
            rows_PBTd = lax.all_to_all(rows_PBTd, token_axes, 0, 0, tiled=True)
        parts = rows_PBTd[None]
        if other_axes:  # a gather whose result is marked as replicated
            own = lax.axis_index(other_axes) == jnp.arange(lax.axis_size(other_axes))
            parts = lax.psum(jnp.where(own[:, None, None, None, None], parts, 0), other_axes)
        parts = parts if (*other_axes, *token_axes) == WIDTH_AXES else parts.swapaxes(0, 1)
        rows_BTD = jnp.moveaxis(parts, (0, 1), (2, 3))
        return rows_BTD.reshape(*rows_BTD.shape[:2], -1)

    looked_up = manual(body, (_table_spec(), tokens_spec), out_spec, check_vma=not in_mailboxes)
    return looked_up(table_VD, tokens_BT), (table_VD, tokens_BT)


def _backward(dtype, residuals, d_out_BTD):
    table_VD, tokens_BT = residuals
    tokens_spec = activation_spec(tokens_BT.shape, ("batch", "time"))
    d_out_spec = activation_spec(d_out_BTD.shape, ("batch", "sequence", None))
    other_axes, token_axes = _width_axes(tokens_spec)
    gathered = split_dim(d_out_spec, tokens_spec)
    table_spec = _table_spec()
    sizes = free_axes()
    num_rows = table_VD.shape[0] // math.prod(sizes[name] for name in axes_of(table_spec[0]))

    def body(tokens_BT, d_out_BTD):
        tokens_PBT = _tokens_of_all(tokens_BT, token_axes)
        local, inside = _local_rows(tokens_PBT, num_rows)
        outer, inner = (lax.axis_size(name) for name in WIDTH_AXES)
        parts = jnp.moveaxis(d_out_BTD.reshape(*d_out_BTD.shape[:2], outer, inner, -1), (2, 3), (0, 1))
        parts = parts if (*other_axes, *token_axes) == WIDTH_AXES else parts.swapaxes(0, 1)
        parts = parts.reshape(-1, lax.axis_size(token_axes) if token_axes else 1, *parts.shape[2:])
        d_out_PBTd = lax.dynamic_index_in_dim(parts, lax.axis_index(other_axes) if other_axes else 0, keepdims=False)
        if token_axes:
            d_out_PBTd = lax.all_to_all(d_out_PBTd, token_axes, 0, 0, tiled=True)
        if gathered is not None:
            d_out_PBTd = lax.all_gather(d_out_PBTd, SEQUENCE_AXES, axis=1 + gathered, tiled=True)
        d_table_Vd = jnp.zeros((num_rows, d_out_PBTd.shape[-1]), jnp.float32)
        rows = jnp.where(inside, local, num_rows)  # out of range: dropped
        d_table_Vd = d_table_Vd.at[rows].add(d_out_PBTd.astype(jnp.float32), mode="drop")
        summed_axes = tuple(axis for entry in tokens_spec for axis in axes_of(entry) if axis not in token_axes)
        return lax.psum(d_table_Vd, summed_axes)

    gradient = manual(body, (tokens_spec, d_out_spec), table_spec)
    return gradient(tokens_BT, d_out_BTD).astype(table_VD.dtype), None


_embed.defvjp(_forward, _backward)


def _table_spec() -> P:
    """Spec of the table as `manual` sees it; inside a pipeline stage the table is already the part of that stage."""
    return local_weight_spec(("vocab", "embed"), free_axes())


def _width_axes(tokens_spec: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that split D -> (those over which tokens are replicated, those that also split the tokens)."""
    splits_tokens = [axis for entry in tokens_spec for axis in axes_of(entry)]
    other_axes = tuple(axis for axis in WIDTH_AXES if axis not in splits_tokens)
    return other_axes, tuple(axis for axis in WIDTH_AXES if axis in splits_tokens)


def _tokens_of_all(tokens_BT, token_axes: tuple[str, ...]):
    """The tokens of every device along these axes [P, B, T]; [1, B, T] without axes."""
    return lax.all_gather(tokens_BT, token_axes) if token_axes else tokens_BT[None]


def _local_rows(tokens, num_rows: int):
    """Row of each token in this device's part of the table, and whether this device holds it."""
    local = tokens - lax.axis_index(TABLE_AXES) * num_rows
    return local, (local >= 0) & (local < num_rows)
