"""The estimate of --plan follows the policy: what is kept, what lies on the host."""

import dataclasses

import jax
import pytest

from megajax.config import Config
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.models.retro import RetroConfig
from megajax.optim.optimizer import OptimizerConfig
from megajax.planning import memory
from megajax.planning.memory import activation_bytes, memory_per_device
from megajax.planning.plan import compile_step
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig

D, F, LAYERS, TOKENS, BYTES = 64, 256, 4, 8 * 32, 2
CONFIG = DecoderConfig(num_layers=LAYERS, embed_dim=D, num_heads=4, vocab_size=128, max_positions=32)


def estimate(**fields) -> tuple[int, int]:
    training = TrainingConfig(global_batch_size=8, sequence_length=32)
    return activation_bytes(Model(CONFIG, PrecisionConfig(), ExecutionConfig(**fields)), MeshConfig(), training)


@pytest.mark.parametrize(
    "fields, elements, layers",
    [
        (dict(recompute="norm"), 2 * D, LAYERS),
        (dict(recompute="attention"), 4 * D, LAYERS),
        (dict(recompute="core_attention,activation"), D + F, LAYERS),
        (dict(recompute="mlp"), 2 * F, LAYERS),
        (dict(recompute="full"), 7 * D + 2 * F, LAYERS),
        (dict(recompute="full", recompute_every=2), 7 * D + 2 * F, LAYERS // 2),
    ],
    ids=str,
)
def test_estimate_leaves_out_what_is_computed_again(fields, elements, layers):
    working = (8 * D + 2 * F) * TOKENS * BYTES  # one layer as if nothing were recomputed
    assert estimate()[0] + working - estimate(**fields)[0] == layers * elements * TOKENS * BYTES
    assert estimate(**fields)[1] == 0


def test_the_encoder_of_neighbours_is_counted():
    """Of a token of it, in a layer: queries, keys, values, what attention gives, its weights; the two of the MLP; the
    inputs and norms of both."""
    config = RetroConfig(num_layers=3, embed_dim=D, num_heads=4, vocab_size=128, max_positions=32, mlp_dim=F,
                         retrieval_layers=(1,), chunk_length=8, neighbour_length=16)  # fmt: skip
    training = TrainingConfig(global_batch_size=8, sequence_length=32)
    two, three = (
        activation_bytes(Model(dataclasses.replace(config, encoder_layers=count)), MeshConfig(), training)[0]
        for count in (2, 3)
    )
    of_token = 3 * D + D + 3 * 4 * 16 + 2 * F + 4 * D
    assert three - two == TOKENS * (2 * 16 / 8) * of_token * BYTES


def test_offloaded_activations_leave_the_device_for_the_host():
    size = LAYERS * D * TOKENS * BYTES
    device, host = estimate(recompute="full", offload=("residual",))
    assert (estimate(recompute="full")[0] - device, host) == (size, size)


def test_offloaded_moments_are_the_hosts():
    config = Config(model=CONFIG, training=TrainingConfig(global_batch_size=8, sequence_length=32))
    model = config.make_model()

    def memory(offload_state):
        program = dataclasses.replace(config, optimizer=OptimizerConfig(offload_state=offload_state)).make_program()
        return memory_per_device(program, config.training)

    device, host = memory(True)
    plain_device, plain_host = memory(False)
    assert plain_host == {} and plain_device["optimizer"] == pytest.approx(8 * model.num_parameters(), rel=1e-3)
    assert host == {"optimizer": plain_device["optimizer"]}
    assert device == plain_device | {"optimizer": 0}


@pytest.mark.parametrize("fields, copies", [({}, 3), (dict(attention_dropout=0.1), 6)], ids=str)
def test_plain_attention_holds_the_scores_of_all_layers(fields, copies):
    """A CPU takes it, a GPU where no kernel can: in float32 and with attention dropout."""
    training = TrainingConfig(global_batch_size=8, sequence_length=32)

    def activations(compute="bfloat16", scan=False, **options):
        execution = ExecutionConfig(scan_layers=scan)
        model = Model(dataclasses.replace(CONFIG, **fields), PrecisionConfig(compute=compute), execution)
        return activation_bytes(model, MeshConfig(), training, **options)[0]

    plain = activations(on_gpu=False)
    scores = 8 * CONFIG.num_heads * 32 * 32 * 4
    without = estimate()[0]
    assert plain - without == copies * LAYERS * scores
    assert activations() == (plain if fields else without)
    assert activations("float32") == activations("float32", on_gpu=False)
    assert activations(scan=True, on_gpu=False) - without == copies * scores


def test_cpu_estimate_is_near_what_xla_allocates():
    config = Config(
        model=dataclasses.replace(CONFIG, num_layers=2, max_positions=512),
        precision=PrecisionConfig(compute="float32"),
        training=TrainingConfig(global_batch_size=2, sequence_length=512),
    )
    program = config.make_program(make_mesh(config.mesh, jax.devices()[:1]))
    compiled, _ = compile_step(program, config.training)
    estimated = sum(memory_per_device(program, config.training)[0].values())
    analysis = compiled.memory_analysis()
    assert estimated == pytest.approx(analysis.temp_size_in_bytes + analysis.argument_size_in_bytes, rel=0.3)


def test_a_run_that_the_machine_cannot_hold_is_refused_or_warned_of(monkeypatch, caplog):
    config = Config(model=CONFIG, training=TrainingConfig(global_batch_size=8, sequence_length=32))
    program = config.make_program(make_mesh(config.mesh, jax.devices()[:1]))
    needed = sum(memory_per_device(program, config.training)[0].values())
    monkeypatch.setattr(memory, "host_memory", lambda: (needed + 1, needed + 1))
    memory.check_host_memory(program, config.training)
    assert "memory" not in caplog.text
    monkeypatch.setattr(memory, "host_memory", lambda: (needed + 1, needed - 1))
    with caplog.at_level("WARNING", "megajax"):
        memory.check_host_memory(program, config.training)
    assert "this run needs about" in caplog.text
    monkeypatch.setattr(memory, "host_memory", lambda: (needed - 1, needed - 1))
    one = dataclasses.replace(config.training, microbatch_size=1)
    with pytest.raises(
        ValueError,
        match=r"training.microbatch_size=None \(8 x 32 tokens at a time\) needs .*MiB.*; use a smaller --training.mi",
    ):
        memory.check_host_memory(program, config.training)
    needed = sum(memory_per_device(program, one)[0].values())
    monkeypatch.setattr(memory, "host_memory", lambda: (needed - 1, needed - 1))
    with pytest.raises(ValueError, match=r"\(1 x 32 tokens.*; use a smaller --training.sequence_length, or a GPU"):
        memory.check_host_memory(program, one)
    monkeypatch.setattr(memory, "host_memory", lambda: (1000, 1000))
    with pytest.raises(ValueError, match="; see what it needs: --plan; recipes that end in _tiny train on a CPU"):
        memory.check_host_memory(program, one)
