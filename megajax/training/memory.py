"""Bytes a device needs for a run, from shapes and shardings alone."""

import math

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.mesh import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.cross_entropy import MAX_CHUNK_BYTES
from megajax.optim.optimizer import Optimizer
from megajax.training.loop import TrainingConfig
from megajax.training.step import abstract_state, state_shardings


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
) -> dict[str, int]:
    """Bytes a device by kind: weights and optimizer exactly, gradients (float32) and activations as estimates."""
    shardings = state_shardings(model, optimizer, mesh, shard_over_data)
    state = abstract_state(model, optimizer)
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), state.params)
    sequences = training.eval_batch_size(mesh_config) // mesh_config.batch_shards
    itemsize = np.dtype(model.precision.compute_dtype).itemsize
    return {
        "weights": bytes_per_device(state.params, shardings.params),
        "optimizer": bytes_per_device(state.optimizer, shardings.optimizer),
        "gradients": bytes_per_device(gradients, shardings.params),
        "activations (estimate)": activation_bytes(
            model.config, mesh_config, sequences, training.sequence_length, itemsize
        ),
    }


def activation_bytes(
    config: DecoderConfig, mesh: MeshConfig, sequences: int, sequence_length: int, itemsize: int
) -> int:
    """Estimate of what forward and backward of one microbatch need on a device beside the state.

    Kept for the backward pass, per token and layer, in elements: the residual stream of width D (full recompute); with
    the matmul results (selective) also q, k, v, the attention output and the widths of the feed-forward layer; with
    nothing recomputed the normalised inputs and the activation too. Working space: one layer as if nothing were
    recomputed, the gathered weights of two layers, and the output layer with its float32 gradient and one chunk of
    logits. Attention keeps no T x T scores (cuDNN); the plain reference does, and is not counted.
    """
    tokens = sequences * sequence_length / mesh.context
    kept = config.num_layers * _layer_elements(config, config.recompute) * tokens * itemsize
    working = _layer_elements(config, "none") * tokens * itemsize if config.recompute != "none" else 0
    output = config.padded_vocab_size * config.embed_dim
    layer_weights = (config.num_parameters() - output) / config.num_layers
    gathered = (2 * layer_weights + output) * itemsize if mesh.fsdp > 1 else 0
    logits = min(tokens * config.padded_vocab_size / mesh.tensor * 4, MAX_CHUNK_BYTES)
    return int((kept + working + gathered + 4 * output) / mesh.tensor + 2 * logits)


def _layer_elements(config: DecoderConfig, recompute: str) -> int:
    """Elements a token that one layer keeps, over all devices of `tensor`."""
    D, F = config.embed_dim, config.width_of_mlp
    gated = config.layer_configs()[0].mlp.num_matrices - 1
    heads = 2 * (config.num_heads + config.kv_heads) * config.width_of_head
    return {"full": D, "selective": 3 * D + heads + gated * F, "none": 6 * D + heads + (gated + 1) * F}[recompute]
