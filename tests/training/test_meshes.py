"""Any mesh is the same model: five training steps on every mesh equal one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.layers.attention.rope import RopeConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import activation_spec, batch_spec, parameter_spec
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.parallel.context import sequence_order
from megajax.parameters import Parameter
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig
from megajax.training.state import new_state, state_shardings
from megajax.training.step import make_train_step

SHAPES = ((4, 16), (2, 16), (4, 1))  # enough sequences; one on each replica; a token of a decoding step each
STEPS, MICROBATCHES, BATCH, LENGTH = 5, 2, 8, 16
# Losses are sums over differently split dims in float32; five AdamW steps amplify the rounding.
LOSS_TOLERANCE = 1e-5

MODEL = DecoderConfig(
    num_layers=2,
    embed_dim=16,
    num_heads=8,
    head_dim=4,
    mlp_dim=32,
    vocab_size=100,
    max_positions=LENGTH,
    dropout=0.1,
    attention_dropout=0.1,
)
SCANNED = ExecutionConfig(scan_layers=True)
LLAMA = DecoderConfig(
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=32,
    vocab_size=100,
    position="rope",
    rope=RopeConfig(fraction=0.5),
    norm="rmsnorm",
    qk_norm=True,
    activation="swiglu",
    biases=(),
    tied_embeddings=False,
    window=6,
    pattern="wf",
    attention_soft_cap=20.0,
)
DROPPING = dataclasses.replace(LLAMA, dropout=0.1, num_kv_heads=4)
RECOMPUTED = ExecutionConfig(recompute="selective")
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, min_learning_rate=0.0)


def batches(order: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Packed documents with a loss mask; the labels are the next tokens. order: see parallel/context.py."""
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, BATCH, LENGTH)
    made = []
    for _ in range(STEPS):
        tokens = rng.integers(0, 100, (*shape[:2], LENGTH + 1), dtype=np.int32)
        segments = np.sort(rng.integers(1, 4, shape, dtype=np.int32), -1)
        mask = (rng.random(shape) < 0.8).astype(np.float32)
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
        batch = dict(
            tokens=tokens[..., :-1], labels=tokens[..., 1:], positions=positions, loss_mask=mask, segment_ids=segments
        )
        made.append({name: array[..., order] for name, array in batch.items()})
    return made


def train(
    config: DecoderConfig, execution: ExecutionConfig, sizes: dict[str, int], zero1: bool = False,
    loss_mean: str = "token", microbatch: int = BATCH
):  # fmt: skip
    """microbatch: sequences of one. -> (losses of STEPS steps, final parameters on the host)."""
    mesh_config = MeshConfig(**sizes)
    config.check(mesh_config, LENGTH, execution)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    model = Model(config, PrecisionConfig(compute="float32"), execution)
    optimizer = Optimizer(OPTIMIZER, model.trained)
    shardings = state_shardings(model, optimizer, mesh, zero1)
    state = new_state(model, optimizer, model.init(0, mesh), mesh, shardings)
    # The regularisers are those of one of the two models, so that both ways are tried.
    terms = dict(z_loss=1e-3, label_smoothing=0.05) if config is MODEL else {}
    step = make_train_step(
        model, Language(), optimizer, TrainingConfig(loss_mean=loss_mean, microbatch_size=2, seed=0, **terms)
    )
    losses, order = [], sequence_order(LENGTH, mesh_config.context, execution.context_attention)
    with jax.set_mesh(mesh):
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        for batch in batches(order):
            batch = {name: array.reshape(-1, microbatch, LENGTH) for name, array in batch.items()}
            batch = jax.device_put(batch, NamedSharding(mesh, batch_spec()))
            state, metrics = step(state, batch, np.float32(1e-2))
            losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


def assert_same(result, reference) -> None:
    np.testing.assert_allclose(result[0], reference[0], rtol=LOSS_TOLERANCE)
    # AdamW divides by the root of the second moment: where a gradient is rounding noise its update is too.
    for got, want in zip(jax.tree.leaves(result[1]), jax.tree.leaves(reference[1]), strict=True):
        assert np.mean(np.abs(got - want)) < 1e-4


@pytest.fixture(scope="module")
def gpt_on_one_device():
    return train(MODEL, SCANNED, {})


@pytest.fixture(scope="module")
def llama_on_one_device():
    """The mean of microbatches: it must not depend on the mesh either."""
    return train(LLAMA, RECOMPUTED, {}, loss_mean="microbatch")


@pytest.fixture(scope="module")
def llama_with_dropout():
    return train(DROPPING, RECOMPUTED, {})


def test_losses_are_those_of_tokens_that_cannot_be_predicted(gpt_on_one_device):
    """100 tokens at random; the rows that pad the vocabulary to 128 count for nothing."""
    losses, params = gpt_on_one_device
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, np.log(100), atol=0.05)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(data=8), marks=pytest.mark.slow),
        pytest.param(dict(fsdp=8), marks=pytest.mark.slow),
        dict(tensor=8),
        dict(context=8),
        pytest.param(dict(expert=8), marks=pytest.mark.slow),
        dict(fsdp=2, context=2, tensor=2),
        dict(data=2, expert=2, context=2),
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_mesh_matches_one_device(sizes, gpt_on_one_device):
    assert_same(train(MODEL, SCANNED, sizes), gpt_on_one_device)


@pytest.mark.parametrize(
    ("sizes", "microbatch"),
    [(dict(tensor=8), 2), (dict(context=2, tensor=4), 1), (dict(fsdp=2, context=2, tensor=2), 2)],
    ids=str,
)
def test_tensor_splits_each_of_few_sequences(sizes, microbatch, gpt_on_one_device):
    assert_same(train(MODEL, SCANNED, sizes, microbatch=microbatch), gpt_on_one_device)


def test_tensor_splits_sequences_between_blocks_where_there_are_enough(make_test_mesh):
    with jax.set_mesh(make_test_mesh(fsdp=2, context=2, tensor=2)):
        specs = [activation_spec((batch, length, 8), ("batch", "sequence", None)) for batch, length in SHAPES]
    replicas = ("data", "fsdp", "expert")
    whole = P((*replicas, "tensor"), "context", None)
    parts = P(replicas, ("context", "tensor"), None)
    assert specs == [whole, parts, P(replicas, None, None)]


@pytest.mark.parametrize(
    ("num_experts", "spec"),
    [
        (16, P("pipeline", ("expert", "fsdp", "context"), None, "tensor")),
        (12, P("pipeline", "expert", ("fsdp", "context"), "tensor")),
    ],
)
def test_experts_are_split_whole_where_there_are_enough(num_experts, spec):
    record = Parameter(("layers", "experts", "embed", "mlp"), "matrix", num_experts=num_experts)
    assert parameter_spec(record, MeshConfig(expert=2, fsdp=2, context=2, tensor=2).sizes()) == spec


@pytest.mark.parametrize(
    "sizes",
    [
        dict(tensor=2, fsdp=4),
        pytest.param(dict(context=2, tensor=2, data=2), marks=pytest.mark.slow),
        pytest.param(dict(expert=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_mesh_matches_one_device_llama(sizes, llama_on_one_device):
    assert_same(train(LLAMA, RECOMPUTED, sizes, loss_mean="microbatch"), llama_on_one_device)


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        pytest.param(dict(context=4, data=2), "all_gather", marks=pytest.mark.slow),
        (dict(context=2, tensor=2, fsdp=2), "all_to_all"),
    ],
    ids=["all_gather", "all_to_all"],
)
def test_other_context_methods_match_one_device(sizes, method, llama_with_dropout):
    execution = dataclasses.replace(RECOMPUTED, context_attention=method)
    assert_same(train(DROPPING, execution, sizes), llama_with_dropout)


def test_zero1_matches_one_device(gpt_on_one_device):
    assert_same(train(MODEL, SCANNED, dict(data=2, fsdp=2, tensor=2), zero1=True), gpt_on_one_device)


def test_loss_weights_are_the_means_they_promise():
    from megajax.training.step import loss_weights

    mask = (np.random.default_rng(1).random((3, 4, 5)) < 0.5).astype(np.float32)
    losses = np.random.default_rng(2).random((3, 4, 5)).astype(np.float32)
    whole = np.sum(losses * mask) / mask.sum()
    np.testing.assert_allclose(np.sum(losses * loss_weights(jnp.asarray(mask), "token", None)), whole, rtol=1e-6)
    pairs = (losses * mask).reshape(6, -1).sum(1) / mask.reshape(6, -1).sum(1)
    grouped = np.sum(losses * loss_weights(jnp.asarray(mask), "microbatch", 2))
    np.testing.assert_allclose(grouped, pairs.mean(), rtol=1e-6)
