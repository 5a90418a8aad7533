"""Estimated time of a step on a mesh, from FLOPs and bytes alone, for plans and the mesh search."""

import dataclasses
import functools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp

from megajax.layers.layer import Flops
from megajax.mesh.config import MeshConfig
from megajax.mesh.devices import Device
from megajax.mesh.sharding import SHARING_AXES, WEIGHT_AXES
from megajax.models.model import Model
from megajax.ops.low_precision import FORMATS
from megajax.parallel.schedule import bubble
from megajax.planning.memory import bytes_per_device
from megajax.training.config import TrainingConfig
from megajax.training.program import Program

# Fitted to the steps in benchmarks/measured, on H100 and H200; checked by tests/planning/test_step_time.py.
# Sustained fraction of the peak, for matmuls and for attention, counting the FLOPs that a causal mask leaves.
MATMUL_EFFICIENCY = 0.66
ATTENTION_EFFICIENCY = 0.44
# Of the FP8 peak, for FP8 matmuls alone: 1,002 to 1,160 TFLOP/s on one H100.
FP8_EFFICIENCY = 0.55
# Rounding to FP8 reads an activation for its largest magnitude, reads it again and writes it twice, in one byte each,
# as it is and transposed. An emulated format also writes and reads what it multiplies.
FP8_PASSES = 3
EMULATED_PASSES = 8
FP8_WEIGHT_BYTES = 10  # of a float32 weight, a microbatch
# Memory reads and writes per activation of a layer and per logit, in both passes: in narrow models they take longer
# than the matmuls. A recomputed activation is written and read once more.
ACTIVATION_PASSES = 6
RECOMPUTED_PASSES = 2
BUFFER_PASSES = 4  # a pipeline copies saved activations into a ring buffer and out of it
ACCUMULATED_BYTES = 12  # per gradient and microbatch: the sum is read and written, the gradient read
# Per gathered weight of an expert and microbatch: casts, copies and joined gradients, which XLA cannot fuse with the
# kernel of the grouped matmul. Fitted to the mixtures in benchmarks/measured (experts.json, published_models.json).
EXPERT_WEIGHT_BYTES = 20
LINK_EFFICIENCY = 0.8  # of the datasheet's bandwidth inside a host, for collectives
# Overlapped communication slows compute by this fraction of the time that its bytes take inside a host.
HIDDEN_COST = 0.5
NETWORK_BANDWIDTH = 50e9  # bytes/s per GPU, one direction: 400 Gb/s InfiniBand
GPUS_PER_HOST = 8
# From host to host, of each step of a ring or a tree: NCCL's own figure (hwLatencies in its src/graph/tuning.cc).
HOP_SECONDS = 14e-6
HOST_BANDWIDTH = 50e9  # bytes/s per GPU, one direction: achievable over PCIe 5 x16


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends along one mesh axis per step, and whether they overlap with compute."""

    axis: str
    bytes: float
    hidden: bool
    num_hops: float = 0.0
    """From host to host, one after the other, of all its collectives."""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step; its time is their sum."""

    compute: float
    idle: float
    """The bubble of a pipeline."""
    update: float
    exposed: float
    """Communication, and copies to and from the host, that do not overlap with compute."""
    traffic: tuple[Traffic, ...]
    routed: float
    """Of the compute: the matmuls of experts, at an even load."""

    @property
    def step(self) -> float:
        return self.compute + self.idle + self.update + self.exposed


def step_times(program: Program, training: TrainingConfig, device: Device, host: dict[str, int]) -> Times:
    """host: bytes per device offloaded to the host, from memory_per_device."""
    model = program.model
    mesh = program.mesh_config
    device = device.computing_in(model.precision.compute)
    num_microbatches = training.schedule(mesh)(training.steps).num_microbatches
    compute = _compute_seconds(program, training, num_microbatches, device)
    bubble_fraction = bubble(mesh.pipeline, num_microbatches, mesh.virtual_stages)
    # Copies to and from the host overlap neither with compute nor with each other, as measured (docs/memory.md).
    update = _update_bytes(program) / device.memory_bandwidth + 2 * host.get("optimizer", 0) / HOST_BANDWIDTH
    flops_of_update = program.optimizer.flops(program.abstract_state.params) / mesh.num_devices
    update += flops_of_update / MATMUL_EFFICIENCY / device.peak_flops
    traffic = tuple(
        dataclasses.replace(t, seconds=t.bytes / _bandwidth(t.axis, mesh, device) + t.num_hops * HOP_SECONDS)
        for t in _traffic(model, mesh, training)
        if t.bytes
    )
    link = device.link_bandwidth * LINK_EFFICIENCY
    exposed = sum(max(HIDDEN_COST * t.bytes / link, t.seconds - compute) if t.hidden else t.seconds for t in traffic)
    exposed += 2 * host.get("activations", 0) * num_microbatches / HOST_BANDWIDTH
    routed = total_flops(model, training.sequence_length).routed / MATMUL_EFFICIENCY / device.peak_flops
    routed *= training.global_batch_size * training.sequence_length / mesh.num_devices
    return Times(compute, compute * bubble_fraction / (1 - bubble_fraction), update, exposed, traffic, routed)


def _compute_seconds(program: Program, training: TrainingConfig, num_microbatches: int, device: Device) -> float:
    """Seconds of forward and backward pass on one device: matmuls, attention, and other memory traffic."""
    model = program.model
    mesh = program.mesh_config
    length = training.sequence_length
    tokens = training.global_batch_size * length / mesh.num_devices
    flops = total_flops(model, length)
    low = flops.matmuls * low_share(model, device)
    work = (flops.matmuls - low) / MATMUL_EFFICIENCY + flops.mixing_causal / ATTENTION_EFFICIENCY
    if device.fp8_peak_flops:
        work += low / FP8_EFFICIENCY * device.peak_flops / device.fp8_peak_flops
    itemsize = jnp.dtype(model.precision.compute_dtype).itemsize
    read_or_written = tokens * itemsize * _activation_passes(model, length, mesh.pipeline > 1)
    read_or_written += _rounding_bytes(model, tokens * itemsize, length, num_microbatches / mesh.num_devices, device)
    matrices = [p for p in model.parameters if p.num_experts > 1 and p.record.role == "matrix"]
    experts = sum(parameter.split(mesh.sizes(), but=SHARING_AXES) for parameter in matrices)
    read_or_written += EXPERT_WEIGHT_BYTES * experts * num_microbatches
    if num_microbatches > 1:
        gradients = sum(parameter.split(mesh.sizes()) for parameter in model.parameters if parameter.is_trained)
        read_or_written += ACCUMULATED_BYTES * gradients * num_microbatches
    return tokens * work / device.peak_flops + read_or_written / device.memory_bandwidth


@functools.lru_cache(maxsize=64)
def _activation_passes(model: Model, sequence_length: int, has_pipeline: bool) -> float:
    """Elements read or written per token."""
    layers = model.layers_run
    outputs = sum(parameter.size for parameter in model.parameters if parameter.is_output)
    passes = ACTIVATION_PASSES * outputs / layers[-1].embed_dim  # the logits
    for layer in layers:
        for name, activation in layer.activations(sequence_length).items():
            is_kept = layer.saved is None or name in layer.saved.kept
            extra = BUFFER_PASSES * has_pipeline if is_kept else RECOMPUTED_PASSES
            passes += (ACTIVATION_PASSES + extra) * activation.elements + ACTIVATION_PASSES * activation.inside
    return passes


def low_share(model: Model, device: Device) -> float:
    """Of the FLOPs of matmuls those that the device computes in FP8."""
    if not model.precision.is_low or FORMATS[model.precision.recipe].is_emulated or device.fp8_peak_flops is None:
        return 0.0
    by_all = [p for p in model.parameters if p.record.is_multiplied and not p.is_looked_up and p.num_experts == 1]
    of_experts = model.forward_flops(1).routed / 2  # elements that multiply a token
    return sum(p.low_size for p in by_all) / (sum(p.size for p in by_all) + of_experts)


def _rounding_bytes(
    model: Model, activation_bytes: float, sequence_length: int, num_weight_passes: float, device: Device
) -> float:
    """Bytes that rounding to precision.recipe reads and writes. activation_bytes: of an activation one element wide."""
    if not model.precision.is_low:
        return 0.0
    passes = FP8_PASSES if low_share(model, device) else EMULATED_PASSES
    matrices = sum(p.size for p in model.parameters if p.record.role == "matrix")
    low = sum(parameter.low_size for parameter in model.parameters)
    low_matrices = sum(parameter.low_size for parameter in model.parameters if parameter.is_in_a_layer)
    layers = model.config.layers(model.execution)
    elements = sum(a.elements for layer in layers for a in layer.activations(sequence_length).values())
    return passes * activation_bytes * elements * low_matrices / matrices + FP8_WEIGHT_BYTES * low * num_weight_passes


def _update_bytes(program: Program) -> int:
    """Bytes per device and update: parameters and state are read and written, float32 gradients read."""
    state = program.abstract_state
    shardings = program.shardings
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), state.params)
    changed = bytes_per_device((state.params, state.optimizer), (shardings.params, shardings.optimizer))
    return 2 * changed + bytes_per_device(gradients, shardings.params)


@functools.lru_cache(maxsize=64)
def total_flops(model: Model, sequence_length: int) -> Flops:
    """Of a token: forward and backward pass, and what is done again, or on several ranks of a pipeline."""
    repeated = model.layers_run[model.num_layers :]
    flops = sum((layer.flops(sequence_length) * 3 for layer in repeated), model.training_flops(sequence_length))
    return flops + recomputed_flops(model, sequence_length)


def recomputed_flops(model: Model, sequence_length: int) -> Flops:
    """FLOPs per token that the backward pass repeats for activations that were not saved."""
    recomputed = Flops()
    for layer in model.layers_run:
        for name, activation in layer.activations(sequence_length).items():
            if layer.saved and name not in layer.saved.kept:
                recomputed += activation.flops
    return recomputed


def _traffic(model: Model, mesh: MeshConfig, training: TrainingConfig) -> list[Traffic]:
    """Volumes of ring collectives: an all-gather or reduce-scatter sends (n - 1) / n of the full array."""
    batch = training.schedule(mesh)(training.steps)
    layers = model.layers_run

    def ring(n: int) -> float:
        return (n - 1) / n

    itemsize = jnp.dtype(model.precision.compute_dtype).itemsize
    weights = _weight_traffic(model, mesh, batch.num_microbatches, itemsize)
    hops = _weight_hops(model, mesh, batch.num_microbatches)
    tokens = batch.microbatch / mesh.batch_shards * training.sequence_length / mesh.context
    sent: dict[str, float] = defaultdict(float)
    for layer in layers:
        for axis, size in layer.sent(mesh, itemsize).items():
            sent[axis] += size
    share = batch.num_microbatches * tokens / mesh.pipeline / mesh.tensor
    # `tensor` splits the activations that are sent over the other axes.
    layer_traffic = {
        axis: ring(mesh.sizes()[axis]) * share * count * (mesh.tensor if axis == "tensor" else 1)
        for axis, count in sent.items()
    }
    # One message each way per chunk; embedding, loss and their gradients are summed over all ranks.
    residual = tokens * layers[0].embed_dim * itemsize / mesh.tensor
    messages = 2 * mesh.virtual_stages + 4 * 2 * ring(mesh.pipeline) if mesh.pipeline > 1 else 0
    hidden = {"context": model.execution.context_attention == "ring"}  # keys are sent during the attention
    return [
        *(Traffic(axis, count, True, hops.get(axis, 0.0)) for axis, count in weights.items()),
        *(Traffic(axis, count, hidden.get(axis, False)) for axis, count in layer_traffic.items()),
        Traffic("pipeline", batch.num_microbatches * messages * residual, hidden=False),
    ]


def _weight_traffic(model: Model, mesh: MeshConfig, num_microbatches: int, itemsize: int) -> dict[str, float]:
    """{mesh axis: bytes} of gathering weights and reducing their gradients (precision.gradient_reduce)."""
    sizes = mesh.sizes()
    sent = {"fsdp": 0.0, "data": 0.0, "expert": 0.0}
    for parameter in model.parameters:
        if parameter.is_looked_up:  # its rows are sent, not the table (ops/embedding.py)
            continue
        shard_size = parameter.split(sizes)
        gathered = parameter.split(sizes, but=SHARING_AXES)
        is_narrow = parameter.record.role == "matrix" and not model.precision.has_float32_gradients
        gradient = (itemsize if is_narrow else 4) * parameter.is_trained
        is_fp8 = parameter.is_in_a_layer and model.precision.is_low and not FORMATS[model.precision.recipe].is_emulated
        gathered_size = itemsize - (itemsize - 1) * is_fp8 * parameter.low_size / parameter.size
        # Gathered once for the forward and once for the backward pass.
        sent["fsdp"] += num_microbatches * (gathered - shard_size) * (2 * gathered_size + gradient)
        axes = {name for axis in parameter.record.axes for name in WEIGHT_AXES[axis]}
        for name in ("data", "expert"):
            if name not in axes:
                sent[name] += 2 * (sizes[name] - 1) / sizes[name] * shard_size * gradient
    return sent


def _weight_hops(model: Model, mesh: MeshConfig, num_microbatches: int) -> dict[str, float]:
    """{mesh axis: Traffic.num_hops} of the same collectives. Weights of a layer are gathered and their gradients
    scattered along a ring of hosts, and gradients are summed over `data` and `expert` along a tree, as NCCL does."""
    layers = model.num_layers / mesh.pipeline
    rings = {"fsdp": 3 * num_microbatches * layers * (_num_hosts("fsdp", mesh) - 1)}
    return rings | {axis: 2 * layers * math.log2(_num_hosts(axis, mesh)) for axis in ("data", "expert")}


def _num_hosts(axis: str, mesh: MeshConfig) -> int:
    """Hosts that have devices of one group along an axis."""
    sizes = list(mesh.sizes().items())
    inner = math.prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) + 1 :])
    return -(-mesh.sizes()[axis] * inner // max(GPUS_PER_HOST, inner))


def _bandwidth(axis: str, mesh: MeshConfig, device: Device) -> float:
    """Bandwidth along an axis: of the link if a ring along it stays within a host, otherwise of the network."""
    sizes = list(mesh.sizes().items())
    inner = math.prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) :])
    return device.link_bandwidth * LINK_EFFICIENCY if inner <= GPUS_PER_HOST else NETWORK_BANDWIDTH
