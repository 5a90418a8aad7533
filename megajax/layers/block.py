"""The stack of layers: parameters stored stacked by kind, run unrolled or scanned, recomputed as asked.

Layers (layers/layer.py) of one kind are stored as one layer whose parameters have a leading dim [layers of that kind].
The stored form does not depend on how the stack is run, but for a pipeline: there the dim is
[chunks, layers of a chunk on all ranks], see parallel/schedule.py.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import LayerConfig, Terms
from megajax.parallel.schedule import Stages
from megajax.parameters import LAYER_AXES, Structure, is_variable

logger = logging.getLogger("megajax")


class Stack(nnx.Module):
    def __init__(self, layers: Sequence[LayerConfig], *, scan: bool, rngs: nnx.Rngs, stages: Stages | None = None):
        """stages: of the pipeline that runs the layers, with run_stage; None: they run here, by being called."""
        self.configs = tuple(layers) if stages is None else tuple(layer.saving_by_name() for layer in layers)
        self.scan = scan
        key = rngs.params()
        for kind in dict.fromkeys(config.kind for config in self.configs):
            setattr(self, kind, _build_stacked(self.configs, key, rows_of_kind(self.configs, kind, stages)))

    def __call__(self, x, inputs: dict, caches: Sequence | None = None, key: DropoutKey | None = None):
        """Runs all layers -> (x, caches, their Terms as `total` gives them).

        caches: one a layer, or None (training). key: for dropout, folded with the layer's number; None: no dropout.
        """
        # In the order of the layers, the same in every process: all must trace the same program.
        kinds = dict.fromkeys(config.kind for config in self.configs)
        states = {kind: nnx.split(getattr(self, kind))[1] for kind in kinds}
        if self.scan and caches is None:
            x, terms = self._looped(x, inputs, states, key)
            return x, None, terms
        new_caches = []
        found = []
        caches = caches or (None,) * len(self.configs)
        slices = {kind: iter(unstack(state)) for kind, state in states.items()}
        for number, (config, cache) in enumerate(zip(self.configs, caches, strict=True)):
            layer = _layer(config, prevent_cse=True)
            state = next(slices[config.kind])
            x, cache, terms = layer(state, x, inputs, cache, fold(key, number))
            new_caches.append(cache)
            found.append(terms)
        return x, tuple(new_caches), total(found)

    def _looped(self, x, inputs, states, key):
        """Each repeated pattern of layers is a loop; one step of it is one period of the pattern."""
        loops = loops_of(self.configs)
        _log_unrolled(sum(loop.steps == 1 for loop in loops), len(self.configs))
        kinds = {kind: [loop.layers_of(self.configs, kind) for loop in loops] for kind in states}
        parts = {kind: split_rows(state, tuple(kinds[kind])) for kind, state in states.items()}
        found = []
        for place, loop in enumerate(loops):
            of_loop = {kind: parts[kind][place] for kind in states if kinds[kind][place]}
            x, terms = self._scan(loop, x, inputs, of_loop, key)
            found.append(terms)
        return x, add_totals(found)

    def _scan(self, loop: "Loop", x, inputs, states, key):
        pattern = self.configs[loop.first : loop.first + loop.period]
        states = jax.tree.map(lambda a: a.reshape(loop.steps, a.shape[0] // loop.steps, *a.shape[1:]), states)

        def step(x, slices):
            states, first = slices
            found = []
            for number, config in enumerate(pattern):
                place = sum(other.kind == config.kind for other in pattern[:number])
                state = jax.tree.map(lambda a, place=place: a[place], states[config.kind])
                layer = _layer(config, prevent_cse=loop.steps == 1)
                x, _, terms = layer(state, x, inputs, None, fold(key, first + number))
                found.append(terms)
            return x, total(found)

        if loop.steps == 1:
            return step(x, (jax.tree.map(lambda a: a[0], states), loop.first))
        firsts = loop.first + loop.period * jax.numpy.arange(loop.steps)
        x, terms = jax.lax.scan(step, x, (states, firsts))
        return x, jax.tree.map(lambda a: a.sum(0), terms)


@functools.cache
def _log_unrolled(count: int, num_layers: int) -> None:
    if count:
        logger.warning("%d of %d layers run unrolled: they are in no pattern that repeats", count, num_layers)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers first, first + 1, ...: a pattern of `period` layers, `steps` times."""

    first: int
    period: int
    steps: int

    def layers_of(self, configs: Sequence[LayerConfig], kind: str) -> int:
        """How many of its layers are of this kind."""
        return sum(config.kind == kind for config in configs[self.first : self.first + self.period * self.steps])


def loops_of(configs: Sequence[LayerConfig]) -> list[Loop]:
    """The stack as loops, one after the other: from each layer on the pattern whose repetition covers most layers, of
    these the shortest. A layer that begins no repetition is a loop of one step."""
    loops: list[Loop] = []
    first = 0
    while first < len(configs):
        rest = tuple(configs[first:])
        periods = range(1, len(rest) // 2 + 1)
        repeated = [Loop(first, period, _repetitions(rest, period)) for period in periods]
        best = max(repeated, key=lambda loop: loop.period * loop.steps if loop.steps > 1 else 0, default=None)
        loops.append(best if best and best.steps > 1 else Loop(first, 1, 1))
        first += loops[-1].period * loops[-1].steps
    return loops


def _repetitions(configs: tuple, period: int) -> int:
    """How often the first `period` configs come one after the other from the start."""
    pattern = configs[:period]
    count = 1
    while configs[count * period : (count + 1) * period] == pattern:
        count += 1
    return count


def total(found: Sequence[Terms]) -> Terms:
    """Terms of several layers as one: auxiliary {name: sum}, metrics {name: (sum, number of layers)}."""
    one = jax.numpy.float32(1)
    counted = [terms._replace(metrics={name: (value, one) for name, value in terms.metrics.items()}) for terms in found]
    return add_totals(counted)


def add_totals(totals: Sequence[Terms]) -> Terms:
    """Several results of `total` as one."""
    auxiliary = {}
    metrics = {}
    for terms in totals:
        auxiliary = add_by_name(auxiliary, terms.auxiliary)
        metrics = add_by_name(metrics, terms.metrics)
    return Terms(auxiliary, metrics)


@jax.custom_vjp
def unstack(tree) -> tuple:
    """Pytree of arrays [n, ...] -> n pytrees of arrays [...].

    The gradient is one concatenation of the layers' gradients. Indexing would make it a sum of n arrays padded with
    zeros, and whatever XLA fuses with that sum evaluates n terms an element.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(count))


unstack.defvjp(
    lambda tree: (unstack(tree), None),
    lambda _, gradients: (jax.tree.map(lambda *layers: jax.numpy.stack(layers), *gradients),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_rows(tree, sizes: tuple[int, ...]) -> tuple:
    """Pytree of arrays [sum(sizes), ...] -> a pytree of arrays [size, ...] of each; the gradient is one concatenation,
    as that of `unstack`."""
    if len(sizes) == 1:
        return (tree,)
    ends = list(itertools.accumulate(sizes))
    return tuple(
        jax.tree.map(lambda a, start=end - size, end=end: a[start:end], tree)
        for size, end in zip(sizes, ends, strict=True)
    )


def _join_rows(sizes, _, gradients):
    return (jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *gradients),)


split_rows.defvjp(lambda tree, sizes: (split_rows(tree, sizes), None), _join_rows)


def _layer(config, *, prevent_cse: bool):
    def run(state, x, inputs, cache, key):
        return nnx.merge(_graphdef(config), state)(x, inputs, cache, key)

    if config.saved is None:
        return run
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=config.saved.on_device,
        names_which_can_be_offloaded=config.saved.on_host,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)


@functools.cache
def _graphdef(config):
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0))))[0]


@functools.cache
def _structure(config) -> Structure:
    return Structure.of(nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0))))[1])


def rows_of_kind(configs: Sequence, kind: str, stages: Stages | None) -> np.ndarray:
    """Number of the layer that each row of the stack of a kind holds, int32 [layers of it] or as Stages.rows."""
    numbers = [number for number, config in enumerate(configs) if config.kind == kind]
    return np.array(numbers, np.int32) if stages is None else stages.rows(set(numbers))


def _build_stacked(configs: Sequence[LayerConfig], key: jax.Array, numbers: np.ndarray) -> nnx.Module:
    """One layer whose parameters are [*numbers.shape, ...], each row drawn as its own config says and from its own
    key; zeros where -1. Where n of the configs draw differently, each row is drawn n times."""
    _check_same_parameters(configs, numbers)
    drawings = {_drawing(configs[number]): configs[number] for number in numbers.ravel().tolist() if number >= 0}
    branches = [functools.partial(_drawn, config) for config in drawings.values()]
    places = {drawing: place for place, drawing in enumerate(drawings)}
    branch_of = np.array([places[_drawing(configs[n])] if n >= 0 else 0 for n in numbers.ravel()], np.int32)

    def build(number, branch):
        row_key = jax.random.fold_in(key, number)
        state = branches[0](row_key) if len(branches) == 1 else jax.lax.switch(branch, branches, row_key)
        return jax.tree.map(lambda a: jax.numpy.where(number >= 0, a, jax.numpy.zeros_like(a)), state)

    lead = LAYER_AXES[-numbers.ndim :]
    for _ in lead:
        build = jax.vmap(build)

    def stacked(parameter):
        return parameter.replace(parameter.get_value(), record=parameter.get_metadata()["record"].stacked(lead))

    state = build(jax.numpy.asarray(numbers), jax.numpy.asarray(branch_of.reshape(numbers.shape)))
    state = jax.tree.map(stacked, state, is_leaf=is_variable)
    return nnx.merge(_graphdef(configs[numbers.max()]), state)


def _drawn(config: LayerConfig, key: jax.Array):
    return nnx.split(config.build(nnx.Rngs(params=key)))[1]


@functools.cache
def _drawing(config: LayerConfig) -> str:
    """The program that draws the parameters of a layer: the same for layers that differ only in how they run."""
    program = jax.make_jaxpr(functools.partial(_drawn, config))(jax.eval_shape(lambda: jax.random.key(0)))
    return f"{program} {[np.asarray(constant).tobytes() for constant in program.consts]}"


def _check_same_parameters(configs: Sequence[LayerConfig], numbers: np.ndarray) -> None:
    """Raises ValueError if the layers of one kind cannot share their arrays."""
    first, *others = sorted(number for number in numbers.ravel().tolist() if number >= 0)
    wanted = _parameters(configs[first])
    for number in others:
        if found := dict(wanted.items() ^ _parameters(configs[number]).items()):
            name = min(found)
            raise ValueError(
                f"layers {first} and {number} are both of kind {configs[first].kind!r}, but their parameters differ: "
                f"{name} is {wanted.get(name)} and {_parameters(configs[number]).get(name)}; give one of them a kind "
                "of its own"
            )


@functools.cache
def _parameters(config: LayerConfig) -> dict[str, str]:
    """{name: shape and dtype}."""
    state = jax.eval_shape(functools.partial(_drawn, config), jax.eval_shape(lambda: jax.random.key(0)))
    leaves = zip(Structure.of(state).paths, jax.tree.leaves(state), strict=True)
    return {".".join(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def run_stage(configs: Sequence[LayerConfig], weights: Sequence[dict], x, inputs: Sequence):
    """Some layers one after the other -> (x, their Terms as `total` gives them).

    weights: of each layer, as nested dicts; inputs: (inputs, dropout key or None) of each.
    """
    found = []
    for config, tree, (given, key) in zip(configs, weights, inputs, strict=True):
        x, _, terms = _layer(config, prevent_cse=True)(_structure(config).to_state(tree), x, given, None, key)
        found.append(terms)
    return x, total(found)


def fold(key: DropoutKey | None, number) -> DropoutKey | None:
    return None if key is None else key.fold(number)


def add_by_name(left: dict, right: dict) -> dict:
    both = [name for name in left if name in right]
    return left | right | {name: jax.tree.map(jax.numpy.add, left[name], right[name]) for name in both}
