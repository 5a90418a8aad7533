"""One Mamba-2 layer of mamba2_2p7b, bfloat16, on one GPU: python -m benchmarks.mamba_layer [--profile]

Prints milliseconds for the forward pass, and for both passes in one program, with 4 sequences of 2,048 tokens, for
several sizes of the chunk, beside the time of the matmuls with weights alone at the share of the peak that `--plan`
assumes. --profile: where the time goes, with the chunk of the recipe.

Whole steps: python -m benchmarks.train_step --config=mamba2_2p7b --model.num_layers=16 --mesh.fsdp=1
--training.global_batch_size=4 --profile; likewise --config=hybrid_8b --model.num_layers=4 --model.pattern=M-M*
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.layer_times import layer_times
from configs.mamba import mamba2_2p7b
from megajax.layers.layer import LayerConfig
from megajax.layers.stack import run_stage
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.devices import find_device
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.planning.step_time import MATMUL_EFFICIENCY
from megajax.precision import PrecisionConfig
from megajax.training.reporting.console import log_to_stderr

BATCH, LENGTH = 4, 2048
CHUNKS = (64, 128, 256)


def measure(model: HybridConfig, chunk: int, shape: tuple[int, int], *, profiled: bool) -> str:
    """-> a line of results. shape: sequences and their length."""
    mamba = dataclasses.replace(model.mamba, chunk=chunk)
    model = dataclasses.replace(model, num_layers=1, vocab_size=128, mamba=mamba)
    execution = ExecutionConfig(recompute="selective")
    (layer,) = model.layers(execution)
    weights = Model(model, PrecisionConfig(params="bfloat16"), execution).init(0)["layers"][layer.kind]
    weights = jax.tree.map(lambda a: a[0], weights)
    x, d_y = (
        jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, model.embed_dim)), jnp.bfloat16)
        for seed in range(2)
    )

    def run(weights, x):
        return run_stage([layer], [weights], x, [({}, None)])[0]

    @jax.jit
    def both(weights, x, d_y):
        y, vjp = jax.vjp(run, weights, x)
        return y, vjp(d_y)

    times = layer_times(jax.jit(run), both, weights, x, d_y, profiled=profiled)
    return f"chunk {chunk}, {shape[0]} x {shape[1]} tokens: {times}{_limit(layer, shape)}"


def _limit(layer: LayerConfig, shape: tuple[int, int]) -> str:
    device = find_device(jax.devices()[0].device_kind)
    if device is None:
        return ""
    flops = 3 * layer.flops(shape[1]).matmuls * shape[0] * shape[1]
    return f"; its matmuls with weights about {1e3 * flops / device.peak_flops / MATMUL_EFFICIENCY:.2f}"


def main(arguments: list[str]) -> None:
    log_to_stderr()
    model = mamba2_2p7b().model
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        for chunk in CHUNKS:
            profiled = "--profile" in arguments and chunk == model.mamba.chunk
            print(measure(model, chunk, (BATCH, LENGTH), profiled=profiled), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
