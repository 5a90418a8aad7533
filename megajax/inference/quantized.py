"""The weights that the programs of an engine read: an array per layer, in the compute dtype or in 8 bits.

Weights are quantised while they are loaded, one matrix of one layer after the other, so that a model fits whose weights
in the compute dtype would not.
"""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import stack_of
from megajax.checkpoint.piecewise import PiecewiseArray
from megajax.inference.config import WeightDtype
from megajax.models.model import Model
from megajax.ops.quantized_matmul import DTYPES, QuantizedWeight, WeightFormat, is_quantized
from megajax.parameters import Parameter, PerLayer, is_per_layer, name_of
from megajax.sharding import weight_spec
from megajax.sources import Source
from megajax.training.reporting.console import format_count

logger = logging.getLogger("megajax")

FORMATS = {dtype: WeightFormat(dtype, "unchanged") for dtype in DTYPES}


def serving_weights(model: Model, params: dict, weights: WeightDtype, mesh: Mesh) -> dict:
    """Weights, stacked or per layer, as programs read them: per layer, matrices in the compute dtype or quantised.
    Those that are already quantised are unchanged."""
    format = FORMATS.get(weights)

    def prepared(node, abstract: jax.ShapeDtypeStruct, record: Parameter):
        if not is_per_layer(node):
            return node.astype(abstract.dtype)
        return PerLayer(tuple(of_layer(a, abstract.dtype, record) for a in node.arrays))

    def of_layer(array, dtype, record: Parameter):
        if is_quantized(array):
            return array
        array = array.astype(dtype)
        return _quantized(array, _of_layer(record), format, mesh) if format and record.is_quantizable else array

    abstract = model.cast_weights(model.precision.compute_dtype)
    return jax.tree.map(prepared, model.per_layer(params), abstract, model.records, is_leaf=is_per_layer)


def restore_quantized(source: Source, model: Model, mesh: Mesh, weights: WeightDtype) -> dict:
    """The weights of a source per layer, sharded over the mesh, with matrices of layers in 8 bits.

    At any time at most one matrix of one layer is on the devices in the compute dtype. Levels that the source has in
    this dtype are taken over as they are.
    """
    format = FORMATS.get(weights)
    stored = source.weight_format
    has_levels = stored is not None and (format is None or format.dtype == stored.dtype)
    abstract = model.cast_weights(model.precision.compute_dtype)
    counts = {True: 0, False: 0}

    def load(path, leaf: jax.ShapeDtypeStruct, record: Parameter):
        name = name_of(path)
        stack = stack_of(name, model.layer_rows)
        numbers = [None] if stack is None else model.layer_rows[stack].tolist()
        of_layer = record if stack is None else _of_layer(record)
        arrays = source.open(name, model.layer_rows)
        found = []
        for number, array in zip(numbers, arrays, strict=True):
            levels = source.levels(name, number) if has_levels and record.is_quantizable else None
            if levels is not None:
                if format is not None:
                    levels = dataclasses.replace(levels, input_scale=None, inputs=format.inputs)
                found.append(_put_levels(levels, of_layer, mesh))
                continue
            found.append(_put(array, leaf.dtype, NamedSharding(mesh, weight_spec(of_layer.axes))))
            if format is not None and record.is_quantizable:
                found[-1] = jax.block_until_ready(_quantized(found[-1], of_layer, format, mesh))
        counts[is_quantized(found[0])] += leaf.size
        return found[0] if stack is None else PerLayer(tuple(found))

    params = jax.tree_util.tree_map_with_path(load, abstract, model.records)
    dtype = (format or stored).dtype
    sizes = (format_count(counts[True]), format_count(sum(counts.values())))
    logger.info("loaded %s: %s of %s parameters in %s", source, *sizes, dtype)
    if format is None and stored.inputs != "unchanged":
        logger.info(
            "weight_dtype=auto: the inputs of products are rounded to %s, as the folder says; weight_dtype=%s leaves "
            "them in %s, which decodes faster", dtype, dtype, model.precision.compute,
        )  # fmt: skip
    if any(record.role == "matrix" and "experts" in record.axes for record in jax.tree.leaves(model.records)):
        logger.warning("weight_dtype=%s: the matrices of experts stay in %s", dtype, model.precision.compute)
    return params


def _of_layer(record: Parameter) -> Parameter:
    return dataclasses.replace(record, axes=record.axes[1:])


def _put(array: PiecewiseArray, dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array.read(index), dtype))


def _put_levels(levels: QuantizedWeight, record: Parameter, mesh: Mesh) -> QuantizedWeight:
    """levels: with arrays of NumPy."""

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, levels, _shardings(record, levels.inputs, mesh))


def _quantized(matrix: jax.Array, record: Parameter, format: WeightFormat, mesh: Mesh) -> QuantizedWeight:
    return _quantizer(record, format, mesh)(matrix)


@functools.cache
def _quantizer(record: Parameter, format: WeightFormat, mesh: Mesh):
    def of(matrix: jax.Array) -> QuantizedWeight:
        return QuantizedWeight.of(matrix, record.num_inputs, format)

    return jax.jit(of, out_shardings=_shardings(record, format.inputs, mesh))


def _shardings(record: Parameter, inputs: str, mesh: Mesh) -> QuantizedWeight:
    """Of the values, the scale and the input scale of a matrix with this record."""
    spec = tuple(weight_spec(record.axes))
    outputs = spec[record.num_inputs :]

    def over(*entries) -> NamedSharding:
        return NamedSharding(mesh, P(*entries))

    of_input = over() if inputs == "static" else None
    return QuantizedWeight(over(*outputs, *spec[: record.num_inputs]), over(*outputs), of_input, inputs)
