"""T5: loss and every gradient equal Megatron Core's, on one device and on a mesh; relative positions are T5's."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import recipes
from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine
from megajax.inference.load import open_model
from megajax.inference.sequence_to_sequence import SequenceToSequence
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.relative_position import RelativeBiasConfig
from megajax.mesh.config import MeshConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.tasks.spans import Spans
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.weights.megatron import from_megajax, to_megajax
from runs import run_of

ORACLE = Path(__file__).parent.parent / "oracles" / "t5.npz"
EVERY = 4  # of the entries of a gradient that the file has
MEGATRON = dict(
    norm="layernorm", norm_epsilon=1e-5, final_norm=False, activation="gelu", bias=True, position="learned",
    attention_multiplier=None, tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")


@functools.cache
def oracle():
    saved = np.load(ORACLE)
    return json.loads(str(saved["config"])), {name: saved[name] for name in saved.files}


def oracle_config() -> EncoderDecoderConfig:
    sizes, _ = oracle()
    D, N = sizes["hidden_size"], sizes["num_attention_heads"]
    return EncoderDecoderConfig(
        num_layers=sizes["num_layers"], embed_dim=D, num_heads=N, head_dim=D // N, mlp_dim=4 * D,
        vocab_size=sizes["vocab"], decoder_length=sizes["seq"], max_positions=sizes["seq"], **MEGATRON,
    )  # fmt: skip


@pytest.mark.parametrize("sizes, scan", [
    ({"data": 2, "fsdp": 2, "tensor": 2}, True),
    pytest.param({}, False, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_loss_and_every_gradient_equal_megatrons(sizes, scan, make_test_mesh):
    _, saved = oracle()
    config = oracle_config()
    model = Model(config, FLOAT32, ExecutionConfig(scan_layers=scan, recompute="full" if scan else "none"))
    mesh = make_test_mesh(**sizes)
    named = {name[6:]: a for name, a in saved.items() if name.startswith("param/")}
    weights = to_megajax(named, config)
    jax.tree.map(np.testing.assert_array_equal, from_megajax(weights, config), named)
    ids, labels = (saved[name].astype(np.int32) for name in ("ids", "labels"))
    batch = {
        "encoder_tokens": np.tile(ids, (2, 1)),
        "encoder_segment_ids": np.ones((4, ids.shape[1]), np.int32),
        "tokens": np.tile(labels, (2, 1)),
        "labels": np.tile(labels, (2, 1)),
        "loss_weights": np.repeat([[1.0], [0.0]], 2, 0) * np.ones((1, ids.shape[1])) / ids.size,
    }
    batch["loss_weights"] = batch["loss_weights"].astype(np.float32)  # rows 2 and 3 only fill the mesh
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights, model.shardings(mesh))
        loss, gradients = jax.jit(jax.value_and_grad(lambda w: model.loss(w, batch, Spans()).main))(weights)
    # Both sides are float32 and add up in another order.
    assert float(loss) == pytest.approx(float(saved["loss_mean"]), rel=1e-5)
    found = from_megajax(gradients, config)
    assert set(found) == set(named)
    for name, array in found.items():
        wanted = saved[f"grad/{name}"].ravel()
        tolerance = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(array.ravel()[::EVERY], wanted, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name, count", [("t5_base", 247_577_856), ("t5_11b", 11_307_321_344)])
def test_recipes_have_the_parameters_of_the_published_models(name, count):
    config = recipes()[name]()
    model = config.make_model()
    assert model.num_parameters() == model.num_active_parameters() == count
    # The matrices of the encoder and those of keys and values of the cross-attention read its tokens, all others those
    # of the decoder, a quarter as many.
    sizes = config.model
    matrices = sum(p.size for p in model.parameters if p.is_in_a_layer and p.record.is_multiplied)
    encoder = sum(layer.flops(512).matmuls for layer in sizes.stacks(ExecutionConfig())["encoder"]) / 2
    cross = 2 * sizes.decoder_layers * sizes.embed_dim * sizes.num_heads * sizes.head_dim
    outside = sizes.embed_dim * 32128
    expected = encoder + cross + (matrices - encoder - cross + outside) / 4
    assert sizes.forward_flops(512).matmuls == pytest.approx(2 * expected)


def test_buckets_are_those_of_the_paper():
    """Exact below 8 places either way (16 in the decoder), then ranges that double every 2 (5.33) buckets."""
    encoder = RelativeBiasConfig(1, 32, 128, True, 1.0).buckets()
    decoder = RelativeBiasConfig(1, 32, 128, False, 1.0).buckets()
    assert encoder[128:137].tolist() == [0, *range(17, 24), 24] and decoder[:129].max() == 31
    for distance in range(1, 129):
        near = distance if distance < 8 else min(8 + int(2 * math.log2(distance / 8) + 1e-6), 15)
        assert (encoder[128 - distance], encoder[128 + distance]) == (near, near + 16)
        near = distance if distance < 16 else min(16 + int(16 / 3 * math.log2(distance / 16) + 1e-6), 31)
        assert (decoder[128 - distance], decoder[128 + distance]) == (near, 0)


# ----------------------------------------------------------------------------- runs

V11 = EncoderDecoderConfig(
    num_layers=2, num_decoder_layers=1, embed_dim=16, num_heads=4, head_dim=8, mlp_dim=32, vocab_size=164,
    decoder_length=8, num_buckets=8, max_distance=12, activation="geglu_tanh", tied_embeddings=False, dropout=0.1,
    attention_dropout=0.1,
)  # fmt: skip
STEPS = 4


def config_of(run_dir, mesh=MeshConfig(), model=V11, **launch) -> Config:
    return Config(
        model=model,
        mesh=mesh,
        precision=FLOAT32,
        task=Spans(),
        data=DataConfig(cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(
            steps=STEPS, global_batch_size=8, sequence_length=24, log_every_steps=1, eval_every_steps=2, eval_steps=1
        ),
        checkpoint=CheckpointConfig(every_steps=2),
        launch=LaunchConfig(**launch),
        run_dir=str(run_dir),
    )


def numbers(lines: list[dict]) -> list[tuple]:
    return [(line["loss"],) if "loss" in line else (line["eval_loss"], line["eval_accuracy"]) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, lines of metrics) of a run on one device."""
    config = config_of(tmp_path_factory.mktemp("runs") / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return config, run_of(config, monkeypatch)


def test_trains_and_evaluates(trained):
    found = numbers(trained[1])
    assert len(found) == STEPS + 2 and found[-1][0] < found[0][0] - 0.1
    assert all(0 <= accuracy <= 1 for _, accuracy in (found[2], found[-1]))


@pytest.mark.slow
def test_learns_to_write_what_follows_from_the_text_of_the_encoder(tmp_path, monkeypatch):
    """In documents that count: with the text of another sample the spans are unknown."""
    config = config_of(tmp_path / "run", model=dataclasses.replace(V11, embed_dim=32, mlp_dim=64, dropout=0.0))
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=100, global_batch_size=32, eval_every_steps=100),
        optimizer=OptimizerConfig(name="muon", learning_rate=2e-2, min_learning_rate=1e-3),
        checkpoint=CheckpointConfig(every_steps=100),
    )
    (accuracy,) = [line["eval_accuracy"] for line in run_of(config, monkeypatch) if "eval_accuracy" in line]
    opened = open_model(config.run_dir)
    samples = [run.load_data(config.check_on(1)).eval[i] for i in range(32)]
    batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    weights = opened.restore()
    score = jax.jit(opened.model.scores)

    def accuracy_with(shift: int) -> float:
        read = {name: np.roll(a, shift, 0) if name.startswith("encoder") else a for name, a in batch.items()}
        counts = batch["loss_mask"] > 0
        return float(np.mean((score(weights, read).top == batch["labels"])[counts]))

    assert accuracy_with(0) == pytest.approx(accuracy) and accuracy > 0.6
    assert accuracy_with(1) < accuracy - 0.2


@pytest.mark.slow
def test_trains_and_evaluates_the_same_on_a_mesh(trained, tmp_path, monkeypatch):
    _, lines = trained
    meshed = run_of(config_of(tmp_path / "run", MeshConfig(data=2, fsdp=2, tensor=2)), monkeypatch)
    for found, wanted in zip(numbers(meshed), numbers(lines), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_resumes_bit_for_bit(trained, tmp_path, monkeypatch):
    run_of(config_of(tmp_path / "run", exit_at_step=2), monkeypatch)
    assert numbers(run_of(config_of(tmp_path / "run"), monkeypatch)) == numbers(trained[1])


@pytest.fixture(scope="module")
def writer(trained):
    return SequenceToSequence(open_model(trained[0].run_dir))


GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = ["1 2 3 <extra_id_0> 7 8 9", "5", " ".join(map(str, range(3, 30)))]


def predictions(writer, prompt: str, tokens: list[int]) -> np.ndarray:
    """float32 [len(tokens), V]: log-probabilities of the next token without a cache, before each of the tokens."""
    source = np.array([writer.tokens.encode(prompt)], np.int32)
    batch = {
        "encoder_tokens": np.pad(source, ((0, 0), (0, 32 - source.shape[1]))),
        "encoder_segment_ids": (np.arange(32) < source.shape[1])[None].astype(np.int32),
        "tokens": np.pad(np.array([[writer.tokens.pad_id, *tokens]], np.int32)[:, :-1], ((0, 0), (0, 8 - len(tokens)))),
    }
    return np.asarray(_log_probs(writer.model, writer.params, batch))[: len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(model, weights, batch):
    module = model.module(weights)
    tokens = jnp.repeat(jnp.arange(model.config.vocab_size)[:, None], 8, 1)
    many = {name: jnp.repeat(jnp.asarray(a), len(tokens), 0) for name, a in batch.items()}
    return module.log_probs(module.hidden(many)[0], tokens).log_probs.T


def test_writes_what_it_predicts_without_a_cache(writer):
    """Of prompts of several lengths in one batch."""
    for prompt, found in zip(PROMPTS, writer.write(PROMPTS, GREEDY), strict=True):
        expected = predictions(writer, prompt, found.tokens)
        assert found.tokens == np.argmax(expected, -1).tolist() and found.finish_reason == "length"


@pytest.mark.slow
def test_any_mesh_writes_the_same(trained, writer):
    meshed = SequenceToSequence(open_model(trained[0].run_dir, MeshConfig(data=2, fsdp=2, tensor=2)))
    assert meshed.write(PROMPTS, GREEDY) == writer.write(PROMPTS, GREEDY)


def test_samples_by_seed_and_ends_at_a_stop_text(writer):
    hot = dataclasses.replace(GREEDY, temperature=1.0)
    first, again, other = (writer.write(PROMPTS, dataclasses.replace(hot, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other
    whole = writer.write(PROMPTS, GREEDY)[0].text
    cut = writer.write(PROMPTS, dataclasses.replace(GREEDY, stop=(whole[2:],)))[0]
    assert (cut.text, cut.finish_reason) == (whole[:2], "stop")


def test_beam_search_finds_texts_that_are_at_least_as_likely(writer):
    def score(prompt, tokens):
        return predictions(writer, prompt, tokens)[np.arange(len(tokens)), tokens].sum()

    greedy = writer.write(PROMPTS, GREEDY)
    beams = writer.write(PROMPTS, GREEDY, num_beams=4)
    scores = [(score(p, a.tokens), score(p, b.tokens)) for p, a, b in zip(PROMPTS, greedy, beams, strict=True)]
    assert all(beam >= one - 1e-5 for one, beam in scores) and any(beam > one + 1e-4 for one, beam in scores)


def test_what_an_encoder_decoder_cannot_do_is_refused_by_name(trained, writer, tmp_path):
    config, _ = trained
    for change, message in (
        (dict(mesh=MeshConfig(context=2)), "mesh.context=2 is not supported by model.kind=t5"),
        (dict(mesh=MeshConfig(pipeline=2)), "mesh.pipeline=2: .*has encoder, decoder"),
        (
            dict(task=Language()),
            "task.kind=language learns from .*model.kind=t5 has target_token; use --task.kind=spans",
        ),
        (dict(model=dataclasses.replace(V11, num_buckets=6)), "model.num_buckets=6 must be a multiple of 4"),
        (dict(model=dataclasses.replace(V11, position="learned", max_positions=16)), "use --model.max_positions=24"),
        (dict(mesh=MeshConfig(tensor=16)), "model.decoder_length=8 is not divisible by mesh.tensor=16"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **change).check()
    with pytest.raises(ValueError, match="model.kind=t5 writes a text from another one"):
        Engine.from_run(config.run_dir)
    with pytest.raises(ValueError, match="logprobs=2 is not supported by model.kind=t5"):
        writer.write(["1"], Sampling(logprobs=2))
    with pytest.raises(ValueError, match="num_beams=2 searches .* use --temperature=0"):
        writer.write(["1"], Sampling(), num_beams=2)
    with pytest.raises(ValueError, match="<extra_id_100> is not a sentinel; the last is <extra_id_99>"):
        writer.write(["<extra_id_100>"], Sampling())
