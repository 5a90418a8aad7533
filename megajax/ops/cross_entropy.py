"""Vocabulary-parallel cross-entropy of the output layer, in chunks, with its gradients computed in the forward pass.

Dimensions: B batch, T sequence, C tokens of a chunk, D model width, V vocabulary.
Only the logits of one chunk exist at a time, [C, V / (pipeline * tensor)] float32; each chunk is immediately turned
into its part of the loss, of dx and of the gradient of the output matrix, so nothing is recomputed in the backward pass
(Hsu et al. 2024, Liger Kernel, https://arxiv.org/abs/2410.10989). Over `tensor` three numbers per token are reduced
(Shoeybi et al. 2019); pipeline stages share the vocabulary in the same way (Yeung et al. 2024,
https://arxiv.org/abs/2411.05288).
On Hopper our kernel makes the loss and the gradient of a chunk's logits in one go (pallas_kernels/cross_entropy.py),
where a device has the whole vocabulary; elsewhere XLA does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import manual
from megajax.mesh.sharding import SEQUENCE_AXES, activation_spec, constrain, split_dim
from megajax.ops.choice import log_choice
from megajax.ops.low_precision import log_format
from megajax.ops.vocabulary import MAX_CHUNK_BYTES, VOCAB_AXES, LogitOptions, chunk_logits, layout_of, num_chunks
from megajax.precision import Recipe

SUMMED_WHOLE = tuple(axis for axis in VOCAB_AXES if axis not in SEQUENCE_AXES)

# In float16 the gradients of logits are computed for the largest weight of a token times this: then probabilities down
# to 2.4e-7 are normal numbers, and a gradient of x overflows only if entries of the head are above 128.
FLOAT16_WEIGHT = 256.0


class CrossEntropyOptions(NamedTuple):
    """Static arguments of `cross_entropy`."""

    logits: LogitOptions
    z_loss: float
    label_smoothing: float


def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    vocab_size: int,
    z_loss: float,
    label_smoothing: float,
    bias_V: jax.Array | None = None,
    multiplier: float = 1.0,
    soft_cap: float | None = None,
    recipe: Recipe | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> jax.Array:
    """Sum over all tokens of weight * loss, a float32 scalar; head is cast to x's dtype, logits are float32.

    bias, multiplier, soft_cap: see ops/vocabulary.py `finish_logits`. recipe: low-precision format of the operands of
    the three products; what shares a scale ends with the chunk and the part of the vocabulary of a device. None: x's
    dtype.

    vocab_size: number of tokens; further columns of the head are padding, which has no probability and no gradient. V
    below is this number.

    The loss of a token is -log p[label], plus z_loss * logsumexp^2 (Chowdhery et al. 2022, section 5); with label
    smoothing s (Megatron's definition), with r = s * V / (V - 1): (1 - r) * -log p[label] - r * mean(log p).
    A token of weight 0 may have any label. Gradients flow to x, head and bias only.
    """
    if recipe is not None:
        log_format(recipe, x_BTD.dtype)
    logits = LogitOptions(vocab_size, float(multiplier), soft_cap, max_chunk_bytes, recipe)
    options = CrossEntropyOptions(logits, float(z_loss), float(label_smoothing))
    return weighted_cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, None, options)


def weighted_cross_entropy(
    x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options: CrossEntropyOptions
) -> jax.Array:
    """entropy_weights: factors of the entropies of the tokens, which are added; None: no entropies."""
    if x_BTD.dtype != jnp.float16:
        return _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options)
    # The gradients are computed before the loss scale is known, and a weight of 1 / tokens would make them zero.
    weights = (weights_BT, entropy_weights_BT)
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a)) for a in jax.tree.leaves(weights)])
    unit = jnp.where(largest > 0, largest, 1.0) / FLOAT16_WEIGHT
    return unit * _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, *jax.tree.map(lambda a: a / unit, weights), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options):
    return _run(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options, None)[0]


def _forward(x, head, bias, labels, weights, entropy_weights, options):
    """The arguments say whether they are differentiated."""
    bias_V = None if bias is None else bias.value
    entropy_weights_BT = None if entropy_weights is None else entropy_weights.value
    arrays = (x.value, head.value, bias_V, labels.value, weights.value, entropy_weights_BT)
    return _run(*arrays, options, Gradients(of_head=head.perturbed))


def _backward(options, gradients, d_loss):
    def scaled(gradient):
        if gradient.dtype == jnp.float16:  # d_loss, a loss scale, may overflow where the product does not
            return (gradient.astype(jnp.float32) * d_loss).astype(gradient.dtype)
        return gradient * d_loss.astype(gradient.dtype)

    d_x, d_head, d_bias = jax.tree.map(scaled, gradients)
    return d_x, d_head, d_bias, None, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


class Gradients(NamedTuple):
    """Which gradients to compute besides that of x."""

    of_head: bool
    """False for a frozen one: its gradient would be a third of the products, and a float32 copy of it."""


def _run(
    x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options, with_gradients: Gradients | None
):  # fmt: skip
    """-> (loss, (dx sharded as batch, sequence; dhead, or None; dbias)), or (loss, None)."""
    tokens, split_over, sharing, head_spec, bias_spec = layout_of(labels_BT)
    sequence = activation_spec(x_BTD.shape, ("batch", "sequence", None))
    scattered = split_dim(sequence, tokens)

    def body(x_BTD, head_DV, bias_V, *of_tokens):
        if sharing:
            head_DV = lax.all_gather(head_DV, sharing, axis=0, tiled=True)
        losses, d_x, d_matrices = _chunks(x_BTD, head_DV, bias_V, of_tokens, options, with_gradients)
        loss = lax.psum(losses, split_over)
        if not with_gradients:
            return loss
        if scattered is not None:
            d_x = lax.psum_scatter(d_x, SEQUENCE_AXES, scatter_dimension=scattered, tiled=True)
            d_x = lax.psum(d_x, SUMMED_WHOLE)
        else:
            d_x = lax.psum(d_x, VOCAB_AXES)
        d_head, d_bias = d_matrices
        if d_head is not None:
            if sharing:
                d_head = lax.psum_scatter(d_head, sharing, scatter_dimension=0, tiled=True)
            d_head = lax.psum(d_head, tuple(axis for axis in split_over if axis not in sharing)).astype(head_dtype)
        if d_bias is not None:
            d_bias = lax.psum(d_bias, split_over).astype(bias_V.dtype)
        return loss, d_x, d_head, d_bias

    head_dtype = head_DV.dtype
    of_tokens = (labels_BT, weights_BT) if entropy_weights_BT is None else (labels_BT, weights_BT, entropy_weights_BT)
    in_specs = (P(*tokens, None), head_spec, bias_spec, *(tokens,) * len(of_tokens))
    out_specs = (P(), sequence, head_spec, bias_spec) if with_gradients else P()
    # Without it XLA gathers x before its last cast, which is twice the bytes.
    x_BTD = constrain(x_BTD, "batch", "sequence", None)
    out = manual(body, in_specs, out_specs)(x_BTD, head_DV.astype(x_BTD.dtype), bias_V, *of_tokens)
    return (out[0], out[1:]) if with_gradients else (out, None)


def _chunks(x_BTD, head_DV, bias_V, of_tokens, options: CrossEntropyOptions, with_gradients):
    """of_tokens: labels, weights and, if there are any, weights of the entropies, [B, T].

    -> (sum of the losses, dx, (dhead, dbias)): this device's parts of sums over vocabulary (dx) and batch."""
    num_tokens = of_tokens[0].size
    count = num_chunks(num_tokens, head_DV, options.logits.max_chunk_bytes)
    chunks = tuple(a.reshape(count, num_tokens // count, *a.shape[2:]) for a in (x_BTD, *of_tokens))
    chunk = _chunk
    if with_gradients is not None:
        reason = _kernel_problem(head_DV, bias_V, of_tokens, options)
        log_choice("cross-entropy", f"XLA ({reason})" if reason else "one kernel (pallas_kernels/cross_entropy.py)")
        chunk = _chunk if reason else _chunk_in_one_kernel
    width = head_DV.shape[1]
    if chunk is _chunk_in_one_kernel:
        head_DV = jnp.pad(head_DV, ((0, 0), (0, _missing_columns(width))))
    given = dict(head=options.logits.products(head_DV), bias_V=bias_V, options=options, with_gradients=with_gradients)
    step = functools.partial(chunk, **given)

    def scan_step(sums, chunk):
        loss_before, before = sums
        x, *others = chunk
        # Forces one chunk after the other: XLA unrolls short loops and would compute the logits of all chunks at once.
        before, x = lax.optimization_barrier((before, x))
        loss, d_x, d_matrices = step(x, *others)
        return jax.tree.map(jnp.add, (loss_before, before), (loss, d_matrices)), d_x

    loss, d_x, d_matrices = step(*(a[0] for a in chunks))
    if count > 1:
        (loss, d_matrices), others = lax.scan(scan_step, (loss, d_matrices), tuple(a[1:] for a in chunks))
        d_x = jnp.concatenate([d_x[None], others]) if with_gradients else None
    if not with_gradients:
        return loss, None, d_matrices
    d_head, d_bias = d_matrices
    return loss, d_x.reshape(x_BTD.shape), (None if d_head is None else d_head[:, :width], d_bias)


def _kernel_problem(head_DV, bias_V, of_tokens, options: CrossEntropyOptions) -> str:
    """Why the kernel for value and gradient cannot be used, or an empty string."""
    num_parts = lax.axis_size(VOCAB_AXES)
    reasons = {
        f"a vocabulary in {num_parts} parts": num_parts > 1,
        "a bias": bias_V is not None,
        "a soft cap": options.logits.soft_cap is not None,
        "label smoothing": options.label_smoothing != 0,
        "entropies": len(of_tokens) > 2,
    }
    if reason := compat.mosaic_problem():
        return reason
    for reason, applies in reasons.items():
        if applies:
            return reason
    # Not at the top: only Hopper needs it, and it takes time to import.
    from pallas_kernels import cross_entropy as kernel

    width = head_DV.shape[1]
    return kernel.problem(width + _missing_columns(width), head_DV.dtype)


def _missing_columns(width: int) -> int:
    """Of zeros, up to a width that the kernel takes: they have no probability and no gradient."""
    from pallas_kernels import cross_entropy as kernel

    return -width % kernel.LINE


def _chunk_in_one_kernel(
    x_CD, labels_C, weights_C, *, head, bias_V, options: CrossEntropyOptions, with_gradients: Gradients
) -> tuple[jax.Array, Any, Any]:
    """What `_chunk` returns, without a bias."""
    from pallas_kernels import cross_entropy as kernel

    (vocab, multiplier, *_), z_loss, _ = options
    products_CV = head.logits(x_CD)
    labels_C = jnp.where((labels_C >= 0) & (labels_C < vocab), labels_C, -1)
    of_label_C = jnp.take_along_axis(products_CV, labels_C[:, None], 1, mode="clip")[:, 0]
    # Read before the kernel: the products of a chunk would otherwise be kept until the loss is summed.
    products_CV, of_label_C = lax.optimization_barrier((products_CV, of_label_C))
    static = dict(vocab_size=vocab, multiplier=multiplier, z_loss=z_loss, dtype=x_CD.dtype)
    results = kernel.value_and_gradient(products_CV, labels_C, weights_C, **static)
    lse_C, d_products_CV = compat.vary(results, compat.varying_axes(products_CV))
    of_label_C = jnp.where(labels_C < 0, 0.0, multiplier * of_label_C)
    lse_C, of_label_C = lax.psum((lse_C, of_label_C), VOCAB_AXES)  # which are of size 1
    loss = jnp.sum(weights_C * (lse_C - of_label_C + z_loss * lse_C**2))
    return loss, *_through_products(x_CD, d_products_CV, None, head, with_gradients)


def value_and_gradient(
    products_CV, labels_C, weights_C, *, vocab_size: int, multiplier: float, z_loss: float, dtype
) -> tuple[jax.Array, jax.Array]:
    """The reference of pallas_kernels/cross_entropy.py, with the same arguments and results."""
    column_V = jnp.arange(products_CV.shape[1])
    logits_CV = jnp.where(column_V < vocab_size, multiplier * products_CV, -jnp.inf)
    top_C = jnp.max(logits_CV, -1)
    exp_CV = jnp.exp(logits_CV - top_C[:, None])
    total_C = jnp.sum(exp_CV, -1)
    lse_C = top_C + jnp.log(total_C)
    factor_C = weights_C * (1.0 + 2.0 * z_loss * lse_C) / total_C
    target_CV = jnp.where(column_V == labels_C[:, None], weights_C[:, None], 0.0)
    return lse_C, (multiplier * (exp_CV * factor_C[:, None] - target_CV)).astype(dtype)


def _through_products(x_CD, d_products_CV, d_bias_V, head, with_gradients: Gradients):
    """-> dx, (dhead, dbias)."""
    d_head_DV = head.d_head(x_CD, d_products_CV) if with_gradients.of_head else None
    return head.d_x(d_products_CV).astype(x_CD.dtype), (d_head_DV, d_bias_V)


def _chunk(
    x_CD,
    labels_C,
    weights_C,
    entropy_weights_C=None,
    *,
    head,
    bias_V,
    options: CrossEntropyOptions,
    with_gradients: Gradients | None,
) -> tuple[jax.Array, Any, Any]:
    """-> (sum of the losses, dx, (dhead, dbias)); without gradients None for both."""
    (vocab, multiplier, soft_cap, *_), z_loss, label_smoothing = options
    logits_CV, token_V, of_tokens = chunk_logits(x_CD, head, bias_V, options.logits)
    is_label_CV = labels_C[:, None] == token_V

    top_C = lax.pmax(lax.stop_gradient(jnp.max(of_tokens(logits_CV, -jnp.inf), -1)), VOCAB_AXES)
    exp_CV = of_tokens(jnp.exp(logits_CV - top_C[:, None]), 0.0)
    # log p of the label and, for smoothing, the mean of all log p: both are linear in the logits, so one reduction.
    smoothing = label_smoothing * vocab / (vocab - 1)
    target_CV = of_tokens(jnp.where(is_label_CV, 1.0 - smoothing, 0.0) + smoothing / vocab, 0.0)
    sums = jnp.sum(exp_CV, -1), jnp.sum(logits_CV * target_CV, -1)
    total_C, expected_C = lax.psum(sums, VOCAB_AXES)
    lse_C = top_C + jnp.log(total_C)
    loss = jnp.sum(weights_C * (lse_C - expected_C + z_loss * lse_C**2))
    entropy_C = None
    if entropy_weights_C is not None:
        entropy_C = lse_C - lax.psum(jnp.sum(exp_CV * logits_CV, -1), VOCAB_AXES) / total_C
        loss += jnp.sum(entropy_weights_C * entropy_C)
    if not with_gradients:
        return loss, None, None

    d_lse_C = weights_C * (1.0 + 2.0 * z_loss * lse_C)
    d_logits_CV = exp_CV * (d_lse_C / total_C)[:, None] - weights_C[:, None] * target_CV
    if entropy_C is not None:  # the derivative by a logit is -p (log p + entropy)
        surplus_CV = logits_CV + (entropy_C - lse_C)[:, None]
        d_logits_CV -= exp_CV * (entropy_weights_C / total_C)[:, None] * surplus_CV
    if soft_cap is not None:  # the derivative of tanh is 1 - tanh^2
        d_logits_CV *= 1.0 - (logits_CV / soft_cap) ** 2
    if multiplier != 1.0:
        d_logits_CV *= multiplier
    d_bias_V = None if bias_V is None else jnp.sum(d_logits_CV, 0)
    return loss, *_through_products(x_CD, d_logits_CV.astype(x_CD.dtype), d_bias_V, head, with_gradients)
