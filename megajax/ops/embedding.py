"""Vocabulary-parallel embedding lookup (Shoeybi et al. 2019, section 3).

Dimensions: B batch, T sequence, V vocabulary, D model width, P parts of D over fsdp.
Each device of `tensor` holds V / tensor rows, looks up the tokens that are its own and the results are summed;
with sequence parallelism the sum is a reduce-scatter over T. XLA's own gather on such a table aborts inside a
pipeline stage.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.sharding import BATCH_AXES, activation_spec, manual


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the table for int32 tokens -> [B, T, D] in `dtype`, laid out as batch, sequence.

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
    scatter = out_spec[1] != tokens_spec[1]

    def body(table_VD, tokens_BT):
        local, inside = _local_rows(tokens_BT, table_VD.shape[0])
        rows_BTD = jnp.where(inside[..., None], table_VD[jnp.where(inside, local, 0)], 0)
        if scatter:
            return lax.psum_scatter(rows_BTD, "tensor", scatter_dimension=1, tiled=True)
        return lax.psum(rows_BTD, "tensor")

    lookup = manual(body, (P("tensor", None), tokens_spec), out_spec)
    return lookup(table_VD.astype(dtype), tokens_BT), (table_VD, tokens_BT)


def _backward(dtype, residuals, d_out_BTD):
    table_VD, tokens_BT = residuals
    tokens_spec = activation_spec(tokens_BT.shape, ("batch", "time"))
    d_out_spec = P(*tokens_spec, None)

    def body(tokens_BT, d_out_BTD):
        num_rows = table_VD.shape[0] // lax.axis_size("tensor")
        local, inside = _local_rows(tokens_BT, num_rows)
        rows = jnp.where(inside, local, num_rows)  # out of range: dropped
        # Each device of fsdp gets its part of D. The parts are laid out one after another from the start: scattering
        # along the last dim would transpose the whole table.
        parts = lax.axis_size("fsdp")
        d_out_PBTD = jnp.moveaxis(d_out_BTD.reshape(*rows.shape, parts, -1), 2, 0).astype(jnp.float32)
        d_table_PVD = jnp.zeros((parts, num_rows, d_out_PBTD.shape[-1]), jnp.float32)
        d_table_PVD = d_table_PVD.at[:, rows].add(d_out_PBTD, mode="drop")
        d_table_VD = lax.psum_scatter(d_table_PVD, "fsdp", scatter_dimension=0)
        return lax.psum(d_table_VD, tuple(axis for axis in (*BATCH_AXES, "context") if axis != "fsdp"))

    gradient = manual(body, (tokens_spec, d_out_spec), P("tensor", "fsdp"))
    return gradient(tokens_BT, d_out_BTD).astype(table_VD.dtype), None


_embed.defvjp(_forward, _backward)


def _local_rows(tokens, num_rows: int):
    """Row of each token in this device's part of the table, and whether it is there."""
    local = tokens - lax.axis_index("tensor") * num_rows
    return local, (local >= 0) & (local < num_rows)
