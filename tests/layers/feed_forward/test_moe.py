"""A layer with experts equals its formula, value and gradients: on any mesh, however tokens get to the experts."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.feed_forward.moe import ExpertsConfig, MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.layer import PADDING, NoState
from megajax.mesh.sharding import weight_shardings
from megajax.parallel.expert import AllGather, AllToAll, choose_exchange, exchange_of, make_plan, rounds_needed
from megajax.parameters import Structure, records

B, T, D, F, E, K = 8, 6, 8, 12, 8, 2
# float32 in another order of additions
TOLERANCE = dict(rtol=1e-5, atol=1e-5)
CONFIG = ExpertsConfig(
    D, F, "swiglu", False, 0.5, 0.5,
    num_experts=E, router=RouterConfig(top_k=K), shared=MlpConfig(D, 4, "swiglu", False, 0.5, 0.5), shared_gate=True,
    context="ring", dispatch="auto", buffer=1.0,
)  # fmt: skip


def parts_of(config: ExpertsConfig, cache=None):
    """-> (function (weights, x) -> (y, Terms), weights as a nested dict, records)."""
    graphdef, state = nnx.split(config.build(nnx.Rngs(params=0)))
    structure = Structure.of(state)

    def apply(weights, x):
        y, _, terms = nnx.merge(graphdef, structure.to_state(weights))(x, {}, cache)
        return y, terms

    return apply, structure.to_tree(state), records(state)


def formula(weights, x):
    """Every expert for every token, those that are not chosen with the weight 0; plus the gated shared experts."""
    logits = x @ weights["router"]
    top, chosen = jax.lax.top_k(logits, K)
    scores = jnp.sum(jax.nn.one_hot(chosen, E) * jax.nn.softmax(top)[..., None], -2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, weights["gate"]))
    hidden *= jnp.einsum("btd,edf->btef", x, weights["up"])
    routed = jnp.einsum("btef,efd,bte->btd", hidden, weights["down"], scores)
    shared = weights["shared"]
    shared_out = (jax.nn.silu(x @ shared["gate"]) * (x @ shared["up"])) @ shared["down"]
    return routed + jax.nn.sigmoid(x @ weights["shared_gate"]) * shared_out


def cases() -> dict:
    """{name: (weights, x)}: the router of the second sends all tokens to two experts, so that the others get none."""
    _, weights, _ = parts_of(CONFIG)
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    one_sided = np.zeros((D, E), np.float32)
    one_sided[:, 5] = 1.0
    one_sided[:, 4] = 0.5
    positive = np.abs(x)
    return {"as it comes": (weights, x), "all to two experts": (weights | {"router": one_sided}, positive)}


@functools.cache
def wanted() -> dict:
    """{case: (y, gradients)} by the formula."""

    @jax.jit
    def run(weights, x, d_y):
        y, vjp = jax.vjp(formula, weights, x)
        return y, vjp(d_y)

    return {name: run(*case, cotangent()) for name, case in cases().items()}


def cotangent():
    return np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


MESHES = {
    "one device": ({}, "auto"),
    "expert 8, all_to_all": (dict(expert=8), "all_to_all"),
    "expert 8, all_gather": (dict(expert=8), "all_gather"),
    "expert 2 x tensor 2 x data 2, all_to_all": (dict(expert=2, tensor=2, data=2), "all_to_all"),
}
SLOW_MESHES = {
    "expert 2 x context 2 x fsdp 2, all_to_all": (dict(expert=2, context=2, fsdp=2), "all_to_all"),
    "expert 4 x fsdp 2": (dict(expert=4, fsdp=2), "all_to_all"),
    "expert 2 x tensor 2 x data 2, all_gather": (dict(expert=2, tensor=2, data=2), "all_gather"),
    "expert 2 x context 2 x fsdp 2, all_gather": (dict(expert=2, context=2, fsdp=2), "all_gather"),
    "expert 4 x tensor 2": (dict(expert=4, tensor=2), "all_to_all"),
    "expert 4 x context 2": (dict(expert=4, context=2), "all_to_all"),
    "expert 2 x fsdp 4": (dict(expert=2, fsdp=4), "all_to_all"),
    "expert 2 x fsdp 2 x tensor 2": (dict(expert=2, fsdp=2, tensor=2), "all_to_all"),
    "expert 2 x context 2 x tensor 2": (dict(expert=2, context=2, tensor=2), "all_to_all"),
    "expert 2 x data 4": (dict(expert=2, data=4), "all_to_all"),
}


def mesh_cases():
    slow = [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW_MESHES.items()]
    return [pytest.param(*case, id=name) for name, case in MESHES.items()] + slow


def run_on(mesh, config, cases):
    """{case: ((y, gradients), Terms)}."""
    apply, _, weight_records = parts_of(config)

    @jax.jit
    def run(weights, x, d_y):
        (y, terms), vjp = jax.vjp(apply, weights, x)
        return y, vjp((d_y, jax.tree.map(jnp.zeros_like, terms))), terms

    found = {}
    with jax.set_mesh(mesh):
        for name, (weights, x) in cases.items():
            weights = jax.device_put(weights, weight_shardings(weight_records, mesh))
            y, gradients, terms = run(weights, x, cotangent())
            found[name] = (jax.device_get((y, gradients)), terms)
    return found


@pytest.mark.parametrize("sizes, dispatch", mesh_cases())
def test_experts_are_the_formula_on_any_mesh(sizes, dispatch, make_test_mesh):
    config = dataclasses.replace(CONFIG, dispatch=dispatch)
    found = run_on(make_test_mesh(**sizes), config, cases())
    for name, (result, terms) in found.items():
        jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), result, wanted()[name])
        np.testing.assert_allclose(np.sum(terms.metrics["expert_load"]), E, rtol=1e-5)
        if "expert" in sizes and name != "as it comes":
            # All goes to one device, or to two that have one expert each: as many rounds as there can be.
            num_tokens = B * T * sizes.get("tensor", 1) // 8
            rounds = exchange_of(num_tokens, sizes["expert"], E, K, dispatch, config.buffer).num_rounds
            assert terms.metrics["expert_rounds"] == rounds > 1


@pytest.mark.parametrize("batch, length, sizes", [
    (1, 3, dict(expert=2, fsdp=2, context=2)),
    pytest.param(2, 3, dict(expert=2, fsdp=2, context=2), marks=pytest.mark.slow),
    pytest.param(4, T, dict(expert=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
])  # fmt: skip
def test_few_sequences_are_counted_once(batch, length, sizes, make_test_mesh):
    """As when a few are generated, and devices have the same ones, or one on each replica, of which tensor splits the
    tokens."""
    config = dataclasses.replace(CONFIG, dispatch="all_to_all")
    weights, x = cases()["as it comes"]
    mesh = make_test_mesh(**sizes)
    apply, _, weight_records = parts_of(config)

    def loss(apply, weights, x):
        return jnp.sum(apply(weights, x) * cotangent()[:batch, :length])

    few = x[:batch, :length]
    reference = jax.value_and_grad(functools.partial(loss, formula), (0, 1))(weights, few)
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, weight_shardings(weight_records, mesh))
        run = jax.jit(jax.value_and_grad(functools.partial(loss, lambda w, x: apply(w, x)[0]), (0, 1)))
        found = run(placed, few)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), found, reference)


@pytest.mark.parametrize("dispatch, batch, wanted", [
    ("all_to_all", 4, 2), ("all_gather", 4, 2), ("all_to_all", 1, 2), ("all_gather", 1, 1),
])  # fmt: skip
def test_each_choice_is_sent_in_one_round(dispatch, batch, wanted, make_test_mesh):
    """Most choices are for experts of the first device, some are dropped (E); both devices have a batch of one."""
    rng = np.random.default_rng(2)
    preferred = rng.normal(size=(batch, 5, E)) + 2 * (np.arange(E) < E // 2)
    experts = np.argsort(-preferred)[..., :K].astype(np.int32)
    experts[rng.random(experts.shape) < 0.1] = E
    with jax.set_mesh(make_test_mesh(expert=2)):
        exchange = choose_exchange(experts.shape[:2], E, K, dispatch, buffer=1.25)

        @jax.jit
        def run(experts):
            plans = jax.lax.map(functools.partial(make_plan, experts, exchange), jnp.arange(exchange.num_rounds))
            return plans, rounds_needed(experts, exchange)

        plans, needed = jax.device_get(run(experts))
    loads = np.bincount(experts.ravel(), minlength=E + 1)[:E]
    np.testing.assert_array_equal(plans.sizes.sum(0), loads)
    assert np.max(plans.sizes.reshape(-1, 2, E // 2).sum(-1)) <= exchange.num_rows
    assert np.count_nonzero(plans.home < exchange.num_rows) == loads.sum()
    assert needed == wanted
    np.testing.assert_array_equal(plans.sizes.any(1), np.arange(exchange.num_rounds) < needed)


LOWERED = """
import hashlib, jax, jax.numpy as jnp
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.parallel.expert import choose_exchange, rounds_needed
with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, expert=2), jax.devices())):
    experts = jnp.zeros((8, 64, 2), jnp.int32)
    exchange = choose_exchange(experts.shape[:2], 8, 2, "all_to_all", buffer=1.25)
    text = jax.jit(lambda experts: rounds_needed(experts, exchange)).lower(experts).as_text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_every_process_lowers_the_same_program():
    """Otherwise no later start finds it in the compilation cache."""
    seeds = "1", "2", "3"
    processes = [
        subprocess.Popen([sys.executable, "-c", LOWERED], env=os.environ | {"PYTHONHASHSEED": seed}, text=True,
                         stdout=subprocess.PIPE)
        for seed in seeds
    ]  # fmt: skip
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert texts[0] and texts == [texts[0]] * len(seeds)


def test_only_the_first_round_saves_activations(make_test_mesh):
    """Under a policy that saves them by name, as execution.recompute does."""
    config = dataclasses.replace(CONFIG, dispatch="all_to_all")
    apply, weights, _ = parts_of(config)
    saved = jax.checkpoint(apply, policy=jax.checkpoint_policies.save_only_these_names("expert_rows"))
    _, x = cases()["as it comes"]
    with jax.set_mesh(make_test_mesh(expert=8)):
        residuals = jax.eval_shape(lambda weights, x: jax.vjp(saved, weights, x)[1], weights, x)
    num_rows = 8 * exchange_of(B * T // 8, 8, E, K, config.dispatch, config.buffer).num_rows
    shapes = [residual.shape for residual in jax.tree.leaves(residuals)]
    assert [shape for shape in shapes if shape[-2:] == (num_rows, D)] == [(num_rows, D)]


@pytest.mark.parametrize("sizes", [{}, dict(expert=8), dict(tensor=2), dict(expert=2, tensor=2)], ids=str)
def test_generation_drops_no_token_and_needs_one_round(sizes, make_test_mesh):
    """The router has a capacity, but does not use it."""
    router = RouterConfig(top_k=K, capacity_factor=0.25)
    config = dataclasses.replace(CONFIG, router=router)
    apply, _, weight_records = parts_of(config, NoState())
    mesh = make_test_mesh(**sizes)
    run = jax.jit(apply)
    with jax.set_mesh(mesh):
        for name, (weights, x) in cases().items():
            y, terms = run(jax.device_put(weights, weight_shardings(weight_records, mesh)), x)
            np.testing.assert_allclose(y, wanted()[name][0], **TOLERANCE)
            assert "expert_rounds" not in terms.metrics


@pytest.mark.parametrize("sizes", [{}, dict(expert=8)], ids=["one device", "expert 8"])
def test_padding_has_no_routed_experts_and_changes_no_other_token(sizes, make_test_mesh):
    mesh = make_test_mesh(**sizes)
    weights, x = cases()["as it comes"]
    padding = np.random.default_rng(2).random((B, T)) < 0.5
    config = dataclasses.replace(CONFIG, shared=None, shared_gate=False)
    graphdef, state = nnx.split(config.build(nnx.Rngs(params=0)))
    structure = Structure.of(state)
    weights = {name: weights[name] for name in structure.to_tree(state)}

    @jax.jit
    def run(weights, x, padding):
        return nnx.merge(graphdef, structure.to_state(weights))(x, {PADDING: padding}, NoState())[0]

    with jax.set_mesh(mesh):
        found, without = (np.asarray(run(weights, x, mask)) for mask in (padding, np.zeros_like(padding)))
    assert not found[padding].any() and without[padding].any()
    np.testing.assert_allclose(found[~padding], without[~padding], **TOLERANCE)


def test_auto_receives_as_little_as_possible():
    def chosen(num_tokens, num_ranks, num_experts, top_k):
        return exchange_of(num_tokens, num_ranks, num_experts, top_k, dispatch="auto", buffer=1.5)

    mixtral = chosen(4096, 8, 8, 2)
    assert isinstance(mixtral, AllToAll)
    assert (mixtral.room, mixtral.num_rows, mixtral.num_rounds) == (1536, 8 * 1536, 3)
    # 12 choices of an expert per token and buffer, on 16 devices and on 8: fewer of them than tokens, or more.
    assert isinstance(chosen(4096, 16, 128, 8), AllToAll)
    qwen = chosen(4096, 8, 128, 8)
    assert qwen == AllGather(8, 128, 8, 4096, num_rows=12 * 4096)
    assert qwen.num_rounds == 6  # 8 * 8 choices per token at most
    one_device = chosen(4096, 1, 128, 8)
    assert one_device == AllGather(1, 128, 8, 4096, num_rows=8 * 4096)
    assert one_device.num_rounds == 1
    # A buffer is never larger than what all tokens need: one row each for the one expert of a device.
    assert exchange_of(4096, 8, 8, 2, "all_to_all", buffer=10.0).room == 4096
    assert exchange_of(4096, 2, 4, 3, "all_gather", buffer=10.0).num_rows == 2 * 2 * 4096


@pytest.mark.parametrize("moe, message", [
    (MoeConfig(shared_dim=4), "but no experts; set --model.moe.num_experts"),
    (MoeConfig(8, shared_gate=True), "set --model.moe.shared_dim"),
    (MoeConfig(1), "top_k=2 is more than model.moe.num_experts=1"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(moe, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        moe.check(has_bias=False)
    with pytest.raises(ValueError, match="leave mlp out of model.biases"):
        MoeConfig(8).check(has_bias=True)
