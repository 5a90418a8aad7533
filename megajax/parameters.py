"""Metadata of each parameter, kept in one record: its axes, its role, and what follows from them.

A module makes its parameters with `weight`, and what a step updates without a gradient with `variable`. `to_tree` turns
the state of a module into the nested dict that is trained, saved and converted; its keys are the paths in a checkpoint.
"""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Role = Literal["matrix", "embedding", "head", "router", "vector", "variable"]

DECAYING = ("matrix", "embedding", "head", "router")  # Megatron's rule: all but biases and norm scales
CAST = ("matrix", "embedding", "head")  # what layers read in the compute dtype anyway; a router computes in float32
LAYER_AXES = ("chunks", "layers")  # axes along which one array holds several layers; they come first
STACK_AXES = (*LAYER_AXES, "experts")  # those along which it holds several matrices


@dataclasses.dataclass(frozen=True)
class Parameter:
    axes: tuple[str, ...]
    """Logical axes, one a dim: megajax/sharding.py has where they lie."""
    role: Role
    """What it is for: matrix (of a layer), embedding (rows are looked up), head (of the output), router, vector (bias,
    scale); variable: not trained, updated by the step."""
    num_inputs: int = 1
    """Of a matrix: how many dims, after those of the stack, a matmul contracts."""
    update: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    """Of a variable: (value, what was observed) -> value after a step; a function of a module, so that records can be
    compared."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies, unless a parameter group says otherwise."""
        return self.role in DECAYING

    @property
    def is_cast(self) -> bool:
        """Whether a copy in the compute dtype gives the same results: for serving, or once a step in a pipeline."""
        return self.role in CAST

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a factor of matmuls, whose FLOPs a layer counts."""
        return self.role in ("matrix", "head", "router") or (self.role == "embedding" and "vocab" in self.axes)

    @property
    def num_stacked(self) -> int:
        """How many dims come before those of one matrix."""
        return len(list(itertools.takewhile(lambda axis: axis in STACK_AXES, self.axes)))

    def stacked(self, lead: Sequence[str]) -> "Parameter":
        """The record of several of them in one array with these leading axes."""
        return dataclasses.replace(self, axes=(*lead, *self.axes))


class Variable(nnx.Variable):
    """A value that a step updates without a gradient: a router's bias, a history of largest magnitudes.

    Read as `variable[...]` it is a constant to differentiation, whose place for its gradient is free for `observe`.
    """

    def __getitem__(self, key):
        return jax.lax.stop_gradient(super().__getitem__(key))


def weight(
    shape: Sequence[int], axes: Sequence[str], init: Callable, rngs: nnx.Rngs, role: Role, num_inputs: int = 1
) -> nnx.Param:
    """A parameter of `shape`, drawn by `init(key, shape)`, with its record."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(rngs.params(), tuple(shape)), record=Parameter(tuple(axes), role, num_inputs))


def variable(shape: Sequence[int], axes: Sequence[str], init: Callable, rngs: nnx.Rngs, update: Callable) -> Variable:
    """As `weight`, for what a step updates with what the forward or backward pass has observed: see `observe` and
    Parameter.update. A floating-point number, because observations take the way of gradients."""
    assert len(shape) == len(axes), (shape, axes)
    value = init(rngs.params(), tuple(shape))
    assert jnp.issubdtype(value.dtype, jnp.floating), value.dtype
    return Variable(value, record=Parameter(tuple(axes), "variable", update=update))


def observe(x: jax.Array, variable: Variable, value: jax.Array) -> jax.Array:
    """x, having observed `value`, of the shape and dtype of the variable.

    The observation takes the place of the variable's gradient, and so reaches the step from anywhere in a model: any
    module, a recomputed layer, a stage of a pipeline. A custom_vjp of an operation can give what only its backward pass
    sees in the same way. A step hands the mean over its microbatches to the variable's update.
    """
    wanted = variable.get_value()
    assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), (value, wanted)
    return _observe(x, wanted, value)


@jax.custom_vjp
def _observe(x: jax.Array, variable: jax.Array, value: jax.Array) -> jax.Array:
    return x


def _observe_backward(value: jax.Array, d_x: jax.Array):
    return d_x, value, jnp.zeros_like(value)


_observe.defvjp(lambda x, variable, value: (x, value), _observe_backward)


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
    """Of the state of a module, and the path of each leaf in the nested dict."""

    treedef: Any
    paths: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(state) -> "Structure":
        leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
        attributes = [tuple(str(getattr(entry, "key", entry)) for entry in path) for path, _ in leaves]
        return Structure(jax.tree.structure(state), tuple(_checkpoint_paths(attributes)))

    def to_tree(self, state) -> dict:
        """The leaves of a state as a nested dict."""
        return _nested(zip(self.paths, jax.tree.leaves(state), strict=True))

    def to_state(self, tree: dict):
        """The state with the leaves of a nested dict."""
        return jax.tree.unflatten(self.treedef, [_at(tree, path) for path in self.paths])


def records(state) -> dict:
    """The record of each parameter, as a nested dict."""
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    return _nested(zip(Structure.of(state).paths, [v.get_metadata()["record"] for v in variables], strict=True))


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def _checkpoint_paths(paths: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of a Linear, `query.weight` is `query` in a checkpoint, and what it has beside it, `query.bias`, `query_bias`."""
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
        raise ValueError(f"two parameters are called {', '.join(twice)}: rename one of the attributes")
    return found


# ----------------------------------------------------------------------------- nested dicts


def name_of(path) -> str:
    """ "layers.dense.attention.query" of a path as jax.tree_util gives it: what patterns in a config match."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a shell pattern (* and ?) is the whole name of a parameter."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parameter_of(place: tuple, paths: Collection[tuple]) -> tuple | None:
    """The parameter that a leaf at `place` of a larger tree (the state of an optimizer) belongs to: the longest of
    `paths` that its path ends with. None for what belongs to no single one, like a count of steps."""
    ends = (place[start:] for start in range(len(place)))
    return next((end for end in ends if end in paths), None)


def select(tree: dict, keep: Callable[[str], bool]) -> dict:
    """The leaves whose name is kept, as a nested dict without empty parts. None is no leaf here."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return _nested((tuple(key.key for key in path), leaf) for path, leaf in leaves if keep(name_of(path)))


def merge(*trees: dict) -> dict:
    """Nested dicts that share no leaf, as one."""
    merged: dict = {}
    for tree in trees:
        for name, node in tree.items():
            merged[name] = merge(merged.get(name, {}), node) if isinstance(node, dict) else node
    return merged


def _nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict:
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
