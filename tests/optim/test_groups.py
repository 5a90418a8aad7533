"""Parameter groups: how they are written, which one decides, and what it changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config, incompatibilities
from megajax.optim.groups import Group, parse_group, rules_of
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.overrides import override
from megajax.parameters import Parameter

RECORDS = {
    "layers": {
        "dense": {
            "query": Parameter(("layers", "embed", "heads"), "matrix"),
            "query_bias": Parameter(("layers", "heads"), "vector"),
            "router": Parameter(("layers", "embed", "experts"), "router"),
        }
    },
    "embedding": Parameter(("vocab", "embed"), "embedding"),
}
SHAPES = {
    "layers": {"dense": {"query": (2, 4, 6), "query_bias": (2, 6), "router": (2, 4, 3)}},
    "embedding": (5, 4),
}
LEARNING_RATE = 1e-2


def random_tree(seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def rules(*groups, optimizer="adamw"):
    """{last part of the name: (update rule, decay, scale)}"""
    tree = rules_of(RECORDS, groups, optimizer, 0.1)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path[-1].key: (rule.optimizer, rule.weight_decay, rule.learning_rate_scale) for path, rule in leaves}


def moved(**fields):
    """How far one step with these fields moves each parameter."""
    optimizer = Optimizer(OptimizerConfig(**fields), RECORDS)
    params = random_tree(0)
    new, _, _ = optimizer.update(random_tree(1), optimizer.init(params), params, jnp.float32(LEARNING_RATE))
    distance = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), new, params)
    return distance["layers"]["dense"] | {"embedding": distance["embedding"]}


def test_the_command_line_and_json_keep_groups():
    text = "*.router* learning_rate_scale=0.1 weight_decay=0,embedding optimizer=lion"
    for arguments in ([f"--optimizer.groups={text}"], ["--optimizer.groups", *text.split(",")]):
        config = override(Config(), arguments)
        assert config.optimizer.groups == tuple(text.split(","))
        config.optimizer.check(100)
        assert Config.from_json(config.to_json()) == config
    parsed = [parse_group(group) for group in config.optimizer.groups]
    assert parsed == [Group("*.router*", 0.1, 0.0, None), Group("embedding", 1.0, None, "lion")]


def test_without_groups_all_follow_the_section():
    assert rules() == {
        "query": ("adamw", 0.1, 1.0),
        "query_bias": ("adamw", 0.0, 1.0),
        "router": ("adamw", 0.1, 1.0),
        "embedding": ("adamw", 0.1, 1.0),
    }


def test_the_first_match_wins():
    assert rules("*.query learning_rate_scale=2", "layers.* weight_decay=0.3 optimizer=lion", "* optimizer=sgd") == {
        "query": ("adamw", 0.1, 2.0),
        "query_bias": ("lion", 0.3, 1.0),
        "router": ("lion", 0.3, 1.0),
        "embedding": ("sgd", 0.1, 1.0),
    }


def test_muon_means_adamw_for_what_is_no_matrix():
    of_group = rules("layers.* optimizer=muon", optimizer="lion")
    assert {name: rule[0] for name, rule in of_group.items()} == {
        "query": "muon",
        "query_bias": "adamw",
        "router": "adamw",
        "embedding": "lion",
    }
    assert {name: rule[0] for name, rule in rules(optimizer="muon").items()} == {
        "query": "muon",
        "query_bias": "adamw",
        "router": "adamw",
        "embedding": "adamw",
    }


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_group_scales_the_learning_rate_of_its_parameters_alone(name):
    plain, scaled = moved(name=name), moved(name=name, groups=("*.query learning_rate_scale=0.25",))
    # Differences of float32 numbers near 1: 6e-8 each.
    np.testing.assert_allclose(scaled["query"], 0.25 * plain["query"], rtol=0, atol=3e-7)
    assert np.abs(plain["query"]).max() > 1e-4
    for other in ("query_bias", "router", "embedding"):
        np.testing.assert_allclose(scaled[other], plain[other], rtol=0, atol=3e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_group_replaces_the_decay_also_where_there_is_none_by_default(name):
    plain = moved(name=name, weight_decay=0.0)
    groups = ("*bias weight_decay=0.5", "*.router weight_decay=0", "embedding weight_decay=0.25")
    changed, params = moved(name=name, weight_decay=0.1, groups=groups), random_tree(0)
    params = params["layers"]["dense"] | {"embedding": params["embedding"]}
    for parameter, decay in {"query": 0.1, "query_bias": 0.5, "router": 0.0, "embedding": 0.25}.items():
        # p - lr * (direction + decay p); in the first step SGD adds it to the gradient with the same result.
        expected = plain[parameter] - LEARNING_RATE * decay * params[parameter]
        np.testing.assert_allclose(changed[parameter], expected, rtol=0, atol=3e-7)


def test_a_group_replaces_the_update_rule_of_its_parameters():
    mixed = moved(groups=("embedding optimizer=lion", "*.router optimizer=sgd", "*.query optimizer=muon"))
    of = {"embedding": "lion", "router": "sgd", "query": "muon", "query_bias": "adamw"}
    for parameter, name in of.items():
        np.testing.assert_allclose(mixed[parameter], moved(name=name)[parameter], rtol=0, atol=3e-7)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["must be a pattern", "field=value", "for example"]),
        ("embedding", ["must be a pattern", "field=value", "for example"]),
        ("weight_decay=0", ["must be a pattern", "for example"]),
        ("embedding learning_rate=0.1", ["'learning_rate' is not a field", "learning_rate_scale, weight_decay"]),
        ("embedding weight_decay", ["weight_decay= must be a number", "for example"]),
        ("embedding weight_decay=big", ["weight_decay=big must be a number", "for example"]),
        (
            "embedding weight_decay=-1",
            ["weight_decay=-1.0 must be a finite number (float32), at least 0 and", ", or None"],
        ),
        ("embedding weight_decay=nan", ["weight_decay=nan must be a finite number"]),
        (
            "embedding learning_rate_scale=0",
            ["learning_rate_scale=0.0 must be", "above 0 and", "; use learning_rate_scale=1.0"],
        ),
        ("embedding learning_rate_scale=inf", ["learning_rate_scale=inf must be a finite number"]),
        ("embedding optimizer=adam", ["optimizer='adam' must be one of adamw, sgd, lion, muon"]),
        ("embedding weight_decay=0 weight_decay=1", ["sets weight_decay twice", "leave one"]),
    ],
)
def test_what_is_no_group_is_refused_in_one_line(text, parts):
    with pytest.raises(ValueError) as refusal:
        OptimizerConfig(groups=(text,)).check(100)
    message = str(refusal.value)
    assert message.startswith(f"optimizer.groups={text!r}") and "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "groups, parts",
    [
        (("*.kernel weight_decay=0",), ["'*.kernel weight_decay=0' matches no trained parameter", "like embedding"]),
        (("dense.query weight_decay=0",), ["matches no trained parameter", "* stands for any part"]),
        (
            ("layers.* weight_decay=0", "*.query weight_decay=1"),
            ["'*.query weight_decay=1' applies to no parameter", "first match wins", "put it before"],
        ),
        (("embedding optimizer=muon",), ["matches no matrix of a layer (embedding)", "use optimizer=adamw"]),
    ],
)
def test_a_group_that_decides_for_nothing_is_refused_in_one_line(groups, parts):
    with pytest.raises(ValueError) as refusal:
        Optimizer(OptimizerConfig(groups=groups), RECORDS)
    message = str(refusal.value)
    assert message.startswith("optimizer.groups=") and "\n" not in message
    assert all(part in message for part in parts), message


def test_an_unknown_update_rule_is_refused():
    with pytest.raises(ValueError, match="optimizer.name=adam is unknown; use adamw, sgd, lion, muon"):
        Optimizer(OptimizerConfig(name="adam"), RECORDS)


def test_a_run_goes_on_with_another_learning_rate_but_not_with_another_update_rule():
    def config(*groups):
        return Config(optimizer=OptimizerConfig(groups=groups))

    decays = "*.query weight_decay=0"
    assert not incompatibilities(config(), config(decays))
    assert not incompatibilities(config("* optimizer=lion"), config("* optimizer=lion learning_rate_scale=0.5"))
    assert incompatibilities(config(decays), config("*.query optimizer=lion"))[0].startswith("optimizer.groups:")
    # The first match wins: the query is now AdamW's.
    assert incompatibilities(config("* optimizer=lion"), config(decays, "* optimizer=lion"))


def test_groups_of_a_recipe_are_checked_with_its_config():
    config = dataclasses.replace(Config(), optimizer=OptimizerConfig(groups=("embedding lr=1",)))
    with pytest.raises(ValueError, match="optimizer.groups='embedding lr=1'"):
        config.check()
