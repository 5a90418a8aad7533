"""Calibration, smoothing and the command, with a small model whose inputs have outliers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import recorded
from megajax.config import Config
from megajax.evaluation.text_model import TextModel
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.ops.matmul import ObservedWeight, matmul
from megajax.precision import PrecisionConfig
from megajax.quantization import __main__ as command
from megajax.quantization.calibrate import channel_ranges_and_counts, errors, input_ranges, percentile_of
from megajax.quantization.observe import batches_of, observe
from megajax.quantization.smooth import smoothed, smoothing
from megajax.quantization.weights import WeightFormat
from megajax.tasks.language import Language
from megajax.weights.hugging_face.folder import Folder

MODEL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=257, max_positions=32,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")
OUTLIER = 5  # an input of matrices of the first layer that is 100 times the others
QUERY, OUT, UP = (f"layers.dense.{name}" for name in ("attention.query", "attention.out", "mlp.up"))


def random_params(model: Model) -> dict:
    generator = np.random.default_rng(0)

    def draw(path, a):
        return generator.normal(float(path[-1].key == "scale"), 0.15, a.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, model.abstract_weights)
    params["layers"]["dense"]["attention_norm"]["scale"][0, OUTLIER] = 100
    return params


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    config = Config(model=MODEL, precision=FLOAT32)
    data = dataclasses.replace(config.data, tokenizer="bytes")
    training = dataclasses.replace(config.training, sequence_length=32)
    # Statistics come out of a loop over layers too.
    config = dataclasses.replace(config, data=data, training=training, execution=ExecutionConfig(scan_layers=True))
    (run_dir / "config.json").write_text(config.to_json())
    model, mesh = Model(MODEL, FLOAT32), make_mesh(MeshConfig(), jax.devices()[:1])
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        params = jax.device_put(random_params(model), model.shardings(mesh))
        checkpointer.save(1, params, {"count": jnp.int32(0)}, recorded(model.layer_rows))
    return run_dir


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(np.random.default_rng(0).integers(32, 127, 600).astype(np.uint8).tobytes().decode())
    return str(file)


@pytest.fixture(scope="module")
def parts(run_dir, text):
    """(model, weights, mesh, batches)."""
    model = TextModel.load(run_dir)
    batches = batches_of(model, [text], [], 16)
    return model.scorer.model, Model.stacked(model.scorer.params), model.scorer.mesh, batches


@pytest.fixture(scope="module")
def inputs_of_queries(parts):
    """The inputs of the first layer's attention, [rows, D], by NumPy."""
    _, weights, _, batches = parts
    tokens = np.concatenate([batch["tokens"].ravel() for batch in batches])
    x = np.asarray(weights["embedding"])[tokens].astype(np.float64)
    x /= np.sqrt((x**2).mean(1, keepdims=True) + MODEL.norm_epsilon)
    return x * np.asarray(weights["layers"]["dense"]["attention_norm"]["scale"])[0]


def test_ranges_are_those_of_the_inputs(parts, inputs_of_queries):
    found = input_ranges(*parts, "max", 0)
    assert sorted(found) == sorted(
        f"layers.dense.{name}" for name in (
            "attention.key", "attention.out", "attention.query", "attention.value", "mlp.down", "mlp.gate", "mlp.up",
        )
    )  # fmt: skip
    assert found[QUERY].shape == (2,)
    np.testing.assert_allclose(found[QUERY][0], np.abs(inputs_of_queries).max(), rtol=1e-5)
    np.testing.assert_array_equal(found[QUERY], found["layers.dense.attention.value"])
    clipped = input_ranges(*parts, "percentile", 98.0)[QUERY][0]
    np.testing.assert_allclose(clipped, np.percentile(np.abs(inputs_of_queries), 98), rtol=0.03)  # a bin is 2 %


def test_percentiles_are_read_from_the_counts():
    x = jnp.array([[0.0, 1.0, 2.0, 4.0], [1.0, 2.0, 2.0, -8.0]])
    seen = {name: np.asarray(a)[None] for name, a in channel_ranges_and_counts(x, None, None).items()}
    assert seen["largest"].tolist() == [[1, 2, 2, 8]] and seen["counts"].sum() == 8
    assert [percentile_of(seen, p).item() for p in (30, 75, 80, 100)] == [1, 2, 4, 8]


def test_statistics_take_the_place_of_gradients_and_change_no_product():
    x = jnp.arange(6.0).reshape(2, 3)
    weight = jnp.ones((3, 4))

    def loss(seen):
        observed = ObservedWeight(weight, seen, (), lambda x, w, _: {"sum": x.sum()})
        return matmul(x, observed).sum()

    assert jax.value_and_grad(loss)({"sum": jnp.zeros(())}) == (60, {"sum": 15})


def test_errors_are_those_of_the_products(parts, inputs_of_queries):
    _, weights, _, _ = parts
    w = np.asarray(weights["layers"]["dense"]["attention"]["query"])[0].reshape(32, -1).astype(np.float64)
    x = inputs_of_queries
    scale_x, scale_w = np.abs(x).max(1, keepdims=True) / 127, np.abs(w).max(0) / 127
    noise = np.rint(x / scale_x) * scale_x @ (np.rint(w / scale_w) * scale_w) - x @ w
    expected = 10 * np.log10(((x @ w) ** 2).sum() / (noise**2).sum())
    found = errors(*parts, WeightFormat("int8", "dynamic"), {})
    np.testing.assert_allclose(found[QUERY].signal_to_noise[0], expected, atol=0.05)  # float32 rounds ties its own way
    assert found[QUERY].signal_to_noise[0] < found[QUERY].signal_to_noise[1] - 3  # which has no outlier


def test_smoothing_changes_no_result_and_helps_against_outliers(parts):
    model, weights, mesh, batches = parts
    factors = smoothing(model, weights, mesh, batches, 0.5)
    assert sorted(factors) == sorted(
        f"layers.dense.{name}" for name in (
            "attention.key", "attention.query", "attention.value", "attention_norm.scale", "mlp.gate", "mlp.up",
            "mlp_norm.scale",
        )
    )  # fmt: skip
    new = smoothed(weights, factors)
    loss = jax.jit(lambda weights: model.loss(weights, batches[0], Language()).main)
    same = dict(new=loss(new), old=loss(weights))
    np.testing.assert_allclose(same["new"], same["old"], rtol=1e-5)
    # With alpha 0.5 the inputs and the weights that read them have the same range (equation 4 of the paper).
    seen = observe(model, new, mesh, batches, channel_ranges_and_counts)
    largest = np.max([np.abs(np.asarray(new["layers"]["dense"]["mlp"][name])).max(2) for name in ("gate", "up")], 0)
    np.testing.assert_allclose(seen[UP]["largest"], largest, rtol=1e-4)
    format = WeightFormat("int8", "dynamic")
    before, after = (errors(model, w, mesh, batches, format, {}) for w in (weights, new))
    assert after[QUERY].signal_to_noise[0] > before[QUERY].signal_to_noise[0] + 6
    np.testing.assert_allclose(after[OUT].signal_to_noise, before[OUT].signal_to_noise, atol=0.1)


@pytest.mark.slow
def test_a_mesh_finds_the_same_ranges(run_dir, text, parts):
    model = TextModel.load(run_dir, MeshConfig(fsdp=2, tensor=2))
    scorer = model.scorer
    weights = Model.stacked(scorer.params)
    found = input_ranges(scorer.model, weights, scorer.mesh, batches_of(model, [text], [], 16), "max", 0)
    alone = input_ranges(*parts, "max", 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, alone)


def test_the_command_writes_a_calibrated_folder(run_dir, text, parts, tmp_path, capsys):
    to = tmp_path / "out"
    options = [f"--run={run_dir}", f"--to={to}", "--format=float8_static", "--smooth=0.5", "--samples=16"]
    command.main([*options, "--text", text])
    printed = capsys.readouterr().out
    assert "layers.dense.mlp.down" in printed and "perplexity after" in printed
    report = json.loads((to / command.REPORT).read_text())
    assert abs(report["after"]["loss"] - report["before"]["loss"]) < 0.02 * report["before"]["loss"]
    model, weights, mesh, batches = parts
    new = smoothed(weights, smoothing(model, weights, mesh, batches, 0.5))
    ranges = input_ranges(model, new, mesh, batches, "max", 0)
    folder = Folder(to)
    assert folder.weight_format == WeightFormat("float8", "static")
    for name in (QUERY, UP):
        np.testing.assert_allclose(folder.levels(name, 1).input_scale, ranges[name][1] / 448, rtol=1e-5)
    up = np.asarray(new["layers"]["dense"]["mlp"]["up"])[1]
    np.testing.assert_allclose(folder.levels(UP, 1).scale[0], np.abs(up).max(0) / 448, rtol=1e-5)


def test_bad_options_are_refused_before_anything_is_loaded(run_dir, text, tmp_path, capsys):
    good = [f"--run={run_dir}", f"--to={tmp_path / 'out'}", "--format=int8", "--text", text]
    for options, message in (
        ([f"--run={run_dir}", f"--to={tmp_path / 'out'}", "--format=int8"], "quantize: name files with --text"),
        ([*good, f"--to={tmp_path}"], f"to={tmp_path} exists"),
        ([*good, "--format=int4"], "error: format=int4 must be one of float8, int8, float8_static"),
        ([*good, "--smooth=1.5"], "smooth=1.5 must be a finite number (float32), above 0 and below 1"),
        ([*good, "--percentile=0"], "percentile=0 must be a finite number (float32), above 0"),
        ([*good, "--text", str(tmp_path / "none")], "none: the file does not exist"),
    ):
        with pytest.raises(SystemExit):
            command.main(options)
        assert message in capsys.readouterr().err
