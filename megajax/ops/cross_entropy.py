"""Vocabulary-parallel cross-entropy of the output layer, in chunks, with its gradients computed in the forward pass.

Dimensions: B batch, T sequence, C part of the sequence, D model width, V vocabulary.
The logits of one chunk at a time exist, [B, C, V / tensor] float32; each is turned at once into its part of the loss,
of dx and of the gradient of the output matrix, so nothing is recomputed in the backward pass (Hsu et al. 2024, Liger
Kernel, https://arxiv.org/abs/2410.10989). Over `tensor` three numbers a token are reduced (Shoeybi et al. 2019).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax import compat
from megajax.ops.matmul import dot_precision
from megajax.sharding import BATCH_AXES, activation_spec, manual

MAX_CHUNK_BYTES = 512 * 2**20  # of float32 logits on a device


def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float,
    label_smoothing: float,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> jax.Array:
    """Sum over all tokens of weight * loss, a float32 scalar; head is cast to x's dtype, logits are float32.

    The loss of a token is -log p[label], plus z_loss * logsumexp^2 (Chowdhery et al. 2022, section 5); with label
    smoothing s (Megatron's definition), with r = s * V / (V - 1): (1 - r) * -log p[label] - r * mean(log p).
    A token of weight 0 may have any label. Gradients flow to x and head only.
    """
    options = (float(z_loss), float(label_smoothing), max_chunk_bytes)
    return _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, options):
    return _run(x_BTD, head_DV, labels_BT, weights_BT, options, with_gradients=False)[0]


def _forward(x_BTD, head_DV, labels_BT, weights_BT, options):
    return _run(x_BTD, head_DV, labels_BT, weights_BT, options, with_gradients=True)


def _backward(options, gradients, d_loss):
    d_x, d_head = (gradient * d_loss.astype(gradient.dtype) for gradient in gradients)
    return d_x, d_head, None, None


_cross_entropy.defvjp(_forward, _backward)


def _run(x_BTD, head_DV, labels_BT, weights_BT, options, with_gradients):
    """-> (loss, (dx laid out as batch, sequence; dhead)), or (loss, None)."""
    tokens = activation_spec(labels_BT.shape, ("batch", "time"))
    sequence = activation_spec(x_BTD.shape, ("batch", "sequence", None))
    scatter = sequence[1] != tokens[1]

    def body(x_BTD, head_DV, labels_BT, weights_BT):
        losses, d_x, d_head = _chunks(x_BTD, head_DV, labels_BT, weights_BT, options, with_gradients)
        loss = lax.psum(losses, (*BATCH_AXES, "context"))
        if not with_gradients:
            return loss
        if scatter:
            d_x = lax.psum_scatter(d_x, "tensor", scatter_dimension=1, tiled=True)
        else:
            d_x = lax.psum(d_x, "tensor")
        d_head = lax.psum_scatter(d_head, "fsdp", scatter_dimension=0, tiled=True)
        d_head = lax.psum(d_head, tuple(axis for axis in (*BATCH_AXES, "context") if axis != "fsdp"))
        return loss, d_x, d_head.astype(head_dtype)

    head_dtype = head_DV.dtype
    in_specs = (P(*tokens, None), P(None, "tensor"), tokens, tokens)
    out_specs = (P(), sequence, P("fsdp", "tensor")) if with_gradients else P()
    out = manual(body, in_specs, out_specs)(x_BTD, head_DV.astype(x_BTD.dtype), labels_BT, weights_BT)
    return (out[0], out[1:]) if with_gradients else (out, None)


def _chunks(x_BTD, head_DV, labels_BT, weights_BT, options, with_gradients):
    """-> (sum of the losses, dx, dhead): this device's parts of sums over `tensor` (dx) and over the batch (dhead)."""
    *loss_options, max_chunk_bytes = options
    batch, length, _ = x_BTD.shape
    fits = lambda n: length % n == 0 and batch * (length // n) * head_DV.shape[1] * 4 <= max_chunk_bytes
    num_chunks = next((n for n in range(1, length) if fits(n)), length)
    step = functools.partial(_chunk, head_DV=head_DV, options=loss_options, with_gradients=with_gradients)
    if num_chunks == 1:
        return step(x_BTD, labels_BT, weights_BT)

    def scan_step(d_head_sum, chunk):
        loss, d_x, d_head = step(*chunk)
        return (d_head_sum + d_head if with_gradients else d_head_sum), (loss, d_x)

    split = lambda a: jnp.moveaxis(a.reshape(batch, num_chunks, length // num_chunks, *a.shape[2:]), 1, 0)
    chunks = tuple(split(a) for a in (x_BTD, labels_BT, weights_BT))
    axes = tuple({axis for a in (x_BTD, head_DV, labels_BT, weights_BT) for axis in compat.varying_axes(a)})
    start = compat.varying(jnp.zeros(head_DV.shape if with_gradients else (), jnp.float32), axes)
    d_head, (losses, d_x) = lax.scan(scan_step, start, chunks)
    if with_gradients:
        d_x = jnp.moveaxis(d_x, 0, 1).reshape(x_BTD.shape)
    return jnp.sum(losses), d_x, d_head


def _chunk(x_BCD, labels_BC, weights_BC, *, head_DV, options, with_gradients):
    z_loss, label_smoothing = options
    dot = functools.partial(jnp.einsum, precision=dot_precision(x_BCD.dtype), preferred_element_type=jnp.float32)
    logits_BCV = dot("bcd,dv->bcv", x_BCD, head_DV)
    vocab = head_DV.shape[1] * lax.axis_size("tensor")
    labels_BC = labels_BC - lax.axis_index("tensor") * head_DV.shape[1]
    is_label_BCV = labels_BC[..., None] == jnp.arange(head_DV.shape[1])

    top_BC = lax.pmax(lax.stop_gradient(jnp.max(logits_BCV, -1)), "tensor")
    exp_BCV = jnp.exp(logits_BCV - top_BC[..., None])
    # log p of the label and, for smoothing, the mean of all log p: both linear in the logits, so one reduction.
    smoothing = label_smoothing * vocab / (vocab - 1)
    target_BCV = jnp.where(is_label_BCV, 1.0 - smoothing, 0.0) + smoothing / vocab
    sums = jnp.sum(exp_BCV, -1), jnp.sum(logits_BCV * target_BCV, -1)
    total_BC, expected_BC = lax.psum(sums, "tensor")
    lse_BC = top_BC + jnp.log(total_BC)
    loss = jnp.sum(weights_BC * (lse_BC - expected_BC + z_loss * lse_BC**2))
    if not with_gradients:
        return loss, None, None

    d_lse_BC = weights_BC * (1.0 + 2.0 * z_loss * lse_BC)
    d_logits_BCV = exp_BCV * (d_lse_BC / total_BC)[..., None] - weights_BC[..., None] * target_BCV
    d_logits_BCV = d_logits_BCV.astype(x_BCD.dtype)
    d_x_BCD = dot("bcv,dv->bcd", d_logits_BCV, head_DV).astype(x_BCD.dtype)
    return loss, d_x_BCD, dot("bcd,bcv->dv", x_BCD, d_logits_BCV)
