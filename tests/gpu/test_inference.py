"""The engine on a GPU: with its kernels, chunks of prompts and decoding give the probabilities of whole sequences; the
loop over steps as a CUDA graph gives the tokens that it gives without, and the host does not wait for it."""

import dataclasses
import functools
import time

import jax
import numpy as np
import pytest

from megajax.inference.device import executor
from megajax.inference.device.compiler_options import IN_GRAPHS, decode_options
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(
    num_layers=2, embed_dim=512, num_heads=8, num_kv_heads=2, head_dim=128, mlp_dim=1024, vocab_size=1000,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False, init_std=0.05,
)  # fmt: skip
SERVING = ServingConfig(max_rows=8, max_batch_tokens=256, page_size=64, num_pages=64, max_length=1024)
MODELS = {
    "plain": CONFIG,
    "window": dataclasses.replace(CONFIG, window=100, pattern="wf"),
    "cap and sinks": dataclasses.replace(CONFIG, attention_soft_cap=5.0, attention_sinks=True),
}
NEW_TOKENS = 40
# In calls of 256 tokens; the last one has the end of the third, the fourth and padding.
PROMPTS = [np.random.default_rng(length).integers(0, 1000, length).tolist() for length in (700, 3, 130, 64)]


LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS


@functools.cache
def exact(name, mesh):
    """-> log-probabilities [T, V] of the tokens of a sequence by the model with these parameters in float32, without a
    cache; all lengths with one program."""
    model = Model(MODELS[name], PrecisionConfig(params="float32", compute="float32"))

    @jax.jit
    def logprobs(params, batch):
        module = model.module(params)
        hidden = module.layers(module.embed(batch, None), module.block_inputs(batch))[0]
        return jax.nn.log_softmax(module.logits(hidden)[0, :, : model.config.vocab_size], -1)

    def of_sequence(params, tokens):
        padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, LONGEST - len(tokens))))
        batch = {"tokens": padded, "positions": np.arange(LONGEST, dtype=np.int32)[None]}
        with jax.set_mesh(mesh):
            return np.asarray(logprobs(params, batch))[: len(tokens)]

    return of_sequence


@pytest.mark.parametrize("page_dtype", ["compute", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_decoding_give_the_probabilities_of_the_whole_sequence(name, page_dtype):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(MODELS[name], PrecisionConfig(params="float32", compute="bfloat16"))
    params = model.init(0, mesh)
    engine = Engine(model, params, mesh, None, serving=dataclasses.replace(SERVING, page_dtype=page_dtype))
    sampling = Sampling(max_tokens=NEW_TOKENS, seed=3, logprobs=0, prompt_logprobs=0)
    found = {engine.submit(prompt, sampling): [] for prompt in PROMPTS}
    while engine.has_work:
        for output in engine.step():
            found[output.request] += output.logprobs
    for request, logprobs in found.items():
        tokens = [*request.prompt, *(entry.token for entry in logprobs)]
        wanted = exact(name, mesh)(params, tokens)[np.arange(len(tokens) - 1), tokens[1:]]
        error = np.abs([entry.logprob for entry in (*request.prompt_logprobs, *logprobs)] - wanted)
        # bfloat16 has 8 bits of mantissa; logits are of order 1 to 10
        assert error.mean() < 0.03 and error.max() < 0.3, (len(request.prompt), error.argmax(), error.max())


FAMILIES = {
    "dense": CONFIG,
    "experts, latent attention": dataclasses.replace(
        CONFIG, num_kv_heads=None, head_dim=64, latent=LatentConfig(kv_rank=64, q_rank=64, rope_dim=32, value_dim=64),
        moe=MoeConfig(4, 256, shared_dim=256),
    ),
    "state spaces, a gated delta net": HybridConfig(
        num_layers=3, embed_dim=256, num_heads=4, mlp_dim=512, vocab_size=1000, pattern="M*G", position="none",
        norm="rmsnorm", biases=(), init_std=0.05, mamba=MambaConfig(head_dim=32, state_dim=32),
        delta_net=DeltaNetConfig(value_head_dim=32, num_key_heads=4, key_head_dim=32),
    ),
}  # fmt: skip
SAMPLINGS = [
    Sampling(max_tokens=20, temperature=0.0),
    Sampling(max_tokens=13, seed=1, logprobs=2),
    Sampling(max_tokens=20, seed=2, top_k=40, top_p=0.9, min_p=0.01, presence_penalty=0.5, logit_bias={3: 2.0}),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_loop_in_a_graph_gives_the_tokens_that_it_gives_without(name, monkeypatch):
    """In float32, where rounding does not change them; with greedy requests alone, and with every kind of sampling."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(FAMILIES[name], PrecisionConfig(compute="float32"))
    params = model.init(0, mesh)

    def tokens():
        engine = Engine(model, params, mesh, None, serving=SERVING)
        greedy = engine.generate_tokens(PROMPTS[1:], SAMPLINGS[0])
        requests = [engine.submit(prompt, sampling) for prompt, sampling in zip(PROMPTS[1:], SAMPLINGS, strict=True)]
        found = {request: [] for request in requests}
        while engine.has_work:
            for output in engine.step():
                found[output.request] += output.tokens
        return greedy, list(found.values())

    assert IN_GRAPHS in decode_options(model, {}, mesh, 8)
    in_graph = tokens()
    monkeypatch.setattr(executor, "decode_options", lambda *_, **__: {})
    assert tokens() == in_graph


def test_the_host_does_not_wait_for_many_rows():
    """If XLA sorted a large vocabulary for that many rows, it would use a kernel that a CUDA graph cannot hold."""
    rows, steps = 32, 64
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(dataclasses.replace(CONFIG, vocab_size=128_256))
    serving = dataclasses.replace(SERVING, max_rows=rows, decode_steps=steps)
    engine = Engine(model, model.init(0, mesh), mesh, None, serving=serving)
    batches = engine.batches
    arguments = (engine.params, *batches.empty_decode(*batches.shapes.fitting_decode(rows, 1)), steps)

    def seconds():
        jax.block_until_ready(engine.executor.caches)
        start = time.perf_counter()
        engine.executor.decode(*arguments)
        returned = time.perf_counter()
        jax.block_until_ready(engine.executor.caches)
        return returned - start, time.perf_counter() - start

    seconds()
    dispatch, total = min(seconds() for _ in range(5))
    assert dispatch < total / 2, (dispatch, total)
