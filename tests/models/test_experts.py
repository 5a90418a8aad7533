"""A decoder with experts trains, resumes on another mesh, and generates: all that a dense one does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config, incompatibilities
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine, Sampling
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.optim.optimizer import OptimizerConfig
from megajax.overrides import override
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.training.step import make_eval_step
from runs import run_of

NUM_EXPERTS = 4
MODEL = DecoderConfig(
    num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, position="rope", norm="rmsnorm", biases=(),
    activation="swiglu", init_std=0.2, pattern="de",
    moe=MoeConfig(NUM_EXPERTS, 24, shared_dim=8, router=RouterConfig(
        score="sigmoid", bias_update_rate=1e-2, aux_loss=0.1, aux_loss_scope="batch",
    )),
)  # fmt: skip


def config_of(run_dir, **training) -> Config:
    return Config(
        model=MODEL,
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="mock", tokenizer="null:63", cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(**dict(
            steps=4, global_batch_size=8, sequence_length=16, log_every_steps=1, eval_every_steps=0,
        ) | training),
        checkpoint=CheckpointConfig(every_steps=2),
        run_dir=str(run_dir),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, lines of metrics) of a run on one device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = config_of(tmp_path_factory.mktemp("runs") / "run")
        return config, run_of(config, monkeypatch)


@pytest.mark.parametrize("mesh, how", [
    (dict(expert=2, fsdp=2), dict(expert_dispatch="all_to_all")),
    pytest.param(dict(pipeline=2, expert=2), {}, marks=pytest.mark.slow),
    pytest.param(dict(expert=4, tensor=2), dict(recompute="selective", scan_layers=True), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_run_goes_on_over_other_devices(mesh, how, trained, tmp_path, monkeypatch):
    config, whole = trained
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    microbatches = dict(microbatch_size=4) if "pipeline" in mesh else {}
    first = dataclasses.replace(
        config,
        mesh=MeshConfig(**mesh),
        execution=ExecutionConfig(**how),
        training=dataclasses.replace(config.training, **microbatches),
        launch=LaunchConfig(exit_at_step=2),
    )
    assert len(run_of(first, monkeypatch)) == 2
    lines = run_of(config, monkeypatch)
    for name in ("loss", "grad_norm", "router_max_load", "expert_load/0", "router_aux_loss"):
        np.testing.assert_allclose([line[name] for line in lines], [line[name] for line in whole], rtol=1e-4)
    loads = [line[f"expert_load/{number}"] for line in lines for number in range(NUM_EXPERTS)]
    np.testing.assert_allclose(np.reshape(loads, (-1, NUM_EXPERTS)).sum(1), NUM_EXPERTS, rtol=1e-5)


def test_an_evaluation_reports_the_loss_of_the_tokens_alone(trained):
    """That of the logits, without the balance losses that training adds."""
    config, _ = trained
    engine = Engine.from_run(config.run_dir)
    tokens = np.random.default_rng(0).integers(0, 63, (2, 17), dtype=np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}

    @jax.jit
    def run(weights):
        results = make_eval_step(engine.model, Language())(
            weights, {name: array[None] for name, array in batch.items()} | {"loss_mask": jnp.ones((1, 2, 16))}
        )
        total, count = results["loss"]
        module = engine.model.module(weights)
        logits = module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])
        return total / count, -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1))

    evaluated, wanted = run(engine.params)
    np.testing.assert_allclose(evaluated, wanted, rtol=1e-5)


def test_variables_follow_the_load(trained):
    config, lines = trained
    router = Engine.from_run(config.run_dir).params["layers"]["moe"]["mlp"]
    loads = np.array([[line[f"expert_load/{number}"] for number in range(NUM_EXPERTS)] for line in lines])
    assert np.any(loads != 1)
    np.testing.assert_allclose(router["router_expert_load"][0], loads[-1], rtol=1e-6)
    np.testing.assert_allclose(router["router_expert_bias"][0], 1e-2 * np.sign(1 - loads).sum(0), atol=1e-6)
    # Before a step there is no load: all experts count as evenly loaded.
    assert lines[0]["router_aux_loss"] == pytest.approx(0.1, rel=1e-5)
    assert abs(lines[-1]["router_aux_loss"] - 0.1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mesh, reduce", [
    (dict(expert=2, fsdp=2, tensor=2), "compute"),
    (dict(expert=2, fsdp=2), "float32"),
    (dict(pipeline=2, expert=2, tensor=2), "compute"),
    (dict(pipeline=2, expert=2, fsdp=2), "float32"),
], ids=str)  # fmt: skip
def test_it_trains_in_bfloat16(mesh, reduce, trained, tmp_path, monkeypatch):
    """Where XLA on CPU aborts at some sums of 16-bit numbers."""
    config, whole = trained
    config = dataclasses.replace(
        config_of(tmp_path / "run", microbatch_size=2 if "pipeline" in mesh else None),
        mesh=MeshConfig(**mesh),
        precision=PrecisionConfig(gradient_reduce=reduce),
    )
    losses = [line["loss"] for line in run_of(config, monkeypatch)]
    np.testing.assert_allclose(losses, [line["loss"] for line in whole], rtol=1e-2)


def test_it_generates_what_it_predicts_without_a_cache(trained):
    config, _ = trained
    engine = Engine.from_run(config.run_dir)
    prompts = [[5, 17, 3], [1], list(range(20, 31))]
    found = engine.generate_tokens(prompts, Sampling(max_tokens=4, temperature=0.0))

    @jax.jit
    def next_tokens(weights, tokens_BT):
        batch = {"tokens": tokens_BT, "positions": jnp.arange(tokens_BT.shape[1])[None]}
        module = engine.model.module(weights)
        return jnp.argmax(module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0]), -1)

    for prompt, generated in zip(prompts, found, strict=True):
        tokens = prompt + list(generated)
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(tokens)] = tokens
        predicted = np.asarray(next_tokens(engine.params, padded))[0]
        assert list(generated) == predicted[len(prompt) - 1 : len(tokens) - 1].tolist()


def test_a_coefficient_may_change_at_a_resume_and_the_number_of_experts_not(trained):
    config, _ = trained
    changed = override(config, ["--model.moe.router.aux_loss=0.2", "--model.moe.router.z_loss=0.1"])
    assert incompatibilities(config, changed) == []
    other = override(config, ["--model.moe.num_experts=8"])
    assert incompatibilities(config, other) == ["model.moe.num_experts: 4 -> 8"]
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("change, message", [
    (["--mesh.expert=8"], "model.moe.num_experts=4 is not divisible by mesh.expert=8; use --mesh.expert=4"),
    (["--model.moe.expert_dim=9", "--mesh.tensor=2"], "model.moe.expert_dim=9 is not divisible by mesh.tensor=2"),
    (["--model.biases=mlp"], "model.moe.num_experts: biases of experts are not supported"),
    (["--model.moe.router.top_k=5"], "model.moe.router.top_k=5 is more than model.moe.num_experts=4"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        override(config_of(tmp_path / "run"), change).check()
