"""Latent attention equals its formula in float64, its cached form equals the other, and a plan counts what it does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.attention.kv_cache import PagedCache, Places, PoolSizes
from megajax.layers.attention.latent import LatentAttentionConfig, LatentConfig
from megajax.layers.attention.rope import RopeConfig, rope_tables
from megajax.layers.norm import NormConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.ops.attention_mask import CAUSAL, window
from megajax.parameters import Structure

B, T, D, N, H, Q, R, P, V = 2, 8, 16, 4, 6, 12, 10, 4, 5
EPSILON = 1e-5
ROPE = RopeConfig(base=100.0, interleaved=True)
CONFIG = LatentAttentionConfig(
    embed_dim=D, num_heads=N, head_dim=H, rope="global", rope_interleaved=True, scale=0.4, init_std=0.3,
    out_init_std=0.3,
    kv_rank=R, q_rank=Q, rope_dim=P, value_dim=V,
    norm=NormConfig("rmsnorm", EPSILON, zero_centered=False, bias=False),
)  # fmt: skip
DIRECT = dataclasses.replace(CONFIG, q_rank=None)


@functools.cache
def layer_of(config):
    """-> (function (weights, x, inputs, cache) -> (out, cache), weights whose scales differ from 1)."""
    graph, state = nnx.split(config.build(nnx.Rngs(params=0)))
    structure = Structure.of(state)
    weights = jax.tree.map(lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape),
                           structure.to_tree(state))  # fmt: skip

    def run(weights, x, inputs, cache=None):
        return nnx.merge(graph, structure.to_state(weights))(x, inputs, cache)[:2]

    return run, weights


def given():
    """x, the gradient of the output, positions."""
    rng = np.random.default_rng(0)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    return *(rng.standard_normal((B, T, D)).astype(np.float32) for _ in range(2)), positions


def inputs_at(positions):
    return dict(zip(("cos_global", "sin_global"), rope_tables(ROPE, P, positions), strict=True))


def formula(weights, x, segments):
    """One head and one query after the other, in complex numbers for the rotation."""
    wave = 100.0 ** (-np.arange(0, P, 2) / P)
    turn = np.exp(1j * np.arange(T)[:, None] * wave)

    def norm(a, scale):
        return a / jnp.sqrt(jnp.mean(a * a, -1, keepdims=True) + EPSILON) * scale

    def rotate(a):
        pairs = jax.lax.complex(a[:, 0::2], a[:, 1::2]) * turn
        return jnp.stack([pairs.real, pairs.imag], -1).reshape(a.shape)

    def of_row(x, segments):
        down = x @ weights["key_value_down"]
        latent = norm(down[:, :R], weights["key_value_norm"]["scale"])
        position = rotate(down[:, R:])
        total = 0.0
        for head in range(N):
            if "query" in weights:
                query = x @ weights["query"][:, head]
            else:
                query = norm(x @ weights["query_down"], weights["query_norm"]["scale"]) @ weights["query_up"][:, head]
            key = latent @ weights["key_up"][:, head]
            scores = 0.4 * (query[:, :H] @ key.T + rotate(query[:, H:]) @ position.T)
            sees = (np.arange(T)[:, None] >= np.arange(T)) & (segments[:, None] == segments)
            probabilities = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), -1)
            total += probabilities @ (latent @ weights["value_up"][:, head]) @ weights["out"][head]
        return total

    return jnp.stack([of_row(*row) for row in zip(x, segments, strict=True)])


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["with a latent of queries", "direct queries"])
def test_value_and_gradients_equal_the_formula_in_float64(config):
    run, weights = layer_of(config)
    x, d_out, positions = given()
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1, 1, 1]], np.int32)

    def ours(weights, x):
        return run(weights, x, inputs_at(positions) | {"segment_ids": segments})[0]

    out, vjp = jax.vjp(jax.jit(ours), weights, x)
    found = (out, *vjp(jnp.asarray(d_out)))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, np.float64), (weights, x, d_out))

        @jax.jit
        def truth(weights, x, d_out):
            out, vjp = jax.vjp(lambda weights, x: formula(weights, x, segments), weights, x)
            return out, *vjp(d_out)

        wanted = jax.device_get(truth(*double))
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        # Sums of about 100 float32 products.
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max(), err_msg=str(path))


@pytest.mark.parametrize(("sizes", "dtype"), [
    ({}, jnp.int8), (dict(data=2, tensor=2), jnp.float32), (dict(fsdp=2, context=2), jnp.float32),
], ids=str)  # fmt: skip
def test_generation_from_pages_of_latents_equals_attention_to_the_whole_sequence(sizes, dtype, make_test_mesh):
    """One token of each row after the other; row 1 has the pages before those of row 0."""
    run, weights = layer_of(dataclasses.replace(CONFIG, mask=CAUSAL & window(6)))
    x, _, positions = given()
    page_size = 4
    table = np.array([[2, 3], [0, 1]], np.int32)

    @jax.jit
    def paged(weights, x):
        cache = PagedCache.zeros(PoolSizes(4, page_size, B, dtype), *CONFIG.cached_heads, has_values=False)

        def step(cache, number):
            now = jnp.full((B, 1), number)
            slots = jnp.asarray(table)[:, number // page_size][:, None] * page_size + number % page_size
            places = Places(slots, now, jnp.arange(B)[:, None], jnp.asarray(table), None, now + 1)
            token = jax.lax.dynamic_slice_in_dim(x, number, 1, 1)
            out, cache = run(weights, token, inputs_at(now), cache.at(places))
            return cache, out[:, 0]

        cache, found = jax.lax.scan(step, cache, jnp.arange(T, dtype=jnp.int32))
        return found.swapaxes(0, 1), cache

    with jax.set_mesh(make_test_mesh()):
        wanted = jax.device_get(jax.jit(lambda weights, x: run(weights, x, inputs_at(positions))[0])(weights, x))
    with jax.set_mesh(make_test_mesh(**sizes)):
        found, cache = paged(weights, x)
    # 8 bits: half of 1 / 127 of the largest entry, in keys and values.
    np.testing.assert_allclose(found, wanted, atol=3e-6 if dtype == jnp.float32 else 0.05)
    assert cache.pages.shape == (4, 1, 1, page_size, R + P)


# ----------------------------------------------------------------------------- a plan


def test_plan_counts_multiply_adds_of_each_weight_and_pair():
    for config in (CONFIG, DIRECT):
        _, weights = layer_of(config)
        matrices = sum(a.size for a in jax.tree.leaves(weights) if a.ndim > 1)
        flops = config.flops(T)
        assert flops.matmuls == 2 * matrices
        assert flops.mixing == 2 * N * (H + P + V) * T
        activations = config.activations(T)
        assert activations["latents"].elements == R + P + (config.q_rank or 0)
        assert activations["qkv"].elements == N * (H + P) + N * (H + V)
        recomputed = sum(one.flops.matmuls for one in activations.values())
        assert recomputed == flops.matmuls - config.out_flops


def test_model_counts_its_parameters():
    model = Model(decoder())
    assert model.num_active_parameters() == model.num_parameters()


# ----------------------------------------------------------------------------- what is refused


def decoder(**fields) -> DecoderConfig:
    return DecoderConfig(**dict(
        num_layers=1, embed_dim=D, num_heads=N, head_dim=H, vocab_size=32, position="rope", norm="rmsnorm", biases=(),
        latent=LatentConfig(kv_rank=R),
    ) | fields)  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), [
    (dict(position="alibi"), "model.position=alibi is not supported by latent attention .* --model.position=rope"),
    (dict(num_kv_heads=2), "model.num_kv_heads=2 .* use --model.num_kv_heads=4"),
    (dict(qk_norm=True), "model.qk_norm=True .* use --model.qk_norm=False"),
    (dict(biases=("qkv", "attention_out", "mlp", "norm")), "model.biases: attention_out, qkv is not supported"),
    (dict(latent=LatentConfig(q_rank=4)), "model.latent: q_rank set, but not kv_rank"),
], ids=str)  # fmt: skip
def test_what_it_cannot_do_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        decoder(**fields).check(MeshConfig(), T, ExecutionConfig())


def test_mesh_that_does_not_divide_heads_or_latents_is_refused():
    with pytest.raises(ValueError, match="model.num_heads=4 is not divisible by mesh.tensor=8"):
        decoder().check(MeshConfig(tensor=8), T, ExecutionConfig())
    with pytest.raises(ValueError, match=r"mesh.fsdp\(4\) .* does not divide 10, the size of .*key_up"):
        Model(decoder()).check_divides(MeshConfig(fsdp=4).sizes())
