"""A decoder with neighbours: its chunked attention is the paper's, neighbours are read after their chunk only, and all
meshes compute the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from megajax.layers.chunked_cross_attention import BlockAttentionConfig, ChunkedCrossAttention
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import batch_spec
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.models.retro import RetroConfig
from megajax.precision import PrecisionConfig
from megajax.retrieval.inputs import NO_TOKEN
from megajax.tasks.language import Language

B, T, M, K, R = 4, 16, 4, 2, 6
U = T // M
VOCAB = 50
CONFIG = RetroConfig(
    num_layers=3, embed_dim=16, num_heads=4, vocab_size=VOCAB, position="rope", init_std=0.3, retrieval_layers=(1, 2),
    chunk_length=M, num_neighbours=K, neighbour_length=R,
)  # fmt: skip


@functools.cache
def make_batch() -> dict[str, np.ndarray]:
    """One document a row but the last, which has two; some neighbours are short, or missing."""
    rng = np.random.default_rng(0)
    neighbours = rng.integers(0, VOCAB, (B, U, K, R), np.int32)
    neighbours[0, 1, 0, 3:] = NO_TOKEN
    neighbours[1, 2] = NO_TOKEN
    neighbours[2, :, 1] = NO_TOKEN
    segments = np.ones((B, T), np.int32)
    segments[3, 9:] = 2
    return {
        "tokens": rng.integers(0, VOCAB, (B, T), np.int32),
        "labels": rng.integers(0, VOCAB, (B, T), np.int32),
        "loss_weights": np.full((B, T), 1 / (B * T), np.float32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "segment_ids": segments,
        "neighbour_tokens": neighbours,
    }


def model_of(config: DecoderConfig = CONFIG) -> Model:
    return Model(config, PrecisionConfig(compute="float32"), ExecutionConfig())


@functools.cache
def initial() -> dict:
    return jax.jit(model_of().init)(0)


@functools.cache
def logits_of_module():
    model = model_of()

    def run(weights, batch):
        module = model.module(weights)
        h = module.hidden(batch)[0]
        return h @ module.embedding[...].T

    return jax.jit(run)


def logits(batch: dict) -> np.ndarray:
    return np.asarray(logits_of_module()(initial(), batch))


def test_chunked_cross_attention_equals_a_loop_over_tokens():
    """In float64: token i reads the neighbours of chunk (i - M + 1) // M, all at once, and the first ones nothing."""
    heads, width = 2, 3
    with jax.enable_x64(True):
        config = BlockAttentionConfig(
            embed_dim=5, num_heads=heads, head_dim=width, bias=True, scale=0.7, init_std=0.5, out_init_std=0.5,
            chunk_length=M, num_keys=K * R,
        )  # fmt: skip
        layer = ChunkedCrossAttention(config, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(0)
        state = nnx.state(layer)
        state = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), state)
        nnx.update(layer, state)
        x = rng.standard_normal((2, T, 5))
        read = rng.standard_normal((2, U, K * R, 5))
        is_neighbour = rng.random((2, U, K * R)) < 0.7
        is_neighbour[0, 1] = False
        got = layer(jnp.asarray(x), {"neighbours": jnp.asarray(read), "is_neighbour": jnp.asarray(is_neighbour)})[0]
        weight = {name: (getattr(layer, name).weight[...], getattr(layer, name).bias[...])
                  for name in ("query", "key", "value", "out")}  # fmt: skip
    weight = jax.tree.map(np.asarray, weight)
    wanted = np.zeros_like(x)
    for row in range(2):
        for token in range(M - 1, T):
            chunk = (token - M + 1) // M
            seen = read[row, chunk][is_neighbour[row, chunk]]
            if not len(seen):
                continue
            q = np.einsum("d,dnh->nh", x[row, token], weight["query"][0]) + weight["query"][1]
            k = np.einsum("sd,dnh->snh", seen, weight["key"][0]) + weight["key"][1]
            v = np.einsum("sd,dnh->snh", seen, weight["value"][0]) + weight["value"][1]
            scores = np.exp(0.7 * np.einsum("nh,snh->ns", q, k))
            mixed = np.einsum("ns,snh->nh", scores / scores.sum(1, keepdims=True), v)
            wanted[row, token] = np.einsum("nh,nhd->d", mixed, weight["out"][0]) + weight["out"][1]
    np.testing.assert_allclose(got, wanted, atol=1e-12)


@pytest.mark.parametrize("chunk", range(U))
def test_neighbours_are_read_from_the_last_token_of_their_chunk_on(chunk):
    batch = make_batch()
    changed = batch["neighbour_tokens"].copy()
    changed[:, chunk] = (changed[:, chunk] + 7) % VOCAB
    first = chunk * M + M - 1
    before, after = logits(batch), logits(batch | {"neighbour_tokens": changed})
    np.testing.assert_array_equal(after[:, :first], before[:, :first])
    assert (np.abs(after - before)[:, first].max(-1) > 1e-4).all()


def test_a_token_changes_nothing_before_it():
    batch = make_batch()
    tokens = batch["tokens"].copy()
    tokens[:, 6] = (tokens[:, 6] + 1) % VOCAB
    before, after = logits(batch), logits(batch | {"tokens": tokens})
    np.testing.assert_allclose(after[:, :6], before[:, :6], atol=1e-5)
    assert np.abs(after - before)[:, 6].max() > 1e-3


def test_neighbours_of_another_document_are_not_read():
    """In the last row a document ends with token 8: tokens 9 and 10 do not read what was retrieved for chunk 1."""
    batch = make_batch()
    changed = batch["neighbour_tokens"].copy()
    changed[3, 1] = (changed[3, 1] + 7) % VOCAB
    difference = np.abs(logits(batch) - logits(batch | {"neighbour_tokens": changed}))[3].max(-1)
    assert (difference[7:9] > 1e-4).all()
    assert (difference[9:11] == 0).all()


def test_without_neighbours_it_is_the_plain_decoder():
    missing = make_batch() | {"neighbour_tokens": np.full((B, U, K, R), NO_TOKEN, np.int32)}
    fields = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(DecoderConfig)}
    plain = model_of(DecoderConfig(**fields | {"kind": "decoder"}))
    weights = initial()
    parts = (weights["front_layers"], weights["layers"])

    def joined(kind: str) -> dict:
        trees = [part[kind] for part in parts if kind in part]
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *trees)

    attention = joined("attention")
    mlp = joined("dense")
    layers = {
        "attention_norm": attention["norm"], "attention": attention["mixer"], "mlp_norm": mlp["norm"],
        "mlp": mlp["mixer"],
    }  # fmt: skip
    given = {name: weights[name] for name in weights if name not in ("front_layers", "layers", "encoder")}
    loss = jax.jit(lambda weights, batch: plain.loss(weights, batch, Language()).total())
    batch = {name: array for name, array in missing.items() if name != "neighbour_tokens"}
    wanted = loss(given | {"layers": {"dense": layers}}, batch)
    got = jax.jit(lambda weights, batch: model_of().loss(weights, batch, Language()).total())(weights, missing)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def loss_and_gradients(sizes: dict, **how):
    mesh_config = MeshConfig(**sizes)
    config = dataclasses.replace(CONFIG, dropout=0.1)
    model = Model(config, PrecisionConfig(compute="float32"), ExecutionConfig(**how))
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    arrays = model.config.inputs(T, packed=True)

    def placed(name, array):
        dims = arrays[name].dims if name in arrays else ("time",)
        return jax.device_put(array, NamedSharding(mesh, jax.sharding.PartitionSpec(*batch_spec(dims)[1:])))

    batch = {name: placed(name, array) for name, array in make_batch().items()}

    @jax.jit
    @jax.value_and_grad
    def run(weights, batch):
        return model.loss(weights, batch, Language(), key=jax.random.key(1)).total()

    with jax.set_mesh(mesh):
        return jax.device_get(run(model.init(0, mesh), batch))


@functools.cache
def on_one_device():
    return loss_and_gradients({})


@pytest.mark.parametrize(
    "sizes, how",
    [
        (dict(data=2, fsdp=2, tensor=2), {}),
        (dict(context=2, tensor=2, data=2), dict(context_attention="all_to_all", recompute="full", scan_layers=True)),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_loss_and_gradients(sizes, how):
    """With dropout, whose masks depend on samples and positions alone."""
    loss, gradients = on_one_device()
    found, on_mesh = loss_and_gradients(sizes, **how)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    for path, wanted in jax.tree_util.tree_leaves_with_path(gradients):
        got = functools.reduce(lambda tree, key: tree[key.key], path, on_mesh)
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
        assert np.abs(wanted).max() > 0, path


@pytest.mark.parametrize("fields, mesh, message", [
    (dict(retrieval_layers=()), {}, "has no layer that reads neighbours"),
    (dict(retrieval_layers=(2, 1)), {}, "must ascend and be below"),
    ({}, dict(pipeline=2), "mesh.pipeline=2 is not supported by model.kind=retro"),
    ({}, dict(context=2), "use --execution.context_attention=all_to_all"),
    (dict(chunk_length=5), {}, "sequence_length=16 is not divisible by 5 = model.chunk_length"),
    (dict(mtp_layers=1), {}, "model.mtp_layers=1 is not supported by model.kind=retro"),
])  # fmt: skip
def test_contradictions_are_refused(fields, mesh, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields).check(MeshConfig(**mesh), T, ExecutionConfig())


def test_layers_are_those_of_megatron():
    """Megatron counts from 1: 6, 9, 12 of 12 layers; 9, 12, ... of 24."""
    assert RetroConfig(num_layers=12).reading_layers == (5, 8, 11)
    assert RetroConfig(num_layers=24).reading_layers == (8, 11, 14, 17, 20, 23)
