"""The experts of a few tokens equal a loop over the choices; and the kernel, interpreted, equals its formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.few_tokens import few_tokens
from pallas_kernels import few_rows as kernel

E, K, D, F = 8, 2, 16, 24


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def formula(rows_ZRK, matrices, groups_Z):
    """As the kernel; the results of slots without a group are NaN. In two parts."""
    found = jnp.stack([jnp.einsum("zrk,zkn->znr", rows_ZRK, jnp.asarray(matrix)[groups_Z]) for matrix in matrices])
    found = jnp.where(groups_Z[:, None, None] < matrices[0].shape[0], found, jnp.nan)[:, None]
    return jnp.concatenate([found / 4, found * 3 / 4], 1)


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
    found = few_tokens(jnp.asarray(x), experts, weights, [gate, up], down, "swiglu", formula)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("same_rows", "num_matrices"), [(True, 2), (False, 1)])
def test_interpreted_kernel_equals_the_formula(same_rows, num_matrices, interpreted, monkeypatch):
    """Two tiles of columns, several parts, more steps than stages, a slot without a group."""
    monkeypatch.setattr(kernel, "STAGES", 2)
    monkeypatch.setattr(kernel, "BLOCKS", 8)
    rows = jnp.asarray(drawn(0, 1 if same_rows else 3, 8, 512), jnp.bfloat16)
    matrices = [jnp.asarray(drawn(1 + number, 4, 512, 256), jnp.bfloat16) for number in range(num_matrices)]
    groups = jnp.array([3, 4, 2], jnp.int32)
    found = kernel.products(rows, matrices, groups, interpret=interpreted).sum(1)
    wanted = formula(jnp.broadcast_to(rows, (3, 8, 512)), matrices, groups).astype(jnp.float32).sum(1)
    np.testing.assert_allclose(found[:, [0, 2]], wanted[:, [0, 2]], rtol=2**-7, atol=2**-7 * 512**0.5)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.planning.plan import devices_without_gpu, plan_device
from pallas_kernels.few_rows import products

mesh = make_mesh(MeshConfig(), devices_without_gpu(1, plan_device("h100")))

def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

with jax.set_mesh(mesh):
    slots = array((128,), jnp.int32)
    for rows, matrices in ((array((1, 8, 2048)), [array((128, 2048, 768))] * 2),
                           (array((128, 64, 768)), [array((128, 768, 2048))])):
        compiled = jax.jit(products).lower(rows, matrices, slots).compile()
        print('custom_call_target="mosaic_gpu' in compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["True 0"] * 2
