"""The embedding lookup equals indexing, value and gradient, on every mesh and over pipeline stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.ops.embedding import embed

B, T, V, D = 4, 16, 32, 8


def arguments():
    """table, tokens and the gradient of the output."""
    rng = np.random.default_rng(0)
    table, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((V, D), (B, T, D)))
    # Few different tokens, so that gradients of one row come from several devices.
    return table, rng.integers(0, V // 2, (B, T)).astype(np.int32) * 2, g


def indexing(table, tokens):
    return jnp.asarray(table)[tokens]


def run(table, tokens, g, lookup=functools.partial(embed, dtype=jnp.float32)):
    out, vjp = jax.vjp(lambda table: lookup(table, tokens), table)
    return out, vjp(jnp.asarray(g, out.dtype))[0]


@functools.cache
def wanted():
    return jax.tree.map(np.asarray, run(*arguments(), lookup=indexing))


def check(out, d_table):
    np.testing.assert_array_equal(out, wanted()[0])
    np.testing.assert_allclose(d_table, wanted()[1], atol=2e-6)  # sums of a few float32 terms in another order


def test_value_and_gradient_equal_indexing(mesh):
    check(*jax.jit(run)(*arguments()))


def test_value_and_gradient_equal_indexing_over_pipeline_stages(over_stages):
    check(*over_stages(run, (P("pipeline"), P(), P()), (P(), P("pipeline")), *arguments()))


@pytest.mark.parametrize("sizes", [dict(fsdp=2), dict(data=2, fsdp=2), dict(data=2, tensor=2)], ids=str)
@pytest.mark.parametrize("batch, length", [(1, 16), (2, 16), (3, 15)])
def test_any_number_of_sequences_on_any_mesh(sizes, batch, length, make_test_mesh):
    """One prompt on a mesh that could split two, say."""
    table, tokens, g = arguments()
    tokens, g = tokens[:batch, :length], g[:batch, :length]
    want = run(table, tokens, g, lookup=indexing)
    with jax.set_mesh(make_test_mesh(**sizes)):
        out, d_table = jax.jit(run)(table, tokens, g)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_allclose(d_table, want[1], atol=2e-6)


def test_tokens_outside_the_table_give_zeros_and_no_gradient(mesh):
    table, tokens, g = arguments()
    outside = tokens.copy()
    outside[:, 0], outside[:, 5] = -1, V
    out, d_table = jax.jit(run)(table, outside, g)
    inside = np.ones((B, T), bool)
    inside[:, [0, 5]] = False
    np.testing.assert_array_equal(out, np.where(inside[..., None], wanted()[0], 0))
    _, wanted_gradient = run(table, tokens, np.where(inside[..., None], g, 0), lookup=indexing)
    np.testing.assert_allclose(d_table, wanted_gradient, atol=2e-6)


def test_the_gradient_is_summed_in_float32(make_test_mesh):
    """1024 times the same token: a bfloat16 sum of ones stops at 256."""
    table, tokens = np.zeros((V, D), np.float32), np.full((4, 256), 3, np.int32)
    with jax.set_mesh(make_test_mesh(tensor=2, fsdp=2)):
        lookup = functools.partial(embed, dtype=jnp.bfloat16)
        out, d_table = jax.jit(functools.partial(run, lookup=lookup))(table, tokens, np.ones((4, 256, D), np.float32))
    assert out.dtype == jnp.bfloat16 and d_table.dtype == jnp.float32
    assert np.all(d_table[3] == 1024) and np.abs(d_table).sum() == 1024 * D


def test_a_length_that_tensor_does_not_divide(make_test_mesh):
    """One token of a decoding step."""
    table, tokens, g = arguments()
    with jax.set_mesh(make_test_mesh(data=2, tensor=2)):
        out, _ = jax.jit(run)(table, tokens[:, :1], g[:, :1])
    np.testing.assert_array_equal(out, wanted()[0][:, :1])
