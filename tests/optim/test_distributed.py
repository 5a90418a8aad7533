"""Optimizer state shardings on a mesh of 8 CPU devices: data 2, fsdp 2, tensor 2."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from megajax.optim.distributed import moment_shardings, optimizer_shardings, unsplit_moments
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.parameters import Parameter

P = PartitionSpec
SPECS = {
    "kernel": P(None, "fsdp", "tensor"),
    "scale": P(None, "fsdp"),
    "embedding": P("tensor", "fsdp"),
    "bias": P(),
}
SHAPES = {"kernel": (3, 8, 16), "scale": (3, 8), "embedding": (32, 8), "bias": (3, 6)}
WITH_DATA = {
    "kernel": P(None, ("fsdp", "data"), "tensor"),
    "scale": P(None, ("fsdp", "data")),
    "embedding": P("tensor", ("fsdp", "data")),
    "bias": P(None, "data"),
}
RECORDS = {
    "kernel": Parameter(("layers", "embed", "mlp"), "matrix"),
    "scale": Parameter(("layers", "embed"), "vector"),
    "embedding": Parameter(("vocab", "embed"), "embedding"),
    "bias": Parameter(("layers", "norm"), "vector"),
}
CONFIGS = {
    "adamw": OptimizerConfig(),
    "lion": OptimizerConfig(name="lion"),
    "sgd": OptimizerConfig(name="sgd"),
    "muon": OptimizerConfig(name="muon"),
    "normuon": OptimizerConfig(name="normuon"),
    "groups": OptimizerConfig(
        groups=("scale optimizer=lion", "kernel optimizer=muon learning_rate_scale=0.5", "bias optimizer=sgd")
    ),
}
NUM_MOMENTS = {"adamw": 8, "lion": 4, "sgd": 4, "muon": 1 + 3 * 2, "normuon": 2 + 3 * 2, "groups": 1 + 1 + 1 + 2}


class OptaxChain(Optimizer):
    """Another optimizer than megajax has: a second moment of all, a first one of some, a factored one."""

    def transform(self, rules):
        some = jax.tree.map(lambda rule: rule.record.role != "vector", rules)
        return optax.chain(
            optax.scale_by_rms(),
            optax.masked(optax.trace(0.9), some),
            optax.scale_by_factored_rms(min_dim_size_to_factor=8),
        )


@pytest.fixture(scope="module")
def mesh(make_test_mesh):
    return make_test_mesh(data=2, fsdp=2, tensor=2)


def named(mesh, specs):
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def abstract(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def specs_of(shardings):
    return {name: sharding.spec for name, sharding in shardings.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shard_over_data, expected", [(False, SPECS), (True, WITH_DATA)])
def test_every_moment_lies_like_its_parameter(mesh, name, shard_over_data, expected):
    optimizer = Optimizer(CONFIGS[name], RECORDS)
    shardings = optimizer_shardings(
        optimizer, abstract(SHAPES), named(mesh, SPECS), mesh=mesh, shard_over_data=shard_over_data
    )
    state = jax.eval_shape(optimizer.init, abstract(SHAPES))
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        of_parameter = expected[path[-1].key] if leaf.ndim else P()
        dims = zip(leaf.shape, of_parameter, strict=False)
        assert sharding.spec == P(*(None if size == 1 else axes for size, axes in dims))
    assert sum(leaf.ndim > 0 for _, leaf in leaves) == NUM_MOMENTS[name]


@pytest.mark.parametrize("shard_over_data, expected", [(False, SPECS), (True, WITH_DATA)])
def test_the_state_of_any_optax_chain_lies_like_the_parameters_or_is_logged(mesh, shard_over_data, expected, caplog):
    optimizer = OptaxChain(OptimizerConfig(), RECORDS)
    with caplog.at_level(logging.WARNING, logger="megajax"):
        shardings = optimizer_shardings(
            optimizer, abstract(SHAPES), named(mesh, SPECS), mesh=mesh, shard_over_data=shard_over_data
        )
    assert shardings[0].nu == {name: NamedSharding(mesh, spec) for name, spec in expected.items()}
    assert shardings[1].inner_state.trace["kernel"].spec == expected["kernel"]
    assert shardings[2].v["bias"].spec == expected["bias"]
    assert shardings[2].v_row["kernel"].spec == shardings[2].count.spec == P()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "2.v_row.kernel (3, 8), 2.v_col.embedding (32,), 2.v_col.kernel (3, 16)" in lines[0]


@pytest.mark.parametrize(
    "shape, spec, expected",
    [
        ((4, 8, 16), P(None, "fsdp", "tensor"), P(None, ("fsdp", "data"), "tensor")),
        ((4, 6, 16), P(None, "fsdp", "tensor"), P(None, "fsdp", ("tensor", "data"))),
        ((4, 6, 6), P(None, "fsdp", "tensor"), P("data", "fsdp", "tensor")),
        ((4, 6), P(), P(None, "data")),
        ((4, 5), P(), P("data", None)),
        ((8,), P("fsdp"), P(("fsdp", "data"))),
        ((3, 5), P(), P()),
        ((), P(), P()),
        ((4, 8), P("data", "fsdp"), P("data", "fsdp")),
        ((4, 16), P(None, ("fsdp", "tensor")), P(None, ("fsdp", "tensor", "data"))),
    ],
)
def test_data_axis_goes_to_the_first_dim_that_divides(mesh, shape, spec, expected):
    result = moment_shardings(abstract({"w": shape}), named(mesh, {"w": spec}), mesh=mesh, shard_over_data=True)
    assert result["w"].spec == expected


def test_parameters_that_cannot_be_split_are_named(mesh):
    params = abstract({"a": (3, 5), "b": (7,), "c": (8,)})
    assert unsplit_moments(params, named(mesh, {"a": P(), "b": P(), "c": P()}), mesh) == ["a", "b"]


@functools.cache
def run_two_steps(mesh, shard_over_data, config=OptimizerConfig(), kind=Optimizer):
    rng = np.random.default_rng(0)
    shardings = named(mesh, SPECS)
    optimizer = kind(config, RECORDS)
    state_shardings = optimizer_shardings(
        optimizer, abstract(SHAPES), shardings, mesh=mesh, shard_over_data=shard_over_data
    )
    params = {k: jax.device_put(rng.normal(size=v).astype(np.float32), shardings[k]) for k, v in SHAPES.items()}
    grads = {k: jax.device_put(rng.normal(size=v).astype(np.float32), shardings[k]) for k, v in SHAPES.items()}
    replicated = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
        update = jax.jit(optimizer.update, out_shardings=(shardings, state_shardings, replicated))
        for _ in range(2):
            params, state, metrics = update(grads, state, params, jnp.float32(0.01))
        compiled = update.lower(grads, state, params, jnp.float32(0.01)).compile()
    return params, state, metrics, compiled


@pytest.mark.parametrize("name", ["normuon", "groups"])
@pytest.mark.parametrize("shard_over_data", [False, True])
def test_a_mesh_makes_the_parameters_of_one_device(mesh, make_test_mesh, name, shard_over_data):
    alone, _, _, _ = run_two_steps(make_test_mesh(), False, CONFIGS[name])
    params, _, _, _ = run_two_steps(mesh, shard_over_data, CONFIGS[name])
    # Sums in another order, 6e-8 of an update, which Newton-Schulz may multiply by up to 3.4445**5 = 485; updates are
    # about lr * 0.2 = 2e-3.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=5e-7), params, alone)


def bytes_of_moments(state):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_splitting_the_state_over_data_changes_no_parameter(mesh, name):
    whole_params, whole_state, whole_metrics, _ = run_two_steps(mesh, False, CONFIGS[name])
    split_params, split_state, split_metrics, _ = run_two_steps(mesh, True, CONFIGS[name])
    # The norm is summed in another order, so the clip coefficient may differ in the last bit.
    np.testing.assert_allclose(split_metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-6)
    for name in SHAPES:
        np.testing.assert_allclose(split_params[name], whole_params[name], rtol=1e-6, atol=5e-7)
        assert split_params[name].sharding.is_equivalent_to(whole_params[name].sharding, split_params[name].ndim)
    assert bytes_of_moments(split_state) * 2 == bytes_of_moments(whole_state)


def test_moments_are_never_gathered(mesh):
    """Split over data, the update gathers each new parameter once and nothing else."""
    *_, compiled = run_two_steps(mesh, shard_over_data=True)
    gathers = [
        line for line in compiled.as_text().splitlines() if " all-gather(" in line or " all-gather-start(" in line
    ]
    assert len(gathers) <= len(SHAPES), gathers


@pytest.mark.parametrize("name, kind", [*((name, Optimizer) for name in CONFIGS), ("adamw", OptaxChain)])
def test_offloaded_moments_stay_on_the_host_and_change_nothing(mesh, name, kind):
    config = CONFIGS[name]
    params, state, metrics, _ = run_two_steps(mesh, True, config, kind)
    offloading = dataclasses.replace(config, offload_state=True)
    off_params, off_state, off_metrics, _ = run_two_steps(mesh, True, offloading, kind)
    assert jax.tree.structure(off_state) == jax.tree.structure(state)
    for leaf in jax.tree.leaves(off_state):
        assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim else "device")
    assert {leaf.sharding.memory_kind for leaf in off_params.values()} == {"device"}
    plain, offloaded = (params, state, metrics), (off_params, off_state, off_metrics)
    # The same operations in another program: the last bit may differ.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), plain, offloaded)


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_rounded_moments_and_their_scales_are_offloaded_too(mesh, moments):
    config = dataclasses.replace(CONFIGS["adamw"], moments=moments)
    params, _, _, _ = run_two_steps(mesh, True, config)
    off_params, state, _, _ = run_two_steps(mesh, True, dataclasses.replace(config, offload_state=True))
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim else "device")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), off_params, params)
