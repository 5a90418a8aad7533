"""Bytes a device needs for a run, from shapes and shardings alone."""

import math

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.layers.block import Saved
from megajax.layers.transformer import ACTIVATIONS
from megajax.mesh import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.cross_entropy import MAX_CHUNK_BYTES
from megajax.optim.optimizer import Optimizer
from megajax.parallel.schedule import Stages, make_table
from megajax.training.config import TrainingConfig
from megajax.training.reporting.console import format_bytes
from megajax.training.state import abstract_state, state_shardings


def bytes_per_device(abstract, shardings) -> int:
    """Bytes of a pytree of abstract arrays on one device, laid out by a pytree of shardings."""
    size = lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, abstract, shardings)))


def memory_per_device(
    model: Model,
    optimizer: Optimizer,
    mesh: Mesh,
    mesh_config: MeshConfig,
    training: TrainingConfig,
    shard_over_data: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes a device by kind, in its memory and on its host: weights and optimizer exactly, gradients (float32) and
    activations as estimates."""
    shardings = state_shardings(model, optimizer, mesh, shard_over_data)
    state = abstract_state(model, optimizer)
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), state.params)
    batch = training.schedule(mesh_config)(training.steps)
    sequences = batch.microbatch // mesh_config.batch_shards
    itemsize = np.dtype(model.precision.compute_dtype).itemsize
    device, host = activation_bytes(model.config, mesh_config, sequences, training.sequence_length, itemsize)
    if model.stages is not None:
        sizes = sequences, batch.num_microbatches, training.sequence_length, itemsize
        device = pipeline_activation_bytes(model.config, mesh_config, model.stages, *sizes)
    moments = bytes_per_device(state.optimizer, shardings.optimizer)
    offloaded = optimizer.config.offload_state
    on_device = {
        "weights": bytes_per_device(state.params, shardings.params),
        "optimizer": 0 if offloaded else moments,
        "gradients": bytes_per_device(gradients, shardings.params),
        "activations (estimate)": device,
    }
    on_host = {"optimizer": moments if offloaded else 0, "activations": host}
    return on_device, {name: size for name, size in on_host.items() if size}


def memory_rows(device: dict[str, int], host: dict[str, int]) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card of what memory_per_device returned."""
    kinds = lambda sizes: ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return [("bytes per device", kinds(device))] + ([("bytes on its host", kinds(host))] if host else [])


def activation_bytes(
    config: DecoderConfig, mesh: MeshConfig, sequences: int, sequence_length: int, itemsize: int
) -> tuple[int, int]:
    """What forward and backward of one microbatch need beside the state -> (on the device, an estimate; on the host).

    Kept for the backward pass: the activations that each layer keeps by name, and where it keeps none its input, the
    residual. Working space: one layer as if nothing were recomputed, the gathered weights of two layers, and the output
    layer with its float32 gradient and one chunk of logits. Attention keeps no T x T scores (cuDNN); the plain
    reference does, and is not counted.
    """
    kept, on_host = _kept_bytes(config, sequences * sequence_length / mesh.context * itemsize)
    on_device = sum(kept) / mesh.tensor + _working_bytes(config, mesh, sequences, sequence_length, itemsize)
    return int(on_device), int(sum(on_host) / mesh.tensor)


def pipeline_activation_bytes(
    config: DecoderConfig,
    mesh: MeshConfig,
    stages: Stages,
    sequences: int,
    num_microbatches: int,
    sequence_length: int,
    itemsize: int,
) -> int:
    """The same for a rank of a pipeline, an estimate: of the fullest stage what its layers keep, for as many
    microbatches as the schedule has in flight; a copy of the weights of its layers in the compute dtype; six residuals,
    those on their way and those of embedding and loss."""
    bytes_an_element = sequences * sequence_length / mesh.context * itemsize
    kept, _ = _kept_bytes(config, bytes_an_element)
    table = make_table(stages.schedule, stages.num_ranks, num_microbatches, stages.num_chunks)
    fullest = max(sum(kept[number] for number in stage) for chunk in stages.layers for stage in chunk)
    residuals = (5 + table.num_loss_slots) * config.embed_dim * bytes_an_element
    weights = (
        _layer_weights(config)
        * max(map(len, sum(stages.layers, ())))
        * stages.num_chunks
        / mesh.weight_shards
        * itemsize
    )
    on_device = (fullest * table.num_slots + residuals + weights) / mesh.tensor
    return int(on_device + _working_bytes(config, mesh, sequences, sequence_length, itemsize))


def _kept_bytes(config: DecoderConfig, bytes_an_element: float) -> tuple[list[float], list[float]]:
    """What each layer keeps for its backward pass, before `tensor` splits it -> (on the device, on the host)."""
    elements = config.activation_elements()
    saved = [layer.saved or Saved(on_device=ACTIVATIONS, on_host=()) for layer in config.layer_configs()]
    count = lambda names: sum(elements[name] for name in names if name in elements) * bytes_an_element
    on_device = [count({*layer.on_device, "residual"} - set(layer.on_host)) for layer in saved]
    return on_device, [count(layer.on_host) for layer in saved]


def _working_bytes(
    config: DecoderConfig, mesh: MeshConfig, sequences: int, sequence_length: int, itemsize: int
) -> float:
    tokens, elements = sequences * sequence_length / mesh.context, config.activation_elements()
    recomputes = any(layer.saved and layer.saved.kept != ACTIVATIONS for layer in config.layer_configs())
    working = sum(elements.values()) * tokens * itemsize if recomputes else 0
    output = config.padded_vocab_size * config.embed_dim / mesh.pipeline
    gathered = (2 * _layer_weights(config) + output) * itemsize if mesh.weight_shards > 1 else 0
    logits = min(tokens * config.padded_vocab_size / mesh.tensor / mesh.pipeline * 4, MAX_CHUNK_BYTES)
    return (working + gathered + 4 * output) / mesh.tensor + 2 * logits


def _layer_weights(config: DecoderConfig) -> float:
    """Parameters of one layer."""
    output = config.padded_vocab_size * config.embed_dim
    return (config.num_parameters() - output * (1 if config.tied_embeddings else 2)) / config.num_layers
