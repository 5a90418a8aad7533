"""The update rules against plain float64 loops, which parameters decay, clipping, and the step that is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megajax.optim.optimizer import CLIP_EPSILON, Optimizer, OptimizerConfig
from megajax.parameters import Parameter

NUM_STEPS = 5
LEARNING_RATE = 1e-2
RECORDS = {
    "block": {
        "kernel": Parameter(("layers", "embed", "mlp"), "matrix"),
        "bias": Parameter(("layers", "mlp"), "vector"),
    },
    "embedding": Parameter(("vocab", "embed"), "embedding"),
}
SHAPES = {"block": {"kernel": (3, 4, 5), "bias": (3, 5)}, "embedding": (7, 4)}


def is_shape(node):
    return isinstance(node, tuple)


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape)


def to_device(tree, dtype=jnp.float32):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def numpy_decayed(config, update, param, decays):
    decayed = decays * config.weight_decay * param
    return update + (decayed * (update * param >= 0) if config.cautious_decay else decayed)


def numpy_adamw(config, grad, param, decays, memory):
    step = memory["step"] = memory.get("step", 0) + 1
    m = memory["m"] = config.betas[0] * memory.get("m", 0.0) + (1 - config.betas[0]) * grad
    v = memory["v"] = config.betas[1] * memory.get("v", 0.0) + (1 - config.betas[1]) * grad**2
    m_hat, v_hat = m / (1 - config.betas[0] ** step), v / (1 - config.betas[1] ** step)
    update = m_hat / (np.sqrt(v_hat) + config.epsilon)
    return param - LEARNING_RATE * numpy_decayed(config, update, param, decays)


def numpy_lion(config, grad, param, decays, memory):
    m = memory.get("m", 0.0)
    memory["m"] = config.betas[1] * m + (1 - config.betas[1]) * grad
    sign = np.sign(config.betas[0] * m + (1 - config.betas[0]) * grad)
    return param - LEARNING_RATE * numpy_decayed(config, sign, param, decays)


def numpy_sgd(config, grad, param, decays, memory):
    decayed = grad + decays * config.weight_decay * param
    memory["m"] = config.momentum * memory.get("m", 0.0) + decayed
    return param - LEARNING_RATE * memory["m"]


def numpy_run(rule, config, params, all_grads):
    """Float64 loop over the steps; clips by the global norm as the Optimizer does."""
    leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(params)]
    decays = [record.decays for record in jax.tree.leaves(RECORDS)]
    memories = [{} for _ in leaves]
    for grads in all_grads:
        grad_leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(grads)]
        if config.clip_norm > 0:
            norm = np.sqrt(sum(np.sum(grad**2) for grad in grad_leaves))
            grad_leaves = [grad * min(1.0, config.clip_norm / (norm + CLIP_EPSILON)) for grad in grad_leaves]
        leaves = [
            rule(config, grad, leaf, decay, memory)
            for grad, leaf, decay, memory in zip(grad_leaves, leaves, decays, memories, strict=True)
        ]
    return leaves


@pytest.mark.parametrize(
    "name, rule, cautious",
    [
        ("adamw", numpy_adamw, False),
        ("adamw", numpy_adamw, True),
        ("lion", numpy_lion, False),
        ("lion", numpy_lion, True),
        ("sgd", numpy_sgd, False),
    ],
)
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_update_matches_float64_loop(name, rule, cautious, clip_norm):
    config = OptimizerConfig(name=name, clip_norm=clip_norm, cautious_decay=cautious)
    all_grads = [random_tree(seed) for seed in range(1, NUM_STEPS + 1)]
    optimizer = Optimizer(config, RECORDS)
    update = jax.jit(optimizer.update)
    params = to_device(random_tree(0))
    state = optimizer.init(params)
    for grads in all_grads:
        params, state, metrics = update(to_device(grads), state, params, jnp.float32(LEARNING_RATE))
        assert metrics["skipped"] == 0
    expected = numpy_run(rule, config, random_tree(0), all_grads)
    for ours, wanted in zip(jax.tree.leaves(params), expected, strict=True):
        # Float32 rounding of values near 1 over five steps: a few times 2**-24 each.
        np.testing.assert_allclose(ours, wanted, rtol=2e-6, atol=1e-6)


def test_decay_reaches_weights_and_embeddings_only():
    optimizer = Optimizer(OptimizerConfig(weight_decay=0.5), RECORDS)
    params = to_device(random_tree(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    new_params, _, _ = optimizer.update(zeros, optimizer.init(params), params, jnp.float32(0.1))
    np.testing.assert_allclose(new_params["embedding"], 0.95 * params["embedding"], rtol=1e-6)  # float32 rounding
    np.testing.assert_allclose(new_params["block"]["kernel"], 0.95 * params["block"]["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(new_params["block"]["bias"], params["block"]["bias"])


def test_grad_norm_is_measured_before_clipping():
    grads = random_tree(1)
    norm = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(grads)))
    optimizer = Optimizer(OptimizerConfig(name="sgd", clip_norm=0.25, weight_decay=0.0, momentum=0.0), RECORDS)
    params = to_device(random_tree(0))
    new_params, _, metrics = optimizer.update(to_device(grads), optimizer.init(params), params, jnp.float32(1.0))
    assert metrics["grad_norm"].dtype == jnp.float32 and metrics["skipped"].dtype == jnp.int32
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)  # float32 sum
    moved = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - np.asarray(old, np.float64), new_params, params)
    moved_norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(moved)))
    np.testing.assert_allclose(moved_norm, 0.25, rtol=1e-5)  # the difference of float32 numbers near 1


def test_small_gradients_are_not_scaled_up():
    config = OptimizerConfig(name="sgd", clip_norm=1e6, weight_decay=0.0, momentum=0.0)
    optimizer = Optimizer(config, RECORDS)
    params = jax.tree.map(jnp.zeros_like, to_device(random_tree(0)))
    grads = to_device(random_tree(1))
    new_params, _, _ = optimizer.update(grads, optimizer.init(params), params, jnp.float32(1.0))
    jax.tree.map(lambda new, grad: np.testing.assert_array_equal(new, -grad), new_params, grads)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.fault
def test_step_with_non_finite_gradient_changes_no_bit(name, bad):
    optimizer = Optimizer(OptimizerConfig(name=name), RECORDS)
    update = jax.jit(optimizer.update)
    params = to_device(random_tree(0))
    params, state, _ = update(to_device(random_tree(1)), optimizer.init(params), params, jnp.float32(LEARNING_RATE))
    grads = random_tree(2)
    grads["block"]["bias"][1, 2] = bad
    new_params, new_state, metrics = update(to_device(grads), state, params, jnp.float32(LEARNING_RATE))
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert bits(new_params) == bits(params)
    assert bits(new_state) == bits(state)


@pytest.mark.fault
def test_step_with_non_finite_loss_is_skipped():
    optimizer = Optimizer(OptimizerConfig(), RECORDS)
    params = to_device(random_tree(0))
    state = optimizer.init(params)
    for loss, skipped in [(2.5, 0), (np.nan, 1), (np.inf, 1)]:
        new_params, new_state, metrics = optimizer.update(
            to_device(random_tree(1)), state, params, jnp.float32(LEARNING_RATE), jnp.float32(loss)
        )
        assert metrics["skipped"] == skipped
        assert (bits(new_params) == bits(params)) == bool(skipped)
        assert (bits(new_state) == bits(state)) == bool(skipped)


@pytest.mark.fault
def test_a_spike_of_the_gradient_norm_is_skipped_and_changes_no_bit():
    params, grads = to_device(random_tree(0)), to_device(random_tree(1))
    norm = float(Optimizer(OptimizerConfig(), RECORDS).update(
        grads, Optimizer(OptimizerConfig(), RECORDS).init(params), params, jnp.float32(LEARNING_RATE)
    )[2]["grad_norm"])  # fmt: skip
    for most, skipped in ((norm * 1.01, 0), (norm * 0.99, 1)):
        optimizer = Optimizer(OptimizerConfig(skip_grad_norm_above=most), RECORDS)
        state = optimizer.init(params)
        new_params, new_state, metrics = optimizer.update(grads, state, params, jnp.float32(LEARNING_RATE))
        assert metrics["skipped"] == skipped
        assert (bits(new_params) == bits(params)) == (bits(new_state) == bits(state)) == bool(skipped)


def test_bias_correction_does_not_count_a_skipped_step():
    optimizer = Optimizer(OptimizerConfig(), RECORDS)
    update = jax.jit(optimizer.update)
    params = to_device(random_tree(0))
    start = optimizer.init(params)
    bad = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), random_tree(1))
    _, after_skip, _ = update(to_device(bad), start, params, jnp.float32(LEARNING_RATE))
    direct = update(to_device(random_tree(2)), start, params, jnp.float32(LEARNING_RATE))
    later = update(to_device(random_tree(2)), after_skip, params, jnp.float32(LEARNING_RATE))
    assert bits(direct) == bits(later)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_update_works_under_strict_dtype_promotion(name):
    optimizer = Optimizer(OptimizerConfig(name=name), RECORDS)
    params = to_device(random_tree(0))
    with jax.numpy_dtype_promotion("strict"):
        optimizer.update(to_device(random_tree(1)), optimizer.init(params), params, jnp.float32(LEARNING_RATE))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_state_without_groups_is_one_chain_of_optax(name):
    """Its paths and its structure are those of checkpoints from before there were groups."""
    decay = optax.add_decayed_weights(0.1, mask=jax.tree.map(lambda record: record.decays, RECORDS))
    chains = {
        "adamw": optax.chain(optax.scale_by_adam(), decay),
        "lion": optax.chain(optax.scale_by_lion(), decay),
        "sgd": optax.chain(decay, optax.trace(0.9)),
    }
    params = to_device(random_tree(0))
    state = Optimizer(OptimizerConfig(name=name), RECORDS).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(chains[name].init(params))
