"""A plan counts what the records of the parameters say: experts, frozen weights, and what a mesh does not divide."""

import dataclasses
import functools
from typing import Literal

import pytest
from flax import nnx

from configs import recipes
from megajax.config import Config
from megajax.layers.layer import Activation, Flops
from megajax.layers.linear import Linear
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import Decoder, DecoderConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.planning.card import described_size
from megajax.planning.memory import activation_bytes, memory_per_device
from megajax.planning.plan import plan_device, plan_rows
from megajax.planning.search import meshes_of
from megajax.planning.step_time import MATMUL_EFFICIENCY, step_times
from megajax.training.config import TrainingConfig
from megajax.training.reporting.console import format_count

NUM_EXPERTS, D, F, NUM_LAYERS, VOCAB = 4, 64, 256, 2, 128
EXPERTS = NUM_LAYERS * NUM_EXPERTS * D * F


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Holds experts, and counts two of them a token; it is planned only."""

    embed_dim: int = D
    saved = None
    kind = "experts"
    modules = {}

    def build(self, rngs):
        return Experts(rngs)

    def check(self, mesh, sequence_length):
        pass

    def flops(self, sequence_length):
        return Flops(2 * 2 * D * F, routed=2 * 2 * D * F)

    def activations(self, sequence_length):
        return {"input": Activation(D)}

    def sent(self, mesh, itemsize):
        return {"expert": 4 * D * itemsize}


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.up = Linear((NUM_EXPERTS, D), (F,), ("experts", "embed", "mlp"), 0.02, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class MixtureConfig(DecoderConfig):
    kind: Literal["planned_mixture"] = "planned_mixture"

    def build(self, rngs, dtype, execution, stages):
        return Decoder(self, dtype, execution, stages, rngs=rngs)

    def make_stacks(self, execution):
        return {"layers": (ExpertsConfig(),) * self.num_layers}


MIXTURE = MixtureConfig(
    num_layers=NUM_LAYERS, embed_dim=D, vocab_size=VOCAB, position="none", biases=(), norm="rmsnorm",
    tied_embeddings=False,
)  # fmt: skip


@functools.cache
def planned(frozen=(), **mesh) -> tuple:
    """-> (program, training)."""
    training = TrainingConfig(global_batch_size=8, sequence_length=32, frozen=frozen)
    program = Config(model=MIXTURE, mesh=MeshConfig(**mesh), training=training).make_program()
    return program, training


def times_of(**mesh):
    program, training = planned(**mesh)
    return step_times(program, training, plan_device("h100"), {})


def test_experts_are_split_over_their_axis():
    weights = {mesh: memory_per_device(*planned(**dict(mesh)))[0]["weights"] for mesh in ((), (("expert", 4),))}
    assert weights[()] - weights[(("expert", 4),)] == 4 * EXPERTS * 3 // 4
    whole, split = times_of().update, times_of(expert=4).update
    others = 28 * (2 * VOCAB * D + D) / plan_device("h100").memory_bandwidth
    assert split - others == pytest.approx((whole - others) / 4, rel=1e-4)  # and a count of steps


def test_gradients_of_experts_do_not_travel_over_their_axis():
    def sent(axis, **mesh):
        return sum(traffic.bytes for traffic in times_of(**mesh).traffic if traffic.axis == axis)

    head = VOCAB * D + D  # and the last norm; the embedding is looked up
    over = (4 - 1) / 4
    tokens = 8 / 4 * 32
    assert sent("data", data=4) == pytest.approx(2 * over * (2 * EXPERTS + 4 * head))
    assert sent("expert", expert=4) == pytest.approx(2 * over * 4 * head + over * tokens * NUM_LAYERS * 4 * D * 2)
    # Gathered in two bytes for both passes; gradients of layers are scattered in two, those of the head in four.
    assert sent("fsdp", fsdp=4) == pytest.approx(over * ((2 * 2 + 2) * EXPERTS + (2 * 2 + 4) * (head - D)))


def test_frozen_matrices_have_no_gradient_to_compute():
    trained, frozen = (planned(frozen=patterns)[0].model.training_flops(32).matmuls for patterns in ((), ("layers.*",)))
    forward = MIXTURE.forward_flops(32).matmuls
    assert trained == 3 * forward
    share = VOCAB * D / (VOCAB * D + EXPERTS)
    assert frozen == pytest.approx((2 + share) * forward)


def test_a_mesh_that_does_not_divide_a_parameter_is_refused():
    config = Config(model=dataclasses.replace(MIXTURE, num_layers=1), mesh=MeshConfig(expert=8))
    with pytest.raises(ValueError, match=r"mesh.expert\(8\) does not divide 4, the size of layers.experts.up along"):
        config.make_program()


def test_state_of_the_optimizer_is_read_and_written_as_it_is():
    seconds = {}
    for name in ("adamw", "lion"):
        config = Config(model=MIXTURE, optimizer=OptimizerConfig(name=name))
        training = TrainingConfig(global_batch_size=8, sequence_length=32)
        seconds[name] = step_times(config.make_program(), training, plan_device("h100"), {}).update
    a_parameter = Model(MIXTURE).num_parameters() / plan_device("h100").memory_bandwidth
    found = {name: round(value / a_parameter) for name, value in seconds.items()}
    assert found == {"adamw": 28, "lion": 20}


def test_parameters_of_a_token_are_those_of_its_experts():
    model = Model(MIXTURE)
    assert model.num_parameters() - model.num_active_parameters() == EXPERTS // 2
    total, active = (format_count(n) for n in (model.num_parameters(), model.num_active_parameters()))
    assert described_size(model) == f"{total}, {active} active"
    mixtral = recipes()["mixtral_8x7b"]().model
    assert (Model(mixtral).num_parameters(), Model(mixtral).num_active_parameters()) == (46_702_792_704, 12_879_925_248)


def test_weights_that_a_token_reads_are_counted():
    shares = Model(MIXTURE).shares_read()
    assert shares["layers"]["experts"]["up"] == 2 / NUM_EXPERTS
    assert (shares["embedding"], shares["head"]) == (0, 1)
    assert Model(dataclasses.replace(MIXTURE, tied_embeddings=True)).shares_read()["embedding"] == 1


def test_an_uneven_load_costs_what_the_experts_take():
    """Of the matmuls of the recipe the share of the experts, at an even load."""
    config = dataclasses.replace(recipes()["moe_tiny"](), mesh=MeshConfig(expert=2))
    times = step_times(config.make_program(), config.training, plan_device("h100"), {})
    model = config.model
    experts = 3 * 2 * model.num_layers * 2 * 3 * model.embed_dim * model.moe.expert_dim
    tokens = config.training.global_batch_size * config.training.sequence_length / 2
    peak = plan_device("h100").computing_in("float32").peak_flops
    assert times.routed == pytest.approx(tokens * experts / MATMUL_EFFICIENCY / peak)
    rows = dict(plan_rows(config.make_program(), config.training, plan_device("a100")))
    assert "1.5 times the mean load" in rows["uneven experts"]


def test_memory_and_traffic_count_the_empty_rows_of_buffers():
    """An even load is 2 rows per token, and buffers have room for half as many again."""
    config = recipes()["moe_tiny"]()
    mesh = MeshConfig(expert=8)
    rows = {}
    sent = {}
    for dispatch in ("all_to_all", "all_gather"):
        execution = dataclasses.replace(config.execution, expert_dispatch=dispatch)
        model = Model(config.model, config.precision, execution)
        elements = model.num_layers * (model.config.embed_dim + 3 * model.config.moe.expert_dim)
        tokens = config.training.global_batch_size // 8 * config.training.sequence_length
        held, _ = activation_bytes(model, mesh, config.training)
        even = dataclasses.replace(execution, expert_dispatch="all_to_all", expert_buffer=1.0)
        without, _ = activation_bytes(Model(config.model, config.precision, even), mesh, config.training)
        rows[dispatch] = (held - without) / (tokens * elements * 4)
        # There and back, forward and backward, float32.
        sent[dispatch] = config.model.layers(execution)[0].sent(mesh, 4)["expert"] / (4 * model.config.embed_dim * 4)
    assert rows == {"all_to_all": pytest.approx(1), "all_gather": pytest.approx(1)}
    assert sent == {"all_to_all": pytest.approx(3), "all_gather": 8}
    layer = config.model.layers(config.execution)[0]
    assert all(activation.empty(MeshConfig(fsdp=8)) == 0 for activation in layer.activations(16).values())


def test_a_search_splits_experts_where_there_are_some():
    config = recipes()["moe_tiny"]()
    split = {mesh.expert for mesh in meshes_of(config, 16)}
    assert split == {1, 2, 4, 8}
    assert {mesh.expert for mesh in meshes_of(recipes()["gpt_tiny"](), 16)} == {1}
    assert all(mesh.num_devices == 16 for mesh in meshes_of(config, 16))
