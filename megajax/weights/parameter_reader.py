"""Reads any part of our parameters from the tensors of another framework."""

import functools
from collections.abc import Callable, Mapping

import jax
import ml_dtypes
import numpy as np

from megajax.checkpoint.layout import Rows, stack_of
from megajax.checkpoint.piecewise import Index, PiecewiseArray, pieces
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.weights.tensor_map import Tensor, WeightMap


class ParameterReader:
    """Memory holds what is asked for, and the arrays that `array_of` gives."""

    def __init__(
        self,
        weights: WeightMap,
        array_of: Callable[[Tensor], np.ndarray],
        dtype_of: Callable[[Tensor], np.dtype],
        describe: Callable[[Tensor], str],
    ):
        """array_of: a tensor with the shape that the map gives it, maybe a mapped file. describe: for messages."""
        self.map = weights
        self._array_of = array_of
        self._dtype_of = dtype_of
        self._describe = describe

    @functools.cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """Of our parameters as they are there, by name; float32 if the tensors of one differ."""
        found: dict[str, np.dtype] = {}
        for (name, _), (tensor, _) in self.map.source.items():
            dtype = self._dtype_of(tensor)
            found[name] = dtype if found.get(name, dtype) == dtype else np.dtype(np.float32)
        return found

    def read(self, name: str, numbers: np.ndarray | None, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of one of our parameters, in memory in the order of the tensors: a copy without transposition.

        numbers: layer index of each row of its leading dims, -1 for padding; None for a parameter outside the layers.
        Raises ValueError for a number that is not finite.
        """
        lead = 0 if numbers is None else numbers.ndim
        wanted = np.array(-1) if numbers is None else numbers[index[:lead]]
        index = index[lead:]
        padded = self.map.shapes[name][1 if lead else 0 :]
        sizes = [len(np.arange(size)[part]) for size, part in zip(padded, index, strict=True)]
        some_layer = () if numbers is None else (int(numbers.max()),)
        order = self.order(name, some_layer)
        out = np.zeros((*wanted.shape, *(sizes[axis] for axis in order)), dtype)
        out = out.transpose(*range(wanted.ndim), *(wanted.ndim + order.index(axis) for axis in range(len(order))))
        for row in np.ndindex(wanted.shape):
            layer = int(wanted[row])
            if layer >= 0 or not lead:
                self._fill(out[row], name, (layer,) if lead else (), index)
        return out

    def restore(self, abstract: dict, layer_rows: Rows) -> dict:
        """The parameters with the dtypes and shardings of the abstract arrays; each device reads its shard.
        layer_rows: layer number of each of their rows."""

        def load(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = name_of(path)
            stack = stack_of(name, layer_rows)
            numbers = None if stack is None else layer_rows[stack]

            def read(index):
                return self.read(name, numbers, index, leaf.dtype)

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

        return jax.tree_util.tree_map_with_path(load, abstract)

    def order(self, name: str, at: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of the parameter `at` a layer in the order in which the tensors have them, outermost first. Most
        matrices are transposed there."""
        if (name, at) not in self.map.source:
            return (0, *(axis + 1 for axis in self.order(name, (*at, 0))))  # of experts, each a tensor
        tensor, number = self.map.source[name, at]
        strides = tensor.split(np.empty(tensor.shape, np.uint8))[number].strides
        return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))

    def _fill(self, out: np.ndarray, name: str, at: tuple[int, ...], index: Index) -> None:
        """Reads a part of the parameter `at` a layer or expert; what remains of `out` is padding of the vocabulary."""
        if (name, at) in self.map.source:
            tensor, number = self.map.source[name, at]
            piece = tensor.split(self._array_of(tensor))[number][index]
            read = out[tuple(map(slice, piece.shape))]
            read[...] = piece
            check_finite(self._describe(tensor), read)
            return
        experts = np.arange(self.map.shapes[name][len(at)])[index[0]].tolist()  # each is a tensor of its own
        for row, expert in zip(out, experts, strict=True):
            self._fill(row, name, (*at, expert), index[1:])

    def array(self, name: str, dtype: np.dtype) -> PiecewiseArray:
        """One of our parameters, with the layers in order."""
        numbers = self.map.layers_of(name)
        return PiecewiseArray(self.map.shapes[name], dtype, lambda index: self.read(name, numbers, index, dtype))

    def piecewise(self, model: Model, dtypes: Mapping[str, np.dtype]) -> dict:
        """Nested dict of all parameters. dtypes: by name."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self.array(name_of(path), dtypes[name_of(path)]), model.abstract_weights
        )


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises ValueError, naming the tensor, if it has an infinity or a NaN: as integers these are the largest."""
    if array.dtype.kind in "iu":
        return
    bits = array.view(f"u{array.dtype.itemsize}")
    magnitude = np.iinfo(bits.dtype).max >> 1
    largest = np.array(ml_dtypes.finfo(array.dtype).max, array.dtype).view(bits.dtype)
    for piece in pieces(bits.shape, bits.dtype):
        if (bits[piece] & magnitude).max(initial=0) > largest:
            raise ValueError(
                f"tensor {name} has values that are not finite in {array.dtype}: the model cannot be computed; "
                "copy the weights again, or take others"
            )
