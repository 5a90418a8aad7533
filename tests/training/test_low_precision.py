"""Training with precision.recipe: which matmuls it concerns, and that meshes and loops agree."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megajax.config import Config, incompatibilities
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import batch_spec
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.optim.optimizer import Optimizer
from megajax.overrides import override
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.planning.card import described_precision
from megajax.planning.plan import plan_device
from megajax.planning.step_time import low_share
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig
from megajax.training.state import new_state, state_shardings
from megajax.training.step import make_train_step

STEPS, BATCH, LENGTH = 3, 4, 16
LLAMA = DecoderConfig(num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=96, biases=(),
                      vocab_multiple=32, position="rope", norm="rmsnorm", activation="swiglu")  # fmt: skip
PRECISION = PrecisionConfig(recipe="fp8", compute="float32", high_layers=(1, 0))


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 96, (2, BATCH, LENGTH + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens[..., 1:].shape)
    mask = np.ones(positions.shape, np.float32)
    return dict(tokens=tokens[..., :-1], labels=tokens[..., 1:], positions=positions, loss_mask=mask)


def train(precision=PRECISION, **sizes: int):
    """-> (losses, final parameters), layers in the order of the model: recomputed in a loop, or
    unrolled in a pipeline."""
    execution = ExecutionConfig() if "pipeline" in sizes else ExecutionConfig(scan_layers=True, recompute="full")
    mesh_config = MeshConfig(**sizes)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    stages = make_stages(mesh_config, LLAMA.num_layers)
    model = Model(LLAMA, precision, execution, stages=stages)
    # With a smaller epsilon AdamW would turn the rounding noise of a tiny gradient into a whole update.
    optimizer = Optimizer(OptimizerConfig(learning_rate=1e-2, min_learning_rate=0.0, epsilon=1e-3), model.trained)
    shardings = state_shardings(model, optimizer, mesh, False)
    state = new_state(model, optimizer, model.init(0, mesh), mesh, shardings)
    step = make_train_step(model, Language(), optimizer, TrainingConfig(seed=0))
    losses = []
    order = sequence_order(LENGTH, mesh_config.context, execution.context_attention)
    with jax.set_mesh(mesh):
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        for number in range(STEPS):
            arrays = {name: array[..., order] for name, array in batch(number).items()}
            arrays = jax.device_put(arrays, NamedSharding(mesh, batch_spec()))
            state, metrics = step(state, arrays, np.float32(1e-2))
            losses.append(float(metrics["loss"]))
    rows = model.layer_rows["layers.dense"]
    places = [rows.ravel().tolist().index(number) for number in range(LLAMA.num_layers)]

    def in_order(tree):
        layers = jax.device_get(tree["layers"]["dense"])
        return jax.tree.map(lambda a: a.reshape(rows.size, *a.shape[rows.ndim :])[places], layers)

    return losses, in_order(state.params)


@pytest.fixture(scope="module")
def on_one_device():
    return train()


def assert_same(result, reference) -> None:
    """A sum in another order moves a few elements to a neighbouring FP8 number. That moves others in the layers and
    steps that follow, up to the noise of the format: 5 % of a gradient. tests/ops compares a single product tightly."""
    np.testing.assert_allclose(result[0][0], reference[0][0], rtol=2e-6)
    np.testing.assert_allclose(result[0], reference[0], rtol=1e-4)
    for got, want in zip(jax.tree.leaves(result[1]), jax.tree.leaves(reference[1]), strict=True):
        assert np.mean(np.abs(got - want)) < 1e-3


@pytest.mark.parametrize(
    "sizes",
    [
        dict(pipeline=2, fsdp=2, tensor=2),
        pytest.param(dict(fsdp=2, tensor=2, context=2), marks=pytest.mark.slow),
        pytest.param(dict(data=4), marks=pytest.mark.slow),
        pytest.param(dict(fsdp=4), marks=pytest.mark.slow),
        pytest.param(dict(fsdp=4, tensor=2), marks=pytest.mark.slow),  # one sequence on each replica
        pytest.param(dict(tensor=2), marks=pytest.mark.slow),
        pytest.param(dict(expert=2, context=2), marks=pytest.mark.slow),
        pytest.param(dict(pipeline=2, data=2, context=2), marks=pytest.mark.slow),
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_mesh_matches_one_device(sizes, on_one_device):
    assert_same(train(**sizes), on_one_device)


@pytest.mark.slow
def test_an_output_layer_in_fp8_trains_alike_in_a_pipeline(on_one_device):
    """Each device has scales of its own there: the losses agree within the noise of the format."""
    precision = dataclasses.replace(PRECISION, low_modules=("*", "head"))
    one = train(precision)[0]
    assert one != on_one_device[0]
    np.testing.assert_allclose(train(precision, pipeline=2, fsdp=2, tensor=2)[0], one, rtol=1e-3)


def forward_pass(config=LLAMA, **changes) -> str:
    """The program of the loss."""
    precision = dataclasses.replace(PRECISION, **changes)
    model = Model(config, precision)
    arrays = {name: a[0] for name, a in batch(0).items()}
    arrays["loss_weights"] = arrays.pop("loss_mask")
    return str(jax.make_jaxpr(lambda weights: model.loss(weights, arrays, Language()).total())(model.abstract_weights))


def num_roundings(config=LLAMA, **changes) -> int:
    """Arrays that the forward pass rounds to e4m3."""
    return forward_pass(config, **changes).count("new_dtype=float8_e4m3fn")


def test_tensor_gathers_inputs_after_they_are_rounded():
    """Of query, key and value, and of gate and up."""
    with jax.set_mesh(make_mesh(MeshConfig(tensor=2), jax.devices()[:2])):
        program = forward_pass(high_layers=(0, 0))
    assert len(re.findall(r":f8_e4m3fn\S* = sharding_constraint", program)) == 3 * 2


def test_only_the_chosen_modules_of_inner_layers_are_rounded():
    """A layer rounds its inputs (of query, key and value; of out; of gate and up; of down) and its seven matrices."""
    assert num_roundings(high_layers=(0, 0)) == 3 * 11
    assert num_roundings(high_layers=(1, 1), low_modules=("mlp.*",)) == 5
    # Products that are joined need the same format.
    assert num_roundings(high_layers=(0, 0), low_modules=("attention.query", "attention.out")) == 3 * 2
    assert num_roundings(high_layers=PRECISION.for_inference.high_layers) == 0


def test_the_output_layer_is_rounded_only_if_named():
    """Its input once, and its matrix for the logits and for the gradient of the input."""
    with_head = dict(high_layers=(1, 1), low_modules=("mlp.*", "head"))
    assert num_roundings(**with_head) == 5 + 3
    precision = dataclasses.replace(PRECISION, low_modules=("*", "head"))
    assert precision.for_inference.head_recipe is None
    sizes = {p.is_output: p.low_size for p in Model(LLAMA, precision).parameters if not p.is_in_a_layer}
    assert sizes[True] == LLAMA.embed_dim * LLAMA.padded_vocab_size
    alone = Config(model=LLAMA, precision=PrecisionConfig(recipe="fp8", low_modules=("head",))).make_program()
    assert "compute bfloat16, matmuls of the output layer fp8" in described_precision(alone)


def test_an_output_layer_that_the_model_lacks_is_refused():
    classifier = BertConfig(num_layers=3, embed_dim=32, num_heads=2, head="token_classification")
    with pytest.raises(ValueError, match="precision.low_modules: 'head' is the output layer, .* lacks; leave it out"):
        Model(classifier, dataclasses.replace(PRECISION, low_modules=("*", "head")))


def test_experts_are_not_rounded_which_the_card_says_and_the_estimate_counts():
    moe = MoeConfig(num_experts=4, expert_dim=16, shared_dim=32)
    config = dataclasses.replace(LLAMA, num_layers=1, moe=moe)
    # As in a dense layer: the four inputs and seven matrices of attention and of the shared experts.
    assert num_roundings(config, high_layers=(0, 0)) == 11
    precision = PrecisionConfig(recipe="fp8", high_layers=(0, 0))
    program = Config(model=config, precision=precision).make_program()
    assert "compute bfloat16, matmuls of layers fp8, of experts bfloat16" in described_precision(program)
    of_attention, of_shared, of_routed, of_head = 3 * 32 * 32, 3 * 32 * 32, moe.router.top_k * 3 * 32 * 16, 32 * 96
    of_router = 32 * 4
    low = of_attention + of_shared
    share = low / (low + of_routed + of_router + of_head)
    assert low_share(program.model, plan_device("h100")) == pytest.approx(share)


def test_weights_and_their_initial_values_do_not_depend_on_the_recipe():
    high, low = (Model(LLAMA, PrecisionConfig(recipe=recipe)) for recipe in ("bf16", "mxfp8"))
    assert high.abstract_weights == low.abstract_weights
    assert high.records == low.records


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--precision.recipe=fp8", "--precision.high_layers=2,2"], "precision.high_layers=2,2 leaves no layer"),
        (["--precision.recipe=fp8", "--precision.low_modules=attn.*"], "'attn.[*]' matches no matrix; the layers have"),
    ],
)
def test_settings_without_effect_are_refused(overrides, message):
    config = override(Config(model=LLAMA), overrides)
    with pytest.raises(ValueError, match=message):
        config.check()
        config.make_model()


def test_a_run_resumes_with_another_recipe():
    bf16, fp8 = (Config(model=LLAMA, precision=PrecisionConfig(recipe=name)) for name in ("bf16", "fp8"))
    assert incompatibilities(bf16, fp8) == []
