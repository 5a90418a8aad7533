"""Transforms of matrices arrive in a file of their own: two toys, defined here alone, train, plan, resume, stack with
number formats, generate and are merged."""

import dataclasses
from typing import Literal

import jax
import numpy as np
import pytest

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config, incompatibilities
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine, Sampling, ServingConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.transform import Transform
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.matmul import matmul
from megajax.optim.config import OptimizerConfig
from megajax.overrides import override
from megajax.parameters import name_of, weight
from megajax.planning.plan import plan_device, plan_rows
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.weights.export import export
from megajax.weights.hugging_face.export import Export
from megajax.weights.sources import SavedStep
from runs import batch, loss_of, run_of

T, STEPS, RANK = 16, 4, 2


@dataclasses.dataclass(frozen=True)
class LowRank(Transform):
    """x w + x a b; b starts at zero."""

    matrices: tuple[str, ...]
    field = "model.low_rank"

    def apply(self, matrix, rngs):
        super().apply(matrix, rngs)
        record = matrix.record
        first, end = record.num_stacked, record.num_stacked + record.num_inputs
        shape = matrix.weight.get_value().shape
        axes = record.axes
        draw, zeros = jax.nn.initializers.normal(0.2), jax.nn.initializers.zeros
        a_axes, b_axes = (*axes[:end], "rank"), (*axes[:first], "rank", *axes[end:])
        matrix.low_a = weight((*shape[:end], RANK), a_axes, draw, rngs, "adapter", record.num_inputs)
        matrix.low_b = weight((*shape[:first], RANK, *shape[end:]), b_axes, zeros, rngs, "adapter")

    def merged(self, matrix, w):
        stack = w.shape[: matrix.record.num_stacked]
        a = matrix.low_a[...].reshape(*stack, -1, RANK)
        b = matrix.low_b[...].reshape(*stack, RANK, -1)
        return w + (a @ b).reshape(w.shape).astype(w.dtype)

    def output(self, matrix, x, y):
        return y + matmul(matmul(x, matrix.low_a[...], matrix.num_inputs), matrix.low_b[...])


@dataclasses.dataclass(frozen=True)
class Gain(Transform):
    """x (w g), with a g for the last dim of the weight."""

    matrices: tuple[str, ...]
    field = "model.gains"

    def apply(self, matrix, rngs):
        super().apply(matrix, rngs)
        matrix.gain = weight(
            (matrix.weight.get_value().shape[-1],), ("norm",), jax.nn.initializers.ones, rngs, "vector"
        )

    def merged(self, matrix, w):
        return w * matrix.gain[...].astype(w.dtype)


@dataclasses.dataclass(frozen=True)
class AdaptedConfig(DecoderConfig):
    kind: Literal["toy_adapted"] = "toy_adapted"
    low_rank: tuple[str, ...] = ("attention.query", "attention.out", "mlp.up", "mlp.down")
    gains: tuple[str, ...] = ("attention.key", "attention.out", "mlp.down")

    @property
    def transforms(self):
        found = (LowRank(self.low_rank), Gain(self.gains))
        return tuple(transform for transform in found if transform.matrices)

    @property
    def without_transforms(self):
        return dataclasses.replace(self, low_rank=(), gains=())


MODEL = AdaptedConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=64, position="rope",
    norm="rmsnorm", biases=(), activation="swiglu", init_std=0.2, moe=MoeConfig(num_experts=4, expert_dim=16),
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")


def config_of(run_dir, mesh=MeshConfig(), **sections) -> Config:
    return Config(**dict(
        model=MODEL, mesh=mesh, precision=FLOAT32,
        data=DataConfig(source="mock", tokenizer="null:63", cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=3e-2, min_learning_rate=1e-2),
        training=TrainingConfig(
            steps=STEPS, global_batch_size=8, sequence_length=T, log_every_steps=1, eval_every_steps=STEPS,
            eval_steps=1, trained=("*_low_?", "*_gain"),
        ),
        checkpoint=CheckpointConfig(every_steps=2), run_dir=str(run_dir),
    ) | sections)  # fmt: skip


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def named(weights: dict) -> dict[str, jax.Array]:
    return {name_of(path): array for path, array in jax.tree_util.tree_leaves_with_path(weights)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> (config, losses, model, weights) of a run on one device."""
    config = config_of(tmp_path_factory.mktemp("runs") / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = losses(run_of(config, monkeypatch))
    model = config.make_model()
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        model.abstract_weights,
    )
    return config, found, model, SavedStep(config.run_dir).restore_params(abstract, model.layer_rows)


def test_only_what_transforms_add_is_trained(trained):
    config, found, model, weights = trained
    assert found[-1] < found[0]
    before = named(model.init(config.training.seed))
    for name, array in named(weights).items():
        assert (np.asarray(array) != before[name]).any() == name.endswith(("_low_a", "_low_b", "_gain")), name
    assert named(weights)["layers.moe.mlp.down_low_b"].shape == (2, 4, RANK, 16)
    plain = named(model.without_transforms.init(config.training.seed))
    assert all((before[name] == array).all() for name, array in plain.items())


@pytest.mark.parametrize("mesh", [
    dict(fsdp=2, tensor=2),
    pytest.param(dict(expert=2, context=2), marks=pytest.mark.slow),
    pytest.param(dict(pipeline=2, tensor=2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_mesh_matches_one_device(mesh, trained, tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", MeshConfig(**mesh))
    if config.mesh.pipeline > 1:
        config = override(config, ["--training.microbatch_size=4"])
    found = losses(run_of(config, monkeypatch))
    np.testing.assert_allclose(found, trained[1], rtol=1e-5)


def test_resume_is_identical_and_refuses_other_transforms(trained, tmp_path, monkeypatch):
    config = config_of(tmp_path / "run")
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert losses(run_of(config, monkeypatch)) == trained[1]
    other = dataclasses.replace(config, model=dataclasses.replace(MODEL, gains=()))
    assert "model.gains:" in incompatibilities(config, other)[0]


def test_the_plan_counts_what_is_added(trained):
    config, _, model, _ = trained
    plain = model.without_transforms
    of_attention = 2 * RANK * 2 * (16 + 16)
    of_experts = 2 * RANK * 2 * (16 + 16) * 4
    gains = 2 * (4 + 16 + 16)
    assert model.num_parameters() - plain.num_parameters() == of_attention + of_experts + gains
    top_k = MODEL.moe.router.top_k
    added = model.forward_flops(T).matmuls - plain.forward_flops(T).matmuls
    assert added == pytest.approx(2 * (of_attention + of_experts * top_k / 4))
    rows = dict(plan_rows(config.make_program(), config.training, plan_device("h100")))
    assert f"({model.num_parameters():,})" in rows["parameters"]


@pytest.mark.parametrize("precision", [
    PrecisionConfig(recipe="fp8", compute="float32", high_layers=(1, 0)),
    PrecisionConfig(gradient_reduce="float32"),
], ids=["fp8", "float32 gradients"])  # fmt: skip
def test_transforms_stack_with_number_formats(precision, trained):
    """Before they are trained, adapters of a model in FP8 change nothing."""
    model = Model(MODEL, precision)
    plain = model.without_transforms
    weights = model.init(0)
    assert loss_of(model, weights) == loss_of(plain, plain.init(0))
    gradient = jax.jit(jax.grad(lambda weights: model.loss(weights, batch(), Language()).main))(weights)
    of_added = {name: g for name, g in named(gradient).items() if name.endswith(("_low_b", "_gain"))}
    assert len(of_added) == 7 and all(np.all(np.any(g, range(1, g.ndim))) for g in of_added.values())


def test_merged_weights_give_the_same_model_and_are_exported(trained, tmp_path):
    config, _, model, weights = trained
    plain = model.without_transforms
    # A sum in another order.
    np.testing.assert_allclose(loss_of(plain, jax.jit(model.merged)(weights)), loss_of(model, weights), rtol=1e-6)
    assert export(config.run_dir, tmp_path / "merged") == STEPS
    assert Config.load(tmp_path / "merged").model == config.model.without_transforms
    serving = ServingConfig(max_rows=2, max_batch_tokens=16, page_size=4, num_pages=8)
    prompts, sampling = [[5, 17, 3], [1]], Sampling(max_tokens=4, temperature=0.0)
    engines = [Engine.from_run(path, serving=serving) for path in (config.run_dir, tmp_path / "merged")]
    adapted, merged = (engine.generate_tokens(prompts, sampling) for engine in engines)
    assert adapted == merged
    with pytest.raises(ValueError, match=r"transforms beside its matrices \(LowRank, Gain\).*merge them first"):
        Export(config.run_dir, None, None, None)


def test_a_pattern_that_matches_no_matrix_is_refused():
    with pytest.raises(ValueError, match="model.gains: 'mlp.gain' matches no matrix; the layers have .*mlp.up"):
        Model(dataclasses.replace(MODEL, gains=("mlp.gain",)))
