"""Metadata of each parameter in one record: its axes, its role, and what follows from them.

A module makes its parameters with `weight`, and values that a step updates without a gradient with `variable`.
`to_tree` turns the state of a module into the nested dict that is trained, saved and converted; its keys are the paths
in a checkpoint.
"""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Role = Literal["matrix", "adapter", "embedding", "head", "router", "vector", "variable"]

DECAYING = ("matrix", "adapter", "embedding", "head", "router")  # Megatron's rule: all but biases and norm scales
CAST = ("matrix", "adapter", "embedding", "head")  # read in the compute dtype anyway; a router computes in float32
LAYER_AXES = ("chunks", "layers")  # axes along which one array holds several layers; they come first
STACK_AXES = (*LAYER_AXES, "experts")  # axes along which one array holds several matrices


def _unchanged(value: jax.Array, observation: jax.Array) -> jax.Array:
    return value


@dataclasses.dataclass(frozen=True)
class Parameter:
    axes: tuple[str, ...]
    """Logical axes, one per dim; megajax/mesh/sharding.py maps them to mesh axes."""
    role: Role
    """matrix (of a layer), adapter (a matrix that a transform puts beside one of a layer), embedding (rows are looked
    up), head (of the output), router, vector (bias, scale) or variable (not trained, updated by the step)."""
    num_inputs: int = 1
    """Of a matrix: how many dims, after those of the stack, a matmul contracts."""
    num_experts: int = 1
    """Whose matrices it holds, along the axis experts."""
    update: Callable[[jax.Array, jax.Array], jax.Array] = _unchanged
    """Of a variable: (value, observation) -> value after a step; a module-level function, so that records can be
    compared."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies, unless a parameter group says otherwise."""
        return self.role in DECAYING

    @property
    def is_cast(self) -> bool:
        """Whether a copy in the compute dtype gives the same results: for serving, or once per step in a pipeline."""
        return self.role in CAST

    @property
    def is_stored_rounded(self) -> bool:
        """Whether precision.params is the format in which it is stored. The others take little memory, and bfloat16
        would lose their updates: a norm scale is near 1, and its updates are below half a unit in the last place,
        2^-9."""
        return self.is_cast and self.role != "adapter"

    @property
    def is_quantizable(self) -> bool:
        """Whether serving can store it in 8 bits: the matrices of layers, except for those of experts (a grouped
        matmul) and those that expand latents (which decoding multiplies from the other side)."""
        return self.role == "matrix" and self.axes[:1] == ("layers",) and not {"experts", "latent"} & {*self.axes}

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a factor of matmuls, whose FLOPs a layer counts (Model.forward_flops those of adapters)."""
        return self.role in DECAYING and (self.role != "embedding" or "vocab" in self.axes)

    @property
    def num_stacked(self) -> int:
        """Number of leading dims before those of a single matrix."""
        return len(list(itertools.takewhile(lambda axis: axis in STACK_AXES, self.axes)))

    def stacked(self, lead: Sequence[str]) -> "Parameter":
        """The record of several such parameters in one array with these leading axes."""
        return dataclasses.replace(self, axes=(*lead, *self.axes))


class Variable(nnx.Variable):
    """A value that a step updates without a gradient: such as a router's bias.

    Read as `variable[...]` it is a constant for autodiff; `observe` returns observations in place of its gradient.
    """

    def __getitem__(self, key):
        return jax.lax.stop_gradient(super().__getitem__(key))


def weight(
    shape: Sequence[int], axes: Sequence[str], init: Callable, rngs: nnx.Rngs, role: Role, num_inputs: int = 1
) -> nnx.Param:
    """A parameter of `shape`, initialised by `init(key, shape)`, with its record."""
    assert len(shape) == len(axes), (shape, axes)
    sizes = dict(zip(axes, shape, strict=True))
    record = Parameter(tuple(axes), role, num_inputs, sizes.get("experts", 1) if role == "matrix" else 1)
    return nnx.Param(init(rngs.params(), tuple(shape)), record=record)


def variable(shape: Sequence[int], axes: Sequence[str], init: Callable, rngs: nnx.Rngs, update: Callable) -> Variable:
    """Like `weight`, for values that a step updates from observations of the forward or backward pass: see `observe`
    and Parameter.update. The dtype is floating point, because observations are passed like gradients."""
    assert len(shape) == len(axes), (shape, axes)
    value = init(rngs.params(), tuple(shape))
    assert jnp.issubdtype(value.dtype, jnp.floating), value.dtype
    return Variable(value, record=Parameter(tuple(axes), "variable", update=update))


def observe(x: jax.Array, variable: Variable, value: jax.Array) -> jax.Array:
    """Returns x and records `value`, which has the shape and dtype of the variable, as an observation.

    The observation takes the place of the variable's gradient, and so reaches the step from anywhere in a model: any
    module, a recomputed layer, a pipeline stage. The custom_vjp of an operation can return what only its backward pass
    sees in the same way. A step passes the mean over its microbatches to the variable's update.
    """
    current = variable.get_value()
    assert (value.shape, value.dtype) == (current.shape, current.dtype), (value, current)
    return observe_arrays(x, current, value)


@jax.custom_vjp
def observe_arrays(x: jax.Array, variables: Any, values: Any) -> jax.Array:
    """Returns x; the gradients of `variables` are `values`, a pytree with the same shapes and dtypes."""
    return x


def _observe_backward(values: Any, d_x: jax.Array):
    return d_x, values, jax.tree.map(jnp.zeros_like, values)


observe_arrays.defvjp(lambda x, variables, values: (x, values), _observe_backward)


def updated(variables: dict, observed: dict, records: dict) -> dict:
    """The variables after a step. Arrays of several layers are updated layer by layer."""

    def update(value: jax.Array, seen: jax.Array, record: Parameter) -> jax.Array:
        function = record.update
        for _ in itertools.takewhile(lambda axis: axis in LAYER_AXES, record.axes):
            function = jax.vmap(function)
        return function(value, seen)

    return jax.tree.map(update, variables, observed, records)


# ----------------------------------------------------------------------------- module state <-> nested dict


@dataclasses.dataclass(frozen=True)
class Structure:
    """Structure of the state of a module, and the path of each leaf in the nested dict."""

    treedef: Any
    paths: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(state) -> "Structure":
        leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
        attributes = [tuple(str(getattr(entry, "key", entry)) for entry in path) for path, _ in leaves]
        return Structure(jax.tree.structure(state), tuple(_checkpoint_paths(attributes)))

    def to_tree(self, state) -> dict:
        """The leaves of a state as a nested dict."""
        return nested(zip(self.paths, jax.tree.leaves(state), strict=True))

    def to_state(self, tree: dict):
        """The state with the leaves of a nested dict."""
        return jax.tree.unflatten(self.treedef, [_at(tree, path) for path in self.paths])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLayer:
    """The weights of the layers of one kind as arrays of their own, [...] each, instead of one array [layers, ...].

    For serving: a matmul that uses few rows would first copy its matrix out of the stack.
    """

    arrays: tuple
    """Arrays, or weights of several arrays (quantization/weights.py)."""

    def __getitem__(self, index: int):
        return self.arrays[index]

    def stacked(self):
        return jax.tree.map(lambda *layers: jax.numpy.stack(layers), *self.arrays)


def is_in_8_bits(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether it holds the levels of a frozen matrix, whose scale is beside it."""
    return array.dtype.itemsize == 1


def is_per_layer(node) -> bool:
    return isinstance(node, PerLayer)


def records(state) -> dict:
    """The record of each parameter, as a nested dict."""
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    return nested(zip(Structure.of(state).paths, [v.get_metadata()["record"] for v in variables], strict=True))


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def _checkpoint_paths(paths: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """In a checkpoint `query.weight` of a Linear is `query`, and its other parameters are named like `query_bias`."""
    linears = {path[:-1] for path in paths if path[-1] == "weight"}

    def shortened(path: tuple[str, ...]) -> tuple[str, ...]:
        length = next((n for n in range(1, len(path)) if path[:n] in linears), None)
        if length is None:
            return path
        *above, name = path[:length]
        parts = path[length:]
        return (*above, name if parts == ("weight",) else "_".join((name, *parts)))

    found = [shortened(path) for path in paths]
    if len(set(found)) < len(found):
        twice = sorted({".".join(path) for path in found if found.count(path) > 1})
        raise ValueError(f"two parameters have the name {', '.join(twice)}: rename one of the attributes")
    return found


# ----------------------------------------------------------------------------- nested dicts


def name_of(path) -> str:
    """ "layers.dense.attention.query" from a path of jax.tree_util: the name that patterns in a config match."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the shell patterns (* and ?) matches the whole name of a parameter."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parameter_of(path: tuple, paths: Collection[tuple]) -> tuple | None:
    """The parameter that the leaf at `path` of a larger tree (the state of an optimizer) belongs to: the longest of
    `paths` that is a suffix of it. None if it belongs to no single parameter, like a step count."""
    ends = (path[start:] for start in range(len(path)))
    return next((end for end in ends if end in paths), None)


def select(tree: dict, keep: Callable[[str], bool]) -> dict:
    """The leaves for whose name `keep` is true, as a nested dict without empty parts. Here None is not a leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return nested((tuple(key.key for key in path), leaf) for path, leaf in leaves if keep(name_of(path)))


def merge(*trees: dict) -> dict:
    """Merges nested dicts that share no leaf."""
    merged: dict = {}
    for tree in trees:
        for name, node in tree.items():
            merged[name] = merge(merged.get(name, {}), node) if isinstance(node, dict) else node
    return merged


def nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict:
    """{path: leaf} as nested dicts."""
    tree: dict = {}
    for path, leaf in leaves:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def _at(tree: dict, path: tuple[str, ...]):
    for name in path:
        tree = tree[name]
    return tree
