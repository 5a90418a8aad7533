"""Generation over pages, against a full recomputation of the sequence for every token."""

import dataclasses
import functools
import json
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from joined import arrays_of
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import recorded
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import BytesTokenizer, NullTokenizer
from megajax.evaluation.scorer import Scorer
from megajax.inference.device.memory import HOST_POOL_BYTES, check_programs, kept_sizes, pool_bytes, pool_sizes
from megajax.inference.draft import check_same_tokens
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.scheduling.work import Prefill, look_up
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from servers import prompt_logprobs, recorded_calls

# Weights far larger than at the start of a training: the most likely token depends strongly on all that came before.
SMALL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, vocab_size=100, vocab_multiple=32, max_positions=64,
    tied_embeddings=False,
)  # fmt: skip
ROPE = dataclasses.replace(
    SMALL, position="rope", num_kv_heads=2, window=6, pattern="wf", qk_norm=True, norm="rmsnorm",
    activation="swiglu", biases=(), tied_embeddings=True,
)  # fmt: skip
MODELS = {
    "learned": SMALL,
    "rope": ROPE,
    "cap": dataclasses.replace(SMALL, attention_soft_cap=5.0),
}
# Attention of other kinds: how these read a cache on one device, see tests/models/test_hugging_face.py.
OTHERS = {
    "recurrent": HybridConfig(
        num_layers=3,
        embed_dim=32,
        num_heads=4,
        mlp_dim=64,
        vocab_size=100,
        vocab_multiple=32,
        pattern="M*G",
        position="none",
        norm="rmsnorm",
        biases=(),
        mamba=MambaConfig(head_dim=8, state_dim=8),
        delta_net=DeltaNetConfig(value_head_dim=8, num_key_heads=4, key_head_dim=8),
    ),
    "window": dataclasses.replace(SMALL, window=6),
    "sinks": dataclasses.replace(ROPE, attention_sinks=True, norm_placement="sandwich"),
    "alibi": dataclasses.replace(SMALL, position="alibi", parallel_residual="one_norm"),
}
DEEPSEEK = DecoderConfig(
    num_layers=1, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=64, vocab_size=100, vocab_multiple=32, position="rope",
    norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False, mtp_layers=2,
    latent=LatentConfig(kv_rank=16, q_rank=16, rope_dim=4, value_dim=8),
    moe=MoeConfig(4, 16, shared_dim=16, router=RouterConfig(score="sigmoid", bias_update_rate=1e-3)),
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")
# Small enough that prompts take several chunks and rows run out of pages.
SERVING = ServingConfig(max_rows=4, max_batch_tokens=16, page_size=8, num_pages=10, max_length=64, decode_steps=3)
PROMPTS = [[5, 17, 3], [1], list(range(20, 50)), [9, 8, 7, 6, 5, 4, 3, 2], [99, 0, 99]]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LONGER = dataclasses.replace(GREEDY, max_tokens=18)
SAMPLED = Sampling(max_tokens=12, temperature=1.3, top_k=40, top_p=0.95, seed=11)


def random_params(model, seed=0):
    """Drawn by numpy: nothing to compile; scales and biases differ from 1 and 0."""
    generator = np.random.default_rng(seed)

    def draw(path, a):
        return generator.normal(float(path[-1].key == "scale"), 0.3, a.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


def make_engine(config, mesh, tokenizer=None, precision=FLOAT32, seed=0, execution=ExecutionConfig(), serving=SERVING):
    model = Model(config, precision, execution)
    params = jax.device_put(random_params(model, seed), model.shardings(mesh))
    return Engine(model, params, mesh, tokenizer, serving=serving)


@pytest.fixture(scope="module")
def engine_of():
    """(name of a model, axes of a mesh) -> its engine, made once."""

    @functools.cache
    def make(name, **sizes):
        config = MeshConfig(**sizes)
        return make_engine(
            (MODELS | OTHERS)[name],
            make_mesh(config, jax.devices()[: config.num_devices]),
            # However it trains, it generates the same.
            execution=ExecutionConfig(recompute="selective", scan_layers=True) if name == "cap" else ExecutionConfig(),
        )

    return make


def recompute(engine, prompts, num_tokens):
    """Greedy tokens from the whole sequences each time, without a cache; their padding is hidden by causality."""
    model, length = engine.model, 48

    @jax.jit
    def logits(params, tokens_BT, last_B):
        module = model.module(params)
        positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens_BT.shape)
        batch = {"tokens": tokens_BT, "positions": positions_BT}
        logits_BTV = module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])
        return jnp.take_along_axis(logits_BTV, last_B[:, None, None], 1)[:, 0]

    rows = [list(prompt) for prompt in prompts]
    with jax.set_mesh(engine.mesh):
        for _ in range(num_tokens):
            padded = np.array([tokens + [0] * (length - len(tokens)) for tokens in rows], np.int32)
            last_B = np.array([len(tokens) - 1 for tokens in rows], np.int32)
            for tokens, new in zip(rows, np.argmax(logits(engine.params, padded, last_B), -1).tolist(), strict=True):
                tokens.append(new)
    return [tokens[len(prompt) :] for tokens, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize("name", [*MODELS, pytest.param("recurrent", marks=pytest.mark.slow)])
def test_cached_generation_equals_full_recomputation(engine_of, name):
    expected = recompute(engine_of(name), PROMPTS, 12)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # the model does not just repeat itself
    assert engine_of(name).generate_tokens(PROMPTS, GREEDY) == expected


@pytest.mark.parametrize(
    "name, sizes",
    [
        pytest.param("learned", dict(data=2, tensor=2), marks=pytest.mark.slow),
        ("rope", dict(data=2, tensor=2)),
        pytest.param("rope", dict(fsdp=2, context=2), marks=pytest.mark.slow),
        pytest.param("sinks", dict(tensor=2, context=2), marks=pytest.mark.slow),
        pytest.param("alibi", dict(tensor=2, context=2), marks=pytest.mark.slow),
    ],
)
def test_any_mesh_generates_the_same(engine_of, name, sizes):
    one, many = engine_of(name), engine_of(name, **sizes)
    for sampling in (GREEDY, SAMPLED):
        assert many.generate_tokens(PROMPTS, sampling) == one.generate_tokens(PROMPTS, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batched_equals_alone(engine_of, sampling):
    engine = engine_of("rope")
    together = engine.generate_tokens(PROMPTS, sampling)
    assert together == [engine.generate_tokens([prompt], sampling)[0] for prompt in PROMPTS]


class Late:
    """An array that the device takes long to compute."""

    def __init__(self, array):
        self.array = array

    def copy_to_host_async(self):
        pass

    def __array__(self, *_, **__):
        time.sleep(0.1)
        return np.asarray(self.array)


def test_the_scheduler_is_told_how_long_the_host_takes(engine_of, monkeypatch):
    engine = engine_of("rope")
    took = []
    decode = engine.executor.decode

    def decode_late(*arguments):
        drawn = decode(*arguments)
        return drawn._replace(tokens=Late(drawn.tokens))

    def decode_slowly(*arguments):
        time.sleep(0.05)
        return decode(*arguments)

    monkeypatch.setattr(engine.scheduler, "host_took", took.append)
    monkeypatch.setattr(engine.executor, "decode", decode_slowly)
    engine.generate_tokens(PROMPTS[:1], GREEDY)
    assert not took  # on a CPU
    monkeypatch.setattr(engine.executor, "asks_for_graphs", True)
    engine.generate_tokens(PROMPTS[:1], GREEDY)
    assert len(took) == 4 and min(took) > 0.05
    took.clear()
    monkeypatch.setattr(engine.executor, "decode", decode_late)
    engine.generate_tokens(PROMPTS[:1], GREEDY)
    assert len(took) == 4 and max(took) < 0.05  # waiting does not count


def test_seed_decides(engine_of):
    settings = [dataclasses.replace(SAMPLED, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (engine_of("rope").generate_tokens(PROMPTS, sampling) for sampling in settings)
    assert first == same != other


# ----------------------------------------------------------------------------- many requests


def run_all(engine, requests):
    """-> {request: tokens of its samples}, all of their outputs."""
    tokens = {request: [[] for _ in request.sequences] for request in requests}
    outputs = []
    while engine.has_work:
        for output in engine.step():
            outputs.append(output)
            tokens[output.request][output.index] += output.tokens
    return tokens, outputs


def test_preemption_shared_prefixes_and_chunks_change_no_token(engine_of):
    engine = engine_of("rope")
    start = list(range(20, 44))
    prompts = [[*start[: 8 * (number % 4)], number, 3] for number in range(12)]
    expected = recompute(engine, prompts, 20)
    before = engine.stats()
    requests = [engine.submit(prompt, dataclasses.replace(GREEDY, max_tokens=20)) for prompt in prompts]
    tokens, _ = run_all(engine, requests)
    assert [tokens[request][0] for request in requests] == expected
    after = engine.stats()
    assert after.preemptions > before.preemptions and after.prefix_hits > before.prefix_hits
    assert after.generated_tokens - before.generated_tokens == 12 * 20
    assert (after.num_running, after.num_waiting, after.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("name", ["rope", *(pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "sinks",
                                  "window", "recurrent"))])  # fmt: skip
def test_sequences_that_decode_beside_prompts_get_the_same_tokens(engine_of, name, monkeypatch):
    """As on a GPU; requests come while others decode, and pages run out."""
    alternating = engine_of(name)
    monkeypatch.setattr(Engine, "platform", "gpu")
    engine = make_engine(alternating.model.config, alternating.mesh)
    calls = recorded_calls(engine, monkeypatch)
    prompts = [[*range(number, 5 * number + 3)] for number in range(9)]
    settings = [dataclasses.replace(sampling, max_tokens=18, logprobs=2) for sampling in (GREEDY, SAMPLED)]
    found = []
    for each in (alternating, engine):
        requests = []
        outputs = []
        while len(requests) < len(prompts) or each.has_work:
            for number in range(len(requests), min(len(requests) + 2, len(prompts))):
                sampling = dataclasses.replace(settings[number % 2], prompt_logprobs=number % 3 or None)
                requests.append(each.submit(prompts[number], sampling))
            outputs += each.step()
        texts = [[token for output in outputs if output.request is request for token in output.tokens]
                 for request in requests]  # fmt: skip
        of_prompts = [[found.logprob for found in request.prompt_logprobs or ()] for request in requests]
        found.append((texts, of_prompts))
    assert found[1][0] == found[0][0]
    for ours, expected in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert any(len(call.chunks) > 1 and len(call.beside) > 1 for call in calls if isinstance(call, Prefill))
    assert engine.stats().preemptions or name == "window"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, dict(tensor=2)], ids=["one device", "two devices"])
def test_prompts_that_continue_from_kept_states_get_the_same_tokens(engine_of, sizes):
    """A model with attention and states; prompts share beginnings of different lengths, and rows and pages run out."""
    engine = engine_of("recurrent", **sizes)
    engine.warm_up()
    programs = engine.num_programs
    start = list(range(20, 46))
    prompts = [[*start[: 8 * (number % 4)], number, 3] for number in range(12)]
    expected = recompute(engine, prompts, 20)
    before = engine.stats()
    for _ in range(3):
        assert engine.generate_tokens(prompts, dataclasses.replace(GREEDY, max_tokens=20)) == expected
    after = engine.stats()
    assert after.prefix_hits > before.prefix_hits and after.preemptions > before.preemptions
    random_requests(engine, 60, seed=3)
    old = engine.params
    engine.use(jax.device_put(random_params(engine.model, seed=1), engine.model.shardings(engine.mesh)))
    assert engine.generate_tokens(prompts, GREEDY) == recompute(engine, prompts, 12)
    engine.use(old)
    assert engine.num_programs == programs


def test_rows_pages_and_kept_states_share_the_memory(make_test_mesh):
    model = Model(OTHERS["recurrent"], FLOAT32)
    pages = {}
    for keeps in (True, False):
        serving = dataclasses.replace(SERVING, num_pages=None, max_rows=50_000, prefix_cache=keeps)
        (sizes,) = pool_sizes([model], make_test_mesh(), serving)
        kept = kept_sizes(model, sizes, serving)
        used = pool_bytes(model, sizes) + (pool_bytes(model, kept) if kept.num_rows else 0)
        pages[keeps] = sizes.num_pages
        assert 0.99 * HOST_POOL_BYTES < used <= HOST_POOL_BYTES
    assert pages[True] < pages[False]


def test_programs_that_need_more_memory_than_is_left_are_refused():
    stats = {"bytes_limit": 100 * 2**30, "bytes_in_use": 90 * 2**30}
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(memory_stats=lambda: stats)])

    def program(gibibytes):
        analysis = SimpleNamespace(temp_size_in_bytes=gibibytes * 2**30)
        return SimpleNamespace(memory_analysis=lambda: analysis)

    serving = ServingConfig(memory_fraction=0.9)
    check_programs(mesh, [program(3), program(10)], serving)
    with pytest.raises(ValueError, match="needs 14.0 GiB .* 10.0 GiB are left; use --memory_fraction=0.86, or fewer"):
        check_programs(mesh, [program(14), program(3)], serving)
    with pytest.raises(ValueError, match="use fewer --num_pages, or fewer --max_rows"):
        check_programs(mesh, [program(14)], dataclasses.replace(serving, num_pages=100))


def test_samples_of_a_request_share_its_pages_and_differ(engine_of):
    engine = engine_of("rope")
    prompt = list(range(60, 80))
    sampling = dataclasses.replace(SAMPLED, n=3, top_k=0, top_p=1.0)
    hits = engine.stats().prefix_hits
    request = engine.submit(prompt, sampling)
    tokens, _ = run_all(engine, [request])
    assert engine.stats().prefix_hits - hits == 2 * 16  # two whole pages, found by the second and third sample
    seeds = [dataclasses.replace(sampling, n=1, seed=sampling.seed + index) for index in range(3)]
    assert tokens[request] == [engine.generate_tokens([prompt], seed)[0] for seed in seeds]
    assert len({tuple(sample) for sample in tokens[request]}) == 3


def test_log_probabilities_are_those_of_the_whole_sequence(engine_of):
    engine = engine_of("learned")
    prompt = PROMPTS[2]
    sampling = dataclasses.replace(SAMPLED, logprobs=2, prompt_logprobs=1, repetition_penalty=1.5)
    request = engine.submit(prompt, sampling)
    other = engine.submit(PROMPTS[0], GREEDY)
    _, outputs = run_all(engine, [request, other])
    found = [entry for output in outputs if output.request is request for entry in output.logprobs]
    assert all(output.logprobs is None for output in outputs if output.request is other)
    tokens = prompt + [entry.token for entry in found]
    batch = {"tokens": np.array([tokens]), "positions": np.arange(len(tokens), dtype=np.int32)[None]}
    module = engine.model.module(engine.params)
    x_BTD = module.layers(module.embed(batch, None), module.block_inputs(batch))[0]
    wanted = np.asarray(jax.nn.log_softmax(module.logits(x_BTD)[0, :, :100], -1))
    for place, entry in enumerate([*request.prompt_logprobs, *found]):
        assert entry.token == tokens[place + 1]
        np.testing.assert_allclose(entry.logprob, wanted[place, entry.token], atol=1e-4)  # float32 sums
        best = np.argsort(-wanted[place])[: 1 if place < len(prompt) - 1 else 2]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], wanted[place, best], atol=1e-4)
    assert len(request.prompt_logprobs) == len(prompt) - 1 and len(found) == 12
    again = prompt_logprobs(engine, prompt)
    assert [entry.logprob for entry in again] == [entry.logprob for entry in request.prompt_logprobs]
    (scores,) = Scorer(engine.model, engine.params, engine.mesh).score([prompt])
    np.testing.assert_allclose(scores.log_probs, [entry.logprob for entry in again], atol=1e-4)  # float32 sums
    assert len(prompt_logprobs(engine, [7] * 64)) == 63  # as long as the model reads


def random_requests(engine, count, seed):
    """Submits, cancels and refuses at random; checks that each request ends and no page is lost."""
    generator = np.random.default_rng(seed)
    alive, ended, submitted = {}, {}, 0
    while submitted < count or engine.has_work:
        while submitted < count and generator.random() < 0.85:
            submitted += 1
            length = int(generator.integers(0, 24))
            if generator.random() < 0.1:
                length += 64
            sampling = Sampling(
                max_tokens=int(generator.integers(1, 40)), temperature=float(generator.choice([0, 1])),
                seed=submitted, n=int(generator.integers(1, 4)), presence_penalty=float(generator.choice([0, 0.5])),
                logprobs=[None, 1][generator.integers(2)], stop_token_ids=(int(generator.integers(100)),),
            )  # fmt: skip
            prompt = generator.integers(0, 3, length).tolist()
            if length == 0 or length + sampling.max_tokens > 64:
                with pytest.raises(ValueError, match="tokens"):
                    engine.submit(prompt, sampling)
                continue
            request = engine.submit(prompt, sampling)
            alive[request] = [0] * sampling.n
        if alive and generator.random() < 0.1:
            engine.cancel(list(alive)[generator.integers(len(alive))])
        for output in engine.step():
            counts = alive[output.request]
            counts[output.index] += len(output.tokens)
            assert counts[output.index] <= output.request.sampling.max_tokens
            if output.finish_reason is not None:
                assert (output.request, output.index) not in ended
                ended[output.request, output.index] = output.finish_reason
                is_full = counts[output.index] == output.request.sampling.max_tokens
                assert (output.finish_reason == "length") == is_full or output.finish_reason == "cancelled"
            if output.request.is_finished and all(
                (output.request, index) in ended for index in range(output.request.sampling.n)
            ):
                del alive[output.request]
        used = {page for sequence in engine.scheduler.running for page in sequence.pages[sequence.num_released :]}
        assert engine.pool.num_used == len(used)
    assert not alive and set(ended.values()) == {"stop", "length", "cancelled"}
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    assert engine.results.texts == {} and len(engine.scheduler.free_rows) == SERVING.max_rows
    return stats


def test_no_page_and_no_request_is_lost(engine_of):
    before = engine_of("rope").stats().preemptions
    assert random_requests(engine_of("rope"), 60, seed=0).preemptions > before


@pytest.mark.slow
def test_no_page_and_no_request_is_lost_in_10000(engine_of):
    random_requests(engine_of("rope"), 10_000, seed=1)


def test_64_requests_with_everything_together_are_each_as_alone(make_test_mesh):
    """Shared prefixes, chunks, preemption, guesses, windows beside full attention, a soft cap, two devices."""
    config = dataclasses.replace(ROPE, attention_soft_cap=5.0)
    serving = ServingConfig(
        max_rows=64, max_batch_tokens=64, page_size=8, num_pages=80, max_length=48, decode_steps=3, draft_tokens=2
    )
    engine = make_engine(config, make_test_mesh(tensor=2), serving=serving)
    generator = np.random.default_rng(0)
    start = generator.integers(0, 5, 24).tolist()
    prompts = [start[: 8 * (number % 4)] + generator.integers(0, 5, 3 + number % 7).tolist() for number in range(64)]
    together = engine.generate_tokens(prompts, GREEDY)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.drafted > 0
    assert together == recompute(engine, prompts, 12)
    assert together[:3] == [engine.generate_tokens([prompt], GREEDY)[0] for prompt in prompts[:3]]


def test_pages_behind_a_window_of_all_layers_are_freed(engine_of):
    engine = engine_of("window")
    prompts = [[5, 17, 3], [1], [20, 21, 22, 23]]
    requests = [engine.submit(prompt, dataclasses.replace(GREEDY, max_tokens=40)) for prompt in prompts]
    tokens, _ = run_all(engine, requests)
    assert [tokens[request][0] for request in requests] == recompute(engine, prompts, 40)
    assert engine.stats().preemptions == 0  # they have 18 pages together, and the pool 10


def test_a_draft_model_changes_no_token(engine_of):
    plain = engine_of("rope")
    params = random_params(plain.model)
    parts = (plain.model, params, plain.mesh, None)
    with pytest.raises(ValueError, match="draft_tokens=0: the draft model guesses nothing; use draft_tokens=4"):
        Engine(*parts, serving=SERVING, draft=parts[:2])
    engine = Engine(*parts, serving=dataclasses.replace(SERVING, draft_tokens=3), draft=parts[:2])
    prompts = PROMPTS * 2  # so that rows and pages run out: the draft model must read tokens that it did not guess
    longer = dataclasses.replace(GREEDY, max_tokens=24)
    expected = [plain.generate_tokens(prompts, sampling) for sampling in (longer, SAMPLED)]
    assert [engine.generate_tokens(prompts, sampling) for sampling in (longer, SAMPLED)] == expected
    stats = engine.stats()
    assert stats.accepted == stats.drafted > 0 and stats.preemptions > 0  # it is the model itself
    noise = np.random.default_rng(3)
    engine.draft.params = jax.tree.map(lambda a: a + noise.normal(0, 0.03, a.shape).astype(a.dtype), engine.params)
    assert [engine.generate_tokens(prompts, sampling) for sampling in (longer, SAMPLED)] == expected
    assert stats.accepted < engine.stats().accepted < engine.stats().drafted
    random_requests(engine, 20, seed=2)


def deepseek_params(model):
    """Of which the multi-token prediction often guesses what the model samples: both mostly read the last token."""
    params = random_params(model)
    params["embedding"] *= 8.0
    for stack in model.config.stacks_of("guess", model.execution):
        (layer,) = params[stack].values()
        layer["projection"][:, : model.config.embed_dim] += 4.0 * np.eye(model.config.embed_dim, dtype=np.float32)
    return params


def whole_guesses(engine, tokens, length=48):
    """The most likely tokens of the layers of multi-token prediction as they train: [depth, token]."""
    model = engine.model

    @jax.jit
    def guess(params, tokens_BT):
        module = model.module(params)
        positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
        inputs = module.block_inputs({"positions": positions_BT})
        h_BTD = module.final_norm(module.layers(module.embed({"tokens": tokens_BT}, None), inputs)[0])
        found = []
        for depth, stack in enumerate(model.config.stacks_of("guess", model.execution), 1):
            later = module.embed({"tokens": jnp.roll(tokens_BT, -depth, 1)}, None)
            h_BTD, _, _ = getattr(module, stack)(h_BTD, inputs | {"next_embeddings": later})
            found.append(jnp.argmax((h_BTD @ module.head.matrix())[0, :, :100], -1))
        return jnp.stack(found)

    with jax.set_mesh(engine.mesh):
        return np.asarray(guess(engine.params, np.array([tokens + [0] * (length - len(tokens))], np.int32)))


@pytest.fixture(scope="module")
def guessing():
    """Number of devices -> (engine of a model like DeepSeek-V3 with two layers of multi-token prediction, which guess a
    token each; prompts for which it runs out of rows and pages; what follows them without guesses, greedy and not)."""

    @functools.cache
    def make(tensor):
        model = Model(DEEPSEEK, FLOAT32)
        mesh = make_mesh(MeshConfig(tensor=tensor), jax.devices()[:tensor])
        serving = dataclasses.replace(SERVING, draft_tokens=2, draft_method="mtp")
        params = jax.device_put(deepseek_params(model), model.shardings(mesh))
        engine = Engine(model, params, mesh, None, serving=serving)
        prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], *PROMPTS, *PROMPTS]
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(engine.scheduler, "_guess", lambda most, total: {})
            found = [engine.generate_tokens(prompts, sampling) for sampling in (LONGER, SAMPLED)]
        assert engine.stats().drafted == 0
        assert found[0] == recompute(engine, prompts, LONGER.max_tokens)
        return engine, prompts, found

    return make


def test_prompt_lookup_changes_no_token(guessing, monkeypatch):
    engine, prompts, found = guessing(1)
    monkeypatch.setattr(engine.scheduler, "_guess", look_up)
    before = engine.stats()
    assert [engine.generate_tokens(prompts, sampling) for sampling in (LONGER, SAMPLED)] == found
    stats = random_requests(engine, 30, seed=2)
    assert 0 < stats.accepted - before.accepted < stats.drafted - before.drafted


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_multi_token_prediction_guesses_and_changes_no_token(tensor, guessing):
    engine, prompts, found = guessing(tensor)
    before = engine.stats()
    assert [engine.generate_tokens(prompts, sampling) for sampling in (LONGER, SAMPLED)] == found
    stats = engine.stats()
    assert 0 < stats.accepted - before.accepted < stats.drafted - before.drafted
    assert stats.preemptions > before.preemptions

    # Alone, what is guessed is what the layers predict as they train.
    request = engine.submit(PROMPTS[0], LONGER)
    sequence = request.sequences[0]
    guesses = {}
    while not request.is_finished:
        engine.step()
        guesses[len(sequence.tokens)] = sequence.guesses
    guesses.pop(len(PROMPTS[0]), None)  # before the first token
    assert len(guesses) < LONGER.max_tokens
    wanted = whole_guesses(engine, sequence.tokens)
    assert {n: first for n, (first, _) in guesses.items()} == {n: wanted[0, n - 2] for n in guesses}
    first = len(PROMPTS[0]) + 1
    one, two = guesses[first]
    assert two == whole_guesses(engine, [*sequence.tokens[:first], one])[1, first - 2]


@pytest.mark.parametrize(("settings", "message"), [
    (dict(draft_tokens=1), "draft_method=mtp: the model has no layers .*; use draft_method=lookup, or a draft model"),
    (dict(draft_tokens=0), "draft_method=mtp: draft_tokens=0 guesses nothing; use draft_tokens=1"),
    (dict(draft_tokens=1, draft_method="eagle"), "draft_method='eagle' must be one of lookup, mtp; use "),
])  # fmt: skip
def test_guesses_that_nothing_makes_are_refused(settings, message, engine_of):
    model = engine_of("rope").model
    with pytest.raises(ValueError, match=message):
        Engine(model, {}, None, None, serving=ServingConfig(**{"draft_method": "mtp"} | settings))


def test_more_guesses_than_layers_are_refused():
    model = Model(DEEPSEEK, FLOAT32)
    with pytest.raises(ValueError, match="draft_tokens=3: draft_method=mtp .* the model has 2; use draft_tokens=2"):
        Engine(model, {}, None, None, serving=ServingConfig(draft_tokens=3, draft_method="mtp"))


def test_cancellation_frees_pages_at_once(engine_of):
    engine = engine_of("rope")
    first, second = (engine.submit(list(range(30)), dataclasses.replace(SAMPLED, n=2)) for _ in range(2))
    for _ in range(4):
        engine.step()
    assert engine.pool.num_used > 0
    engine.cancel(first)
    engine.cancel(second)
    assert engine.pool.num_used == 0
    reasons = [output.finish_reason for output in engine.step()]
    assert reasons.count("cancelled") == 4 and not any(engine.step() for _ in range(2))
    assert not engine.has_work


def test_nothing_compiles_after_warm_up_not_even_with_the_first_programs_and_pages_of_8_bits_change_little(engine_of):
    """With the first programs, prompts take more calls and sequences wait for each other: the tokens are the same."""
    whole = engine_of("learned")
    engine = make_engine(SMALL, whole.mesh, serving=dataclasses.replace(SERVING, page_dtype="int8"))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    samplings = (GREEDY, SAMPLED, dataclasses.replace(SAMPLED, logprobs=3, logit_bias={5: 2.0}, prompt_logprobs=0))

    def answers():
        compiled.clear()
        caches = engine.executor.caches
        found = [
            engine.generate_tokens(prompts, sampling)
            for sampling in samplings
            for prompts in (PROMPTS, PROMPTS[:1], PROMPTS * 3)
        ]
        prompt_logprobs(engine, PROMPTS[2] * 2)
        assert compiled == []
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))  # donated
        return found

    rest = engine.warm_up_first()
    assert compiled and [len(stage.compilations) for stage in rest] == [1, 1]  # short prompts, and four rows
    first = answers()
    for stage in rest:
        compiled.clear()
        stage.compile()
        assert compiled
        engine.use_shapes(stage.shapes)
        assert answers() == first
    assert whole_and_rounded(whole, engine) < 0.05  # half a step of 1 / 127 of the largest value


@pytest.mark.slow
def test_pages_in_float8_change_little(engine_of):
    whole = engine_of("learned")
    engine = make_engine(SMALL, whole.mesh, serving=dataclasses.replace(SERVING, page_dtype="float8"))
    assert whole_and_rounded(whole, engine) < 0.3  # half a step of 1 / 16 of each value


def whole_and_rounded(whole, engine):
    """Mean difference of the log-probabilities of a prompt in several chunks."""
    assert engine.bytes_per_token < 0.5 * whole.bytes_per_token
    prompt = np.random.default_rng(0).integers(0, 100, 60).tolist()
    exact, rounded = ([entry.logprob for entry in prompt_logprobs(each, prompt)] for each in (whole, engine))
    return np.abs(np.subtract(exact, rounded)).mean()


def test_new_weights_need_no_new_program_and_drop_the_prefix_cache(engine_of):
    engine = engine_of("rope")
    old = engine.params
    expected = engine.generate_tokens(PROMPTS, GREEDY)
    programs = dict(engine.executor.compiled)
    engine.use(jax.device_put(random_params(engine.model, seed=1), engine.model.shardings(engine.mesh)))
    assert engine.generate_tokens(PROMPTS, GREEDY) == recompute(engine, PROMPTS, 12) != expected
    engine.use(old)
    assert engine.generate_tokens(PROMPTS, GREEDY) == expected
    assert engine.executor.compiled == programs


def test_bfloat16_keeps_matrices_and_pages_in_bfloat16_and_norms_in_float32(make_test_mesh):
    engine = make_engine(SMALL, make_test_mesh(), precision=PrecisionConfig(compute="bfloat16"))
    assert engine.params["layers"]["dense"]["attention"]["query"][0].weight.dtype == jnp.bfloat16
    assert engine.params["final_norm"]["scale"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.executor.caches)} == {jnp.dtype(jnp.bfloat16)}


# ----------------------------------------------------------------------------- where a text ends


@pytest.fixture(scope="module")
def bytes_engine():
    """With more ids in the model than in the tokenizer."""
    config = dataclasses.replace(SMALL, vocab_size=300)
    return make_engine(config, make_mesh(MeshConfig(), jax.devices()[:1]), BytesTokenizer())


@pytest.fixture(scope="module")
def null_engine():
    return make_engine(SMALL, make_mesh(MeshConfig(), jax.devices()[:1]), NullTokenizer(100))


def test_generation_stops_at_the_end_of_the_document(engine_of, null_engine):
    sampling, end = Sampling(max_tokens=30, temperature=20.0), 99
    free = engine_of("learned").generate_tokens(PROMPTS, sampling)
    assert any(0 < tokens.index(end) < 29 for tokens in free if end in tokens)
    expected = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in free]
    assert null_engine.generate_tokens(PROMPTS, sampling) == expected


def test_an_empty_prompt_starts_a_document(null_engine):
    assert null_engine.prompts.encode("") == [99]
    empty, end, *_ = null_engine.generate(["", "99", "1 2", "3", " ".join(map(str, range(20)))], GREEDY)
    assert empty == end


def test_a_stop_text_ends_the_generation_and_is_cut_off(bytes_engine):
    sampling, prompts = Sampling(max_tokens=40, temperature=3.0, seed=4), ["def ", "class"]
    texts = bytes_engine.generate(prompts, sampling)
    stop = texts[0][5:7]
    with_stop = dataclasses.replace(sampling, stop=("never there", stop))
    assert bytes_engine.generate(prompts, with_stop) == [text.split(stop)[0] for text in texts]
    tokens = bytes_engine.generate_tokens([bytes_engine.prompts.encode(prompt) for prompt in prompts], with_stop)[0]
    assert len(tokens) < 40 and stop in bytes_engine.tokenizer.decode(tokens)


def test_ids_that_the_tokenizer_does_not_have_never_come(bytes_engine):
    tokens = bytes_engine.generate_tokens([[1], [2, 3]], Sampling(max_tokens=40, temperature=100.0))
    assert 200 < max(map(max, tokens)) < 257


def test_structured_output_follows_its_schema_beside_free_text(bytes_engine):
    schema = json.dumps({
        "type": "object", "properties": {"name": {"enum": ["ab", "cd"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
    })  # fmt: skip
    free = Sampling(max_tokens=12, temperature=3.0, seed=1)
    alone = bytes_engine.generate_tokens([[1, 2, 3]], free)[0]
    structured = Sampling(max_tokens=60, temperature=3.0, schema=schema, n=2)
    requests = [
        bytes_engine.submit([65, 66], structured),
        bytes_engine.submit([1, 2, 3], free),
        bytes_engine.submit([65], Sampling(max_tokens=40, temperature=3.0, regex="[a-c]{3}x+y")),
    ]
    tokens, outputs = run_all(bytes_engine, requests)
    texts = ["".join(output.text for output in outputs if output.request is requests[0] and output.index == index)
             for index in range(2)]  # fmt: skip
    for text in texts:
        found = json.loads(text)
        assert found["name"] in ("ab", "cd") and found["age"] <= 99
    assert re.fullmatch("[a-c]{3}x+y", bytes_engine.tokenizer.decode(tokens[requests[2]][0]))
    assert tokens[requests[1]] == [alone]
    with pytest.raises(ValueError, match="^regex='\\(' cannot be used: unclosed group$"):
        bytes_engine.submit([1], Sampling(regex="("))
    with pytest.raises(ValueError, match="^schema="):
        bytes_engine.submit([1], Sampling(schema="{"))


# ----------------------------------------------------------------------------- what is refused


def test_what_does_not_fit_is_refused(engine_of):
    engine = engine_of("learned")
    with pytest.raises(ValueError, match="exceeds the 64 tokens that the model supports; use max_tokens=4 or less"):
        engine.generate_tokens([[1] * 60], dataclasses.replace(GREEDY, max_tokens=5))
    assert len(engine.generate_tokens([[1] * 60], dataclasses.replace(GREEDY, max_tokens=4))[0]) == 4
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate_tokens([[1], []], GREEDY)
    with pytest.raises(ValueError, match="must be below model.vocab_size=100"):
        engine.generate_tokens([[100]], GREEDY)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate(["text"], GREEDY)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a random model with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("run")
    config = Config(model=SMALL, precision=FLOAT32)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tokenizer="null:100"),
        training=dataclasses.replace(config.training, sequence_length=32),
    )
    (run_dir / "config.json").write_text(config.to_json())
    model, mesh = Model(SMALL, FLOAT32), make_mesh(MeshConfig(), jax.devices()[:1])
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        for step in (1, 2):
            params = jax.device_put(random_params(model, step), model.shardings(mesh))
            checkpointer.save(step, params, {"count": jnp.int32(0)}, recorded(model.layer_rows))
    return run_dir


@pytest.mark.parametrize("step, mesh", [(None, None), (1, MeshConfig(tensor=2)), (None, MeshConfig(data=-1, tensor=2))])
def test_a_run_is_restored_from_any_step_onto_any_mesh(run_dir, step, mesh):
    engine = Engine.from_run(run_dir, mesh, step)
    assert engine.mesh.size == {None: 1, 1: 2, -1: 8}[mesh and mesh.data]
    assert engine.params["head"].sharding.shard_shape((32, 128)) == (32, 128 // (mesh.tensor if mesh else 1))
    joined = engine.params["layers"]["dense"]["attention"]["query"][1].weight
    assert joined.sharding.shard_shape(joined.shape)[1] == joined.shape[1] // (mesh.tensor if mesh else 1)
    params = arrays_of(engine.params, engine.model.config)
    jax.tree.map(np.testing.assert_array_equal, params, random_params(engine.model, step or 2))


def test_text_beyond_the_length_of_training_is_warned_of_once(run_dir, caplog):
    engine = Engine.from_run(run_dir)
    engine.submit([1] * 4, Sampling(max_tokens=28))
    assert "trained on" not in caplog.text
    for _ in range(2):
        engine.submit([1] * 4, Sampling(max_tokens=29))
    assert caplog.text.count("prompt and max_tokens are up to 33 tokens, and the model was trained on 32") == 1


def test_the_draft_model_of_a_run_is_on_the_same_devices_and_has_the_same_tokens(run_dir):
    serving = dataclasses.replace(SERVING, draft_tokens=2)
    mesh = MeshConfig(tensor=2)
    engine = Engine.from_run(run_dir, mesh, 1, serving, draft_run=run_dir, devices=jax.devices()[4:])
    out = engine.draft.params["layers"]["dense"]["attention"]["out"][0]
    assert out.sharding.device_set == set(jax.devices()[4:6])
    np.testing.assert_array_equal(out, random_params(engine.model, 2)["layers"]["dense"]["attention"]["out"][0])
    for other in (NullTokenizer(100), NullTokenizer(BytesTokenizer().vocab_size)):
        with pytest.raises(ValueError, match="draft_run=small has another tokenizer"):
            check_same_tokens("small", BytesTokenizer(), other)
    check_same_tokens("small", BytesTokenizer(), BytesTokenizer())


def test_runs_that_cannot_be_served_are_refused(run_dir, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in .*; give the directory of a run"):
        Engine.from_run(tmp_path)
    with pytest.raises(ValueError, match="step=7 is not in .*; there are 1, 2"):
        Engine.from_run(run_dir, step=7)
    with pytest.raises(ValueError, match="num_heads=4 is not divisible by mesh.tensor=8"):
        Engine.from_run(run_dir, MeshConfig(tensor=8))
    with pytest.raises(ValueError, match="mesh.pipeline=2: inference does not support pipelines"):
        Engine.from_run(run_dir, MeshConfig(pipeline=2))
    with pytest.raises(ValueError, match="does not match the number of devices, 8"):
        Engine.from_run(run_dir, MeshConfig(data=16))
    (tmp_path / "config.json").write_text((run_dir / "config.json").read_text())
    with pytest.raises(ValueError, match="no checkpoint in"):
        Engine.from_run(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
