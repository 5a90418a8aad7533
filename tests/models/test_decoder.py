"""Each feature of the decoder changes what it should and nothing else; how a stack is run changes nothing."""

import dataclasses
import functools
import math
import random
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import recipes
from megajax.layers.attention.kv_cache import Places, PoolSizes
from megajax.layers.attention.multi_head import Attention
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import Mlp
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.norm import Norm
from megajax.models.decoder import DecoderConfig
from megajax.models.decoder_fields import padded_vocab_size
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import LossOptions, split_key
from megajax.models.model import Model
from megajax.planning.step_time import recomputed_flops
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language

FLOAT32 = PrecisionConfig(compute="float32")
T = 16
SMALL = DecoderConfig(
    num_layers=1, embed_dim=16, num_heads=2, vocab_size=30, vocab_multiple=8, max_positions=T, position="rope",
    norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False, init_std=0.2,
)  # fmt: skip


def variant(**fields) -> DecoderConfig:
    return dataclasses.replace(SMALL, **fields)


def layers_of(config: DecoderConfig, execution: ExecutionConfig = ExecutionConfig()):
    return config.stacks(execution)["layers"]


def make_batch(seed=0, batch=2) -> dict:
    rng = np.random.default_rng(seed)

    def tokens():
        return rng.integers(0, SMALL.vocab_size, (batch, T)).astype(np.int32)

    return {
        "tokens": tokens(),
        "labels": tokens(),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (batch, T)),
        "loss_weights": np.full((batch, T), 1 / (batch * T), np.float32),
    }


def changed(batch: dict, place: int) -> dict:
    """The batch with other tokens at one place."""
    tokens = batch["tokens"].copy()
    tokens[:, place] = (tokens[:, place] + 1) % SMALL.vocab_size
    return batch | {"tokens": tokens}


@pytest.fixture
def one_device(make_test_mesh):
    mesh = make_test_mesh()
    with jax.set_mesh(mesh):
        yield mesh


def make_params(config: DecoderConfig) -> dict:
    """Like Model.init, whose compilation takes longer than any test here."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if path[-1].key == "scale":
            return np.full(leaf.shape, 0.0 if config.norm.endswith("_1p") else 1.0, np.float32)
        return (config.init_std * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map_with_path(draw, Model(config, FLOAT32).abstract_weights)


@functools.cache
def compiled(config: DecoderConfig, mesh):
    """-> (model, params, jitted logits(params, batch, key))."""
    model = Model(config, FLOAT32)

    @jax.jit
    def logits(params, batch, key):
        module = model.module(params)
        embed_key, layers_key = split_key(key)
        x, _, _ = module.layers(module.embed(batch, embed_key), module.block_inputs(batch), key=layers_key)
        return module.logits(x)[..., : config.vocab_size]

    return model, make_params(config), logits


def logits_of(config: DecoderConfig, mesh, batch: dict, *, params=None, key=None) -> np.ndarray:
    _, own_params, logits = compiled(config, mesh)
    return np.asarray(logits(own_params if params is None else params, batch, key))


def touched(config: DecoderConfig, mesh, place: int) -> np.ndarray:
    """bool [T]: which logits a change of the token at `place` reaches."""
    batch = make_batch()
    before, after = (logits_of(config, mesh, b) for b in (batch, changed(batch, place)))
    return np.any(before != after, axis=(0, 2))


# ----------------------------------------------------------------------------- sizes


def counted(config: DecoderConfig) -> int:
    """Parameters by the formula, from the sizes alone."""
    D, N, K, H, F = config.embed_dim, config.num_heads, config.kv_heads, config.width_of_head, config.width_of_mlp
    wide = 2 if config.activation in ("swiglu", "geglu", "geglu_tanh") else 1
    of_a_norm = 2 if config.norm.startswith("layernorm") and "norm" in config.biases else 1
    norms = {"pre": 2, "post": 2, "sandwich": 4}[config.norm_placement] - (config.parallel_residual == "one_norm")
    latent = config.latent
    layer = (2 * D * (N + K) * H if latent.kv_rank is None else counted_latent(config)) + norms * of_a_norm * D
    if config.qk_norm:
        layer += of_a_norm * H * (N + K if config.qk_norm == "all_heads" else 2)
    layer += (N + 2 * K) * H if "qkv" in config.biases else 0
    layer += D if "attention_out" in config.biases else 0
    layer += N if config.attention_sinks else 0
    matrices, moe = (wide + 1) * D, config.moe
    dense = matrices * F + (wide * F + D if "mlp" in config.biases else 0)
    experts = (moe.num_experts or 0) * (D + matrices * (moe.expert_dim or F))
    experts += matrices * (moe.shared_dim or 0) + moe.shared_gate * D
    mlps = sum(experts if config.has_experts(number) else dense for number in range(config.num_layers))
    tables = config.padded_vocab_size * (D * (1 if config.tied_embeddings else 2) + ("head" in config.biases))
    tables += config.max_positions * D if config.position == "learned" else 0
    mtp = config.mtp_layers * (layer + (experts if config.has_experts(config.num_layers - 1) else dense))
    mtp += config.mtp_layers * (2 * D * D + 3 * of_a_norm * D)
    return config.num_layers * layer + mlps + mtp + of_a_norm * D * (1 + config.embedding_norm) + tables


def counted_latent(config: DecoderConfig) -> int:
    """Of the attention of a layer with latents."""
    D, N, H = config.embed_dim, config.num_heads, config.width_of_head
    Q, R, P = config.latent.q_rank, config.latent.kv_rank, config.latent.rope_dim
    values = config.latent.value_dim or H
    queries = D * N * (H + P) if Q is None else D * Q + Q + Q * N * (H + P)
    return queries + D * (R + P) + R + R * N * (H + values) + N * values * D


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if recipe().model.kind == "decoder"])
def test_counted_parameters_equal_the_real_ones_of_every_recipe(name):
    config = recipes()[name]()
    if config.model.kind != "decoder":
        pytest.skip("the tests of its family count them")
    assert counted(config.model) == Model(config.model, config.precision).num_parameters()


@pytest.mark.parametrize("seed", range(12))
def test_counted_parameters_equal_the_real_ones_of_random_features(seed):
    rng = random.Random(seed)
    config = variant(
        num_layers=rng.randint(1, 3),
        num_heads=4,
        num_kv_heads=rng.choice([None, 1, 2]),
        head_dim=rng.choice([None, 6]),
        mlp_dim=rng.choice([None, 20]),
        position=rng.choice(["learned", "rope", "alibi", "none"]),
        norm=rng.choice(["layernorm", "rmsnorm", "layernorm_1p"]),
        norm_placement=rng.choice(["pre", "sandwich"]),
        embedding_norm=rng.choice([False, True]),
        parallel_residual=rng.choice(["none", "one_norm", "two_norms"]),
        qk_norm=rng.choice([False, True, "all_heads"]),
        activation=rng.choice(["gelu", "swiglu", "geglu_tanh", "squared_relu"]),
        biases=tuple(rng.sample(("qkv", "attention_out", "mlp", "norm", "head"), rng.randint(0, 5))),
        attention_sinks=rng.choice([False, True]),
        tied_embeddings=rng.choice([False, True]),
        window=rng.choice([None, 4]),
        moe=rng.choice([MoeConfig(), MoeConfig(4, 8, shared_dim=6, shared_gate=True)]),
        mtp_layers=rng.choice([0, 1, 2]),
    )
    assert counted(config) == Model(config, FLOAT32).num_parameters(), config


def equations(jaxpr):
    """Of a jaxpr and all within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize(
    "config, options, execution",
    [
        (
            variant(
                biases=("qkv", "attention_out", "mlp", "norm"),
                norm="layernorm",
                position="learned",
                activation="gelu",
                tied_embeddings=True,
            ),
            LossOptions(),
            ExecutionConfig(),
        ),
        (
            variant(biases=("qkv", "attention_out", "mlp", "norm"), qk_norm=True, num_kv_heads=1),
            LossOptions(z_loss=1e-4, label_smoothing=0.1),
            ExecutionConfig(recompute="selective"),
        ),
    ],
    ids=["gpt", "llama"],
)
def test_no_gradient_is_summed_in_bfloat16(one_device, config, options, execution):
    """A sum over tokens in bfloat16 stops growing when a token's part is smaller than its last bit."""
    model = Model(config, PrecisionConfig(compute="bfloat16"), execution)
    params = model.init(0, one_device)
    loss = lambda params: model.loss(params, make_batch(), Language(), options=options).total()
    sums = [equation for equation in equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
            if equation.primitive.name in ("reduce_sum", "scatter-add", "cumsum")]  # fmt: skip
    assert len(sums) > 10
    assert not [one for one in sums if one.outvars[0].aval.dtype == jnp.bfloat16]


@pytest.mark.parametrize("mesh", [{}, dict(data=2, fsdp=2, tensor=2)], ids=["one device", "mesh"])
def test_gradients_of_matrices_are_reduced_as_asked(mesh, make_test_mesh):
    """In bfloat16 they have no more bits than that; asked for float32 they are nearer to those of a float32 model."""
    config = variant(num_heads=4, head_dim=8, biases=("qkv", "attention_out", "mlp", "norm"))

    def gradients(precision):
        model = Model(config, precision)
        placed = jax.device_put(make_params(config), model.shardings(make_test_mesh(**mesh)))
        found = jax.jit(jax.grad(lambda params: model.loss(params, make_batch(batch=4), Language()).total()))(placed)
        return [np.asarray(found["layers"]["dense"][part][name]) for part, name in
                (("attention", "query"), ("attention", "out"), ("mlp", "gate"), ("mlp", "down"))]  # fmt: skip

    with jax.set_mesh(make_test_mesh(**mesh)):
        exact = gradients(FLOAT32)
        narrow, wide = (gradients(PrecisionConfig(gradient_reduce=how)) for how in ("compute", "float32"))
    for a, b, wanted in zip(narrow, wide, exact, strict=True):
        assert np.array_equal(a, a.astype(jnp.bfloat16).astype(np.float32)) and a.dtype == b.dtype == np.float32
        assert np.mean(b != b.astype(jnp.bfloat16).astype(np.float32)) > 0.9
        np.testing.assert_allclose(b, wanted, atol=0.05 * np.abs(wanted).max())


def test_padded_vocabulary_equals_megatrons():
    oracle = np.load(Path(__file__).parent.parent / "oracles" / "numbers.npz")
    for vocab_size, tensor, padded in oracle["padded_vocab"]:
        assert padded_vocab_size(vocab_size, 128 * tensor) == padded


def test_padding_is_never_predicted(one_device):
    model, params, _ = compiled(SMALL, one_device)
    logits = jax.jit(lambda params, x: model.module(params).logits(x))(params, jnp.ones((1, 2, 16)))
    assert logits.shape == (1, 2, 32)
    assert np.all(np.isneginf(logits[..., 30:])) and np.all(np.isfinite(logits[..., :30]))


# ----------------------------------------------------------------------------- what a token sees


def test_a_token_sees_itself_and_everything_before(one_device):
    assert list(touched(SMALL, one_device, 5)) == [place >= 5 for place in range(T)]


def test_window_hides_what_is_farther_back(one_device):
    assert list(touched(variant(window=4), one_device, 5)) == [5 <= place < 9 for place in range(T)]
    # Each further layer reaches window - 1 farther.
    assert list(touched(variant(window=4, num_layers=2), one_device, 5)) == [5 <= place < 12 for place in range(T)]


def test_every_nth_layer_sees_everything(one_device):
    config = variant(window=4, num_layers=2, pattern="wf")
    assert list(touched(config, one_device, 5)) == [place >= 5 for place in range(T)]
    layers = layers_of(dataclasses.replace(config, num_layers=6, pattern="w2f"))
    assert [layer.attention.mask.reach for layer in layers] == [4, 4, None] * 2


def test_every_nth_layer_has_no_rotary_embedding(one_device):
    stretched = make_batch() | {"positions": 3 * make_batch()["positions"]}

    def difference(config):
        return np.abs(logits_of(config, one_device, make_batch()) - logits_of(config, one_device, stretched)).max()

    assert difference(variant(pattern="n")) == 0
    assert difference(variant(pattern="fn", num_layers=2)) > 1e-3
    layers = layers_of(variant(pattern="f2n", num_layers=6))
    assert [layer.attention.rope for layer in layers] == ["global", "global", "none"] * 2


def test_packed_documents_never_see_each_other(one_device):
    places = np.concatenate([np.arange(6), np.arange(10)]).astype(np.int32)
    segments = np.repeat(np.array([0, 1], np.int32), [6, 10])
    packed = make_batch() | {name: np.broadcast_to(a, (2, T)) for name, a in
                             (("positions", places), ("segment_ids", segments))}  # fmt: skip
    config = variant(num_layers=2)
    before = logits_of(config, one_device, packed)
    after = logits_of(config, one_device, changed(packed, 2))
    np.testing.assert_array_equal(before[:, 6:], after[:, 6:])
    assert np.all(np.any(before[:, 2:6] != after[:, 2:6], axis=(0, 2)))
    # And the second document is what it would be alone; sums run over other lengths, so to rounding only.
    alone = {name: array[:, 6:] for name, array in packed.items()}
    np.testing.assert_allclose(before[:, 6:], logits_of(config, one_device, alone), atol=1e-5)


# ----------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("activation, gated, formula", [
    ("relu", False, lambda x: np.maximum(x, 0)),
    ("squared_relu", False, lambda x: np.maximum(x, 0) ** 2),
    ("geglu", True, lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
    ("swiglu", True, lambda x: x / (1 + np.exp(-x))),
    ("gelu_tanh", False, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ("geglu_tanh", True, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
])  # fmt: skip
def test_activations_equal_their_formulas(one_device, activation, gated, formula):
    config = variant(activation=activation, mlp_dim=8)
    mlp = Mlp(layers_of(config)[0].mlp, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 4, 16))
    up, down = (np.asarray(linear.weight[...], np.float64) for linear in (mlp.up, mlp.down))
    hidden = formula(x @ np.asarray(mlp.gate.weight[...], np.float64)) * (x @ up) if gated else formula(x @ up)
    np.testing.assert_allclose(mlp(x)[0], hidden @ down, atol=1e-5)


def test_soft_cap_equals_its_formula(one_device):
    config = layers_of(variant(position="none", attention_soft_cap=0.5))[0].attention
    layer = Attention(dataclasses.replace(config, init_std=1.0), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 6, 16))

    def project(linear):
        return np.einsum("btd,dnh->bnth", x, linear.weight[...])

    query, key, value = (project(linear) for linear in (layer.query, layer.key, layer.value))
    scores = np.einsum("bnth,bnsh->bnts", query, key) / math.sqrt(8)
    scores = np.where(np.tri(6, dtype=bool), 0.5 * np.tanh(scores / 0.5), -np.inf)
    probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("bnts,bnsh,nhd->btd", probs, value, layer.out.weight[...])
    np.testing.assert_allclose(jax.jit(lambda x: layer(x, {})[0])(x), wanted, atol=1e-5)


def test_tied_output_is_the_transposed_embedding(one_device):
    untied, tied = SMALL, variant(tied_embeddings=True)
    _, params, _ = compiled(tied, one_device)
    assert "head" not in params
    wanted = logits_of(untied, one_device, make_batch(), params=params | {"head": params["embedding"].T})
    np.testing.assert_allclose(logits_of(tied, one_device, make_batch(), params=params), wanted, atol=1e-6)


def test_zero_centered_norm_starts_as_the_plain_one(one_device):
    plain = variant(qk_norm=True)
    centered = variant(qk_norm=True, norm="rmsnorm_1p")
    for config, start in ((plain, 1), (centered, 0)):
        assert np.all(Norm(layers_of(config)[0].norm, 4, rngs=nnx.Rngs(0)).scale[...] == start)
        assert np.all(make_params(config)["layers"]["dense"]["attention"]["key_norm"]["scale"] == start)
    np.testing.assert_array_equal(
        logits_of(plain, one_device, make_batch()), logits_of(centered, one_device, make_batch())
    )


def test_initial_weights_follow_megatrons_rule(one_device):
    config = variant(
        num_layers=4, embed_dim=128, vocab_size=512, biases=("qkv", "attention_out", "mlp", "norm"), init_std=0.02
    )
    params = Model(config, FLOAT32).init(3, one_device)
    layers = params["layers"]["dense"]
    inner = [params["embedding"], params["head"], *(layers["attention"][name] for name in ("query", "key", "value"))]
    inner += [layers["mlp"]["gate"], layers["mlp"]["up"]]
    outer = [layers["attention"]["out"], layers["mlp"]["down"]]
    for weights, std in ((inner, 0.02), (outer, 0.02 / math.sqrt(2 * 4))):
        for w in weights:
            # The smallest has 65536 entries: its std is known to 0.3 %, its mean to 0.4 % of the std.
            assert float(w.std()) == pytest.approx(std, rel=0.02)
            assert abs(float(w.mean())) < 0.02 * std
    assert all(np.all(b == 0) for name, b in layers["attention"].items() if name.endswith("bias"))
    for w in (layers["attention"]["query"], layers["mlp"]["down"]):
        assert abs(np.corrcoef(w[0].ravel(), w[1].ravel())[0, 1]) < 0.03  # layers are drawn independently


# ----------------------------------------------------------------------------- dropout


def test_dropout_drops_its_rate_and_keeps_the_mean():
    x = jnp.ones((10, 20, 200))
    key, order = DropoutKey(jax.random.key(0), jnp.int32(0)), np.arange(20)
    dropped = dropout(x, 0.3, key, order)
    assert float((dropped == 0).mean()) == pytest.approx(0.3, abs=0.01)  # 4 sigma of 40,000 draws
    np.testing.assert_allclose(dropped[dropped != 0], 1 / 0.7, rtol=1e-6)
    assert dropout(x, 0.3, None, order) is x and dropout(x, 0.0, key, order) is x


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_dropout_is_a_function_of_the_key(one_device, kind):
    config = variant(**{kind: 0.5})

    def run(seed, first_sample=0, batch=None):
        key = DropoutKey(jax.random.key(seed), jnp.int32(first_sample))
        return logits_of(config, one_device, batch or make_batch(), key=key)

    first = run(1)
    np.testing.assert_array_equal(first, run(1))
    assert np.abs(first - run(2)).max() > 1e-2
    plain = logits_of(SMALL, one_device, make_batch())
    np.testing.assert_array_equal(logits_of(config, one_device, make_batch()), plain)
    # A sample's dropout does not depend on its microbatch: the same rows, one later in theirs.
    shifted = run(1, first_sample=1, batch={name: np.roll(array, -1, 0) for name, array in make_batch().items()})
    np.testing.assert_array_equal(shifted[0], first[1])
    assert np.abs(shifted[1] - first[0]).max() > 1e-2


# ----------------------------------------------------------------------------- how a stack is run

# A pattern of two layers, twice, and one more.
PATTERN = variant(num_layers=5, window=4, pattern="wf", attention_dropout=0.1)


def loss_and_gradients(**how):
    model = Model(PATTERN, FLOAT32, ExecutionConfig(**how))

    def loss(params):
        return model.loss(params, make_batch(), Language(), key=jax.random.key(5)).total()

    return jax.jit(jax.value_and_grad(loss))(make_params(PATTERN))


@pytest.fixture(scope="module")
def plain_run(make_test_mesh):
    """What the others are compared with: unrolled, nothing computed again."""
    with jax.set_mesh(make_test_mesh()):
        return loss_and_gradients(scan_layers=False)


MLP_AGAIN = dict(recompute="norm,core_attention,mlp")


@pytest.mark.parametrize(
    "how",
    [
        dict(scan_layers=True),
        pytest.param(dict(recompute="selective"), marks=pytest.mark.slow),
        dict(recompute="full", scan_layers=True),
        pytest.param(dict(recompute="full", recompute_every=3), marks=pytest.mark.slow),
        dict(recompute="attention,activation", recompute_every=2, scan_layers=True),
        dict(MLP_AGAIN, offload=("residual", "mlp_wide")),
        pytest.param(dict(recompute="full", offload=("residual", "attention_out")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_scan_recompute_and_offload_change_nothing(one_device, plain_run, how):
    """With a pattern of layers, and with dropout, whose masks depend on the number of the layer only."""
    result = loss_and_gradients(**how)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(result))
    # The same operations, fused differently: float32 rounding.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5), result, plain_run)


def test_a_model_works_without_a_mesh(make_test_mesh):
    """As in a notebook: eager, jitted, differentiated, on any one device, and reading a prompt."""
    model = Model(variant(tied_embeddings=True), FLOAT32)
    weights = make_params(model.config)
    loss = lambda weights: model.loss(weights, make_batch(), Language()).total()
    with jax.set_mesh(make_test_mesh()):
        wanted = jax.jit(jax.value_and_grad(loss))(weights)
    there = jax.device_put(weights, jax.devices()[1])
    found = jax.jit(jax.value_and_grad(loss))(there)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5), found, wanted)
    np.testing.assert_allclose(loss(weights), wanted[0], rtol=1e-5)
    tokens = np.arange(6, dtype=np.int32)[None]
    pages = model.config.new_pages(PoolSizes(1, 8, 1, jnp.float32), model.execution)["layers"]
    zeros = jnp.zeros((1, 1), jnp.int32)
    places = Places(tokens, tokens, 0 * tokens, zeros, 0 * tokens, tokens + 1)
    batch = {"tokens": tokens, "positions": tokens}
    x, caches = model.module(weights).extend(batch, {"layers": tuple(cache.at(places) for cache in pages)})
    assert x.shape == (1, 6, 16)
    assert caches["layers"][0].pages.shape == (1, 2, 2, 8, 8)


def test_offload_on_a_mesh_changes_nothing(make_test_mesh, plain_run):
    with jax.set_mesh(make_test_mesh(fsdp=2, tensor=2)):
        result = loss_and_gradients(recompute="full", offload=("residual",))
    # Sums over devices come in another order.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4), result, plain_run)


def kept_by(**fields):
    layers = layers_of(variant(num_layers=3), ExecutionConfig(**fields))
    return [layer.saved and layer.saved.kept for layer in layers]


def test_layers_keep_what_the_policy_says():
    everything = ("residual", "normed", "qkv", "attention_out", "residual_mid", "mlp_wide", "mlp_hidden")
    assert kept_by() == [None] * 3
    assert kept_by(recompute="full") == [()] * 3
    assert kept_by(recompute="full", recompute_every=2) == [(), None, ()]
    without = tuple(name for name in everything if name not in ("normed", "mlp_hidden"))
    assert kept_by(recompute="selective") == [(*without, "attention_lse")] * 3
    # What is offloaded is kept, whatever the policy says.
    assert kept_by(recompute="full", offload=("attention_out",)) == [("attention_lse", "attention_out")] * 3
    assert set(kept_by(offload=("qkv",))[0]) == {*everything, "attention_lse"}


def test_recomputed_flops_are_those_of_the_matmuls_that_are_not_kept():
    config = variant(num_layers=2, num_kv_heads=1)
    D, N, K, H, F, T = 16, 2, 1, 8, 64, 32
    qkv, attention, out, wide = 2 * D * (N + 2 * K) * H, 4 * (T + 1) / 2 * N * H, 2 * N * H * D, 2 * D * 2 * F

    def again(**fields):
        flops = recomputed_flops(Model(config, FLOAT32, ExecutionConfig(**fields)), T)
        return flops.matmuls, flops.mixing_causal

    assert again() == again(recompute="selective") == again(offload=("mlp_wide",)) == (0, 0)
    assert again(recompute="full") == (2 * (qkv + out + wide), 2 * attention)
    assert again(recompute="full", recompute_every=2) == (qkv + out + wide, attention)
    assert again(recompute="full", offload=("mlp_wide",)) == (2 * (qkv + out), 2 * attention)
    assert again(recompute="attention,mlp") == (2 * (qkv + wide), 2 * attention)
    assert again(recompute="qkv") == (2 * qkv, 0)
