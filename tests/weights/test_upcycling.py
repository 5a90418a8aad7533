"""A run with experts that starts from a dense model computes what the dense model did."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig
from megajax.weights import start_from

# Two experts of half the width, or several weights of a sum, round in another order.
TOLERANCE = 1e-5
DENSE = DecoderConfig(
    num_layers=4, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, vocab_multiple=1, position="rope",
    norm="rmsnorm", activation="swiglu", biases=(), init_std=0.2,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")
PATTERNS = {"copies in every second layer": "de"}
MIXTURES = {
    "copies in every second layer": MoeConfig(num_experts=4, router=RouterConfig(top_k=2)),
    "halves, scaled sigmoids": MoeConfig(
        num_experts=8, expert_dim=16,
        router=RouterConfig(top_k=4, score="sigmoid", scale=2.5, bias_update_rate=1e-3),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """(directory of a run, its loss)."""
    run_dir = tmp_path_factory.mktemp("dense") / "run"
    config = Config(
        model=DENSE, precision=FLOAT32, data=DataConfig(source="mock", tokenizer="null:50"),
        training=TrainingConfig(sequence_length=16),
    )  # fmt: skip
    model = Model(DENSE, FLOAT32)
    weights = model.init(0)
    rows = {stack: rows.tolist() for stack, rows in model.layer_rows.items()}
    with Checkpointer(run_dir, CheckpointConfig(keep=0)) as checkpointer:
        checkpointer.write(1, {"params": weights}, {"step": 1, "layer_rows": rows})
    (run_dir / "config.json").write_text(config.to_json())
    return run_dir, loss_of(model, weights)


def loss_of(model: Model, weights: dict) -> float:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (2, 17)).astype(np.int32)
    batch = dict(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_weights=np.full((2, 16), 1 / 32, np.float32),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16)),
    )  # fmt: skip
    with jax.default_matmul_precision("highest"):
        return float(jax.jit(lambda w: model.loss(w, batch, Language()).main)(weights))


def config_of(run_dir, moe: MoeConfig, mesh: MeshConfig | None = None, **model) -> Config:
    before = Config.load(run_dir)
    mixture = dataclasses.replace(before.model, moe=moe, **model)
    checkpoint = CheckpointConfig(start_from=str(run_dir))
    return dataclasses.replace(before, model=mixture, mesh=mesh or MeshConfig(), checkpoint=checkpoint)


def started(config: Config, mesh) -> tuple[Model, dict]:
    start_from.check(config)
    program = config.make_program(mesh)
    return program.model, start_from.weights(config, program)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_first_loss_is_that_of_the_dense_model(name, dense_run, make_test_mesh):
    run_dir, want = dense_run
    model, weights = started(config_of(run_dir, MIXTURES[name], pattern=PATTERNS.get(name, "")), make_test_mesh())
    assert loss_of(model, jax.device_get(weights)) == pytest.approx(want, rel=TOLERANCE)
    router = np.asarray(weights["layers"]["moe"]["mlp"]["router"])
    assert np.std(router[0, :, 0] - router[0, :, -1]) > 0.1


def test_every_mesh_starts_with_the_same_weights(dense_run, make_test_mesh):
    run_dir, _ = dense_run
    moe = MIXTURES["copies in every second layer"]
    _, want = started(config_of(run_dir, moe, pattern="de"), make_test_mesh())
    sizes = dict(pipeline=2, expert=2)
    model, found = started(config_of(run_dir, moe, MeshConfig(**sizes), pattern="de"), make_test_mesh(**sizes))
    assert jax.tree.map(lambda a: a.sharding, found) == model.shardings(make_test_mesh(**sizes))
    for kind, layers in (("dense", [0, 2]), ("moe", [1, 3])):
        assert model.layer_rows[f"layers.{kind}"].ravel().tolist() == layers
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.reshape(a, b.shape), b), found, want)


REFUSED = {
    "model.moe.shared_dim=8: a dense model has no shared experts": dict(shared_dim=8),
    "model.moe.expert_dim=24 does not divide the feed-forward width 32": dict(expert_dim=24),
    "model.moe.router.top_k=2: an expert is 1 / 4 .* multiple of 4": dict(expert_dim=8),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_upcycled_is_named(message, dense_run):
    run_dir, _ = dense_run
    moe = dataclasses.replace(MIXTURES["copies in every second layer"], **REFUSED[message])
    with pytest.raises(ValueError, match=f"checkpoint.start_from={run_dir}: {message}"):
        start_from.check(config_of(run_dir, moe, pattern="de"))


def test_another_width_is_named(dense_run):
    run_dir, _ = dense_run
    with pytest.raises(ValueError, match="layers.moe.mlp.down is .*there and .* here"):
        start_from.check(config_of(run_dir, MIXTURES["copies in every second layer"], pattern="de", mlp_dim=64))
