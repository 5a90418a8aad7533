"""The router is Megatron's, number for number (tests/oracles/numbers.npz, made with Megatron Core 0.20.0)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.feed_forward.router import MIN_IN_PARTS, Router, RouterConfig, TowardsBalance, load, sinkhorn
from megajax.parallel.context import sequence_order

ORACLE = np.load(Path(__file__).parents[2] / "oracles" / "numbers.npz")
LOGITS = ORACLE["router/logits"]
T, E = LOGITS.shape
BIAS = ORACLE["router/expert_bias"]


def route(config: RouterConfig, logits=LOGITS[None], expert_bias=None, **how):
    """-> (dense weights [B, T, E], routing table, Terms) of tokens with these logits."""
    router = Router(config, E, E, 0.02, "ring", rngs=nnx.Rngs(0))
    router.weight = router.weight.replace(jnp.eye(E))
    if expert_bias is not None:
        router.expert_bias.set_value(jnp.asarray(expert_bias))
    choice, terms = router(jnp.asarray(logits, jnp.float32), **how)
    dense = jax.nn.one_hot(choice.experts_BTK, E) * choice.weights_BTK[..., None]
    return np.asarray(dense.sum(2)), np.asarray(jax.nn.one_hot(choice.experts_BTK, E).sum(2)) > 0, terms


@pytest.mark.parametrize("name, config", [
    ("softmax_top2", RouterConfig()),
    ("pre_softmax_top2", RouterConfig(score="softmax_all")),
    ("sigmoid_bias_top2", RouterConfig(score="sigmoid", bias_update_rate=1e-3, scale=2.5)),
    ("group_limited_top4",
     RouterConfig(top_k=4, score="sigmoid", bias_update_rate=1e-3, groups=(4, 2))),
    ("drop_capacity0.75", RouterConfig(capacity_factor=0.75)),
])  # fmt: skip
def test_weights_and_experts_are_megatrons(name, config):
    config.check(E)
    bias = BIAS if config.bias_update_rate else None
    weights, table, _ = route(config, expert_bias=bias)
    np.testing.assert_allclose(weights[0], ORACLE[f"router/{name}/probs"], rtol=2e-6, atol=1e-7)
    if f"router/{name}/map" in ORACLE.files:
        np.testing.assert_array_equal(table[0], ORACLE[f"router/{name}/map"])


@pytest.mark.parametrize("config", [
    RouterConfig(top_k=1, score="sigmoid"),
    RouterConfig(score="sqrt_softplus", scale=2.0),
    RouterConfig(top_k=4, score="softmax_all", groups=(4, 2)),
], ids=["one sigmoid", "sqrt_softplus", "groups by their softmax"])  # fmt: skip
def test_weights_are_the_formula(config):
    config.check(E)
    logits = np.random.default_rng(0).normal(0, 2, (64, E))
    scores = {
        "softmax_all": np.exp(logits) / np.exp(logits).sum(1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(logits))),
    }[config.score]
    groups = np.sort(scores.reshape(64, config.groups[0], -1))[:, :, -(config.top_k // config.groups[1]) :].sum(-1)
    best = groups >= np.sort(groups)[:, -config.groups[1], None]
    allowed = scores * best.repeat(E // config.groups[0], 1)
    weights = np.where(allowed >= np.sort(allowed)[:, -config.top_k, None], scores, 0)
    if not config.is_softmax and config.top_k > 1:
        weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(route(config, logits[None])[0][0], config.scale * weights, rtol=1e-5)


@pytest.mark.parametrize("fields, value", [
    (dict(aux_loss=1e-2), "aux_loss_top2_coeff1e-2"),
    (dict(aux_loss=1e-2, aux_loss_scope="sequence"), "aux_loss_top2_coeff1e-2"),
    (dict(z_loss=1e-3), "z_loss_coeff1e-3"),
])  # fmt: skip
def test_losses_are_megatrons(fields, value):
    _, _, terms = route(RouterConfig(**fields))
    name = next(iter(fields))
    assert list(terms.auxiliary) == [f"router_{name}"]
    np.testing.assert_allclose(terms.auxiliary[f"router_{name}"], ORACLE[f"router/{value}"], rtol=1e-6)


def test_a_bias_moves_the_balance_loss_not_at_all():
    """It is the balance of the scores, whatever the bias and the groups make of them."""
    config = dict(top_k=4, score="sigmoid", bias_update_rate=1e-3, aux_loss=0.1)
    values = [
        route(RouterConfig(**config, **groups), expert_bias=bias)[2].auxiliary["router_aux_loss"]
        for bias, groups in ((np.zeros(E, np.float32), {}), (BIAS, dict(groups=(4, 2))))
    ]
    assert values[0] == values[1]
    scores = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    counts = np.bincount(np.argsort(-scores)[:, :4].ravel(), minlength=E)
    shares = (scores / scores.sum(1, keepdims=True)).sum(0)
    np.testing.assert_allclose(values[0], 0.1 * E / (4 * T * T) * (shares * counts).sum(), rtol=1e-6)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_losses_of_a_batch_are_the_mean_of_those_of_its_microbatches(scope):
    logits = np.random.default_rng(0).normal(size=(4, T, E)).astype(np.float32)
    config = RouterConfig(aux_loss=0.1, aux_loss_scope=scope, z_loss=0.1)
    whole = route(config, logits)[2].auxiliary
    parts = [route(config, part)[2].auxiliary for part in (logits[:2], logits[2:])]
    for name, value in whole.items():
        np.testing.assert_allclose(np.mean([part[name] for part in parts]), value, rtol=1e-6)


def test_what_is_reported_is_the_load():
    _, table, terms = route(RouterConfig(capacity_factor=0.75))
    load = ORACLE["router/softmax_top2/map"].sum(0) * E / (2 * T)
    np.testing.assert_allclose(terms.metrics["expert_load"], load, rtol=1e-6)
    np.testing.assert_allclose(terms.metrics["router_max_load"], load.max(), rtol=1e-6)
    np.testing.assert_allclose(terms.metrics["router_dropped"], 1 - table.sum() / (2 * T), rtol=1e-6)
    shares = np.asarray(jax.nn.softmax(LOGITS.astype(np.float64)))
    np.testing.assert_allclose(terms.metrics["router_entropy"], -(shares * np.log(shares)).sum(1).mean(), rtol=1e-6)


def test_the_last_tokens_of_a_sequence_are_dropped_by_position():
    # 0.7 of an even share, rounded up, are 3 tokens.
    _, table, _ = route(RouterConfig(capacity_factor=0.7, drop="position"), np.stack([LOGITS, LOGITS[::-1]]))
    wanted = ORACLE["router/softmax_top2/map"]
    for found, whole in zip(table, (wanted, wanted[::-1]), strict=True):
        np.testing.assert_array_equal(found, whole & (np.cumsum(whole, 0) <= 3))


@pytest.mark.parametrize("config", [RouterConfig(capacity_factor=0.25), RouterConfig(assignment="sinkhorn")])
def test_generation_treats_each_token_by_itself(config):
    weights, _, terms = route(config, generates=True)
    np.testing.assert_allclose(weights[0], ORACLE["router/softmax_top2/probs"], rtol=2e-6)
    assert "router_dropped" not in terms.metrics


@pytest.mark.parametrize("num_tokens", [MIN_IN_PARTS - 1, MIN_IN_PARTS])
def test_generation_has_the_logits_of_training(num_tokens):
    router = Router(RouterConfig(top_k=2), 256, 16, 0.2, "ring", rngs=nnx.Rngs(0))
    x_BTD = jax.random.normal(jax.random.key(1), (1, num_tokens, 256), jnp.bfloat16)
    choices = [jax.jit(lambda x, how=how: router(x, generates=how)[0])(x_BTD) for how in (False, True)]
    np.testing.assert_array_equal(choices[0].experts_BTK, choices[1].experts_BTK)
    np.testing.assert_allclose(choices[0].weights_BTK, choices[1].weights_BTK, rtol=1e-5)


@pytest.mark.parametrize("drop", [pytest.param("probability", marks=pytest.mark.slow), "position"])
def test_a_split_sequence_drops_the_same(drop, make_test_mesh):
    config = RouterConfig(capacity_factor=0.5, drop=drop)
    logits = np.random.default_rng(0).normal(size=(2, 16, E)).astype(np.float32)
    wanted = route(config, logits)[0]
    order = sequence_order(16, 2, "ring")
    with jax.set_mesh(make_test_mesh(context=2, fsdp=2, tensor=2)):
        found = jax.jit(lambda logits: route_traced(config, logits))(logits[:, order])
    np.testing.assert_allclose(found, wanted[:, order], rtol=1e-6)


def route_traced(config, logits):
    router = Router(config, E, E, 0.02, "ring", rngs=nnx.Rngs(0))
    router.weight = router.weight.replace(jnp.eye(E))
    choice, _ = router(logits)
    return (jax.nn.one_hot(choice.experts_BTK, E) * choice.weights_BTK[..., None]).sum(2)


def test_sinkhorn_gives_every_expert_its_share():
    table = np.asarray(sinkhorn(jnp.asarray(LOGITS[None])))[0]
    np.testing.assert_allclose(table.sum(1), 1 / T, rtol=1e-3)
    np.testing.assert_allclose(table.sum(0), 1 / E, rtol=1e-3)
    # The fixed point in float64, from the formula alone.
    costs = np.exp(LOGITS.astype(np.float64))
    experts = np.ones(E)
    for _ in range(200):
        tokens = 1 / T / (costs @ experts)
        experts = 1 / E / (tokens @ costs)
    np.testing.assert_allclose(table, tokens[:, None] * costs * experts, rtol=2e-3)
    _, chosen, _ = route(RouterConfig(assignment="sinkhorn"))
    np.testing.assert_array_equal(chosen[0], table >= np.sort(table, 1)[:, -2:-1])


def test_the_benchmark_gives_every_expert_the_same(caplog):
    _, table, terms = route(RouterConfig(top_k=3, assignment="balanced_benchmark"))
    assert np.all(table.sum((0, 1)) == 3 * T / E) and np.all(table.sum(-1) == 3)
    assert terms.metrics["router_max_load"] == 1.0


def test_the_bias_moves_against_the_load():
    update = TowardsBalance(1e-3)
    np.testing.assert_allclose(update(jnp.zeros(3), jnp.array([0.5, 1.0, 1.5])), [1e-3, 0, -1e-3], rtol=1e-6)
    assert update == TowardsBalance(1e-3)


def test_rounding_of_an_even_load_does_not_move_the_bias():
    """In float32, 41 * (1 / 41) is 1 - 2^-24."""
    even = load(jnp.arange(2 * 41, dtype=jnp.int32).reshape(1, -1, 1) % 2, 2).mean(0)
    assert np.all(even != 1)
    np.testing.assert_array_equal(TowardsBalance(1e-3)(jnp.zeros(2), even), 0)


@pytest.mark.parametrize("config, message", [
    (RouterConfig(top_k=9), "top_k=9 is more than model.moe.num_experts=8"),
    (RouterConfig(groups=(3, 1)), "groups=3,1: 3 groups do not divide model.moe.num_experts=8"),
    (RouterConfig(groups=(2, 4)), "groups=2,4: the groups per token must be at most the number of groups"),
    (RouterConfig(top_k=3, groups=(4, 1)), "top_k=3 is more than the 2 experts of the groups of a token"),
    (RouterConfig(bias_update_rate=1e-3), "use --model.moe.router.score=sigmoid"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.check(E)
