"""Layers of one kind as one layer whose parameters are stacked: how it is initialised, and what it must have in
common."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from megajax.layers.layer import StackedConfig
from megajax.layers.linear import matrices_of
from megajax.parallel.schedule import Stages
from megajax.parameters import Structure, is_variable


def rows_of_kind(configs: Sequence, kind: str, stages: Stages | None) -> np.ndarray:
    """Layer index of each row in the stacked arrays of a kind, int32 [layers of that kind] or as Stages.rows."""
    numbers = [number for number, config in enumerate(configs) if config.kind == kind]
    return np.array(numbers, np.int32) if stages is None else stages.rows(set(numbers))


def build_stacked(
    configs: Sequence[StackedConfig], key: jax.Array, numbers: np.ndarray, axes: tuple[str, ...]
) -> nnx.Module:
    """One layer with parameters [*numbers.shape, ...]; axes: logical axes of these dims. Each row is initialised by its
    own config and key; rows numbered -1 are zero. With n different initialisers every row is drawn n times (lax.switch
    under vmap)."""
    _check_same_parameters(configs, numbers)
    configs_by_program = {
        _init_program(configs[number]): configs[number] for number in numbers.ravel().tolist() if number >= 0
    }
    branches = [functools.partial(_init_state, config) for config in configs_by_program.values()]
    branch_numbers = {program: i for i, program in enumerate(configs_by_program)}
    branch_of = np.array(
        [branch_numbers[_init_program(configs[n])] if n >= 0 else 0 for n in numbers.ravel()], np.int32
    )

    def build(number, branch):
        row_key = jax.random.fold_in(key, number)
        state = branches[0](row_key) if len(branches) == 1 else jax.lax.switch(branch, branches, row_key)
        return jax.tree.map(lambda a: jax.numpy.where(number >= 0, a, jax.numpy.zeros_like(a)), state)

    for _ in axes:
        build = jax.vmap(build)

    def stacked(parameter):
        return parameter.replace(parameter.get_value(), record=parameter.get_metadata()["record"].stacked(axes))

    state = build(jax.numpy.asarray(numbers), jax.numpy.asarray(branch_of.reshape(numbers.shape)))
    state = jax.tree.map(stacked, state, is_leaf=is_variable)
    return nnx.merge(graphdef(configs[numbers.max()]), state)


def _init_state(config: StackedConfig, key: jax.Array):
    return nnx.split(config.build(nnx.Rngs(params=key)))[1]


@functools.cache
def _init_program(config: StackedConfig) -> str:
    """The program that initialises a layer's parameters: equal for layers that differ only in their forward pass."""
    program = jax.make_jaxpr(functools.partial(_init_state, config))(jax.eval_shape(lambda: jax.random.key(0)))
    return f"{program} {[np.asarray(constant).tobytes() for constant in program.consts]}"


def _check_same_parameters(configs: Sequence[StackedConfig], numbers: np.ndarray) -> None:
    """Raises ValueError if the layers of one kind cannot share their arrays."""
    first, *others = sorted(number for number in numbers.ravel().tolist() if number >= 0)
    wanted = _parameters(configs[first])
    for number in others:
        if found := dict(wanted.items() ^ _parameters(configs[number]).items()):
            name = min(found)
            raise ValueError(
                f"layers {first} and {number} are both of kind {configs[first].kind!r}, but their parameters differ: "
                f"{name} is {wanted.get(name)} and {_parameters(configs[number]).get(name)}; give "
                "them different kinds"
            )


@functools.cache
def _parameters(config: StackedConfig) -> dict[str, str]:
    """{name: shape and dtype}."""
    state = jax.eval_shape(functools.partial(_init_state, config), jax.eval_shape(lambda: jax.random.key(0)))
    leaves = zip(Structure.of(state).paths, jax.tree.leaves(state), strict=True)
    return {".".join(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


@functools.cache
def graphdef(config: StackedConfig):
    return nnx.split(abstract_layer(config))[0]


@functools.cache
def structure(config: StackedConfig) -> Structure:
    return Structure.of(nnx.split(abstract_layer(config))[1])


def abstract_layer(config: StackedConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0)))


def merged_layers(configs: Sequence[StackedConfig], weights: dict) -> dict:
    """Stacked weights of layers with these configs, in which transforms are merged into the matrices; what they put
    beside the matrices is still there."""
    found = []
    for row, config in enumerate(configs):
        state = structure(config).to_state(jax.tree.map(lambda a, row=row: a[row], weights))
        module = nnx.merge(graphdef(config), state)
        for _, matrix in matrices_of(module):
            matrix.weight.set_value(matrix.matrix())
        found.append(structure(config).to_tree(nnx.split(module)[1]))
    return jax.tree.map(lambda *layers: jax.numpy.stack(layers), *found)
