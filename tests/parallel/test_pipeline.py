"""A pipeline is the same model: five training steps, evaluation and memory of each schedule and layout."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megajax.checkpoint.layout import stored_form, wanted_form
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import batch_spec
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig
from megajax.training.state import new_state, state_shardings
from megajax.training.step import make_eval_step, make_train_step

STEPS, BATCH, LENGTH = 5, 16, 16
GPT = DecoderConfig(
    num_layers=5, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=100, max_positions=LENGTH, dropout=0.1,
    attention_dropout=0.1,
)  # fmt: skip
LLAMA = DecoderConfig(
    num_layers=8, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=100, position="rope",
    rope=RopeConfig(fraction=0.5), norm="rmsnorm", qk_norm=True, activation="swiglu", biases=(), tied_embeddings=False,
    window=6, pattern="w3f",
)  # fmt: skip
SELECTIVE = dict(recompute="selective")
MOE = DecoderConfig(
    num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=100, position="rope", norm="rmsnorm",
    activation="swiglu", biases=(), init_std=0.2, mtp_layers=1, pattern="de",
    moe=MoeConfig(4, 24, shared_dim=16, shared_gate=True, router=RouterConfig(
        score="sigmoid", bias_update_rate=1e-2, aux_loss=0.1, aux_loss_scope="batch", z_loss=0.01,
    )),
)  # fmt: skip

GPT_CASES = {
    "pipeline 2, uneven": dict(pipeline=2),
    "pipeline 4 x data 2, uneven": dict(pipeline=4, data=2),
    "pipeline 2 x fsdp 2 x context 2, interleaved": dict(pipeline=2, fsdp=2, context=2, virtual_stages=2),
    "pipeline 4 x expert 2": dict(pipeline=4, expert=2),
    "pipeline 2 x context 2 x tensor 2, empty stage": dict(
        pipeline=2, context=2, tensor=2, virtual_stages=2, pipeline_layout="Et||ttt|tL"
    ),
}
LLAMA_CASES = {
    "pipeline 8": (dict(pipeline=8), SELECTIVE),
    "pipeline 4 x tensor 2, interleaved": (dict(pipeline=4, tensor=2, virtual_stages=2), SELECTIVE),
    "pipeline 2 x fsdp 2 x tensor 2, interleaved": (dict(pipeline=2, fsdp=2, tensor=2, virtual_stages=4), SELECTIVE),
    "pipeline 4 x data 2, full recompute": (dict(pipeline=4, data=2), dict(recompute="full")),
    "pipeline 2 x data 2 x context 2, nothing recomputed": (
        dict(pipeline=2, data=2, context=2), dict(recompute="none"),
    ),
    "pipeline 2 x fsdp 4, every second layer recomputed": (
        dict(pipeline=2, fsdp=4), dict(recompute="full", recompute_every=2),
    ),
}  # fmt: skip


def batches(order: np.ndarray, num_microbatches: int = 4) -> list[dict[str, np.ndarray]]:
    """Packed documents with a loss mask. order: see parallel/context.py."""
    rng = np.random.default_rng(0)
    shape, made = (num_microbatches, BATCH // num_microbatches, LENGTH), []
    for _ in range(STEPS):
        tokens = rng.integers(0, 100, (*shape[:2], LENGTH + 1), dtype=np.int32)
        made.append({
            "tokens": tokens[..., :-1],
            "labels": tokens[..., 1:],
            "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
            "loss_mask": (rng.random(shape) < 0.8).astype(np.float32),
            "segment_ids": np.sort(rng.integers(1, 4, shape, dtype=np.int32), -1),
        })  # fmt: skip
    return [{name: array[..., order] for name, array in batch.items()} for batch in made]


def set_up(config: DecoderConfig, sizes: dict, zero1: bool = False, **how):
    mesh_config, execution = MeshConfig(**sizes), ExecutionConfig(**how)
    mesh_config.check()
    config.check(mesh_config, LENGTH, execution)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    stages = make_stages(mesh_config, config.num_layers)
    model = Model(config, PrecisionConfig(compute="float32"), execution, stages=stages)
    optimizer = Optimizer(OptimizerConfig(learning_rate=1e-2, min_learning_rate=0.0), model.trained)
    return mesh, model, optimizer, state_shardings(model, optimizer, mesh, zero1)


def as_numbered(model: Model, params):
    """Parameters with their layers one after the other, as without a pipeline."""
    plain = Model(model.config, model.precision)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    abstract = lambda m: jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), m.abstract_weights, m.shardings(mesh)
    )
    rows = model.layer_rows, plain.layer_rows
    form = stored_form(abstract(plain), *rows)
    here = jax.tree.map(lambda a, like: jax.device_put(np.asarray(a), like.sharding), params, form)
    return jax.device_get(wanted_form(here, abstract(plain), *rows))


def train(config: DecoderConfig, sizes: dict, zero1: bool = False, **how):
    """-> (losses of STEPS steps, loss and rates of an evaluation, final parameters as without a pipeline, and as they
    are)."""
    mesh, model, optimizer, shardings = set_up(config, sizes, zero1, **how)
    state = new_state(model, optimizer, model.init(0, mesh), mesh, shardings)
    terms = dict(z_loss=1e-3, label_smoothing=0.05) if config is GPT else {}
    step = make_train_step(model, Language(), optimizer, TrainingConfig(microbatch_size=4, seed=0, **terms))
    put = lambda batch: jax.device_put(batch, NamedSharding(mesh, batch_spec()))
    losses, order = [], sequence_order(LENGTH, mesh.shape["context"], "ring")
    with jax.set_mesh(mesh):
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        for batch in batches(order):
            state, metrics = step(state, put(batch), np.float32(1e-2))
            losses.append(float(metrics["loss"]))
        # Without a pipeline an evaluation takes one microbatch at a time.
        evaluate = jax.jit(make_eval_step(model, Language()))
        batch = batches(order)[0]
        parts = [batch] if model.stages else [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
        found = [jax.device_get(evaluate(state.weights, put(part))) for part in parts]
        sums = {name: np.sum([part[name] for part in found], 0) for name in found[0]}
    evaluated = {name: numerator / denominator for name, (numerator, denominator) in sums.items()}
    return losses, evaluated, as_numbered(model, state.weights), jax.device_get(state.params)


def assert_same(result, reference) -> None:
    np.testing.assert_allclose(result[0], reference[0], rtol=1e-5)
    for name, value in reference[1].items():  # after the last update
        assert result[1][name] == pytest.approx(value, rel=3e-5 if name == "loss" else 1e-5)
    # AdamW divides by the root of the second moment: where a gradient is rounding noise its update is too.
    for got, want in zip(jax.tree.leaves(result[2]), jax.tree.leaves(reference[2]), strict=True):
        assert np.mean(np.abs(got - want)) < 1e-4


@pytest.fixture(scope="module")
def gpt_on_one_device():
    return train(GPT, {}, scan_layers=True)


@pytest.fixture(scope="module")
def llama_on_one_device():
    return train(LLAMA, {}, **SELECTIVE, scan_layers=True)


SLOW = (
    "pipeline 4 x data 2, uneven",
    "pipeline 8",
    "pipeline 2 x fsdp 2 x context 2, interleaved",
    "pipeline 4 x expert 2",
    "pipeline 2 x context 2 x tensor 2, empty stage",
    "pipeline 2 x fsdp 4, every second layer recomputed",
    "pipeline 2 x fsdp 2 x tensor 2, interleaved",
    "pipeline 4 x data 2, full recompute",
    "pipeline 2 x data 2 x context 2, nothing recomputed",
)


def cases(of: dict) -> list:
    return [pytest.param(case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in of.items()]


@pytest.mark.parametrize("sizes", cases(GPT_CASES))
def test_pipeline_matches_one_device_and_rows_of_padding_stay_zero(sizes, gpt_on_one_device):
    result = train(GPT, sizes)
    assert_same(result, gpt_on_one_device)
    model = set_up(GPT, sizes)[1]
    assert model.num_parameters() == Model(GPT, model.precision).num_parameters()
    padding = model.layer_rows["layers.dense"] < 0
    assert padding.sum() == padding.size - 5
    for leaf in jax.tree.leaves(result[3]["layers"]):
        assert not np.any(leaf[padding]) and all(np.any(layer) for layer in leaf[~padding])


@pytest.mark.parametrize("case", cases(LLAMA_CASES))
def test_pipeline_matches_one_device_llama(case, llama_on_one_device):
    sizes, how = case
    assert_same(train(LLAMA, sizes, **how), llama_on_one_device)


@pytest.fixture(scope="module")
def moe_on_one_device():
    return train(MOE, {})


@pytest.mark.parametrize("sizes, how", [
    (dict(pipeline=2, expert=2, data=2), dict(expert_dispatch="all_to_all", expert_buffer=1.0)),
    pytest.param(
        dict(pipeline=2, expert=2, tensor=2), dict(expert_dispatch="all_gather", recompute="full"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        dict(pipeline=2, expert=2, fsdp=2), dict(recompute="selective"), marks=pytest.mark.slow,
    ),
    pytest.param(
        dict(pipeline=2, expert=2, context=2), dict(expert_dispatch="all_to_all"), marks=pytest.mark.slow,
    ),
    pytest.param(dict(pipeline=2, context=2, tensor=2), {}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_pipeline_matches_one_device_with_experts(sizes, how, moe_on_one_device):
    """The bias, the load of the batch before and all terms of the loss included; multi-token prediction too."""
    assert moe_on_one_device[1].keys() == {"loss", "mtp_acceptance/1"}
    assert_same(train(MOE, sizes, **how), moe_on_one_device)


@pytest.mark.slow
def test_pipeline_with_zero1_matches_one_device(llama_on_one_device):
    assert_same(train(LLAMA, dict(pipeline=2, data=4), zero1=True, **SELECTIVE), llama_on_one_device)


def test_initial_parameters_do_not_depend_on_the_layout():
    plain, laid_out = (
        as_numbered(model, model.init(3, mesh))
        for mesh, model, *_ in (set_up(GPT, {}), set_up(GPT, dict(pipeline=2, virtual_stages=2)))
    )
    jax.tree.map(np.testing.assert_array_equal, laid_out, plain)


def temporary_bytes(num_microbatches: int) -> int:
    config = dataclasses.replace(GPT, num_layers=4, dropout=0.0, attention_dropout=0.0)
    sizes = dict(pipeline=4)
    mesh, model, optimizer, shardings = set_up(config, sizes)
    step = make_train_step(model, Language(), optimizer, TrainingConfig(seed=0))
    state = new_state(model, optimizer, model.init(0, mesh), mesh, shardings)
    shape = (num_microbatches, 4, LENGTH)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
    batch["loss_mask"] = np.ones(shape, np.float32)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, NamedSharding(mesh, batch_spec()))
        compiled = jax.jit(step, out_shardings=(shardings, None)).lower(state, batch, np.float32(0)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_activation_memory_does_not_grow_with_the_microbatches():
    few, many = (temporary_bytes(count) for count in (8, 32))
    tokens = 24 * 4 * LENGTH * 4  # of what differs: the weights that each token of 24 more microbatches has
    assert many - few <= 4 * tokens
