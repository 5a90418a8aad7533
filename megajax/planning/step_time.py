"""Time of a step on a mesh, from FLOPs and bytes alone: what a plan prints and a search compares."""

import dataclasses
import math

import jax.numpy as jnp

from megajax.devices import Device
from megajax.mesh import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parallel.schedule import bubble
from megajax.training.config import TrainingConfig

# Of the bf16 peak, sustained on H100 and H200: matmuls, with the element-wise work between them, and attention (cuDNN,
# 131,072 tokens; docs/context.md), of which the FLOPs that a causal mask leaves count.
MATMUL_EFFICIENCY = 0.57
ATTENTION_EFFICIENCY = 0.46
NETWORK_BANDWIDTH = 50e9  # bytes/s a GPU, one direction: 400 Gb/s InfiniBand
GPUS_PER_HOST = 8
HOST_BANDWIDTH = 50e9  # bytes/s a GPU, one direction: what is left of PCIe 5 x16


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in a step along one mesh axis, and how much of it hides under compute."""

    axis: str
    bytes: float
    hidden: bool
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step; they add up."""

    compute: float
    idle: float
    """The bubble of a pipeline."""
    update: float
    exposed: float
    """Communication, and copies to and from the host, with no compute beside them."""
    traffic: tuple[Traffic, ...]

    @property
    def step(self) -> float:
        return self.compute + self.idle + self.update + self.exposed


def step_times(model: Model, mesh: MeshConfig, training: TrainingConfig, device: Device, host: dict[str, int]) -> Times:
    """host: bytes a device keeps on its host, as memory_per_device has them."""
    config, length = model.config, training.sequence_length
    tokens = training.global_batch_size * length / mesh.num_devices
    attention = config.attention_flops_per_token(length, causal=True)
    matmuls = config.flops_per_token(length, causal=True) - attention
    matmuls_again, attention_again = config.recomputed_flops_per_token(length)
    work = (matmuls + matmuls_again) / MATMUL_EFFICIENCY + (attention + attention_again) / ATTENTION_EFFICIENCY
    compute = tokens * work / device.peak_flops
    batch = training.schedule(mesh)(training.steps)
    waiting = bubble(mesh.pipeline, batch.num_microbatches, mesh.virtual_stages)
    parameters = model.num_parameters() / (mesh.tensor * mesh.weight_shards * mesh.pipeline)
    update = 28 * parameters / device.memory_bandwidth  # p, m, v read and written in float32, gradient read
    update += host.get("optimizer", 0) / HOST_BANDWIDTH
    traffic = tuple(
        dataclasses.replace(t, seconds=t.bytes / _bandwidth(t.axis, mesh, device))
        for t in _traffic(model, mesh, training)
        if t.bytes
    )
    exposed = sum(max(0.0, t.seconds - compute) if t.hidden else t.seconds for t in traffic)
    # There and back with nothing beside them: what was measured (docs/memory.md).
    exposed += 2 * host.get("activations", 0) * batch.num_microbatches / HOST_BANDWIDTH
    return Times(compute, compute * waiting / (1 - waiting), update, exposed, traffic)


def _traffic(model: Model, mesh: MeshConfig, training: TrainingConfig) -> list[Traffic]:
    """Ring-collective volumes: (n - 1) / n of the gathered array to gather or reduce-scatter it."""
    config, batch = model.config, training.schedule(mesh)(training.steps)
    ring = lambda n: (n - 1) / n
    itemsize = jnp.dtype(model.precision.compute_dtype).itemsize
    weights = model.num_parameters() / mesh.tensor / mesh.pipeline
    if not config.tied_embeddings:  # the rows of the table travel, not the table (ops/embedding.py)
        weights -= config.padded_vocab_size * config.embed_dim / mesh.tensor / mesh.pipeline
    gathers = 2 * batch.num_microbatches * weights * itemsize  # for the forward and again for the backward pass
    tokens = batch.microbatch / mesh.batch_shards * training.sequence_length / mesh.context
    # Forward, backward, and the forward that is done again.
    passes = 2 + (1 / config.recompute_every if config.recompute == "full" else 0)
    layers = config.num_layers / mesh.pipeline
    activations = batch.num_microbatches * layers * 4 * passes * tokens * config.embed_dim * itemsize
    sequence = batch.num_microbatches * layers * tokens * _context_bytes(config, mesh, itemsize) / mesh.tensor
    # One there, one back for each chunk; embedding, loss and their gradients are sums over all ranks.
    residual = tokens * config.embed_dim * itemsize / mesh.tensor
    messages = 2 * mesh.virtual_stages + 4 * 2 * ring(mesh.pipeline) if mesh.pipeline > 1 else 0
    return [
        Traffic("fsdp", ring(mesh.weight_shards) * (gathers + batch.num_microbatches * weights * 4), hidden=True),
        Traffic("data", 2 * ring(mesh.data) * weights / mesh.weight_shards * 4, hidden=True),
        Traffic("tensor", ring(mesh.tensor) * activations, hidden=False),
        Traffic("context", ring(mesh.context) * sequence, hidden=config.context_attention == "ring"),
        Traffic("pipeline", batch.num_microbatches * messages * residual, hidden=False),
    ]


def _context_bytes(config: DecoderConfig, mesh: MeshConfig, itemsize: int) -> float:
    """Of a token and layer, before `tensor` splits the heads; times (n - 1) / n it is what a device sends."""
    heads = config.num_heads * config.width_of_head
    keys_values = 2 * config.kv_heads * config.width_of_head
    if config.context_attention == "all_to_all":  # q, k, v and out there and back, and what the backward pass adds
        return (5 * heads + 3 * keys_values) * itemsize
    return keys_values * mesh.context * (2 * itemsize + 4)  # in both passes, and their gradients in float32


def _bandwidth(axis: str, mesh: MeshConfig, device: Device) -> float:
    """Along an axis whose neighbours and ends lie in one host, the link; otherwise the network."""
    sizes = list(mesh.sizes().items())
    inner = math.prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) :])
    return device.link_bandwidth if inner <= GPUS_PER_HOST else NETWORK_BANDWIDTH
