"""LoRA: before training an adapted model is its base; only adapters are trained, on every mesh alike."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.lora import LoraConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.overrides import override
from megajax.parameters import is_in_8_bits, merge, name_of, named, select
from megajax.planning.memory import state_bytes
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import LaunchConfig
from megajax.weights import start_from
from megajax.weights.sources import SavedStep
from runs import batch, loss_of, run_of, toy_config

T, STEPS = 16, 4
MODEL = DecoderConfig(
    num_layers=2, pattern="de", embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=64, position="rope",
    norm="rmsnorm", biases=(), activation="swiglu", init_std=0.2, moe=MoeConfig(num_experts=4, expert_dim=16),
)  # fmt: skip
LORA = LoraConfig(rank=4)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_before_training_a_model_is_its_base_bit_for_bit(compute):
    """The base of an adapted model is stored in bfloat16, that of the other in float32."""
    precision = PrecisionConfig(compute=compute)
    model = Model(MODEL, precision, adapters=LORA.transforms)
    weights = model.init(0)
    base = model.without_transforms
    assert loss_of(model, weights) == loss_of(base, base.init(0))
    scale_of_a = {name: float(abs(a).max()) for name, a in named(weights).items() if name.endswith("_lora_a")}
    assert len(scale_of_a) == 14 and all(
        0.5 < bound * np.sqrt(32 if name == "layers.dense.mlp.down_lora_a" else 16) < 1
        for name, bound in scale_of_a.items()
    )


def test_the_scale_is_that_of_peft():
    scales = [LoraConfig(rank=16, alpha=8, rslora=rslora).transforms[0].scale for rslora in (False, True)]
    assert scales == [0.5, 2.0]


def test_merged_weights_give_the_same_model():
    model = Model(MODEL, PrecisionConfig(compute="float32"), adapters=LORA.transforms)
    key = jax.random.key(1)
    weights = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(key, a.shape), model.init(0))
    plain = model.without_transforms
    merged = jax.jit(model.merged)(weights)
    np.testing.assert_allclose(loss_of(plain, merged), loss_of(model, weights), rtol=1e-6)  # sums in another order
    only_base = select(weights, lambda name: name in named(merged))
    assert abs(loss_of(plain, only_base) / loss_of(model, weights) - 1) > 1e-3


def config_of(run_dir, mesh=MeshConfig(), **sections) -> Config:
    training = dict(steps=STEPS, sequence_length=T)
    return toy_config(run_dir, mesh, training, model=MODEL, **sections)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """-> (config of a run that adapts the weights of another, its losses, on one device)."""
    folder = tmp_path_factory.mktemp("runs")
    base = override(config_of(folder / "base"), ["--training.steps=2"])
    config = override(
        config_of(folder / "run", lora=LORA),
        [f"--checkpoint.start_from={base.run_dir}", "--optimizer.learning_rate=3e-2"],
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_of(base, monkeypatch)
        return config, losses(run_of(config, monkeypatch))


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def saved(config: Config) -> dict[str, jax.Array]:
    model = config.make_model()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda a: a.update(sharding=sharding), model.abstract_weights)
    return named(SavedStep(config.run_dir).restore_params(abstract, model.layer_rows))


def test_only_adapters_are_trained(adapted):
    config, found = adapted
    assert found[-1] < found[0]
    base = saved(Config.load(config.checkpoint.source()[0]))
    for name, array in saved(config).items():
        if name.endswith("_lora_b"):
            assert np.asarray(array).any(), name
        elif not name.endswith("_lora_a"):
            np.testing.assert_array_equal(array, base[name])


@pytest.mark.parametrize("mesh", [
    dict(fsdp=2, tensor=2),
    pytest.param(dict(expert=2, context=2), marks=pytest.mark.slow),
    pytest.param(dict(pipeline=2, tensor=2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_mesh_matches_one_device(mesh, adapted, tmp_path, monkeypatch):
    config, wanted = adapted
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"), mesh=MeshConfig(**mesh))
    if config.mesh.pipeline > 1:
        config = override(config, ["--training.microbatch_size=4"])
    np.testing.assert_allclose(losses(run_of(config, monkeypatch)), wanted, rtol=1e-5)


def test_resume_is_identical_and_refuses_another_rank(adapted, tmp_path, monkeypatch):
    config, wanted = adapted
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert losses(run_of(config, monkeypatch)) == wanted
    with pytest.raises(ValueError, match=r"cannot resume with other settings \(lora.rank: 4 -> 8\)"):
        run_of(override(config, ["--lora.rank=8"]), monkeypatch)


def test_adapters_go_on_from_a_run_with_the_same_scale(adapted, tmp_path):
    config, _ = adapted
    more = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    more = override(more, [f"--checkpoint.start_from={config.run_dir}"])
    start_from.check(start_from.pinned(more))
    weights = named(start_from.weights(more, more.make_program(make_mesh(more.mesh, jax.devices()[:1]))))
    for name, array in saved(config).items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    with pytest.raises(ValueError, match="adapters are multiplied by 8 there and 2 here"):
        start_from.check(start_from.pinned(override(more, ["--lora.alpha=8"])))


def test_frozen_weights_take_two_bytes_and_the_plan_says_so(tmp_path):
    config = dataclasses.replace(config_of(tmp_path / "run", lora=LORA), precision=PrecisionConfig()).check_on(1)
    program = config.make_program()
    state = program.abstract_state
    adapters = named(state.params)
    assert all(name.endswith(("_lora_a", "_lora_b")) and a.dtype == np.float32 for name, a in adapters.items())
    others = {name: a for name, a in named(state.frozen).items() if a.dtype == np.float32}
    assert all("norm" in name or "router" in name for name in others)
    size = sum(a.size for a in adapters.values())
    whole = sum(a.size for a in named(state.frozen).values())
    device, _ = state_bytes(program)
    assert device["weights"] == 4 * size + 2 * whole + 2 * sum(a.size for a in others.values())
    assert device["gradients"] == 4 * size and 8 * size <= device["optimizer"] < 8 * size + 16


def test_the_learning_rate_of_a_recipe_is_ten_times_as_large(caplog):
    caplog.set_level(logging.INFO, "megajax")
    recipe = Config(
        checkpoint=CheckpointConfig(start_from="x"),
        optimizer=OptimizerConfig(learning_rate=1e-5, min_learning_rate=1e-6),
    )
    rates = override(recipe, ["--lora.rank=8"]).optimizer
    assert (rates.learning_rate, rates.min_learning_rate) == pytest.approx((1e-4, 1e-5))
    assert "optimizer.learning_rate=0.0001, adapted to the overrides (the recipe has 1e-05)" in caplog.text
    typed = override(recipe, ["--lora.rank=8", "--optimizer.learning_rate=3e-5"])
    assert (typed.optimizer.learning_rate, typed.optimizer.min_learning_rate) == (3e-5, 1e-6)
    assert override(typed, ["--lora.rank=16"]).optimizer == typed.optimizer
    pretraining = Config(optimizer=recipe.optimizer)
    assert override(pretraining, ["--lora.rank=8"]).optimizer == recipe.optimizer


def test_adapters_of_random_weights_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="lora.rank=4 adapts weights that have been trained.*start_from"):
        run_of(config_of(tmp_path / "run", lora=LORA), monkeypatch)


@pytest.mark.parametrize("base", ["int8", "float8"])
def test_a_base_in_8_bits_computes_with_its_levels(base):
    """In float32 the products are those of the matrices that the levels stand for, and so are the gradients."""
    lora = dataclasses.replace(LORA, base=base)
    model = Model(MODEL, PrecisionConfig(compute="float32"), adapters=lora.transforms)
    key = jax.random.key(1)
    weights = jax.tree_util.tree_map_with_path(
        lambda path, a: a + 0.1 * jax.random.normal(key, a.shape) if name_of(path).endswith("_lora_b") else a,
        model.init(0),
    )
    found = named(weights)
    levels = {name for name, a in found.items() if is_in_8_bits(a)}
    assert len(levels) == 2 * 4 + 3 and not any("moe.mlp" in name for name in levels)
    whole = Model(MODEL, PrecisionConfig(compute="float32"), adapters=LORA.transforms)
    scales = {name: found[f"{name}_scale"] for name in levels}

    def restored(path, a: jax.Array) -> jax.Array:
        name = name_of(path)
        if name not in levels:
            return found[name]
        return found[name].astype(np.float32) * np.expand_dims(scales[name], (1, 2) if name.endswith("out") else 1)

    same = jax.tree_util.tree_map_with_path(restored, whole.abstract_weights)
    original = named(whole.without_transforms.init(0))
    for name in levels:
        error = np.abs(named(same)[name] - original[name]).max() / np.abs(original[name]).max()
        assert 0 < error < {"int8": 1 / 200, "float8": 1 / 15}[base]

    def gradients(model: Model, weights: dict):
        params, *others = model.split(weights)
        loss = lambda params: model.loss(merge(params, *others), batch(), Language()).main
        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, of_levels), (wanted, of_whole) = gradients(model, weights), gradients(whole, same)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    # The scale is applied after the sum instead of before.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), of_levels, of_whole)


@pytest.mark.parametrize("scan", [False, True])
def test_the_backward_pass_reads_a_base_in_8_bits_as_it_is_stored(scan):
    """What is kept from the forward pass has no copy of a matrix in the compute dtype."""
    model = dataclasses.replace(MODEL, pattern="", moe=MoeConfig(), num_layers=6, embed_dim=24, mlp_dim=40)
    adapters = dataclasses.replace(LORA, base="int8").transforms
    model = Model(model, PrecisionConfig(), ExecutionConfig(scan_layers=scan), adapters=adapters)
    params, *others = model.split(model.abstract_weights)

    def kept(params, others):
        loss = lambda params: model.loss(merge(params, *others), batch(), Language()).main
        return jax.vjp(loss, params)[1]

    found = jax.tree.leaves(jax.eval_shape(kept, params, others))
    # Of a layer or stacked: down, out, query, key and value, gate and up, in the shapes of their products.
    for shape in [(40, 24), (4, 6, 24), (24, 2, 2, 6), (24, 2, 1, 6), (24, 1, 40)]:
        dtypes = {str(a.dtype) for a in found if shape in (a.shape, a.shape[1:])}
        assert dtypes == {"int8"}, (shape, dtypes)


@pytest.mark.parametrize("mesh", [
    dict(fsdp=2, tensor=2), pytest.param(dict(pipeline=2, expert=2), marks=pytest.mark.slow)
], ids=str)  # fmt: skip
def test_a_run_on_8_bits_starts_from_a_run_and_resumes(mesh, adapted, tmp_path, monkeypatch):
    config, wanted = adapted
    config = override(dataclasses.replace(config, run_dir=str(tmp_path / "run")), ["--lora.base=int8"])
    found = losses(run_of(config, monkeypatch))
    np.testing.assert_allclose(found, wanted, rtol=2e-2)  # int8
    assert found != wanted
    meshed = dataclasses.replace(config, run_dir=str(tmp_path / "mesh"), mesh=MeshConfig(**mesh))
    if meshed.mesh.pipeline > 1:
        meshed = override(meshed, ["--training.microbatch_size=2"])
    run_of(dataclasses.replace(meshed, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    np.testing.assert_allclose(losses(run_of(meshed, monkeypatch)), found, rtol=1e-5)
    levels = {name: a for name, a in saved(config).items() if is_in_8_bits(a)}
    assert len(levels) == 2 * 4 + 3 and all(np.abs(np.asarray(a, np.int32)).max() == 127 for a in levels.values())
    with pytest.raises(ValueError, match="lora.base=int8 with precision.recipe=fp8"):
        override(config, ["--precision.recipe=fp8", "--precision.high_layers=0,0"]).check()
    with pytest.raises(ValueError, match="lora.base=int8 is the format of frozen matrices beside adapters"):
        override(config, ["--lora.rank=none"]).check()


def test_targets_that_match_no_matrix_are_refused():
    with pytest.raises(ValueError, match=r"lora.targets: 'mlp.gat' matches no matrix; the layers have .*mlp.gate"):
        Model(MODEL, adapters=dataclasses.replace(LORA, targets=("mlp.gat",)).transforms)
