"""Sums and gathers over the tensor axis in mailboxes, with XLA's in the place of the kernels, which need GPUs
(tests/gpu/test_mailboxes.py): products, the embedding, and the tokens of an engine."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.inference.device import executor
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.lora import LoraConfig
from megajax.mesh.current import exchanging
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops import mailboxes
from megajax.ops.embedding import embed
from megajax.precision import PrecisionConfig
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from pallas_kernels import mailboxes as kernel

ADDRESSES = np.array([[7, 0], [9, 0]], np.uint32)
K, N = 64, 32


@pytest.fixture
def exchanged(monkeypatch):
    """Shapes of the arrays that the kernels got."""
    shapes = []

    def all_reduce(x, rank, addresses):
        shapes.append(x.shape)
        return lax.psum(x.astype(jnp.float32), "tensor").astype(x.dtype)

    def all_gather(x, rank, addresses):
        shapes.append(x.shape)
        return lax.all_gather(x, "tensor", axis=x.ndim - 1, tiled=True)

    monkeypatch.setattr(kernel, "all_reduce", all_reduce)
    monkeypatch.setattr(kernel, "all_gather", all_gather)
    return shapes


def weight(kind: str) -> jax.Array | QuantizedWeight:
    matrix = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
    if kind == "bfloat16":
        return matrix
    format = WeightFormat(*kind.split(" "))
    return QuantizedWeight.of(matrix, 1, format, jnp.float32(0.01) if format.inputs == "static" else None)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("bfloat16", 3),
        ("int8 unchanged", 3),
        ("float8 by_rows", 3),
        ("float8 by_rows", 64),
        ("float8 static", 64),
        ("float8 dynamic", 64),
    ],
)
def test_products_are_summed_in_mailboxes(kind, rows, exchanged, make_test_mesh):
    x = jax.random.normal(jax.random.key(0), (rows, 1, K), jnp.bfloat16)
    w = weight(kind)
    with jax.set_mesh(make_test_mesh(tensor=2)), exchanging(ADDRESSES):
        found = jax.jit(lambda x, w: mailboxes.summed_matmul(x, w, 1, ("mlp", "embed")))(x, w)
        jax.jit(lambda x, w: mailboxes.summed_matmul(x, w, 1, ("embed", "mlp")))(x, w)  # no sum
    assert exchanged == [(rows, 1, N)]
    matrix = w if isinstance(w, jax.Array) else w.matrix()
    wanted = np.asarray(x, np.float32) @ np.asarray(matrix, np.float32)
    error = np.linalg.norm(np.asarray(found, np.float32) - wanted) / np.linalg.norm(wanted)
    assert error < (0.04 if kind.startswith("float8") and rows > 32 else 0.01), error


def test_outside_of_exchanging_nothing_is_in_mailboxes(exchanged, make_test_mesh):
    x = jnp.ones((2, K), jnp.bfloat16)
    with jax.set_mesh(make_test_mesh(tensor=2)):
        jax.jit(lambda x: mailboxes.summed_matmul(x, weight("bfloat16"), 1, ("mlp", "embed")))(x)
        assert mailboxes.gathered(x) is x
    assert not exchanged


def test_gathers_and_embeddings(exchanged, make_test_mesh):
    mesh = make_test_mesh(tensor=2)
    x = jax.device_put(np.arange(3 * K, dtype=np.float32).reshape(3, K), NamedSharding(mesh, P(None, "tensor")))
    table = jax.random.normal(jax.random.key(2), (10, K), jnp.bfloat16)
    tokens = np.array([[1], [9], [4]], np.int32)
    with jax.set_mesh(mesh), exchanging(ADDRESSES):
        whole = jax.jit(mailboxes.gathered)(x)
        rows = jax.jit(functools.partial(embed, dtype=jnp.bfloat16))(table, tokens)
    assert exchanged == [(3, K // 2), (1, 3, 1, K)]
    np.testing.assert_array_equal(whole, x)
    assert whole.sharding.is_fully_replicated
    np.testing.assert_array_equal(rows[:, 0], table[tokens[:, 0]])


DENSE = DecoderConfig(num_layers=2, embed_dim=64, num_heads=4, head_dim=16, num_kv_heads=2, mlp_dim=128,
                      vocab_size=200, position="rope", activation="swiglu", biases=())  # fmt: skip
MIXTURE = dataclasses.replace(DENSE, moe=MoeConfig(num_experts=4, expert_dim=32, shared_dim=32))
SERVING = ServingConfig(max_rows=2, max_batch_tokens=16, num_pages=8)


@pytest.mark.parametrize(
    ("config", "adapters", "widths"),
    [(DENSE, (), [64, 64]), (MIXTURE, (), [64, 64, 64]), (DENSE, LoraConfig(rank=8).transforms, [64, 8, 64, 8])],
)
def test_an_engine_generates_the_same_with_mailboxes_as_without(
    config, adapters, widths, exchanged, make_test_mesh, monkeypatch, caplog
):
    """In one process and with the same shapes, so what is traced once for one of them must not be used by the other.
    widths: of the sums of a layer."""
    mesh = make_test_mesh(tensor=2)
    model = Model(config, PrecisionConfig(compute="bfloat16"), adapters=adapters)
    params = model.init(0, mesh)

    def generated() -> list[list[int]]:
        engine = Engine(model, params, mesh, None, serving=SERVING)
        engine.warm_up()
        return engine.generate_tokens([[1, 2, 3], [4, 5]], Sampling(max_tokens=6, temperature=0.0))

    expected = generated()
    monkeypatch.setattr(executor, "NVIDIA", "cpu")
    with caplog.at_level("INFO", "megajax"):
        assert generated() == expected
    assert "calls are not CUDA graphs: cpu is not Hopper" in caplog.text
    assert not exchanged
    monkeypatch.setattr(executor, "mailboxes_problem", lambda *_: "")
    assert generated() == expected
    # The layers are equal, so they are traced once. The vocabulary is padded to 256.
    steps = [[(1, rows, 1, 64), *[(rows, 1, width) for width in widths], (rows, 1, 128)] for rows in (1, 2)]
    prompts = [[(1, 1, 16, 64), *[(1, 16, width) for width in widths], (2, 1, 128), (16, 1, 128)]] * 2
    assert sorted(exchanged) == sorted(itertools.chain(*steps, *prompts))
    monkeypatch.undo()
    assert generated() == expected


def device(kind: str, process: int = 0) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, process_index=process)


HOPPER = [device("NVIDIA H100 80GB HBM3"), device("NVIDIA H100 80GB HBM3")]


@pytest.mark.parametrize(
    ("devices", "tensor", "dtype", "found"),
    [
        (HOPPER, 2, jnp.bfloat16, ""),
        ([device("NVIDIA A100")] * 2, 2, jnp.bfloat16, "NVIDIA A100 is not Hopper"),
        (HOPPER * 2, 2, jnp.bfloat16, "the mesh has other axes than tensor"),
        (HOPPER, 2, jnp.float32, "the model computes in float32"),
        ([device("NVIDIA H20"), device("NVIDIA H20", 1)], 2, jnp.bfloat16, "the GPUs belong to several processes"),
    ],
)
def test_what_has_no_mailboxes_is_said_with_the_reason(devices, tensor, dtype, found, monkeypatch):
    monkeypatch.setattr(mailboxes.compat, "reaches_memory", lambda *_: True)
    mesh = SimpleNamespace(devices=np.array(devices), size=len(devices), shape={"tensor": tensor})
    assert mailboxes.problem(mesh, np.dtype(dtype)) == found


def test_memory_of_other_gpus_has_to_be_reached(monkeypatch):
    monkeypatch.setattr(mailboxes.compat, "reaches_memory", lambda one, other: one is HOPPER[0])
    mesh = SimpleNamespace(devices=np.array(HOPPER), size=2, shape={"tensor": 2})
    assert "cannot access the memory of" in mailboxes.problem(mesh, np.dtype(jnp.bfloat16))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert mailboxes.problem(mesh, np.dtype(jnp.bfloat16)) == "NCCL_P2P_DISABLE is set"
