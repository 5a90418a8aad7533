"""The options of XLA with which the programs of an engine are compiled for NVIDIA GPUs, and why."""

import math

import jax
from jax.sharding import Mesh

from megajax.models.model import Model
from megajax.ops.matmul import JOINED_MULTIPLE
from megajax.quantization.weights import QuantizedWeight, is_quantized
from megajax.training.compiler_options import accepted

NVIDIA = "NVIDIA"  # in the names of its GPUs
# XLA makes one product of those with the same input if their matrices together are smaller than this. Triton reads the
# matrices where they are if each has a multiple of JOINED_MULTIPLE columns (ops/matmul.py); others, and all for cuBLAS,
# are copied into one in every call (jaxlib 0.11.2). Those in 4 bits would be copied in the compute dtype.
LARGEST_JOINED = "xla_gpu_dot_merger_threshold_mb"
# What a CUDA graph may hold: with WHILE and CONDITIONAL, all of a call. Without a graph the host waits for the device
# at each condition: whether another step follows, and how tokens are sampled.
IN_GRAPHS = "xla_gpu_enable_command_buffer"
WHOLE_LOOP = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
# With mailboxes: what is in a graph is run in sequence, which is the default, because two sums must not use them at the
# same time; and a loop alone is a graph too, as the sum before it is in none.
WITH_MAILBOXES = {"xla_gpu_command_buffer_scheduling_mode": "LHS", "xla_gpu_graph_min_graph_size": "1"}
# Whether XLA lets our kernels read a part of an array where it is, here of the one that holds the small arrays of a
# call. Such a kernel is not in a graph (jaxlib 0.11.2): attention in each layer divided that of a call with prompts.
READS_PARTS = "xla_gpu_enable_dynamic_slice_fusion"
# Whether XLA tunes kernels of Triton for products, besides those of cuBLAS. For prompts and for more than a few rows
# this takes long (up to 97 s for a product of 8,192 tokens), and cuBLAS is as fast. But matrices in 8 bits are better
# read by the product than converted in memory before it, unless there are many tokens.
TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
# 0: XLA measures no kernels, which needs the GPU, and memory for the products. For prompts cuBLAS is as fast then, but
# for the smallest calls (Llama-3 8B on one H100: 10.5 and 11.5 ms for 192 tokens, 24.2 and 23.6 for 960).
TUNING = "xla_gpu_autotune_level"
FEW_ROWS = 32
MANY_TOKENS = 1024


def decode_options(
    model: Model, params: dict, mesh: Mesh, num_rows: int, *, has_mailboxes: bool = False
) -> dict[str, str]:
    """The compiler options of a decoding program, for NVIDIA GPUs."""
    quantized = _quantized(params)
    is_even = not any(columns % JOINED_MULTIPLE for columns in _columns(model, mesh))
    joins = num_rows <= FEW_ROWS and is_even and not any(weight.is_in_4_bits for weight in quantized)
    has_triton = num_rows <= FEW_ROWS or _reads_levels(quantized, num_rows)
    return _options(mesh, joins=joins, has_triton=has_triton, tunes=True, has_mailboxes=has_mailboxes)


def prefill_options(params: dict, mesh: Mesh, num_tokens: int, *, has_mailboxes: bool = False) -> dict[str, str]:
    """The compiler options of a program for prompts, for NVIDIA GPUs."""
    tunes = num_tokens < MANY_TOKENS and _reads_levels(_quantized(params), num_tokens)
    return _options(mesh, joins=False, has_triton=tunes, tunes=tunes, has_mailboxes=has_mailboxes)


def _options(mesh: Mesh, *, joins: bool, has_triton: bool, tunes: bool, has_mailboxes: bool) -> dict[str, str]:
    if NVIDIA not in mesh.devices.flat[0].device_kind:
        return {}
    options = {LARGEST_JOINED: "1000" if joins else "0"}
    if not has_triton:
        options[TRITON_PRODUCTS] = "False"
    if not tunes:
        options[TUNING] = "0"
    if has_mailboxes or mesh.size == 1:
        options |= {IN_GRAPHS: WHOLE_LOOP, READS_PARTS: "False"}
    if has_mailboxes:
        options |= WITH_MAILBOXES
    return accepted(options, mesh)


def _quantized(params: dict) -> list[QuantizedWeight]:
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]


def _reads_levels(quantized: list[QuantizedWeight], num_rows: int) -> bool:
    """Whether products of this many rows read quantised matrices, and inputs in the compute dtype."""
    return any(not weight.rounds_inputs(num_rows) for weight in quantized)


def _columns(model: Model, mesh: Mesh) -> set[int]:
    """Of the matrices of layers on a device, and of what is beside them."""
    leaves = (jax.tree.leaves(tree) for tree in (model.abstract_weights, model.records, model.shardings(mesh)))
    return {
        math.prod(sharding.shard_shape(leaf.shape)[record.num_stacked + record.num_inputs :])
        for leaf, record, sharding in zip(*leaves, strict=True)
        if record.role in ("matrix", "adapter")
    }
