"""The weights that the programs of an engine read: an array per layer, in the compute dtype, or in 8 or 4 bits, and for
queries, keys and values together (Model.joinable).

Joined, they are one product that reads its matrix where it is: with 256 rows of Llama-3 8B 48 us per layer, together
with the product of the output, instead of 78 (one H100, jaxlib 0.11.2).

They are loaded one array of one layer after the other, so that a model fits that needs nearly all of the memory, or
whose weights in the compute dtype would not fit.
"""

import dataclasses
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import stack_of
from megajax.checkpoint.piecewise import PiecewiseArray, StoredParameter
from megajax.checkpoint.verify import digest
from megajax.inference.config import WeightDtype
from megajax.mesh.sharding import parameter_spec, weight_spec
from megajax.models.model import Model
from megajax.ops.matmul import JoinedWeight
from megajax.parameters import Parameter, PerLayer, is_per_layer, name_of
from megajax.quantization.weights import Inputs, QuantizedWeight, WeightFormat, is_quantized
from megajax.training.reporting.console import format_bytes, format_count, format_seconds
from megajax.weights.sources import StoredWeights

logger = logging.getLogger("megajax")

READERS = 8  # threads; each holds an array of a layer on the host
LOG_SECONDS = 10.0  # between lines that say how much is loaded

FORMATS = {"int8": WeightFormat("int8", "unchanged"), "float8": WeightFormat("float8", "by_rows")}


def serving_weights(model: Model, params: dict, weights: WeightDtype, mesh: Mesh) -> dict:
    """Weights, stacked or per layer, as programs read them: per layer, matrices in the compute dtype or quantised.
    Those that are already quantised are unchanged."""
    format = FORMATS.get(weights)

    def prepared(node, abstract: jax.ShapeDtypeStruct, record: Parameter):
        if not is_per_layer(node):
            return node.astype(abstract.dtype)
        return PerLayer(tuple(of_layer(a, abstract.dtype, record) for a in node.arrays))

    def of_layer(array, dtype, record: Parameter):
        if isinstance(array, QuantizedWeight | JoinedWeight):
            return array
        array = array.astype(dtype)
        return _quantized(array, _of_layer(record), format, mesh) if format and record.is_quantizable else array

    abstract = model.cast_weights(model.precision.compute_dtype)
    found = jax.tree.map(prepared, model.per_layer(params), abstract, model.records, is_leaf=is_per_layer)
    return joined_layers(model, found)


def joined_layers(model: Model, params: dict) -> dict:
    """The weights of each layer, with those that are multiplied side by side as JoinedWeights."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_per_layer)
    found = {name_of(path): node for path, node in leaves}
    for names, shape, axis in model.joinable():
        layers = zip(*(found[name].arrays for name in names), strict=True)
        joined = [_joined(matrices, shape, axis) for matrices in layers]
        found |= {name: PerLayer(arrays) for name, arrays in zip(names, zip(*joined, strict=True), strict=True)}
    return jax.tree.unflatten(structure, found.values())


def _joined(matrices: tuple, shape: tuple[int, ...], axis: int) -> tuple:
    """The matrices as JoinedWeights; unchanged if they are, or cannot be."""
    if isinstance(matrices[0], JoinedWeight):
        return matrices
    return _join(matrices, shape, axis) or matrices


@functools.partial(jax.jit, static_argnames=("shape", "axis"))
def _join(matrices: tuple, shape: tuple[int, ...], axis: int) -> tuple | None:
    return JoinedWeight.of(matrices, shape, axis)


def restore_weights(
    source: StoredWeights, model: Model, mesh: Mesh, weights: WeightDtype, replaced: dict | None = None, *,
    joins: bool = False
) -> dict:  # fmt: skip
    """The weights of a source as programs read them, sharded over the mesh: an array per layer, in the compute dtype or
    in 8 bits.

    Each of these arrays is read, verified, cast and quantised on its own, the largest ones first, so that the devices
    never hold much more than the result. Levels that the source has in this dtype are taken over as they are. replaced:
    weights of this form that are no longer needed; each is deleted before the one that takes its place is read. joins:
    whether matrices that are multiplied side by side become JoinedWeights.

    Raises ValueError for weights that are damaged or not finite.
    """
    loader = Loader(source, model, mesh, weights, joins=joins)
    params = loader.load(replaced or {})
    loader.log(params)
    return params


def check_weights(source: StoredWeights, model: Model, mesh: Mesh, weights: WeightDtype) -> dict:
    """Reads all weights and keeps none -> abstract arrays like the result of `restore_weights`. Raises what it
    raises."""
    return Loader(source, model, mesh, weights).load({}, keeps=False)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The array of a layer, or one that is in no layer."""

    name: str
    number: int
    """Among the parts of the parameter, in the order in which they are stored."""
    layer: int | None
    stored: PiecewiseArray
    record: Parameter
    """Of this array."""
    dtype: jnp.dtype
    """Of the result, if it is not quantised."""
    is_quantizable: bool


class Loader:
    def __init__(self, source: StoredWeights, model: Model, mesh: Mesh, weights: WeightDtype, *, joins: bool = False):
        self._source = source
        self._model = model
        self._mesh = mesh
        self._format = FORMATS.get(weights)
        self._stored_format = None if weights == "compute" else source.weight_format
        stored = self._stored_format
        self._has_levels = stored is not None and (self._format is None or self._format.dtype == stored.dtype)
        self._start = time.perf_counter()
        self._num_bytes = 0
        self._joinable = {name: joint for joint in model.joinable() for name in joint[0]} if joins else {}

    def load(self, replaced: dict, keeps: bool = True) -> dict:
        """keeps: whether the result has arrays, or abstract ones."""
        opened, parts = self._open()
        self._num_bytes = sum(part.stored.nbytes for part in parts)
        places = self._places(replaced)
        found: dict[tuple[str, int | None], Any] = {}
        sums: dict[str, list[jax.Array]] = {name: [] for name in opened}
        num_read = 0
        logged = self._start
        with ThreadPoolExecutor(READERS) as readers:
            for part, array in _read_ahead(readers, functools.partial(self._read, places=places), parts):
                wanted = opened[part.name].digest
                found_sum = self.checked(part, array, wanted is not None)
                if found_sum is not None:
                    sums[part.name].append(found_sum)
                if wanted is not None and len(sums[part.name]) == len(opened[part.name].parts):
                    self._compare(part.name, sums[part.name], wanted)
                convert = functools.partial(self._converted, part)
                found[part.name, part.layer] = convert(array) if keeps else jax.eval_shape(convert, array)
                if part.layer is not None:
                    found |= self._completed(part.name, part.layer, found)
                num_read += part.stored.nbytes
                if time.perf_counter() - logged > LOG_SECONDS:
                    logged = time.perf_counter()
                    sizes = (format_bytes(num_read), format_bytes(self._num_bytes))
                    logger.info("loading %s: %s of %s", self._source, *sizes)
        return self._assembled(found) if keeps else jax.eval_shape(self._assembled, found)

    def _open(self) -> tuple[dict[str, StoredParameter], list[_Part]]:
        """The parameters by name, and what is read of them, in this order."""
        abstract = self._model.cast_weights(self._model.precision.compute_dtype)
        opened = {}
        parts = []
        leaves = jax.tree_util.tree_leaves_with_path(abstract)
        for (path, leaf), record in zip(leaves, jax.tree.leaves(self._model.records), strict=True):
            name = name_of(path)
            opened[name] = self._source.open(name, self._model.layer_rows)
            for number, (layer, stored) in enumerate(opened[name].parts):
                of_part = record if layer is None else _of_layer(record)
                parts.append(_Part(name, number, layer, stored, of_part, leaf.dtype, record.is_quantizable))
        # Casting and rounding take memory beside an array. At the end, when there is little left, the arrays are small.
        return opened, sorted(parts, key=lambda part: -part.stored.nbytes)

    def _places(self, params: dict) -> dict[tuple[str, int | None], Any]:
        """Each array of these weights by name and layer."""
        places = {}
        for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict)):
            name = name_of(path)
            arrays = zip(self._layers(name), node.arrays, strict=True) if is_per_layer(node) else [(None, node)]
            places |= {(name, layer): array for layer, array in arrays}
        return places

    def _layers(self, name: str) -> list[int]:
        rows = self._model.layer_rows
        stack = stack_of(name, rows)
        return [] if stack is None else rows[stack].tolist()

    def _read(self, part: _Part, places: dict) -> jax.Array | QuantizedWeight:
        """On the devices, as it is stored. Called by several threads."""
        for array in jax.tree.leaves(places.get((part.name, part.layer))):
            array.delete()
        try:
            if self._has_levels and part.is_quantizable:
                levels = self._source.levels(part.name, part.layer)
                if levels is not None:
                    return _put_levels(levels, part.record, self._mesh)
            return _put(part.stored, NamedSharding(self._mesh, parameter_spec(part.record, self._mesh.shape)))
        except (ValueError, OSError) as error:
            problem = str(error).strip().splitlines()[0]
            raise ValueError(f"{self._source} cannot be read ({part.name}: {problem}); use other weights") from error

    def checked(self, part: _Part, array: jax.Array | QuantizedWeight, has_digest: bool) -> jax.Array | None:
        """The digest of a part, if there is one to compare with."""
        first = np.uint32(part.number * part.stored.size % 2**32)
        sums, is_finite = _sums(array, first) if has_digest else (None, _is_finite(array))
        if not is_finite:
            layer = "" if part.layer is None else f" of layer {part.layer}"
            raise ValueError(f"{self._source}: {part.name}{layer} has numbers that are not finite; use other weights")
        return sums

    def _compare(self, name: str, sums: list[jax.Array], wanted: list[int]) -> None:
        if np.sum(jax.device_get(sums), axis=0, dtype=np.uint32).tolist() != wanted:
            raise ValueError(f"{self._source} is damaged: {name} is not what was saved; use another step")

    def _converted(self, part: _Part, array: jax.Array | QuantizedWeight) -> jax.Array | QuantizedWeight:
        if isinstance(array, QuantizedWeight):
            if self._format is None:
                return array
            return dataclasses.replace(array, input_scale=None, inputs=self._format.inputs)
        array = array if array.dtype == part.dtype else _cast(array, part.dtype)
        if self._format is not None and part.is_quantizable:
            array = _quantized(array, part.record, self._format, self._mesh)
        return array

    def _completed(self, name: str, layer: int, found: dict) -> dict:
        """The matrices that are stored together with this one, joined once all of them are there."""
        names, shape, axis = self._joinable.get(name, ((), (), 0))
        keys = [(name, layer) for name in names]
        if not keys or not all(key in found for key in keys):
            return {}
        return dict(zip(keys, _joined(tuple(found[key] for key in keys), shape, axis), strict=True))

    def _assembled(self, found: dict[tuple[str, int | None], Any]) -> dict:
        def whole(path, record: Parameter):
            name = name_of(path)
            if (name, None) in found:
                return found[name, None]
            layers = PerLayer(tuple(found[name, layer] for layer in self._layers(name)))
            return layers if record.axes[0] == "layers" else layers.stacked()

        return jax.tree_util.tree_map_with_path(whole, self._model.records)

    def log(self, params: dict) -> None:
        seconds = time.perf_counter() - self._start
        logger.info("loaded %s: %s in %s", self._source, format_bytes(self._num_bytes), format_seconds(seconds))
        format = self._format or self._stored_format
        if format is None:
            return
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        dtype = format.dtype
        rounded = sum(leaf.size for leaf in leaves if is_quantized(leaf))
        whole = sum(leaf.size for leaf in leaves)
        logger.info("%s of %s parameters are in %s", format_count(rounded), format_count(whole), dtype)
        if self._format is None and format.inputs != "unchanged":
            logger.info(
                "weight_dtype=auto: the inputs of products are rounded to %s, as the folder says; weight_dtype=%s "
                "leaves them in %s, which decodes faster", dtype, dtype, self._model.precision.compute,
            )  # fmt: skip
        records = jax.tree.leaves(self._model.records)
        if any(record.role == "matrix" and "experts" in record.axes for record in records):
            logger.warning("weight_dtype=%s: the matrices of experts stay in %s", dtype, self._model.precision.compute)


def _read_ahead(readers: ThreadPoolExecutor, read: Callable, parts: Iterable[_Part]) -> Iterator[tuple[_Part, Any]]:
    """(part, read(part)) of each part, in order; the threads are up to READERS parts ahead."""
    started: deque[tuple[_Part, Future]] = deque()
    for part in parts:
        started.append((part, readers.submit(read, part)))
        if len(started) > READERS:
            earlier, reading = started.popleft()
            yield earlier, reading.result()
    for earlier, reading in started:
        yield earlier, reading.result()


@jax.jit
def _sums(array: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> (digest of an array that begins at the element `first`, whether all of its numbers are finite)."""
    return digest(array, first), jnp.isfinite(array).all()


@jax.jit
def _is_finite(array: jax.Array | QuantizedWeight) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(array) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return array.astype(dtype)


def _of_layer(record: Parameter) -> Parameter:
    return dataclasses.replace(record, axes=record.axes[1:])


def _put(stored: PiecewiseArray, sharding: NamedSharding) -> jax.Array:
    """Sends the array in the order in which it is in memory, and transposes it on the devices."""
    axes = tuple(range(len(stored.shape)))
    order = stored.order or axes
    inverse = tuple(map(order.index, axes))
    spec = (*sharding.spec, *[None] * (len(axes) - len(sharding.spec)))

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        places = index or ()
        part = stored.read(tuple(places[axis] for axis in inverse))
        return np.asarray(part.transpose(order), order="C")

    shape = tuple(stored.shape[axis] for axis in order)
    in_order = NamedSharding(sharding.mesh, P(*(spec[axis] for axis in order)))
    array = jax.make_array_from_callback(shape, in_order, read)
    return array if order == axes else _transposer(inverse, sharding)(array)


@functools.cache
def _transposer(axes: tuple[int, ...], sharding: NamedSharding):
    return jax.jit(lambda array: array.transpose(axes), out_shardings=sharding)


def _put_levels(levels: QuantizedWeight, record: Parameter, mesh: Mesh) -> QuantizedWeight:
    """levels: with arrays of NumPy. Raises ValueError if the mesh splits groups of inputs."""
    _check_groups(levels, NamedSharding(mesh, _outputs_first(record)))

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, levels, shardings_of(record, levels.inputs, mesh, has_zero=levels.zero is not None))


def _check_groups(levels: QuantizedWeight, sharding: NamedSharding) -> None:
    """sharding: of the values."""
    num_groups = len(levels.scale)
    shape = levels.values.shape
    of_device, whole = (math.prod(of[levels.num_outputs :]) for of in (sharding.shard_shape(shape), shape))
    if num_groups > 1 and of_device * num_groups % whole:
        raise ValueError(
            f"the mesh splits groups of {levels.size // levels.scale.size} inputs: decrease mesh.tensor or mesh.fsdp, "
            "or set weight_dtype=compute"
        )


def _quantized(matrix: jax.Array, record: Parameter, format: WeightFormat, mesh: Mesh) -> QuantizedWeight:
    return _quantizer(record, format, mesh)(matrix)


@functools.cache
def _quantizer(record: Parameter, format: WeightFormat, mesh: Mesh):
    def of(matrix: jax.Array) -> QuantizedWeight:
        return QuantizedWeight.of(matrix, record.num_inputs, format)

    return jax.jit(of, out_shardings=shardings_of(record, format.inputs, mesh))


def shardings_of(record: Parameter, inputs: Inputs, mesh: Mesh, *, has_zero: bool = False) -> QuantizedWeight:
    """Of the arrays of a matrix with this record, on these devices."""

    def over(*entries) -> Any:  # a sharding in the place of its array
        return NamedSharding(mesh, P(*entries))

    of_input = over() if inputs == "static" else None
    of_groups = over(None, *weight_spec(record.axes)[record.num_inputs :])
    zero = of_groups if has_zero else None
    return QuantizedWeight(over(*_outputs_first(record)), of_groups, of_input, inputs, zero)


def _outputs_first(record: Parameter) -> P:
    """Of the values of a QuantizedWeight."""
    spec = tuple(weight_spec(record.axes))
    return P(*spec[record.num_inputs :], *spec[: record.num_inputs])
