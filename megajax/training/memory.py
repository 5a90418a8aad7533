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
    """Estimate of what the backward pass of one microbatch keeps on a device.

    Per token and layer, in elements: the residual stream of width D is kept once (full recompute); with the matmul
    results (selective) also q, k, v, the attention output and the widths of the feed-forward layer; with nothing
    recomputed the normalised inputs and the activation too. Beside the layers: one chunk of float32 logits with its
    gradient. Attention keeps no T x T scores (cuDNN); the plain reference does, and is not counted.
    """
    D, F, H = config.embed_dim, config.width_of_mlp, config.width_of_head
    gated = config.layer_configs()[0].mlp.num_matrices - 1
    heads = (config.num_heads + 2 * config.kv_heads + config.num_heads) * H
    split_over_sequence = {"full": D, "selective": 3 * D, "none": 5 * D}[config.recompute]
    split_over_width = {"full": 0, "selective": heads + gated * F, "none": heads + D + (gated + 1) * F}[config.recompute]
    tokens = sequences * sequence_length / mesh.context
    layer = (split_over_sequence + split_over_width) / mesh.tensor * tokens * itemsize
    logits = min(tokens * config.padded_vocab_size / mesh.tensor * 4, MAX_CHUNK_BYTES)
    return int(config.num_layers * layer + 2 * logits)
