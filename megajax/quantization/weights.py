"""Matrices in 8 bits, and products with them.

Formats (formats.py): int8, symmetric, with levels -127 to 127; float8 is e4m3. A matrix has a float32 scale per
output, value = scale * level. Its inputs are multiplied as they are, or are rounded to the format of the matrix first:
with a scale per token that is found while computing (dynamic), or with one scale that was calibrated before (static).
"""

import dataclasses
from collections.abc import Sequence
from types import EllipsisType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.quantization.formats import scale_of, to_levels

Inputs = Literal["unchanged", "dynamic", "static"]

DTYPES = {"int8": jnp.dtype(jnp.int8), "float8": jnp.dtype(jnp.float8_e4m3fn)}


class WeightFormat(NamedTuple):
    dtype: Literal["int8", "float8"]
    inputs: Inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [*K, *N] in 8 bits, for programs that only read it. A layer passes it to `matmul` like an array."""

    values: jax.Array | np.ndarray
    """int8 or float8_e4m3fn [*N, *K]: the inputs are last, as the FP8 products of GPUs read them."""
    scale: jax.Array | np.ndarray
    """float32 [*N]."""
    input_scale: jax.Array | np.ndarray | None
    """float32 scalar, for static inputs."""
    inputs: Inputs = dataclasses.field(metadata=dict(static=True))

    @staticmethod
    def of(matrix: jax.Array, num_inputs: int, format: WeightFormat, input_scale=None) -> "QuantizedWeight":
        """Rounds a matrix [*K, *N] with num_inputs dims K; the largest weight of each output is the largest level."""
        dtype = DTYPES[format.dtype]
        scale = scale_of(matrix, dtype, range(num_inputs))
        levels = to_levels(matrix.astype(jnp.float32) / scale, dtype)
        outputs_first = (*range(num_inputs, matrix.ndim), *range(num_inputs))
        scale = scale.reshape(matrix.shape[num_inputs:])
        return QuantizedWeight(levels.transpose(outputs_first), scale, input_scale, format.inputs)

    def __getitem__(self, key: EllipsisType) -> "QuantizedWeight":
        assert key is Ellipsis, key
        return self

    def reshape(self, shape: Sequence[int]) -> "QuantizedWeight":
        """As of the matrix; its only dim of inputs stays."""
        assert self.values.ndim - self.scale.ndim == 1, self.values.shape
        outputs = self.scale.reshape(shape[1:])
        values = self.values.reshape(*outputs.shape, self.values.shape[-1])
        return dataclasses.replace(self, values=values, scale=outputs)

    @staticmethod
    def joined(weights: Sequence["QuantizedWeight"], axis: int) -> "QuantizedWeight | None":
        """Those of matrices with one dim of inputs, side by side along `axis` of the matrix; None if their formats
        differ, or if each has an input scale of its own."""
        formats = {(w.values.dtype, w.inputs) for w in weights}
        if len(formats) > 1 or any(w.input_scale is not None for w in weights):
            return None
        values = jnp.concatenate([w.values for w in weights], axis - 1)
        return dataclasses.replace(
            weights[0], values=values, scale=jnp.concatenate([w.scale for w in weights], axis - 1)
        )

    def matrix(self) -> jax.Array:
        """float32 [*K, *N]."""
        outputs = self.scale.ndim
        full = jnp.asarray(self.values, jnp.float32) * jnp.expand_dims(self.scale, range(outputs, self.values.ndim))
        return full.transpose((*range(outputs, full.ndim), *range(outputs)))

    def multiply(self, x: jax.Array, num_inputs: int = 1) -> jax.Array:
        """x [..., *K] -> [..., *N] in x's dtype; scales are applied to the product, in float32.

        With unchanged inputs the levels are cast to x's dtype, in which bfloat16 holds all of them; Triton's products
        include the cast, and so read 8 bits per weight. cuBLAS reads a copy of the matrix in x's dtype.
        """
        assert num_inputs == self.values.ndim - self.scale.ndim, (num_inputs, self.values.shape, self.scale.shape)
        contracted = tuple(range(x.ndim - num_inputs, x.ndim))
        assert x.shape[contracted[0] :] == self.values.shape[self.scale.ndim :], (x.shape, self.values.shape)
        dims = (contracted, tuple(range(self.scale.ndim, self.values.ndim))), ((), ())
        if self.inputs == "unchanged":
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            product = jax.lax.dot_general(
                x, self.values.astype(x.dtype), dims, precision=precision, preferred_element_type=jnp.float32
            )
            return (product * self.scale).astype(x.dtype)
        scale = scale_of(x, self.values.dtype, contracted) if self.input_scale is None else self.input_scale
        levels = to_levels(x.astype(jnp.float32) / scale, self.values.dtype)
        accumulated = jnp.int32 if levels.dtype == jnp.int8 else jnp.float32
        product = jax.lax.dot_general(levels, self.values, dims, preferred_element_type=accumulated)
        if self.input_scale is None:
            scale = scale.reshape(*x.shape[: contracted[0]], *[1] * self.scale.ndim)
        return (product.astype(jnp.float32) * scale * self.scale).astype(x.dtype)


def is_quantized(node) -> bool:
    return isinstance(node, QuantizedWeight)
