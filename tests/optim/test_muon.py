"""Muon against its formulas in float64, and where its matrices lie while they are orthogonalised.

L layers, D model width, N heads, H head dim, F feed-forward width.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.mesh.sharding import weight_shardings
from megajax.optim.distributed import optimizer_shardings
from megajax.optim.muon import muon_direction, orthogonalised, scale_by_muon, scale_by_normuon
from megajax.optim.optimizer import CLIP_EPSILON, Optimizer, OptimizerConfig
from megajax.parameters import Parameter

NUM_STEPS = 3
LEARNING_RATE = 1e-2
MUON = OptimizerConfig(name="muon", momentum=0.95)
NORMUON = OptimizerConfig(name="normuon", momentum=0.95)
RECORDS = {
    "query": Parameter(("layers", "embed", "heads", "head_dim"), "matrix"),
    "out": Parameter(("layers", "heads", "head_dim", "embed"), "matrix", num_inputs=2),
    "down": Parameter(("layers", "mlp", "embed"), "matrix"),
    "scale": Parameter(("layers", "norm"), "vector"),
    "embedding": Parameter(("vocab", "embed"), "embedding"),
    "head": Parameter(("embed", "vocab"), "head"),
    "router": Parameter(("layers", "embed", "experts"), "router"),
}
SHAPES = {
    "query": (3, 8, 2, 6),
    "out": (3, 2, 6, 8),
    "down": (3, 16, 8),
    "scale": (3, 8),
    "embedding": (16, 8),
    "head": (8, 16),
    "router": (3, 8, 4),
}
MATRICES = {"query": (3, 8, 12), "out": (3, 12, 8), "down": (3, 16, 8)}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@functools.cache
def run(config):
    """-> (parameters, state) after NUM_STEPS."""
    optimizer = Optimizer(config, RECORDS)
    params = jax.tree.map(jnp.asarray, random_tree(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(1, NUM_STEPS + 1):
        params, state, _ = update(random_tree(step), state, params, jnp.float32(LEARNING_RATE))
    return params, state


def numpy_newton_schulz(x):
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


def numpy_muon(name, beta=None):
    """Float64, one matrix after the other; beta: of NorMuon."""
    param = random_tree(0)[name].astype(np.float64).reshape(MATRICES[name])
    m = np.zeros_like(param)
    v = 0.0
    for step in range(1, NUM_STEPS + 1):
        grads = random_tree(step)
        norm = np.sqrt(sum(np.sum(grad.astype(np.float64) ** 2) for grad in grads.values()))
        grad = grads[name].astype(np.float64).reshape(MATRICES[name]) / (norm + CLIP_EPSILON)
        m = 0.95 * m + grad
        update = np.stack([numpy_newton_schulz(u) for u in grad + 0.95 * m])
        if beta is not None:
            v = beta * v + (1 - beta) * np.mean(update**2, 1, keepdims=True)
            even = update / np.sqrt(v)
            sizes = (np.linalg.norm(u, axis=(1, 2), keepdims=True) for u in (update, even))
            update = even * next(sizes) / next(sizes)
        scale = 0.2 * np.sqrt(max(MATRICES[name][1:]))
        param = param - LEARNING_RATE * (scale * update + MUON.weight_decay * param)
    return param.reshape(SHAPES[name])


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_follow_the_formulas_in_float64(name):
    # Float32: 6e-8 of an update of about 2e-3, times up to 3.4445**5 = 485 in the iteration; and of parameters near 1.
    np.testing.assert_allclose(run(MUON)[0][name], numpy_muon(name), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", MATRICES)
def test_normuon_follows_the_formulas_in_float64(name):
    np.testing.assert_allclose(run(NORMUON)[0][name], numpy_muon(name, beta=0.95), rtol=2e-6, atol=2e-6)
    assert np.abs(run(NORMUON)[0][name] - run(MUON)[0][name]).max() > 1e-4


def test_normuon_keeps_zeros_and_the_size_of_the_whole_update():
    record = Parameter(("layers", "embed", "mlp"), "matrix")
    grads = {"up": jnp.asarray(random_tree(1)["down"]).at[1].set(0)}
    muon = scale_by_muon(0.9, {"up": record})
    normuon = scale_by_normuon(0.9, 0.95, 1e-8, {"up": record})
    before, _ = muon.update(grads, muon.init(grads))
    after, _ = normuon.update(grads, normuon.init(grads))
    norms = [jnp.linalg.norm(update["up"], axis=(1, 2)) for update in (before, after)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    assert norms[1][1] == 0
    of_outputs = jnp.linalg.norm(after["up"], axis=1)
    np.testing.assert_allclose(of_outputs[0], of_outputs[0, 0], rtol=1e-5)  # in a first step all have one size


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in MATRICES])
def test_what_is_no_matrix_of_a_layer_is_updated_by_adamw(name):
    # The same operations in another program.
    np.testing.assert_allclose(run(MUON)[0][name], run(OptimizerConfig())[0][name], rtol=1e-6, atol=1e-7)


def test_a_matrix_has_one_moment_and_everything_else_two():
    leaves = [path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(run(MUON)[1]) if leaf.ndim]
    assert {name: leaves.count(name) for name in SHAPES} == {name: 1 if name in MATRICES else 2 for name in SHAPES}


@pytest.mark.parametrize("dtype, margin", [(jnp.float32, 0.0), (jnp.bfloat16, 0.1)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (1, 8)])
def test_singular_values_come_near_one(shape, dtype, margin):
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(1, 0.01, shape[0])
    x = orthogonalised(jnp.asarray((u * values) @ v, dtype))
    result = np.linalg.svd(x.astype(jnp.float32), compute_uv=False)
    # What the iteration does with numbers from 0.002 to 1, evaluated on a fine grid: 0.6818 to 1.2024.
    # bfloat16 rounds the entries of x to 0.4 %, which moves the singular values of 64 x 64 by up to 0.1.
    assert result.min() > 0.68 - margin and result.max() < 1.21 + margin


def test_every_matrix_of_a_stack_is_orthogonalised_by_itself():
    rng = np.random.default_rng(0)
    u = jnp.asarray(rng.normal(size=(2, 3, 8, 16)) * np.geomspace(1e-3, 1e3, 6).reshape(2, 3, 1, 1), jnp.float32)
    u = u.at[1, 0].set(0)  # a pipeline's row of padding
    together = muon_direction(u, Parameter(("chunks", "layers", "embed", "mlp"), "matrix"))
    experts = muon_direction(u, Parameter(("layers", "experts", "embed", "mlp"), "matrix"))
    alone = jnp.stack([muon_direction(matrix, Parameter(("embed", "mlp"), "matrix")) for matrix in u.reshape(6, 8, 16)])
    # The same sums in another order, times up to 3.4445**5 = 485.
    np.testing.assert_allclose(together, alone.reshape(u.shape), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(together, experts)
    np.testing.assert_array_equal(together[1, 0], 0)
    assert RECORDS["router"].num_stacked == 1  # its experts are outputs, not a stack


def test_a_transposed_matrix_has_the_transposed_update():
    u = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24)), jnp.float32)
    wide = muon_direction(u, Parameter(("embed", "mlp"), "matrix"))
    tall = muon_direction(u.T, Parameter(("mlp", "embed"), "matrix"))
    np.testing.assert_array_equal(wide, tall.T)


@pytest.mark.parametrize(
    "num_layers, gathers, sums",
    [
        (8, 0, 0),  # one matrix on each device
        (4, 0, 6),  # four matrices over eight devices: their norms, and s in each of the five iterations
    ],
)
def test_orthogonalising_gathers_nothing(make_test_mesh, num_layers, gathers, sums):
    mesh = make_test_mesh(fsdp=4, tensor=2)
    records = {"up": Parameter(("layers", "embed", "mlp"), "matrix")}
    params = {"up": jax.ShapeDtypeStruct((num_layers, 16, 32), jnp.float32)}
    shardings, optimizer = weight_shardings(records, mesh), Optimizer(MUON, records)
    of_state = optimizer_shardings(optimizer, params, shardings, mesh=mesh, shard_over_data=False)
    params, state = (
        jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, its_shardings)
        for tree, its_shardings in ((params, shardings), (jax.eval_shape(optimizer.init, params), of_state))
    )
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.set_mesh(mesh):
        update = jax.jit(optimizer.update, out_shardings=(shardings, of_state, None))
        program = update.lower(params, state, params, rate, grad_norm=rate).compile().as_text()
    assert len(re.findall(r" all-gather(-start)?\(", program)) == gathers
    assert len(re.findall(r" all-reduce(-start)?\(", program)) == sums
