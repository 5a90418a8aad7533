"""Weights of the engine in 8 bits: what is stored, what is computed, how they are loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import recorded
from megajax.config import Config
from megajax.inference.device import weights
from megajax.inference.device.weights import serving_weights
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.load import open_model
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.precision import PrecisionConfig
from megajax.quantization.weights import WeightFormat

MODEL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=100, max_positions=64,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")
SERVING = ServingConfig(max_rows=4, max_batch_tokens=16, page_size=8, num_pages=20, max_length=64)
PROMPTS = [[5, 17, 3], list(range(20, 30))]
GREEDY = Sampling(max_tokens=12, temperature=0.0)


def random_params(model: Model, seed: int) -> dict:
    generator = np.random.default_rng(seed)

    def draw(path, a):
        return generator.normal(float(path[-1].key == "scale"), 0.3, a.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two steps of a random model."""
    run_dir = tmp_path_factory.mktemp("run")
    config = Config(model=MODEL, precision=FLOAT32)
    data = dataclasses.replace(config.data, tokenizer="null:100")
    training = dataclasses.replace(config.training, sequence_length=64)
    config = dataclasses.replace(config, data=data, training=training)
    (run_dir / "config.json").write_text(config.to_json())
    model, mesh = Model(MODEL, FLOAT32), make_mesh(MeshConfig(), jax.devices()[:1])
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        for step in (1, 2):
            params = jax.device_put(random_params(model, step), model.shardings(mesh))
            checkpointer.save(step, params, {"count": jnp.int32(0)}, recorded(model.layer_rows))
    return run_dir


@pytest.fixture(scope="module")
def logits():
    """(weights, token ids [T]) -> float32 [T, V]."""
    model = Model(MODEL, FLOAT32)

    @jax.jit
    def run(weights, tokens_1T):
        batch = {"tokens": tokens_1T, "positions": jnp.arange(tokens_1T.shape[1], dtype=jnp.int32)[None]}
        module = model.module(weights)
        return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])[0, :, :100]

    return lambda weights, tokens: np.asarray(run(weights, np.array([tokens], np.int32)))


@pytest.fixture(scope="module", params=["float8", pytest.param("int8", marks=pytest.mark.slow)])
def engine(request, run_dir):
    return Engine.from_run(run_dir, step=1, serving=dataclasses.replace(SERVING, weight_dtype=request.param))


# Noise of the seven products of a layer, which add up in the residual stream. Half a step of int8 is 1 / 254 of the
# largest of 32 normal weights: 0.5 % of their standard deviation on average. Half a step of float8 is up to 1 / 16 of a
# value, 2.6 % on average.
BOUND = {"int8": 0.015, "float8": 0.08}


@pytest.mark.parametrize("weight_dtype", BOUND)
def test_logits_are_within_the_noise_of_the_format(logits, weight_dtype):
    model = Model(MODEL, FLOAT32)
    tokens = np.random.default_rng(0).integers(0, 100, 60)
    params = jax.tree.map(lambda a, r: a / 3 if r.is_quantizable else a, random_params(model, 1), model.records)
    rounded = serving_weights(model, params, weight_dtype, make_mesh(MeshConfig(), jax.devices()[:1]))
    exact = logits(params, tokens)
    error = (logits(rounded, tokens) - exact).std() / exact.std()
    assert BOUND[weight_dtype] / 10 < error < BOUND[weight_dtype]


def test_generation_equals_full_recomputation(engine, logits):
    for prompt, new in zip(PROMPTS, engine.generate_tokens(PROMPTS, GREEDY), strict=True):
        likely = logits(engine.params, [*prompt, *new]).argmax(-1)
        assert new == likely[len(prompt) - 1 : -1].tolist()


def test_generation_with_inputs_in_8_bits_equals_full_recomputation(run_dir, logits, monkeypatch):
    monkeypatch.setitem(weights.FORMATS, "float8", WeightFormat("float8", "dynamic"))
    engine = Engine.from_run(run_dir, step=1, serving=dataclasses.replace(SERVING, weight_dtype="float8"))
    assert engine.params["layers"]["dense"]["mlp"]["down"][0].inputs == "dynamic"
    test_generation_equals_full_recomputation(engine, logits)


def test_new_weights_are_quantised_and_need_no_new_program(engine, run_dir):
    old = engine.params
    expected = engine.generate_tokens(PROMPTS, GREEDY)
    programs = dict(engine.executor.compiled)
    engine.use(jax.device_put(random_params(engine.model, 2)))
    loaded = open_model(run_dir, step=2, weights=engine.serving.weight_dtype).restore(joins=True)
    jax.tree.map(np.testing.assert_array_equal, engine.params, loaded)
    assert engine.generate_tokens(PROMPTS, GREEDY) != expected
    engine.use(old)
    assert engine.generate_tokens(PROMPTS, GREEDY) == expected
    assert engine.executor.compiled == programs
    other = {"int8": "float8", "float8": "int8"}[engine.serving.weight_dtype]
    with pytest.raises(ValueError, match="quantised in another way"):
        engine.use(open_model(run_dir, weights=other).restore())


def test_any_mesh_quantises_to_the_same_numbers(engine, run_dir):
    mesh = MeshConfig(tensor=2, fsdp=2)
    params = open_model(run_dir, mesh, 1, weights=engine.serving.weight_dtype).restore(joins=True)
    down = params["layers"]["dense"]["mlp"]["down"][0].values
    assert down.shape == (32, 64) and down.sharding.shard_shape(down.shape) == (16, 32)
    jax.tree.map(np.testing.assert_array_equal, params, engine.params)


def test_experts_latents_and_what_is_outside_layers_stay():
    latent = LatentConfig(kv_rank=8, q_rank=8, rope_dim=4)
    moe = MoeConfig(num_experts=2, expert_dim=16, shared_dim=16)
    model = Model(dataclasses.replace(MODEL, num_kv_heads=None, latent=latent, moe=moe), FLOAT32)
    leaves = jax.tree_util.tree_leaves_with_path(model.records)
    found = [name_of(path).removeprefix("layers.moe.") for path, record in leaves if record.is_quantizable]
    shared = [f"mlp.shared.{name}" for name in ("down", "gate", "up")]
    assert sorted(found) == [*(f"attention.{n}" for n in ("key_value_down", "out", "query_down")), *shared]


def test_unknown_formats_are_refused():
    for name in ("weight_dtype", "page_dtype"):
        with pytest.raises(ValueError, match=f"^{name}='fp8' must be one of "):
            ServingConfig(**{name: "fp8"}).check()
