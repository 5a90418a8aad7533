"""Vocabulary-parallel cross-entropy of the output layer, in chunks, with its gradients computed in the forward pass.

Dimensions: B batch, T sequence, C tokens of a chunk, D model width, V vocabulary.
Only the logits of one chunk exist at a time, [C, V / (pipeline * tensor)] float32; each chunk is immediately turned
into its part of the loss, of dx and of the gradient of the output matrix, so nothing is recomputed in the backward pass
(Hsu et al. 2024, Liger Kernel, https://arxiv.org/abs/2410.10989). Over `tensor` three numbers per token are reduced
(Shoeybi et al. 2019); pipeline stages share the vocabulary in the same way (Yeung et al. 2024,
https://arxiv.org/abs/2411.05288).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import (
    SEQUENCE_AXES,
    WEIGHT_AXES,
    activation_spec,
    axes_of,
    constrain,
    entry_of,
    local_weight_spec,
)
from megajax.ops.low_precision import FORMATS, log_format, product
from megajax.ops.matmul import dot_precision
from megajax.precision import Recipe
from megajax.quantization.formats import quantize, rotate

VOCAB_AXES = WEIGHT_AXES["vocab"]
SUMMED_WHOLE = tuple(axis for axis in VOCAB_AXES if axis not in SEQUENCE_AXES)

MAX_CHUNK_BYTES = 2 * 2**30  # of float32 logits on a device; each chunk reads and writes the gradient of the head once


# In float16 the gradients of logits are computed for the largest weight of a token times this: then probabilities down
# to 2.4e-7 are normal numbers, and a gradient of x overflows only if entries of the head are above 128.
FLOAT16_WEIGHT = 256.0


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

    bias, multiplier, soft_cap: see `finish_logits`. recipe: low-precision format of the operands of the three products;
    what shares a scale ends with the chunk and the part of the vocabulary of a device. None: x's dtype.

    vocab_size: number of tokens; further columns of the head are padding, which has no probability and no gradient. V
    below is this number.

    The loss of a token is -log p[label], plus z_loss * logsumexp^2 (Chowdhery et al. 2022, section 5); with label
    smoothing s (Megatron's definition), with r = s * V / (V - 1): (1 - r) * -log p[label] - r * mean(log p).
    A token of weight 0 may have any label. Gradients flow to x, head and bias only.
    """
    if recipe is not None:
        log_format(recipe, x_BTD.dtype)
    logit_options = (float(multiplier), soft_cap)
    options = (vocab_size, float(z_loss), float(label_smoothing), logit_options, recipe, max_chunk_bytes, "float32")
    return _scaled_cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, None, options)


def _scaled_cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options):
    """entropy_weights: factors of the entropies of the tokens, which are added; None: no entropies."""
    if x_BTD.dtype != jnp.float16:
        return _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options)
    # The gradients are computed before the loss scale is known, and a weight of 1 / tokens would make them zero.
    weights = (weights_BT, entropy_weights_BT)
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a)) for a in jax.tree.leaves(weights)])
    unit = jnp.where(largest > 0, largest, 1.0) / FLOAT16_WEIGHT
    return unit * _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, *jax.tree.map(lambda a: a / unit, weights), options)


def finish_logits(
    products: jax.Array,
    bias_V: jax.Array | None = None,
    multiplier: float = 1.0,
    soft_cap: float | None = None,
) -> jax.Array:
    """float32 products [..., V] of hidden states and the head -> logits: multiplier * (products + bias), and of that
    soft_cap * tanh(logits / soft_cap), if there is a soft cap."""
    logits = products if bias_V is None else products + bias_V.astype(jnp.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


class TopK(NamedTuple):
    ids: jax.Array
    """int32 [B, T, K], the most likely token first; of equally likely ones the lowest."""
    log_probs: jax.Array
    """float32 [B, T, K], without a gradient."""


class TokenScores(NamedTuple):
    log_probs: jax.Array
    """float32 [B, T]: log p[label]; has a gradient."""
    top: jax.Array
    """int32 [B, T]: the most likely token; the lowest of equally likely ones."""
    entropy: jax.Array | None = None
    """float32 [B, T]: -sum over the vocabulary of p log p, in nats; has a gradient. None unless asked for."""
    top_k: TopK | None = None


def class_scores(logits: jax.Array, labels: jax.Array) -> TokenScores:
    """The same for a few classes. logits: float32 [..., C]; labels: int32 [...]."""
    log_probs = jax.nn.log_softmax(logits)
    of_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return TokenScores(jnp.sum(log_probs * of_label, -1), jnp.argmax(logits, -1).astype(jnp.int32))


def token_scores(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    *,
    vocab_size: int,
    bias_V: jax.Array | None = None,
    multiplier: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    top_k: int = 0,
    logits_dtype: str = "float32",
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TokenScores:
    """Scores of every label, from the logits that `cross_entropy` computes; arguments as there.

    entropy, top_k: what else to compute. logits_dtype: bfloat16 rounds the products with the head, as an engine that
    computes in bfloat16 does. The log-probabilities and the entropy are differentiated with respect to x, head and
    bias, in chunks that compute their logits again, so memory is bounded as in `cross_entropy`.
    """
    static = _Scoring(vocab_size, float(multiplier), soft_cap, logits_dtype, entropy, top_k, max_chunk_bytes)
    return _token_scores(x_BTD, head_DV, bias_V, labels_BT, static)


class _Scoring(NamedTuple):
    """Static arguments of `token_scores`."""

    vocab_size: int
    multiplier: float
    soft_cap: float | None
    logits_dtype: str
    entropy: bool
    top_k: int
    max_chunk_bytes: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_scores(x_BTD, head_DV, bias_V, labels_BT, static: _Scoring) -> TokenScores:
    layout = _layout(labels_BT)

    def body(x_BTD, head_DV, bias_V, labels_BT):
        if layout.sharing:
            head_DV = lax.all_gather(head_DV, layout.sharing, axis=0, tiled=True)
        head = _Products(head_DV, static.logits_dtype)
        score = functools.partial(_score_chunk, head=head, bias_V=bias_V, static=static)
        num_chunks = _num_chunks(labels_BT.size, head_DV, static.max_chunk_bytes)
        chunks = tuple(a.reshape(num_chunks, -1, *a.shape[2:]) for a in (x_BTD, labels_BT))
        found = lax.map(lambda chunk: score(*chunk), chunks)
        return jax.tree.map(lambda a: a.reshape(*labels_BT.shape, *a.shape[2:]), found)

    x_BTD = constrain(x_BTD, "batch", "sequence", None)
    of_top_k = P(*layout.tokens, None)
    outputs = TokenScores(
        layout.tokens,
        layout.tokens,
        layout.tokens if static.entropy else None,
        TopK(of_top_k, of_top_k) if static.top_k else None,
    )
    run = manual(body, (P(*layout.tokens, None), layout.head, layout.bias, layout.tokens), outputs)
    return run(x_BTD, head_DV.astype(x_BTD.dtype), bias_V, labels_BT)


def _score_forward(x_BTD, head_DV, bias_V, labels_BT, static: _Scoring):
    return _token_scores(x_BTD, head_DV, bias_V, labels_BT, static), (x_BTD, head_DV, bias_V, labels_BT)


def _score_backward(static: _Scoring, saved, d_scores: TokenScores):
    """The gradient of a sum of log-probabilities with factors is that of the cross-entropy with their negatives as
    weights."""
    x_BTD, head_DV, bias_V, labels_BT = saved

    def loss(x_BTD, head_DV, bias_V):
        options = (
            static.vocab_size, 0.0, 0.0, (static.multiplier, static.soft_cap), None, static.max_chunk_bytes,
            static.logits_dtype,
        )  # fmt: skip
        return _scaled_cross_entropy(x_BTD, head_DV, bias_V, labels_BT, -d_scores.log_probs, d_scores.entropy, options)

    return *jax.grad(loss, (0, 1, 2))(x_BTD, head_DV, bias_V), None


_token_scores.defvjp(_score_forward, _score_backward)


def _score_chunk(x_CD, labels_C, *, head, bias_V, static: _Scoring) -> TokenScores:
    vocab = static.vocab_size
    logits_CV, token_V, of_tokens = _logits(x_CD, head, bias_V, vocab, (static.multiplier, static.soft_cap))
    top_C = lax.pmax(jnp.max(of_tokens(logits_CV, -jnp.inf), -1), VOCAB_AXES)
    exp_CV = of_tokens(jnp.exp(logits_CV - top_C[:, None]), 0.0)
    sums = [jnp.sum(exp_CV, -1), jnp.sum(jnp.where(labels_C[:, None] == token_V, logits_CV, 0.0), -1)]
    if static.entropy:
        sums.append(jnp.sum(exp_CV * logits_CV, -1))
    total_C, label_C, *weighted = lax.psum(sums, VOCAB_AXES)
    lse_C = top_C + jnp.log(total_C)
    is_top_CV = of_tokens(logits_CV, -jnp.inf) == top_C[:, None]
    first_C = lax.pmin(jnp.min(jnp.where(is_top_CV, token_V, vocab), -1), VOCAB_AXES)
    return TokenScores(
        label_C - top_C - jnp.log(total_C),
        first_C,
        lse_C - weighted[0] / total_C if static.entropy else None,
        _top_k(of_tokens(logits_CV, -jnp.inf), token_V, lse_C, static.top_k) if static.top_k else None,
    )


def _top_k(logits_CV, token_V, lse_C, top_k: int) -> TopK:
    """Of the parts of the vocabulary first, then of what these give together."""
    logits_CK, places_CK = lax.top_k(logits_CV, min(top_k, logits_CV.shape[-1]))

    def of_all_parts(a_CK):
        """[C, parts * K]: a sum, because of an all-gather shard_map does not know that all devices get the same."""
        is_own_P = jnp.arange(lax.axis_size(VOCAB_AXES)) == lax.axis_index(VOCAB_AXES)
        parts_CPK = jnp.where(is_own_P[:, None], a_CK[:, None], jnp.zeros_like(a_CK[:, None]))
        return lax.psum(parts_CPK, VOCAB_AXES).reshape(len(a_CK), -1)

    ids_CP = of_all_parts(token_V[places_CK])
    logits_CK, places_CK = lax.top_k(of_all_parts(logits_CK), top_k)
    return TopK(jnp.take_along_axis(ids_CP, places_CK, 1).astype(jnp.int32), logits_CK - lse_C[:, None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _cross_entropy(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options):
    return _run(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options, with_gradients=False)[0]


def _forward(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options):
    return _run(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options, with_gradients=True)


def _backward(options, gradients, d_loss):
    def scaled(gradient):
        if gradient.dtype == jnp.float16:  # d_loss, a loss scale, may overflow where the product does not
            return (gradient.astype(jnp.float32) * d_loss).astype(gradient.dtype)
        return gradient * d_loss.astype(gradient.dtype)

    d_x, d_head, d_bias = jax.tree.map(scaled, gradients)
    return d_x, d_head, d_bias, None, None, None


_cross_entropy.defvjp(_forward, _backward)


def _run(x_BTD, head_DV, bias_V, labels_BT, weights_BT, entropy_weights_BT, options, with_gradients):
    """-> (loss, (dx sharded as batch, sequence; dhead; dbias)), or (loss, None)."""
    tokens, split_over, sharing, head_spec, bias_spec = _layout(labels_BT)
    sequence = activation_spec(x_BTD.shape, ("batch", "sequence", None))
    scatter = sequence[1] != tokens[1]

    def body(x_BTD, head_DV, bias_V, *of_tokens):
        if sharing:
            head_DV = lax.all_gather(head_DV, sharing, axis=0, tiled=True)
        losses, d_x, d_matrices = _chunks(x_BTD, head_DV, bias_V, of_tokens, options, with_gradients)
        loss = lax.psum(losses, split_over)
        if not with_gradients:
            return loss
        if scatter:
            d_x = lax.psum_scatter(d_x, SEQUENCE_AXES, scatter_dimension=1, tiled=True)
            d_x = lax.psum(d_x, SUMMED_WHOLE)
        else:
            d_x = lax.psum(d_x, VOCAB_AXES)
        d_head, d_bias = d_matrices
        if sharing:
            d_head = lax.psum_scatter(d_head, sharing, scatter_dimension=0, tiled=True)
        d_head = lax.psum(d_head, tuple(axis for axis in split_over if axis not in sharing))
        if d_bias is not None:
            d_bias = lax.psum(d_bias, split_over).astype(bias_V.dtype)
        return loss, d_x, d_head.astype(head_dtype), d_bias

    head_dtype = head_DV.dtype
    of_tokens = (labels_BT, weights_BT) if entropy_weights_BT is None else (labels_BT, weights_BT, entropy_weights_BT)
    in_specs = (P(*tokens, None), head_spec, bias_spec, *(tokens,) * len(of_tokens))
    out_specs = (P(), sequence, head_spec, bias_spec) if with_gradients else P()
    # Without it XLA gathers x before its last cast, which is twice the bytes.
    x_BTD = constrain(x_BTD, "batch", "sequence", None)
    out = manual(body, in_specs, out_specs)(x_BTD, head_DV.astype(x_BTD.dtype), bias_V, *of_tokens)
    return (out[0], out[1:]) if with_gradients else (out, None)


class _Layout(NamedTuple):
    tokens: P
    """Of [B, T]."""
    split_over: tuple[str, ...]
    """Mesh axes that split the tokens."""
    sharing: tuple[str, ...]
    """Of these, axes that split D too: the head is gathered over them in the region, in its own dtype."""
    head: P
    bias: P


def _layout(labels_BT) -> _Layout:
    tokens = activation_spec(labels_BT.shape, ("batch", "time"))
    split_over = tuple(axis for entry in tokens for axis in axes_of(entry))
    sharing = tuple(axis for axis in WEIGHT_AXES["embed"] if axis in split_over)
    bias = local_weight_spec(("vocab",), free_axes())
    return _Layout(tokens, split_over, sharing, P(entry_of(sharing), bias[0]), bias)


def _num_chunks(num_tokens: int, head_DV, max_chunk_bytes: int) -> int:
    """The fewest chunks whose logits fit; a chunk has at least one token."""

    def fits(n: int) -> bool:
        return num_tokens % n == 0 and num_tokens // n * head_DV.shape[1] * 4 <= max_chunk_bytes

    return next((n for n in range(1, num_tokens) if fits(n)), num_tokens)


def _chunks(x_BTD, head_DV, bias_V, of_tokens, options, with_gradients):
    """of_tokens: labels, weights and, if there are any, weights of the entropies, [B, T].

    -> (sum of the losses, dx, (dhead, dbias)): this device's parts of sums over vocabulary (dx) and batch."""
    *loss_options, recipe, max_chunk_bytes, logits_dtype = options
    num_tokens = of_tokens[0].size
    num_chunks = _num_chunks(num_tokens, head_DV, max_chunk_bytes)
    chunk_shape = (num_chunks, num_tokens // num_chunks)
    chunks = tuple(a.reshape(*chunk_shape, *a.shape[2:]) for a in (x_BTD, *of_tokens))
    head = _Products(head_DV, logits_dtype) if recipe is None else _LowProducts(head_DV, recipe)
    given = dict(head=head, bias_V=bias_V, options=loss_options, with_gradients=with_gradients)
    step = functools.partial(_chunk, **given)

    def scan_step(sums, chunk):
        loss_before, before = sums
        x, *others = chunk
        # Forces one chunk after the other: XLA unrolls short loops and would compute the logits of all chunks at once.
        before, x = lax.optimization_barrier((before, x))
        loss, d_x, d_matrices = step(x, *others)
        return jax.tree.map(jnp.add, (loss_before, before), (loss, d_matrices)), d_x

    loss, d_x, d_matrices = step(*(a[0] for a in chunks))
    if num_chunks > 1:
        (loss, d_matrices), others = lax.scan(scan_step, (loss, d_matrices), tuple(a[1:] for a in chunks))
        d_x = jnp.concatenate([d_x[None], others]) if with_gradients else None
    return loss, d_x.reshape(x_BTD.shape) if with_gradients else None, d_matrices


def _chunk(x_CD, labels_C, weights_C, entropy_weights_C=None, *, head, bias_V, options, with_gradients):
    vocab, z_loss, label_smoothing, (multiplier, soft_cap) = options
    logits_CV, token_V, of_tokens = _logits(x_CD, head, bias_V, vocab, (multiplier, soft_cap))
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
    if entropy_weights_C is not None:
        entropy_C = lse_C - lax.psum(jnp.sum(exp_CV * logits_CV, -1), VOCAB_AXES) / total_C
        loss += jnp.sum(entropy_weights_C * entropy_C)
    if not with_gradients:
        return loss, None, None

    d_lse_C = weights_C * (1.0 + 2.0 * z_loss * lse_C)
    d_logits_CV = exp_CV * (d_lse_C / total_C)[:, None] - weights_C[:, None] * target_CV
    if entropy_weights_C is not None:  # the derivative by a logit is -p (log p + entropy)
        surplus_CV = logits_CV + (entropy_C - lse_C)[:, None]
        d_logits_CV -= exp_CV * (entropy_weights_C / total_C)[:, None] * surplus_CV
    if soft_cap is not None:  # the derivative of tanh is 1 - tanh^2
        d_logits_CV *= 1.0 - (logits_CV / soft_cap) ** 2
    if multiplier != 1.0:
        d_logits_CV *= multiplier
    d_bias_V = None if bias_V is None else jnp.sum(d_logits_CV, 0)
    d_logits_CV = d_logits_CV.astype(x_CD.dtype)
    return loss, head.d_x(d_logits_CV).astype(x_CD.dtype), (head.d_head(x_CD, d_logits_CV), d_bias_V)


class _Products:
    """The products of chunks with the head, float32, in the dtype of its operands."""

    def __init__(self, head_DV, logits_dtype: str = "float32"):
        self.head_DV = head_DV
        self._logits_dtype = logits_dtype
        self._dot = functools.partial(
            jnp.einsum, precision=dot_precision(head_DV.dtype), preferred_element_type=jnp.float32
        )

    def logits(self, x_CD):
        products_CV = self._dot("cd,dv->cv", x_CD, self.head_DV)
        if self._logits_dtype == "float32":
            return products_CV
        return lax.reduce_precision(products_CV, 8, 7)

    def d_x(self, d_logits_CV):
        return self._dot("cv,dv->cd", d_logits_CV, self.head_DV)

    def d_head(self, x_CD, d_logits_CV):
        return self._dot("cd,cv->dv", x_CD, d_logits_CV)


class _LowProducts(_Products):
    """The same with operands rounded to the format of a recipe, in each product along the dim that it contracts."""

    def __init__(self, head_DV, recipe: Recipe):
        super().__init__(head_DV)
        self._formats = FORMATS[recipe]
        # Once for all chunks. Where scales do not depend on the contracted dim the two are equal: XLA computes one.
        self._for_logits, self._for_d_x = (quantize(head_DV, self._formats.weight, (dim,)) for dim in (0, 1))

    def logits(self, x_CD):
        return self._product(quantize(x_CD, self._formats.input, (1,)), 1, self._for_logits, 0)

    def d_x(self, d_logits_CV):
        return self._product(quantize(d_logits_CV, self._formats.gradient, (1,)), 1, self._for_d_x, 1)

    def d_head(self, x_CD, d_logits_CV):
        if self._formats.rotates:
            x_CD, d_logits_CV = rotate(x_CD, 0), rotate(d_logits_CV, 0)
        x = quantize(x_CD, self._formats.input, (0,))
        return self._product(x, 0, quantize(d_logits_CV, self._formats.gradient, (0,)), 0)

    def _product(self, a, a_dim, b, b_dim):
        return product(a, (a_dim,), b, (b_dim,), self.head_DV.dtype, jnp.float32)


def _logits(x_CD, head: _Products, bias_V, vocab, logit_options):
    """-> (logits float32 [C, V / devices], the ids of these tokens, a function that replaces entries of padding)."""
    width = head.head_DV.shape[1]
    logits_CV = finish_logits(head.logits(x_CD), bias_V, *logit_options)
    token_V = lax.axis_index(VOCAB_AXES) * width + jnp.arange(width)
    is_padded = width * lax.axis_size(VOCAB_AXES) > vocab

    def of_tokens(array_CV, otherwise):
        return jnp.where(token_V < vocab, array_CV, otherwise) if is_padded else array_CV

    return logits_CV, token_V, of_tokens
