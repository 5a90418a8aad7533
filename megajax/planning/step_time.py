"""Time of a step on a mesh, from FLOPs and bytes alone: what a plan prints and a search compares."""

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp

from megajax.devices import Device
from megajax.layers.layer import Flops
from megajax.mesh import MeshConfig
from megajax.models.model import Model
from megajax.parallel.schedule import bubble
from megajax.planning.memory import bytes_per_device
from megajax.sharding import SHARING_AXES, WEIGHT_AXES
from megajax.training.config import TrainingConfig
from megajax.training.program import Program

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


def step_times(program: Program, training: TrainingConfig, device: Device, host: dict[str, int]) -> Times:
    """host: bytes a device keeps on its host, as memory_per_device has them."""
    model = program.model
    mesh = program.mesh_config
    length = training.sequence_length
    tokens = training.global_batch_size * length / mesh.num_devices
    flops = model.training_flops(length) + recomputed_flops(model, length)
    work = flops.matmuls / MATMUL_EFFICIENCY + flops.mixing_causal / ATTENTION_EFFICIENCY
    compute = tokens * work / device.peak_flops
    batch = training.schedule(mesh)(training.steps)
    waiting = bubble(mesh.pipeline, batch.num_microbatches, mesh.virtual_stages)
    update = _update_bytes(program) / device.memory_bandwidth
    update += host.get("optimizer", 0) / HOST_BANDWIDTH
    flops_of_update = program.optimizer.flops(program.abstract_state.params) / mesh.num_devices
    update += flops_of_update / MATMUL_EFFICIENCY / device.peak_flops
    traffic = tuple(
        dataclasses.replace(t, seconds=t.bytes / _bandwidth(t.axis, mesh, device))
        for t in _traffic(model, mesh, training)
        if t.bytes
    )
    exposed = sum(max(0.0, t.seconds - compute) if t.hidden else t.seconds for t in traffic)
    # There and back with nothing beside them: what was measured (docs/memory.md).
    exposed += 2 * host.get("activations", 0) * batch.num_microbatches / HOST_BANDWIDTH
    return Times(compute, compute * waiting / (1 - waiting), update, exposed, traffic)


def _update_bytes(program: Program) -> int:
    """That a device reads and writes for an update: parameters and state read and written, float32 gradients read."""
    state = program.abstract_state
    shardings = program.shardings
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), state.params)
    changed = bytes_per_device((state.params, state.optimizer), (shardings.params, shardings.optimizer))
    return 2 * changed + bytes_per_device(gradients, shardings.params)


def recomputed_flops(model: Model, sequence_length: int) -> Flops:
    """Of a token: what the backward pass does again, because a layer does not keep it."""
    again = Flops()
    for layer in model.config.layers(model.execution):
        for name, activation in layer.activations(sequence_length).items():
            if layer.saved and name not in layer.saved.kept:
                again += activation.flops
    return again


def _traffic(model: Model, mesh: MeshConfig, training: TrainingConfig) -> list[Traffic]:
    """Ring-collective volumes: (n - 1) / n of the gathered array to gather or reduce-scatter it."""
    batch = training.schedule(mesh)(training.steps)
    layers = model.config.layers(model.execution)

    def ring(n: int) -> float:
        return (n - 1) / n

    itemsize = jnp.dtype(model.precision.compute_dtype).itemsize
    weights = _weight_traffic(model, mesh, batch.num_microbatches, itemsize)
    tokens = batch.microbatch / mesh.batch_shards * training.sequence_length / mesh.context
    sent: Counter[str] = Counter()
    for layer in layers:
        sent.update(layer.sent(mesh, itemsize))
    share = batch.num_microbatches * tokens / mesh.pipeline / mesh.tensor
    # `tensor` splits what travels over the other axes.
    of_layers = {
        axis: ring(mesh.sizes()[axis]) * share * count * (mesh.tensor if axis == "tensor" else 1)
        for axis, count in sent.items()
    }
    # One there, one back for each chunk; embedding, loss and their gradients are sums over all ranks.
    residual = tokens * layers[0].embed_dim * itemsize / mesh.tensor
    messages = 2 * mesh.virtual_stages + 4 * 2 * ring(mesh.pipeline) if mesh.pipeline > 1 else 0
    hidden = {"context": model.execution.context_attention == "ring"}  # keys travel beside the attention
    return [
        *(Traffic(axis, count, hidden=True) for axis, count in weights.items()),
        *(Traffic(axis, count, hidden.get(axis, False)) for axis, count in of_layers.items()),
        Traffic("pipeline", batch.num_microbatches * messages * residual, hidden=False),
    ]


def _weight_traffic(model: Model, mesh: MeshConfig, num_microbatches: int, itemsize: int) -> Counter[str]:
    """{mesh axis: bytes} of gathering weights and reducing their gradients (precision.gradient_reduce)."""
    sizes = mesh.sizes()
    sent = Counter({"fsdp": 0.0, "data": 0.0})
    for parameter in model.parameters:
        if parameter.is_looked_up:  # its rows travel, not the table (ops/embedding.py)
            continue
        held = parameter.split(sizes)
        gathered = parameter.split(sizes, but=SHARING_AXES)
        is_narrow = parameter.record.role == "matrix" and not model.precision.has_float32_gradients
        gradient = (itemsize if is_narrow else 4) * parameter.is_trained
        # Gathered for the forward and again for the backward pass.
        sent["fsdp"] += num_microbatches * (gathered - held) * (2 * itemsize + gradient)
        axes = {name for axis in parameter.record.axes for name in WEIGHT_AXES[axis]}
        for name in ("data", "expert"):
            if name not in axes:
                sent[name] += 2 * (sizes[name] - 1) / sizes[name] * held * gradient
    return sent


def _bandwidth(axis: str, mesh: MeshConfig, device: Device) -> float:
    """Along an axis whose neighbours and ends lie in one host, the link; otherwise the network."""
    sizes = list(mesh.sizes().items())
    inner = math.prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) :])
    return device.link_bandwidth if inner <= GPUS_PER_HOST else NETWORK_BANDWIDTH
