"""The experts of a few tokens equal a loop over the choices; and the kernel, interpreted, equals its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.few_tokens import few_tokens
from pallas_kernels import few_rows as kernel
from pallas_kernels import registers

E, K, D, F = 8, 2, 16, 24


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def multiplied(rows, matrix, groups_Z):
    """rows [R, K] or [Z, R, K] -> float32 [Z, R, N]; NaN without a group."""
    matrix_ZKN = jnp.asarray(matrix, rows.dtype)[groups_Z]
    found = jnp.einsum("...rk,zkn->zrn" if rows.ndim == 2 else "zrk,zkn->zrn", rows, matrix_ZKN)
    return jnp.where(groups_Z[:, None, None] < matrix.shape[0], found, jnp.nan).astype(jnp.float32)


class Formula:
    """As the kernel; products are in two parts."""

    @staticmethod
    def hidden(rows_nK, gate, up, groups_Z, weights_ZR, function):
        assert function == "silu"
        rows_RK = jnp.pad(rows_nK, ((0, weights_ZR.shape[1] - len(rows_nK)), (0, 0)))
        gate_ZRF, up_ZRF = (multiplied(rows_RK, matrix, groups_Z) for matrix in (gate, up))
        found = jax.nn.silu(gate_ZRF) * up_ZRF * weights_ZR[..., None]
        return jnp.where(weights_ZR[..., None] != 0, found, 0).astype(rows_RK.dtype)

    @staticmethod
    def products(rows_ZRK, matrix, groups_Z):
        found = multiplied(rows_ZRK, matrix, groups_Z)
        return jnp.stack([found / 4, found * 3 / 4])


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_experts_equal_a_loop_over_the_choices(num_tokens):
    """With a slot for each choice, and with one for each expert; the last token is dropped by an expert."""
    x = drawn(0, num_tokens, D)
    gate, up, down = drawn(1, E, D, F), drawn(2, E, D, F), drawn(3, E, F, D)
    experts = np.stack([np.random.default_rng(token).permutation(E)[:K] for token in range(num_tokens)]).astype(
        np.int32
    )
    weights = np.abs(drawn(4, num_tokens, K))
    experts[-1, 1] = E
    weights[-1, 1] = 0
    wanted = np.zeros((num_tokens, D))
    for token in range(num_tokens):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            if expert < E:
                g, u = (x[token].astype(np.float64) @ matrix[expert] for matrix in (gate, up))
                wanted[token] += weight * (g / (1 + np.exp(-g)) * u) @ down[expert]
    found = few_tokens(jnp.asarray(x), experts, weights, [gate, up], down, "swiglu", Formula)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_interpreted_kernels_equal_the_formula(interpreted, monkeypatch):
    """Two tiles of columns, several parts, more steps than stages, a slot without a group, a weight of zero."""

    def store_transposed(ref, value):
        ref[...] = value.T

    monkeypatch.setattr(registers, "store_transposed", store_transposed)  # the interpreter has no transposed stores
    for name, value in {"STAGES": 2, "HIDDEN_STAGES": 3, "BLOCKS": 12}.items():
        monkeypatch.setattr(kernel, name, value)
    x = jnp.asarray(drawn(0, 8, 512), jnp.bfloat16)
    gate, up = (jnp.asarray(drawn(1 + number, 4, 512, 256) * 512**-0.5, jnp.bfloat16) for number in range(2))
    down = jnp.asarray(drawn(3, 4, 256, 256), jnp.bfloat16)
    groups = jnp.array([3, 4, 2], jnp.int32)
    weights = jnp.asarray(np.abs(drawn(4, 3, 8))).at[0, 2].set(0)
    used = np.array([0, 2])

    given = (x, gate, up, groups, weights)
    found = kernel.hidden(*given, function="silu", interpret=interpreted)
    wanted = Formula.hidden(x.astype(jnp.float32), *given[1:], "silu")
    assert not found[0, 2].any()
    np.testing.assert_allclose(found[used].astype(np.float32), wanted[used], rtol=2**-7, atol=2**-9)

    rows = jnp.asarray(wanted, jnp.bfloat16)
    found = kernel.products(rows, down, groups, interpret=interpreted)
    assert found.shape[0] == 2
    wanted = Formula.products(rows.astype(jnp.float32), down, groups)
    np.testing.assert_allclose(found.sum(0)[used], wanted.sum(0)[used], rtol=2**-7, atol=2**-7 * 256**0.5)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.planning.plan import devices_without_gpu, plan_device
from pallas_kernels.few_rows import hidden, products

mesh = make_mesh(MeshConfig(), devices_without_gpu(1, plan_device("h100")))

def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

with jax.set_mesh(mesh):
    for slots, rows in ((16, 8), (128, 64)):
        groups = array((slots,), jnp.int32)
        matrix = array((128, 2048, 768))
        weights = array((slots, rows), jnp.float32)
        calls = [
            jax.jit(hidden, static_argnames="function").lower(
                array((rows, 2048)), matrix, matrix, groups, weights, function="silu"
            ),
            jax.jit(products).lower(array((slots, rows, 768)), array((128, 768, 2048)), groups),
        ]
        for call in calls:
            compiled = call.compile()
            print('custom_call_target="mosaic_gpu' in compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["True 0"] * 4
