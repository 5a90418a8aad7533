"""Memory per device of a run, from shapes and shardings alone."""

import functools
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.layers.layer import LayerConfig, Saved
from megajax.mesh.config import MeshConfig
from megajax.models.model import Model
from megajax.ops.vocabulary import MAX_CHUNK_BYTES
from megajax.optim.distributed import unsplit_moments
from megajax.parallel.schedule import make_table
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.console import format_bytes

logger = logging.getLogger("megajax")


def bytes_per_device(abstract, shardings) -> int:
    """Bytes on one device of a pytree of abstract arrays, given a pytree of shardings."""

    def size(a, sharding) -> int:
        return math.prod(sharding.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, abstract, shardings)))


def memory_per_device(program: Program, training: TrainingConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per device by kind -> (in device memory, on the host). Weights and optimizer state are exact, gradients
    (float32) and activations are estimates."""
    on_device, on_host = state_bytes(program)
    on_gpu = not isinstance(program.mesh, Mesh) or program.mesh.devices.flat[0].platform != "cpu"
    device, host = activation_bytes(program.model, program.mesh_config, training, on_gpu=on_gpu)
    on_host = on_host | {"activations": host}
    return on_device | {"activations (estimate)": device}, {name: size for name, size in on_host.items() if size}


def state_bytes(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """The part of memory_per_device that depends neither on the batch nor on recomputation."""
    shardings = program.shardings
    state = program.abstract_state
    held = bytes_per_device((state.frozen, state.variables), (shardings.frozen, shardings.variables))
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), state.params)
    moments = bytes_per_device(state.optimizer, shardings.optimizer)
    offloaded = program.optimizer.config.offload_state
    on_device = {
        "weights": bytes_per_device(state.params, shardings.params) + held,
        "optimizer": 0 if offloaded else moments,
        "gradients": bytes_per_device(gradients, shardings.params),
    }
    return on_device, {"optimizer": moments if offloaded else 0}


def memory_rows(device: dict[str, int], host: dict[str, int]) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card, from the result of memory_per_device."""

    def kinds(sizes: dict[str, int]) -> str:
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())

    return [("bytes per device", kinds(device))] + ([("bytes on its host", kinds(host))] if host else [])


def unsplit_rows(program: Program) -> list[tuple[str, str]]:
    """Rows for Console.card: what optimizer.shard_over_data does not split."""
    number = program.mesh_config.data
    if number == 1 or not program.optimizer.config.shard_over_data:
        return []
    names = unsplit_moments(program.abstract_state.params, program.shardings.params, program.mesh)
    found = f"moments of {', '.join(names)}: no dim is divisible by mesh.data={number}"
    return [("not split over data", found)] if names else []


def activation_bytes(
    model: Model, mesh: MeshConfig, training: TrainingConfig, *, on_gpu: bool = True
) -> tuple[int, int]:
    """Bytes that forward and backward pass need besides the state -> (on the device, an estimate; on the host).

    Saved for the backward pass: the input of each layer and the activations it saves by name, and what is kept outside
    of the layers (ModelConfig.activations_outside). Working space: one layer
    without recomputation, the gathered weights of two layers, and the output layer with its float32 gradient and one
    chunk of logits. Plain attention, used on CPUs, in float32 and with attention dropout, materialises T x T scores: of
    all layers if they are unrolled, because XLA keeps them for the backward pass. A pipeline rank saves the activations
    of its fullest stage for each microbatch in flight, for one microbatch those of the layers that all ranks run, a
    copy of its layers' weights in the compute dtype, and six residuals: those being sent and those of embedding and
    loss.
    """
    layers = model.config.layers(model.execution)
    itemsize = np.dtype(model.precision.compute_dtype).itemsize
    batch = training.schedule(mesh)(training.steps)
    tokens = batch.microbatch // mesh.batch_shards * training.sequence_length / mesh.context
    kept = dict.fromkeys(range(len(layers)), (0.0, 0.0))
    for layer, numbers in model.distinct_layers.items():
        kept |= dict.fromkeys(numbers, _kept_elements(layer, training.sequence_length, mesh))
    on_device = [tokens * itemsize * device for device, _ in kept.values()]
    outside = tokens * itemsize * model.config.activations_outside(training.sequence_length)
    on_host = sum(tokens * itemsize * host for _, host in kept.values())
    working = _working_bytes(model, mesh, training, tokens, itemsize)
    working += tokens * 4 * _scores(model, training.sequence_length, on_gpu=on_gpu) / mesh.tensor
    if model.stages is None:
        return int((sum(on_device) + outside) / mesh.tensor + working), int(on_host / mesh.tensor)
    stages = model.stages
    num_slots, num_loss_slots = _num_slots(stages.num_ranks, batch.num_microbatches, stages.num_chunks)
    fullest = max(sum(on_device[number] for number in stage) for chunk in stages.layers for stage in chunk)
    residuals = (5 + num_loss_slots) * layers[0].embed_dim * tokens * itemsize
    most = max(len(stage) for chunk in stages.layers for stage in chunk)
    on_all_ranks = on_device[model.config.num_stage_layers :]
    num_layers = most * stages.num_chunks + len(on_all_ranks)
    weights = _layer_weights(model, mesh) * num_layers / mesh.weight_shards * itemsize
    saved = fullest * num_slots + sum(on_all_ranks)
    return int((saved + residuals) / mesh.tensor + weights + working), 0


@functools.cache
def _num_slots(num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, int]:
    """Maximum number of microbatches that a rank stores at a time -> (for its layers, for the loss)."""
    table = make_table(num_ranks, num_microbatches, num_chunks)
    return table.num_slots, table.num_loss_slots


@functools.lru_cache(maxsize=1024)
def _kept_elements(layer: LayerConfig, sequence_length: int, mesh: MeshConfig) -> tuple[float, float]:
    """Elements per token that a layer saves for its backward pass, before `tensor` splits them -> (on the device, on
    the host)."""
    activations = layer.activations(sequence_length)
    first = next(iter(activations))  # the input
    saved = layer.saved or Saved(on_device=tuple(activations), on_host=())

    def count(names: Iterable[str]) -> float:
        held = (activations[name] for name in names if name in activations)
        return sum(activation.elements + activation.empty(mesh) for activation in held)

    return count({*saved.on_device, first} - set(saved.on_host)), count(saved.on_host)


@functools.lru_cache(maxsize=64)
def _scores(model: Model, sequence_length: int, *, on_gpu: bool) -> float:
    """Elements per token of the scores that plain attention materialises at a time."""
    is_plain = not on_gpu or model.precision.compute == "float32"
    found = [
        sum(a.scores for a in layer.activations(sequence_length).values() if is_plain or a.needs_scores)
        for layer in model.config.layers(model.execution)
    ]
    return max(found, default=0) if model.scans else sum(found)


def host_memory() -> tuple[int, int]:
    """Memory of this machine in bytes -> (total, or the limit of the container; available now)."""
    table = Path("/proc/meminfo")
    if not table.is_file():  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    known = dict(line.split(":") for line in table.read_text().splitlines())
    total, available = (int(known[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total, min(total, available)


def check_host_memory(program: Program, training: TrainingConfig) -> None:
    """For a run on CPU devices, which share the memory of the machine: logs a warning if it needs more than is
    available now. Raises ValueError if it needs more than the total."""
    devices = program.mesh.local_devices
    if devices[0].platform != "cpu":
        return
    device, host = memory_per_device(program, training)
    needed = len(devices) * (sum(device.values()) + sum(host.values()))
    total, available = host_memory()
    microbatch = training.schedule(program.mesh_config)(training.steps).microbatch // program.mesh_config.batch_shards
    size = f"{microbatch} x {training.sequence_length} tokens at a time"
    fewer = "a smaller --training.microbatch_size, " if microbatch > 1 else ""
    if needed > total:
        state = needed - len(devices) * sum(size for kind, size in device.items() if kind.startswith("activations"))
        way = f"use {fewer}a smaller --training.sequence_length, or a GPU"
        if state > total:
            way = "see what it needs: --plan; recipes that end in _tiny train on a CPU"
        raise ValueError(
            f"training.microbatch_size={training.microbatch_size} ({size}) needs about {format_bytes(needed)} of "
            f"memory, {format_bytes(state)} of it for weights, optimizer and gradients, and this machine has "
            f"{format_bytes(total)}; {way}"
        )
    if needed > available:
        logger.warning(
            "this run needs about %s of memory, %s are available; use %sa smaller --training.sequence_length",
            format_bytes(needed),
            format_bytes(available),
            fewer and f"{fewer[:-2]} or ",
        )


def _working_bytes(model: Model, mesh: MeshConfig, training: TrainingConfig, tokens: float, itemsize: int) -> float:
    saving = [layer for layer in model.distinct_layers if layer.saved]
    activations = [layer.activations(training.sequence_length).values() for layer in saving]
    elements = max((sum(a.elements + a.empty(mesh) for a in of_layer) for of_layer in activations), default=0)
    working = elements * tokens * itemsize
    outputs = [parameter for parameter in model.parameters if parameter.is_output]
    output = sum(parameter.computed(mesh.sizes()) for parameter in outputs)
    gathered = (2 * _layer_weights(model, mesh) + output) * itemsize if mesh.weight_shards > 1 else 0
    width = model.config.layers(model.execution)[-1].embed_dim
    logits = min(tokens * output / width * 4, MAX_CHUNK_BYTES)
    gradient = sum(parameter.computed(mesh.sizes()) for parameter in outputs if parameter.is_trained)
    return working / mesh.tensor + gathered + 4 * gradient + 2 * logits


def _layer_weights(model: Model, mesh: MeshConfig) -> float:
    """Parameters of an average layer, as one device computes with them."""
    return sum(p.computed(mesh.sizes()) for p in model.parameters if p.is_in_a_layer) / model.num_layers
