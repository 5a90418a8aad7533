"""Finds the tensor that became non-finite first, by evaluating a computation equation by equation.

A non-finite output of finite inputs is an *origin*; a non-finite output of non-finite inputs inherits their origins; a
finite output has none, so that masked values are not reported. Infinities from constants (masks) are not reported; a
NaN computed from them is an origin.

A part of the computation (a jitted function, one iteration of a scan, a rule of custom differentiation) first runs
compiled, and equation by equation only if it turns finite inputs into non-finite outputs. A shard_map and a while loop
are never taken apart. Arrays are freed after their last use.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.mesh import compat

PACKAGE = Path(__file__).parents[2]
# Primitives that call a jaxpr once with their own inputs; shard_map does not.
CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "cond")


class Loop(NamedTuple):
    place: str
    """Source location, as in Origin.places."""
    iteration: int
    """Index into the scanned arrays; the backward pass, which runs in reverse, uses the same index."""
    length: int


class Found(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    largest: float
    """Largest magnitude of the finite elements."""


class Origin(NamedTuple):
    primitive: str
    """JAX's name of the operation; "argument" for a non-finite argument."""
    places: tuple[str, ...]
    """"file:line function", innermost first, without libraries; of an argument its path."""
    name_stack: str
    loops: tuple[Loop, ...]
    """Enclosing loops, outermost first."""
    output: Found
    inputs: tuple[Found, ...]
    """Inputs of float dtypes."""

    @property
    def backward(self) -> bool:
        return "transpose(" in self.name_stack


class _Value(NamedTuple):
    array: Any
    finite: bool
    nan: bool
    origins: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Where:
    """The context of an equation."""

    name_stack: str = ""
    places: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()


def find_origins(function: Callable, *arguments) -> tuple[Any, list[Origin]]:
    """-> (the result of the function, the origins of non-finite values in it, in order of computation).

    arguments: pytrees of arrays. Call it under the mesh of the function, in every process.
    """
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    search = _Search()
    named = jax.tree_util.tree_leaves_with_path(arguments)
    values = _look([array for _, array in named])
    values = [search.argument(path, value) for (path, _), value in zip(named, values, strict=True)]
    values = search.evaluate(jaxpr, values, _Where())
    reached = sorted(frozenset().union(*(value.origins for value in values)))
    outputs = jax.tree.unflatten(jax.tree.structure(result), [value.array for value in values])
    return outputs, [search.origins[number] for number in reached]


class _Search:
    def __init__(self):
        self.origins: list[Origin] = []

    def argument(self, path, value: _Value) -> _Value:
        where = _Where(places=(jax.tree_util.keystr(path),))
        return value if value.finite else self._new_origin("argument", value, [], where)

    def evaluate(self, closed_jaxpr, values: list[_Value], where: _Where) -> list[_Value]:
        """values: of the arguments; the list is emptied, so that they can be freed after their last use."""
        jaxpr = closed_jaxpr.jaxpr
        environment = dict(zip(jaxpr.constvars, _look(closed_jaxpr.consts), strict=True))
        environment |= zip(jaxpr.invars, values, strict=True)
        values.clear()

        def read(atom) -> _Value:
            return _look([atom.val])[0] if hasattr(atom, "val") else environment[atom]

        def variables(atoms) -> list:
            return [atom for atom in atoms if not hasattr(atom, "val")]

        last_use = {v: number for number, equation in enumerate(jaxpr.eqns) for v in variables(equation.invars)}
        last_use |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
        for number, equation in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in equation.invars]
            for variable in set(variables(equation.invars)):
                if last_use[variable] == number:
                    del environment[variable]
            outputs = self._equation(equation, inputs, where)
            environment |= {v: value for v, value in zip(equation.outvars, outputs, strict=True) if v in last_use}
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, inputs: list[_Value], where: _Where) -> list[_Value]:
        name_stack = "/".join(name for name in (where.name_stack, compat.name_stack_of(equation)) if name)
        where = dataclasses.replace(where, name_stack=name_stack, places=_places(equation) or where.places)
        name = equation.primitive.name
        params = equation.params
        if name == "scan" and params["length"]:
            return self._scan(params, inputs, where)
        run = compat.function_of_equation(equation)
        if not any(compat.is_jaxpr(param) for param in jax.tree.leaves(params, is_leaf=compat.is_jaxpr)):
            return self._outputs(name, run, None, inputs, where)
        part = params.get("jaxpr", params.get("call_jaxpr"))
        arguments = inputs
        if name == "cond":
            part = params["branches"][int(inputs[0].array)]
            arguments = inputs[1:]
        inside = None
        if name in CALLS and len(compat.closed(part).jaxpr.invars) == len(arguments):
            inside = functools.partial(self.evaluate, compat.closed(part), list(arguments), where)
        return self._outputs(name, jax.jit(run), inside, inputs, where)

    def _scan(self, params: dict, inputs: list[_Value], where: _Where) -> list[_Value]:
        body = params["jaxpr"]
        length = params["length"]
        num_constants, num_carried = compat.scan_counts(params)
        constants = inputs[:num_constants]
        carried = inputs[num_constants:][:num_carried]
        scanned = inputs[num_constants + num_carried :]
        collected = [None] * length
        inputs.clear()
        run = jax.jit(jax.extend.core.jaxpr_as_fun(body))
        for number in reversed(range(length)) if params["reverse"] else range(length):
            arguments = [*constants, *carried, *_rows_of(scanned, number)]
            loops = (*where.loops, Loop(where.places[0] if where.places else "", number, length))
            at = dataclasses.replace(where, loops=loops)
            inside = functools.partial(self.evaluate, body, list(arguments), at)
            outputs = self._outputs("scan", run, inside, arguments, at)
            carried = outputs[:num_carried]
            collected[number] = outputs[num_carried:]
        columns = list(zip(*collected, strict=True))
        arrays = _stack([[value.array for value in values] for values in columns])
        return [*carried, *(_joined(array, values) for array, values in zip(arrays, columns, strict=True))]

    def _outputs(
        self, name: str, run: Callable, inside: Callable | None, inputs: list[_Value], where: _Where
    ) -> list[_Value]:
        """The outputs of `run`. inside: the same computation, equation by equation."""
        outputs = _look(run(*(value.array for value in inputs)))
        carried = frozenset().union(*(value.origins for value in inputs))
        if carried or all(value.finite for value in outputs):
            return [value if value.finite else value._replace(origins=carried) for value in outputs]
        if inside is not None:
            found = inside()
            if all(compiled.finite or not plain.finite for compiled, plain in zip(outputs, found, strict=True)):
                return found
            # Finite equation by equation: only the compiled program gives non-finite values.
        # Without a float input an infinity is a constant.
        explained = any(not value.finite for value in inputs) or not any(_is_float(value.array) for value in inputs)
        explained_nan = any(value.nan for value in inputs)

        def is_origin(value: _Value) -> bool:
            return not value.finite and not (explained_nan if value.nan else explained)

        return [self._new_origin(name, value, inputs, where) if is_origin(value) else value for value in outputs]

    def _new_origin(self, primitive: str, value: _Value, inputs: list[_Value], where: _Where) -> _Value:
        floats = tuple(_found(value.array) for value in inputs if _is_float(value.array))
        origin = Origin(primitive, where.places, where.name_stack, where.loops, _found(value.array), floats)
        self.origins.append(origin)
        return value._replace(origins=frozenset({len(self.origins) - 1}))


def _look(arrays: Sequence) -> list[_Value]:
    """The arrays with their finite and NaN flags, without origins."""
    floats = [number for number, array in enumerate(arrays) if _is_float(array)]
    on_device = [number for number in floats if _on_device(arrays[number]) is arrays[number]]
    groups = [on_device] if on_device else []
    groups += [[number] for number in floats if number not in on_device]  # offloaded: they may not fit at the same time
    values = [_Value(array, True, False, frozenset()) for array in arrays]
    for group in groups:
        flags = np.asarray(_finite_and_nan([_on_device(arrays[number]) for number in group])).T
        for number, (finite, nan) in zip(group, flags.tolist(), strict=True):
            values[number] = values[number]._replace(finite=finite, nan=nan)
    return values


def _is_float(array) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact)


def _on_device(array):
    """A copy in device memory if the array is offloaded, because host memory cannot be computed on."""
    sharding = getattr(array, "sharding", None)
    if sharding is None or sharding.memory_kind is None:
        return array
    kind = next(iter(sharding.device_set)).default_memory().kind
    return array if sharding.memory_kind == kind else jax.device_put(array, sharding.with_memory_kind(kind))


@jax.jit
def _finite_and_nan(arrays: list) -> jax.Array:
    finite = jnp.stack([jnp.all(jnp.isfinite(a)) for a in arrays])
    return jnp.stack([finite, jnp.stack([jnp.any(jnp.isnan(a)) for a in arrays])])


@jax.jit
def _count(a) -> tuple[jax.Array, jax.Array, jax.Array]:
    magnitude = jnp.abs(a).astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(magnitude), magnitude, 0.0), initial=0.0)
    return jnp.sum(jnp.isnan(a), dtype=jnp.int32), jnp.sum(jnp.isinf(a), dtype=jnp.int32), largest


def _found(array) -> Found:
    num_nan, num_inf, largest = jax.device_get(_count(_on_device(array)))
    return Found(str(jnp.result_type(array)), jnp.shape(array), int(num_nan), int(num_inf), float(largest))


@jax.jit
def _rows(arrays: list, number) -> list:
    return [lax.dynamic_index_in_dim(array, number, keepdims=False) for array in arrays]


@jax.jit
def _stack(columns: list[list]) -> list:
    return [jnp.stack(arrays) for arrays in columns]


def _rows_of(values: list[_Value], number: int) -> list[_Value]:
    rows = _rows([value.array for value in values], np.int32(number))
    if all(value.finite for value in values):
        return [value._replace(array=row) for value, row in zip(values, rows, strict=True)]
    pairs = zip(values, _look(rows), strict=True)
    return [row if row.finite else row._replace(origins=value.origins) for value, row in pairs]


def _joined(array, values: Sequence[_Value]) -> _Value:
    origins = frozenset().union(*(value.origins for value in values))
    return _Value(array, all(value.finite for value in values), any(value.nan for value in values), origins)


def _places(equation) -> tuple[str, ...]:
    """Source locations, in this package or its callers, without libraries."""
    places = []
    for file, line, function in compat.source_of(equation):
        path = Path(file)
        function = function.split(".")[-1]
        if path.is_relative_to(PACKAGE):
            places.append(f"{path.relative_to(PACKAGE.parent)}:{line} {function}")
        elif "site-packages" not in path.parts:
            places.append(f"{path.name}:{line} {function}")
    return tuple(places)
