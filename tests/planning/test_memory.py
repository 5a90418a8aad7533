"""The estimate of --plan follows the policy: what is kept, what lies on the host."""

import dataclasses

import pytest

from megajax.config import Config
from megajax.mesh import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.optim.optimizer import OptimizerConfig
from megajax.planning.memory import activation_bytes, memory_per_device
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
        (dict(recompute="selective", recompute_modules=("norm",)), 2 * D, LAYERS),
        (dict(recompute="selective", recompute_modules=("attention",)), 4 * D, LAYERS),
        (dict(recompute="selective", recompute_modules=("core_attention", "activation")), D + F, LAYERS),
        (dict(recompute="selective", recompute_modules=("mlp",)), 2 * F, LAYERS),
        (dict(recompute="full"), 7 * D + 2 * F, LAYERS),
        (dict(recompute="full", recompute_every=2), 7 * D + 2 * F, LAYERS // 2),
    ],
    ids=str,
)
def test_estimate_leaves_out_what_is_computed_again(fields, elements, layers):
    working = (8 * D + 2 * F) * TOKENS * BYTES  # one layer as if nothing were recomputed
    assert estimate()[0] + working - estimate(**fields)[0] == layers * elements * TOKENS * BYTES
    assert estimate(**fields)[1] == 0


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
