"""Multi-token prediction: its loss equals an independent computation, on every mesh, and an evaluation says how often
its guesses are those of the main model."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config, incompatibilities
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine, Sampling
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import num_parts
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import EVALUATION
from megajax.models.model import Model
from megajax.optim.optimizer import OptimizerConfig
from megajax.overrides import override
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.planning.step_time import total_flops
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import LaunchConfig, TrainingConfig
from runs import run_of

FLOAT32 = PrecisionConfig(compute="float32")
B, T, V = 4, 16, 30
PLAIN = DecoderConfig(
    num_layers=1, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=V, vocab_multiple=8, position="rope", norm="rmsnorm",
    norm_epsilon=1e-6, biases=(), tied_embeddings=False, mtp_layers=2, mtp_loss=0.6,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    PLAIN, num_heads=4, head_dim=4, init_std=0.2, activation="swiglu", mtp_layers=1,
    rope=RopeConfig(interleaved=True), latent=LatentConfig(kv_rank=8, q_rank=8, rope_dim=2, value_dim=6),
    moe=MoeConfig(4, 8, shared_dim=8, router=RouterConfig(
        score="sigmoid", bias_update_rate=1e-2, aux_loss=0.1, aux_loss_scope="sequence",
    )),
)  # fmt: skip


def batch_of(order=np.arange(T)) -> dict:
    """Three documents in each row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "segment_ids": np.sort(rng.integers(0, 3, (B, T), dtype=np.int32), -1),
        "loss_weights": ((rng.random((B, T)) < 0.8) / (B * T)).astype(np.float32),
    }
    return {name: array[:, order] for name, array in batch.items()}


def weights_of(model: Model) -> dict:
    rng = np.random.default_rng(1)

    def draw(path, a):
        name = path[-1].key
        return rng.normal(float(name == "scale"), 0.0 if name == "bias" else 0.3, a.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


def test_loss_and_gradients_equal_an_independent_computation_in_float64():
    model = Model(PLAIN, FLOAT32)
    weights = weights_of(model)
    for stack in ("layers", "mtp_1", "mtp_2"):  # what the layers add is tested elsewhere
        layer = weights[stack]["dense"] if stack == "layers" else weights[stack]["dense"]["layer"]
        layer["attention"]["out"] *= 0.0
        layer["mlp"]["down"] *= 0.0
    for stack in ("mtp_1", "mtp_2"):  # so that some of its guesses, not all, are those of the main model
        weights[stack]["dense"]["projection"][:, :8] += np.eye(8, dtype=np.float32)
    batch = batch_of()

    def total(weights):
        terms = model.loss(weights, batch, Language(), options=EVALUATION)
        return terms.total(), terms

    (_, terms), gradients = jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(weights))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
        of_truth = jax.jit(jax.value_and_grad(functools.partial(truth, batch), has_aux=True))
        (_, (main, by_depth, accepted)), wanted = jax.device_get(of_truth(double))
    np.testing.assert_allclose(terms.main, main, rtol=1e-5)
    np.testing.assert_allclose(terms.further["mtp_loss"], 0.6 / 2 * sum(loss for loss, _ in by_depth), rtol=1e-5)
    for depth, (loss, weight) in enumerate(by_depth, 1):
        np.testing.assert_allclose(terms.metrics[f"mtp_loss/{depth}"], loss / weight, rtol=1e-5)
        agreed, counted = accepted[depth - 1]
        assert terms.rates[f"mtp_acceptance/{depth}"] == (agreed, counted)
        assert 0 < agreed < counted
    compared = [
        ("embedding",), ("head",), ("final_norm", "scale"), ("mtp_1", "dense", "projection"),
        ("mtp_2", "dense", "projection"), ("mtp_1", "dense", "embedding_norm", "scale"),
        ("mtp_2", "dense", "hidden_norm", "scale"), ("mtp_1", "dense", "final_norm", "scale"),
    ]  # fmt: skip
    for path in compared:
        got, want = (functools.reduce(lambda tree, name: tree[name], path, tree) for tree in (gradients, wanted))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=str(path))


def truth(batch, weights):
    """With layers that add nothing -> (loss, (main term, [(sum, weight) of a depth], [(accepted, counted)]))."""

    def norm(a, scale):
        return a / jax.numpy.sqrt(jax.numpy.mean(a * a, -1, keepdims=True) + 1e-6) * scale["scale"]

    def logits(h):
        return (h @ weights["head"])[..., :V]

    def token_loss(h, labels):
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(logits(h)), labels[..., None], -1)[..., 0]

    h = norm(weights["embedding"][batch["tokens"]], weights["final_norm"])
    likely = logits(h).argmax(-1)
    weights_BT = np.float64(batch["loss_weights"])
    main = (weights_BT * token_loss(h, batch["labels"])).sum()
    by_depth = []
    accepted = []
    for k in (1, 2):
        of_depth = jax.tree.map(lambda a: a[0], weights[f"mtp_{k}"]["dense"])
        embeddings = norm(weights["embedding"][batch["tokens"][:, k:]], of_depth["embedding_norm"])
        joined = jax.numpy.concatenate([embeddings, norm(h[:, : T - k], of_depth["hidden_norm"])], -1)
        h = norm(joined @ of_depth["projection"], of_depth["final_norm"])
        same_document = batch["segment_ids"][:, k:] == batch["segment_ids"][:, :-k]
        weight = weights_BT[:, k:] * same_document
        by_depth.append(((weight * token_loss(h, batch["labels"][:, k:])).sum(), weight.sum()))
        agrees = logits(h).argmax(-1) == likely[:, k:]
        accepted.append(((agrees & (weight > 0)).sum(), (weight > 0).sum()))
    return main + 0.6 / 2 * sum(loss for loss, _ in by_depth), (main, by_depth, accepted)


# ----------------------------------------------------------------------------- meshes


def loss_and_gradients(config: DecoderConfig, sizes: dict, **how):
    mesh_config = MeshConfig(**sizes)
    execution = ExecutionConfig(**how)
    config.check(mesh_config, T, execution)
    model = Model(config, FLOAT32, execution)
    batch = batch_of(sequence_order(T, mesh_config.context, execution.context_attention))
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])

    def total(weights):
        terms = model.loss(weights, batch, Language(), options=EVALUATION)
        return terms.total(), (terms.main, terms.further, terms.auxiliary, terms.rates)

    with jax.set_mesh(mesh):
        weights = jax.device_put(weights_of(model), model.shardings(mesh))
        return jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(weights))


@pytest.fixture(scope="module")
def on_one_device():
    return functools.cache(lambda config: loss_and_gradients(config, {}))


@pytest.mark.parametrize(("config", "sizes", "how"), [
    (PLAIN, dict(context=2, tensor=2), dict(recompute="selective")),
    pytest.param(DEEPSEEK, dict(context=2, tensor=2, expert=2), {}, marks=pytest.mark.slow),
    pytest.param(DEEPSEEK, dict(data=2, fsdp=2), dict(recompute="full", scan_layers=True), marks=pytest.mark.slow),
    pytest.param(PLAIN, dict(context=2, fsdp=2), dict(context_attention="all_to_all"), marks=pytest.mark.slow),
], ids=["dense", "experts", "experts, scanned", "dense, all-to-all"])  # fmt: skip
def test_any_mesh_gives_the_same_loss_gradients_and_rates(config, sizes, how, on_one_device):
    found = loss_and_gradients(config, sizes, **how)
    wanted = on_one_device(config)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        # Sums over devices come in another order.
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=str(path))


# ----------------------------------------------------------------------------- whole runs


def config_of(run_dir, model=PLAIN) -> Config:
    return Config(
        model=dataclasses.replace(model, vocab_size=64, mtp_layers=1),
        precision=FLOAT32,
        data=DataConfig(source="mock", tokenizer="null:63", cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(
            steps=4, global_batch_size=8, sequence_length=16, log_every_steps=1, eval_every_steps=4, eval_steps=1
        ),
        checkpoint=CheckpointConfig(every_steps=2),
        run_dir=str(run_dir),
    )  # fmt: skip


@pytest.mark.slow
def test_metrics_have_the_terms_of_the_loss_and_an_evaluation_the_main_term_alone(tmp_path, monkeypatch):
    *steps, last = run_of(config_of(tmp_path / "run"), monkeypatch)
    assert len(steps) == 4
    for line in steps:
        assert line["loss"] - line["mtp_loss"] == pytest.approx(math.log(64), rel=0.2)  # random tokens
        assert line["mtp_loss"] == pytest.approx(0.6 * line["mtp_loss/1"] * 15 / 16, rel=1e-4)  # 15 of 16 have a target
    assert last["eval_loss"] == pytest.approx(math.log(64), rel=0.2)
    assert 0 <= last["eval_mtp_acceptance/1"] <= 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, lines of metrics) of a run of all parts of DeepSeek-V3 on one device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = config_of(tmp_path_factory.mktemp("runs") / "run", DEEPSEEK)
        return config, run_of(config, monkeypatch)


@pytest.mark.slow
def test_deepseek_resumes_on_another_mesh_with_other_microbatches(trained, tmp_path, monkeypatch):
    config, whole = trained
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    first = dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=2, expert=2),
        training=dataclasses.replace(config.training, microbatch_size=1),
        launch=LaunchConfig(exit_at_step=2),
    )
    run_of(first, monkeypatch)
    lines = run_of(config, monkeypatch)
    for name in ("loss", "mtp_loss", "mtp_loss/1", "grad_norm", "router_aux_loss"):
        found, wanted = ([line[name] for line in run_lines if name in line] for run_lines in (lines, whole))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_step_of_deepseek_replays_bit_for_bit(trained, monkeypatch, capsys):
    config, _ = trained
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    run.replay(config, 3)
    assert "reproduced: both runs and metrics.jsonl are bitwise identical" in capsys.readouterr().out


@pytest.mark.slow
def test_deepseek_generates_with_the_main_model_alone(trained):
    config, _ = trained
    engine = Engine.from_run(config.run_dir)
    prompts = [[5, 17, 3], list(range(20, 31))]
    found = engine.generate_tokens(prompts, Sampling(max_tokens=4, temperature=0.0))
    without = Model(dataclasses.replace(config.model, mtp_layers=0), FLOAT32)
    params = {name: tree for name, tree in engine.params.items() if name in without.abstract_weights}
    alone = Engine(without, params, engine.mesh, None)
    assert found == alone.generate_tokens(prompts, Sampling(max_tokens=4, temperature=0.0))


def test_its_coefficient_may_change_at_a_resume_and_its_depth_not(tmp_path):
    config = config_of(tmp_path / "run", DEEPSEEK)
    assert incompatibilities(config, override(config, ["--model.mtp_loss=0.1"])) == []
    assert incompatibilities(config, override(config, ["--model.mtp_layers=2"])) == ["model.mtp_layers: 1 -> 2"]
    assert Config.from_json(config.to_json()) == config


def test_dropout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model.mtp_layers=1: .* no dropout; use --model.dropout=0"):
        override(config_of(tmp_path / "run"), ["--model.dropout=0.1"]).check()


def test_a_pipeline_divides_the_other_layers(tmp_path):
    config = config_of(tmp_path / "run", dataclasses.replace(PLAIN, num_layers=2))
    pipeline = ["--mesh.pipeline=2", "--training.microbatch_size=1"]
    override(config, [*pipeline, "--mesh.pipeline_layout=Et|tmL"]).check()
    with pytest.raises(ValueError, match="are 4 stages for model.num_layers=2"):
        override(config, ["--mesh.pipeline=4", "--training.microbatch_size=1"]).check()


def test_plan_counts_its_layer_and_another_output():
    with_one, without = (Model(dataclasses.replace(PLAIN, mtp_layers=n)) for n in (1, 0))
    added = with_one.config.forward_flops(T).matmuls - without.config.forward_flops(T).matmuls
    layer = without.config.layers(ExecutionConfig())[0].flops(T).matmuls
    assert added == layer + 2 * (2 * 8 * 8) + 2 * 8 * 32
    assert with_one.num_active_parameters() == with_one.num_parameters()
    # Every rank of a pipeline has and runs it.
    config = dataclasses.replace(PLAIN, num_layers=2, mtp_layers=1)
    model = Model(config, stages=make_stages(MeshConfig(pipeline=2), config.num_stage_layers))
    assert len(model.layers_run) == 2 + 2
    projection = model.records["mtp_1"]["dense"]["projection"]
    assert num_parts(projection.axes, MeshConfig(pipeline=2).sizes()) == 1
    again = total_flops(model, T).matmuls - total_flops(Model(config), T).matmuls
    assert again == 3 * model.layers_run[-1].flops(T).matmuls
