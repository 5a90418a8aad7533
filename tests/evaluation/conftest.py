"""A small random model of bytes, whose predictions depend strongly on the context."""

import dataclasses

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
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

MODEL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=257, vocab_multiple=64,
    max_positions=64, tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")


def random_weights(model: Model, seed: int) -> dict:
    """Drawn by numpy: nothing to compile."""
    generator = np.random.default_rng(seed)

    def draw(path, a):
        return generator.normal(float(path[-1].key == "scale"), 0.3, a.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A run of two steps, both saved, with bytes as its tokens."""
    run_dir = tmp_path_factory.mktemp("run")
    config = Config(model=MODEL, precision=FLOAT32, run_dir=str(run_dir))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tokenizer="bytes"),
        training=dataclasses.replace(config.training, sequence_length=64, steps=2),
        checkpoint=dataclasses.replace(config.checkpoint, keep=0),
    )
    (run_dir / "config.json").write_text(config.to_json())
    model = Model(MODEL, FLOAT32)
    shardings = model.shardings(make_mesh(MeshConfig(), jax.devices()[:1]))
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        for step in (1, 2):
            params = jax.device_put(random_weights(model, step), shardings)
            checkpointer.save(step, params, {"count": jnp.int32(0)}, recorded(model.layer_rows))
    return run_dir


@pytest.fixture(scope="session")
def text_model(run_dir):
    """Step 2; reads 64 tokens at once, 128 in a batch."""
    return TextModel.load(run_dir, batch_tokens=128)


@pytest.fixture(scope="session")
def log_probs_by_hand(text_model):
    """Tokens [n] -> log p of every token, float64 [n - 1, V], after those before it, by a float64 softmax of the
    logits of the whole model."""
    model = text_model.scorer.model

    @jax.jit
    def logits(params, tokens_BT):
        module = model.module(params)
        positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        batch = {"tokens": tokens_BT, "positions": positions_BT}
        return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])

    def by_hand(tokens):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens) - 1] = tokens[:-1]
        found = np.asarray(logits(text_model.scorer.params, padded), np.float64)[0, : len(tokens) - 1, :257]
        return found - np.log(np.exp(found).sum(-1, keepdims=True))  # logits are around 10: nothing overflows

    return by_hand
