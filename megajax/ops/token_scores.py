"""Scores of given tokens: the log-probability of each, the most likely ones, the entropy, from the logits that
ops/cross_entropy.py computes, in the same chunks.

Dimensions: B batch, T sequence, C tokens of a chunk, D model width, V vocabulary, K most likely tokens.
"""

import functools
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import manual
from megajax.mesh.sharding import constrain
from megajax.ops.cross_entropy import CrossEntropyOptions, weighted_cross_entropy
from megajax.ops.vocabulary import MAX_CHUNK_BYTES, VOCAB_AXES, LogitOptions, chunk_logits, layout_of, num_chunks

Leaf = TypeVar("Leaf")


class TopK(NamedTuple, Generic[Leaf]):
    ids: Leaf
    """int32 [B, T, K], the most likely token first; of equally likely ones the lowest."""
    log_probs: Leaf
    """float32 [B, T, K], without a gradient."""


class TokenScores(NamedTuple, Generic[Leaf]):
    log_probs: Leaf
    """float32 [B, T]: log p[label]; has a gradient."""
    top: Leaf
    """int32 [B, T]: the most likely token; the lowest of equally likely ones."""
    entropy: Leaf | None = None
    """float32 [B, T]: -sum over the vocabulary of p log p, in nats; has a gradient. None unless asked for."""
    top_k: TopK[Leaf] | None = None


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
    logits = LogitOptions(vocab_size, float(multiplier), soft_cap, max_chunk_bytes, dtype=logits_dtype)
    return _token_scores(x_BTD, head_DV, bias_V, labels_BT, _Scoring(logits, entropy, top_k))


class _Scoring(NamedTuple):
    """Static arguments of `token_scores`."""

    logits: LogitOptions
    entropy: bool
    top_k: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_scores(x_BTD, head_DV, bias_V, labels_BT, static: _Scoring) -> TokenScores:
    layout = layout_of(labels_BT)

    def body(x_BTD, head_DV, bias_V, labels_BT):
        if layout.sharing:
            head_DV = lax.all_gather(head_DV, layout.sharing, axis=0, tiled=True)
        score = functools.partial(_score_chunk, head=static.logits.products(head_DV), bias_V=bias_V, static=static)
        count = num_chunks(labels_BT.size, head_DV, static.logits.max_chunk_bytes)
        chunks = tuple(a.reshape(count, -1, *a.shape[2:]) for a in (x_BTD, labels_BT))
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
        options = CrossEntropyOptions(static.logits, 0.0, 0.0)
        return weighted_cross_entropy(x_BTD, head_DV, bias_V, labels_BT, -d_scores.log_probs, d_scores.entropy, options)

    return *jax.grad(loss, (0, 1, 2))(x_BTD, head_DV, bias_V), None


_token_scores.defvjp(_score_forward, _score_backward)


def _score_chunk(x_CD, labels_C, *, head, bias_V, static: _Scoring) -> TokenScores:
    logits_CV, token_V, of_tokens = chunk_logits(x_CD, head, bias_V, static.logits)
    top_C = lax.pmax(jnp.max(of_tokens(logits_CV, -jnp.inf), -1), VOCAB_AXES)
    exp_CV = of_tokens(jnp.exp(logits_CV - top_C[:, None]), 0.0)
    sums = [jnp.sum(exp_CV, -1), jnp.sum(jnp.where(labels_C[:, None] == token_V, logits_CV, 0.0), -1)]
    if static.entropy:
        sums.append(jnp.sum(exp_CV * logits_CV, -1))
    total_C, label_C, *weighted = lax.psum(sums, VOCAB_AXES)
    lse_C = top_C + jnp.log(total_C)
    is_top_CV = of_tokens(logits_CV, -jnp.inf) == top_C[:, None]
    first_C = lax.pmin(jnp.min(jnp.where(is_top_CV, token_V, static.logits.vocab_size), -1), VOCAB_AXES)
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
