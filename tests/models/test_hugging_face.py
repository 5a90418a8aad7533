"""Models of Hugging Face transformers that take other choices than GPT-2 and Llama: the same logits, with a cache too.

tests/oracles/make_hugging_face.py makes the oracle.
Its rotary frequencies are compared in tests/layers/attention/test_rope.py.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config
from megajax.layers.attention.kv_cache import Places, PoolSizes
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

ORACLE = np.load(Path(__file__).parent.parent / "oracles" / "hugging_face.npz")
NAMES = ("gemma3", "bloom", "gpt_oss", "cohere2")
SLOW_NAMES = ("olmo2", "gpt_neox", "gptj", "granite")  # of which tests/weights/hugging_face compares the logits too


def config_of(name: str) -> DecoderConfig:
    return Config.from_dict({"model": json.loads(str(ORACLE[f"{name}/fields"]))}).model


def params_of(name: str, model: Model) -> dict:
    """All that the file has and the model asks for, no more and no less."""
    left = {key for key in ORACLE.files if key.startswith(f"{name}/params/")}

    def read(path, leaf):
        key = f"{name}/params/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        left.remove(key)
        assert ORACLE[key].shape == leaf.shape, key
        return ORACLE[key]

    params = jax.tree.map_with_path(read, model.abstract_weights)
    assert not left
    return params


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_NAMES)])
def test_logits_equal_those_of_transformers(name):
    """Of the whole sequence, and of a prompt and two more tokens with a cache."""
    config = config_of(name)
    tokens = ORACLE[f"{name}/tokens"]
    length = tokens.shape[1]
    execution = ExecutionConfig(scan_layers=False)
    config.check(MeshConfig(), length, execution)
    model = Model(config, PrecisionConfig(compute="float32"), execution)

    def batch_of(first: int, end: int) -> dict:
        positions = np.broadcast_to(np.arange(first, end, dtype=np.int32), (len(tokens), end - first))
        return {"tokens": tokens[:, first:end], "positions": positions}

    @jax.jit
    def run(params):
        module = model.module(params)
        batch = batch_of(0, length)
        x, _, _ = module.layers(module.embed(batch, None), module.block_inputs(batch))
        rows = np.arange(len(tokens), dtype=np.int32)[:, None]  # each with a page of its own
        caches = config.new_pages(PoolSizes(len(tokens), length, len(tokens), jnp.float32), execution)

        def extend(caches, batch, row, lower):
            positions = batch["positions"]
            places = Places(row * length + positions, positions, row + 0 * positions, row, lower, positions + 1)
            return module.extend(batch, {"layers": tuple(cache.at(places) for cache in caches["layers"])})

        prompts = []
        for number in range(len(tokens)):
            batch = {name: array[number : number + 1] for name, array in batch_of(0, length - 2).items()}
            prompt, caches = extend(caches, batch, rows[number : number + 1], 0 * batch["positions"])
            prompts.append(prompt[:, -1:])
        cached = [jnp.concatenate(prompts)]
        for place in (length - 2, length - 1):
            x1, caches = extend(caches, batch_of(place, place + 1), rows, None)
            cached.append(x1)
        return module.logits(x), module.logits(jnp.concatenate(cached, 1))

    whole, cached = (np.asarray(logits)[..., : config.vocab_size] for logits in run(params_of(name, model)))
    wanted = ORACLE[f"{name}/logits"]
    assert wanted.std() > 0.1
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=1e-5 * wanted.std())
    np.testing.assert_allclose(cached, wanted[:, -3:], rtol=0, atol=1e-5 * wanted.std())
