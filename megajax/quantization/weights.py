"""Matrices in 8 and 4 bits, and products with them.

Formats (formats.py): int8, symmetric, with levels -127 to 127; float8 is e4m3. A matrix has a float32 scale per
output, value = scale * level. Its inputs are multiplied as they are, or are rounded to the format of the matrix first:
with a scale per token that is found while computing (dynamic), in all products or in those of many tokens (by_rows), or
with one scale that was calibrated before (static).

Folders in AWQ and GPTQ have int4, levels -8 to 7, with a scale for each group of inputs of an output, and inputs that
are multiplied as they are.
"""

import dataclasses
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from megajax.quantization.formats import scale_of, to_levels

Inputs = Literal["unchanged", "dynamic", "by_rows", "static"]

# Up to here products take about as long as reading the matrix, with unchanged inputs too, and rounding adds kernels.
# Llama-3's matrix [4096, 28672] in float8 on one H100, 32 rows: 47 us, and 43 rounded; with what is around them 53 and
# 60. 8,192 rows take 2,770 us in bfloat16 and 1,340 in float8.
FEW_ROWS = 32

DTYPES = {"int8": jnp.dtype(jnp.int8), "float8": jnp.dtype(jnp.float8_e4m3fn)}


class WeightFormat(NamedTuple):
    dtype: Literal["int8", "float8", "int4"]
    """Folders have int4; no matrix is rounded to it here."""
    inputs: Inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [*K, *N] in 8 or 4 bits, for programs that only read it. A layer passes it to `matmul` like an array.

    A weight is (level - zero) * scale. In 8 bits all inputs of an output share a scale, in 4 bits those of each of G
    groups of consecutive inputs share zero and scale.
    """

    values: jax.Array | np.ndarray
    """int8 or float8_e4m3fn [*N, *K]: the inputs are last, as the FP8 products of GPUs read them. In 4 bits uint8,
    with the levels of each group as `packed` writes them: the last dim has half its size."""
    scale: jax.Array | np.ndarray
    """float32 [1, *N]; of groups in the dtype of their folder, [G, *N]."""
    input_scale: jax.Array | np.ndarray | None
    """float32 scalar, for static inputs."""
    inputs: Inputs = dataclasses.field(metadata=dict(static=True))
    zero: jax.Array | np.ndarray | None = None
    """int8 [G, *N]; None: 0."""

    @staticmethod
    def of(matrix: jax.Array, num_inputs: int, format: WeightFormat, input_scale=None) -> "QuantizedWeight":
        """Rounds a matrix [*K, *N] with num_inputs dims K; the largest weight of each output is the largest level."""
        dtype = DTYPES[format.dtype]
        scale = scale_of(matrix, dtype, range(num_inputs))
        levels = to_levels(matrix.astype(jnp.float32) / scale, dtype)
        outputs_first = (*range(num_inputs, matrix.ndim), *range(num_inputs))
        scale = scale.reshape(1, *matrix.shape[num_inputs:])
        return QuantizedWeight(levels.transpose(outputs_first), scale, input_scale, format.inputs)

    def __getitem__(self, key: EllipsisType) -> "QuantizedWeight":
        assert key is Ellipsis, key
        return self

    @property
    def num_outputs(self) -> int:
        """How many dims N are."""
        return self.scale.ndim - 1

    @property
    def is_in_4_bits(self) -> bool:
        return self.values.dtype == jnp.uint8

    @property
    def size(self) -> int:
        """Weights of the matrix."""
        return self.values.size * (2 if self.is_in_4_bits else 1)

    def specs(self, values: P, of_groups: P) -> Any:
        """The PartitionSpecs of its arrays, given those of the values and of what each group of inputs has."""
        zero = None if self.zero is None else of_groups
        input_scale = None if self.input_scale is None else P()
        specs: dict[str, Any] = dict(values=values, scale=of_groups, input_scale=input_scale, zero=zero)
        return dataclasses.replace(self, **specs)

    def rounds_inputs(self, num_rows: int) -> bool:
        """Whether the inputs of a product of this many rows are rounded to the format of the matrix."""
        return self.inputs != "unchanged" and (self.inputs != "by_rows" or num_rows > FEW_ROWS)

    def reshape(self, shape: Sequence[int]) -> "QuantizedWeight":
        """As of the matrix; its only dim of inputs stays."""
        assert self.values.ndim - self.num_outputs == 1, self.values.shape

        def reshaped(array: jax.Array) -> jax.Array:
            return array.reshape(array.shape[0], *shape[1:])

        values = self.values.reshape(*shape[1:], self.values.shape[-1])
        scale, zero = jax.tree.map(reshaped, (self.scale, self.zero))
        return dataclasses.replace(self, values=values, scale=scale, zero=zero)

    @staticmethod
    def joined(weights: Sequence["QuantizedWeight"], axis: int) -> "QuantizedWeight | None":
        """Those of matrices with one dim of inputs, side by side along `axis` of the matrix; None if their formats
        differ, or if each has an input scale of its own."""
        formats = {(jax.tree.structure(w), w.values.dtype, w.scale.dtype, w.scale.shape[0]) for w in weights}
        if len(formats) > 1 or any(w.input_scale is not None for w in weights):
            return None
        values = jnp.concatenate([w.values for w in weights], axis - 1)
        of_groups = [(w.scale, w.zero) for w in weights]
        scale, zero = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *of_groups)
        return dataclasses.replace(weights[0], values=values, scale=scale, zero=zero)

    def matrix(self) -> jax.Array:
        """float32 [*K, *N]."""
        full = self._dequantized(jnp.float32)
        return full.transpose((*range(self.num_outputs, full.ndim), *range(self.num_outputs)))

    def _dequantized(self, dtype: jnp.dtype) -> jax.Array:
        """[*N, *K]; computed in float32."""
        levels = self._levels()
        of_groups = levels.astype(jnp.float32).reshape(*self.scale.shape[1:], self.scale.shape[0], -1)
        zero, scale = jax.tree.map(_beside_inputs, (self.zero, self.scale))
        of_groups = of_groups if zero is None else of_groups - zero
        return (of_groups * scale).astype(dtype).reshape(levels.shape)

    def _levels(self) -> jax.Array:
        """int8 or float8_e4m3fn [*N, *K].

        Not by a bitcast to int4: Triton's products of that are wrong (jaxlib 0.11.2, 2 to 32 rows on an H100).
        """
        if not self.is_in_4_bits:
            return jnp.asarray(self.values)
        values = jnp.asarray(self.values)
        pairs = _reordered(values.reshape(*self.scale.shape[1:], self.scale.shape[0], -1))
        first = jax.lax.bitcast_convert_type((pairs & 15) ^ 8, jnp.int8) - jnp.int8(8)
        second = jax.lax.bitcast_convert_type(pairs, jnp.int8) >> 4
        return jnp.concatenate([first, second], -1).reshape(*values.shape[:-1], -1)

    def multiply(self, x: jax.Array, num_inputs: int = 1) -> jax.Array:
        """x [..., *K] -> [..., *N] in x's dtype.

        In 8 bits the scales are applied to the product, in float32. With unchanged inputs the levels are cast to x's
        dtype, in which bfloat16 holds all of them; Triton's products include the cast, and so read 8 bits per weight.
        cuBLAS reads a copy of the matrix in x's dtype. Products of levels in float8 are rounded to bfloat16 before the
        scales are applied, if x has this dtype.

        In 4 bits a product has a copy of the matrix in x's dtype: Triton's products include nothing that depends on the
        scales. ops/four_bits.py multiplies up to 512 rows without one.
        """
        assert num_inputs == self.values.ndim - self.num_outputs, (num_inputs, self.values.shape, self.scale.shape)
        contracted = tuple(range(x.ndim - num_inputs, x.ndim))
        inputs = x.shape[contracted[0] :]
        assert math.prod((*inputs, *self.scale.shape[1:])) == self.size, (x.shape, self.values.shape)
        dims = (contracted, tuple(range(self.num_outputs, self.values.ndim))), ((), ())
        if not self.rounds_inputs(math.prod(x.shape[: contracted[0]])):
            factor = self._dequantized(x.dtype) if self.is_in_4_bits else self.values.astype(x.dtype)
            product = jax.lax.dot_general(
                x, factor, dims, precision=_precision(x.dtype), preferred_element_type=jnp.float32
            )
            return (product if self.is_in_4_bits else product * self.scale[0]).astype(x.dtype)
        scale = scale_of(x, self.values.dtype, contracted) if self.input_scale is None else self.input_scale
        levels = to_levels(x.astype(jnp.float32) / scale, self.values.dtype)
        of_levels = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32  # float16 could not hold them
        product_dtype = jnp.int32 if levels.dtype == jnp.int8 else of_levels
        product = jax.lax.dot_general(levels, self.values, dims, preferred_element_type=product_dtype)
        if self.input_scale is None:
            scale = scale.reshape(*x.shape[: contracted[0]], *[1] * self.num_outputs)
        return (product.astype(jnp.float32) * scale * self.scale[0]).astype(x.dtype)


def packed(levels: np.ndarray) -> np.ndarray:
    """The levels of a group in 4 bits: integers [..., I] from -8 to 7 -> uint8 [..., I / 2].

    The first half is in the lower bits, the second half in the upper ones, both as int4. Bytes are in the order that
    pallas_kernels/four_bits.py reads without an exchange between threads.
    """
    halves = (levels.astype(np.uint8) & 15).reshape(*levels.shape[:-1], 2, -1)
    return _reordered(halves[..., 0, :] | halves[..., 1, :] << 4)


def _reordered(pairs):
    """[..., B] of NumPy or JAX: the eight pairs of each 16 bytes in bit-reversed order, which is its own inverse; as
    they are unless B is a multiple of 16."""
    if pairs.shape[-1] % 16:
        return pairs
    return pairs.reshape(*pairs.shape[:-1], -1, 2, 2, 2, 2).swapaxes(-4, -2).reshape(pairs.shape)


def _beside_inputs(of_groups: jax.Array | np.ndarray) -> jax.Array:
    """[G, *N] -> float32 [*N, G, 1]."""
    return jnp.moveaxis(of_groups.astype(jnp.float32), 0, -1)[..., None]


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def is_quantized(node) -> bool:
    return isinstance(node, QuantizedWeight)
