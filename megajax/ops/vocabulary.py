"""Logits of the output layer, of chunks of tokens and of a device's part of the vocabulary: what the loss and the
scores of tokens share.

Dimensions: B batch, T sequence, C tokens of a chunk, D model width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import free_axes
from megajax.mesh.sharding import WEIGHT_AXES, activation_spec, axes_of, entry_of, local_weight_spec
from megajax.ops.low_precision import FORMATS, product
from megajax.ops.matmul import dot_precision
from megajax.precision import Recipe
from megajax.quantization.formats import quantize, rotate

VOCAB_AXES = WEIGHT_AXES["vocab"]
MAX_CHUNK_BYTES = 2 * 2**30  # of float32 logits on a device; each chunk reads and writes the gradient of the head once


class LogitOptions(NamedTuple):
    """What is static of the logits."""

    vocab_size: int
    """Further columns of the head are padding."""
    multiplier: float
    soft_cap: float | None
    max_chunk_bytes: int
    recipe: Recipe | None = None
    """Low-precision format of the operands of products with the head."""
    dtype: str = "float32"
    """bfloat16 rounds the products with the head."""

    def products(self, head_DV) -> "Products":
        return Products(head_DV, self.dtype) if self.recipe is None else _LowProducts(head_DV, self.recipe)


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


def chunk_logits(x_CD, head: "Products", bias_V, options: LogitOptions):
    """-> (logits float32 [C, V / devices], the ids of these tokens, a function that replaces entries of padding)."""
    vocab = options.vocab_size
    width = head.head_DV.shape[1]
    logits_CV = finish_logits(head.logits(x_CD), bias_V, options.multiplier, options.soft_cap)
    token_V = lax.axis_index(VOCAB_AXES) * width + jnp.arange(width)
    is_padded = width * lax.axis_size(VOCAB_AXES) > vocab

    def of_tokens(array_CV, otherwise):
        return jnp.where(token_V < vocab, array_CV, otherwise) if is_padded else array_CV

    return logits_CV, token_V, of_tokens


class Layout(NamedTuple):
    tokens: P
    """Of [B, T]."""
    split_over: tuple[str, ...]
    """Mesh axes that split the tokens."""
    sharing: tuple[str, ...]
    """Of these, axes that split D too: the head is gathered over them in the region, in its own dtype."""
    head: P
    bias: P


def layout_of(labels_BT) -> Layout:
    tokens = activation_spec(labels_BT.shape, ("batch", "time"))
    split_over = tuple(axis for entry in tokens for axis in axes_of(entry))
    sharing = tuple(axis for axis in WEIGHT_AXES["embed"] if axis in split_over)
    bias = local_weight_spec(("vocab",), free_axes())
    return Layout(tokens, split_over, sharing, P(entry_of(sharing), bias[0]), bias)


def num_chunks(num_tokens: int, head_DV, max_chunk_bytes: int) -> int:
    """The fewest chunks whose logits fit; a chunk has at least one token."""

    def fits(n: int) -> bool:
        return num_tokens % n == 0 and num_tokens // n * head_DV.shape[1] * 4 <= max_chunk_bytes

    return next((n for n in range(1, num_tokens) if fits(n)), num_tokens)


class Products:
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


class _LowProducts(Products):
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
