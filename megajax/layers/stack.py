"""The stack of layers: parameters are stacked by kind of layer; layers run unrolled or scanned, with recomputation.

Layers (layers/layer.py) of one kind are stored as one layer whose parameters have a leading dim [layers of that kind].
The stored form does not depend on how the stack is run, except in a pipeline, where the leading dims are
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
from megajax.layers.layer import LayerConfig, Saved, StackedConfig, Terms, Totals
from megajax.layers.linear import matrices_of
from megajax.layers.transform import Transform, computing, current_transforms
from megajax.parallel.schedule import Stages
from megajax.parameters import LAYER_AXES, Structure, is_per_layer, is_variable

logger = logging.getLogger("megajax")

MAX_PADDED = 4  # operands of a concatenation that XLA gives to that emitter (see `unstack`)


class Stack(nnx.Module):
    def __init__(
        self, layers: Sequence[LayerConfig], *, scan: bool, rngs: nnx.Rngs, stages: Stages | None = None,
        is_on_all_ranks: bool = False
    ):  # fmt: skip
        """stages: those of the pipeline that runs the layers through run_stage; None: __call__ runs them.
        is_on_all_ranks: whether every rank of a pipeline runs all of the layers, through __call__."""
        self.configs: tuple[StackedConfig, ...] = tuple(layers)
        if stages is not None:
            self.configs = tuple(layer.saving_by_name() for layer in layers)
        if transforms := current_transforms():
            self.configs = tuple(
                TransformedLayer(config, tuple(transform.in_layer(number, len(layers)) for transform in transforms))
                for number, config in enumerate(self.configs)
            )
        self.scan = scan
        key = rngs.params()
        for kind in dict.fromkeys(config.kind for config in self.configs):
            rows = rows_of_kind(self.configs, kind, stages)
            axes = ("chunks",) if is_on_all_ranks else LAYER_AXES[-rows.ndim :]
            setattr(self, kind, _build_stacked(self.configs, key, rows, axes))

    def __call__(self, x, inputs: dict, caches: Sequence | None = None, key: DropoutKey | None = None):
        """Runs all layers -> (x, caches, Totals).

        caches: one per layer, or None (training). key: for dropout, folded with the index of each layer; None: no
        dropout.
        """
        # In layer order, not the order of a set: all processes must trace the same program.
        kinds = dict.fromkeys(config.kind for config in self.configs)
        states = {kind: nnx.split(getattr(self, kind))[1] for kind in kinds}
        serves = caches is not None or _has_per_layer(states)
        if self.scan and not serves:
            (x,), terms = self._run_scanned(x, inputs, states, key)
            return x, None, terms
        new_caches = []
        found = []
        caches = caches or (None,) * len(self.configs)
        slices = {kind: iter(self._rows(kind, state)) for kind, state in states.items()}
        for number, (config, cache) in enumerate(zip(self.configs, caches, strict=True)):
            layer = _layer_to_serve(config) if serves else _layer(config, prevent_cse=True)
            state = next(slices[config.kind])
            x, cache, terms = layer(state, x, inputs, cache, fold(key, number))
            new_caches.append(cache)
            found.append(terms)
        return x, tuple(new_caches), total(found)

    def outputs(self, x, inputs: dict, numbers: Sequence[int]) -> list:
        """Runs all layers without dropout -> the outputs of those with these numbers, ascending, and of the last."""
        kinds = dict.fromkeys(config.kind for config in self.configs)
        states = {kind: nnx.split(getattr(self, kind))[1] for kind in kinds}
        if self.scan and not _has_per_layer(states):
            return self._run_scanned(x, inputs, states, None, [number + 1 for number in numbers])[0]
        slices = {kind: iter(self._rows(kind, state)) for kind, state in states.items()}
        found = []
        for number, config in enumerate(self.configs):
            x, _, _ = _layer(config, prevent_cse=True)(next(slices[config.kind]), x, inputs, None, None)
            if number in numbers:
                found.append(x)
        return [*found, x]

    def _rows(self, kind: str, state) -> Sequence:
        """The state of each layer of a kind."""
        if not _has_per_layer(state):
            return unstack(state)
        count = sum(config.kind == kind for config in self.configs)
        return [jax.tree.map(lambda a, i=i: a[i], state, is_leaf=is_per_layer) for i in range(count)]

    def _run_scanned(self, x, inputs, states, key, ends: Sequence[int] = ()):
        """Runs each repeated pattern of layers as a loop with one period of the pattern per step -> (x after each of
        these numbers of layers, and after the last, Totals)."""
        parts = zip((0, *ends), (*ends, len(self.configs)), strict=True)
        loops = [loop for begin, end in parts for loop in loops_of(self.configs[begin:end], begin)]
        _log_unrolled(sum(loop.steps == 1 for loop in loops), len(self.configs))
        counts = {kind: [loop.layers_of(self.configs, kind) for loop in loops] for kind in states}
        parts = {kind: split_rows(state, tuple(counts[kind])) for kind, state in states.items()}
        found = []
        outputs = []
        for number, loop in enumerate(loops):
            loop_states = {kind: parts[kind][number] for kind in states if counts[kind][number]}
            x, terms = self._scan(loop, x, inputs, loop_states, key)
            found.append(terms)
            if loop.first + loop.period * loop.steps in ends:
                outputs.append(x)
        return [*outputs, x], add_totals(found)

    def _scan(self, loop: "Loop", x, inputs, states, key):
        pattern = self.configs[loop.first : loop.first + loop.period]
        states = jax.tree.map(lambda a: a.reshape(loop.steps, a.shape[0] // loop.steps, *a.shape[1:]), states)

        def step(x, slices):
            states, first = slices
            found = []
            for number, config in enumerate(pattern):
                row = sum(other.kind == config.kind for other in pattern[:number])
                state = jax.tree.map(lambda a, row=row: a[row], states[config.kind])
                layer = _layer(config, prevent_cse=loop.steps == 1)
                x, _, terms = layer(state, x, inputs, None, fold(key, first + number))
                found.append(terms)
            return x, total(found)

        if loop.steps == 1:
            return step(x, (jax.tree.map(lambda a: a[0], states), loop.first))
        firsts = loop.first + loop.period * jax.numpy.arange(loop.steps)
        x, terms = jax.lax.scan(step, x, (states, firsts))
        return x, jax.tree.map(lambda a: a.sum(0), terms)


@dataclasses.dataclass(frozen=True)
class TransformedLayer:
    """A layer whose matrices have transforms."""

    layer: StackedConfig
    transforms: tuple[Transform, ...]

    @property
    def kind(self) -> str:
        return self.layer.kind

    @property
    def saved(self) -> Saved | None:
        return self.layer.saved

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        module = self.layer.build(rngs)
        for name, matrix in matrices_of(module):
            for transform in self.transforms:
                if transform.takes(name, matrix.record):
                    transform.apply(matrix, rngs)
        return module


def _has_per_layer(states) -> bool:
    return any(map(is_per_layer, jax.tree.leaves(states, is_leaf=is_per_layer)))


@functools.cache
def _log_unrolled(count: int, num_layers: int) -> None:
    if count:
        logger.warning("%d of %d layers run unrolled: they are not part of a repeating pattern", count, num_layers)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers first, first + 1, ...: a pattern of `period` layers, repeated `steps` times."""

    first: int
    period: int
    steps: int

    def layers_of(self, configs: Sequence[StackedConfig], kind: str) -> int:
        """Number of its layers of this kind."""
        return sum(config.kind == kind for config in configs[self.first : self.first + self.period * self.steps])


def loops_of(configs: Sequence[StackedConfig], offset: int = 0) -> list[Loop]:
    """Splits layers, numbered from `offset`, into consecutive loops, greedily: each takes the pattern whose repetition
    covers the most layers, the shortest on ties. A layer that starts no repetition is a loop of one step."""
    loops: list[Loop] = []
    first = 0
    while first < len(configs):
        rest = tuple(configs[first:])
        periods = range(1, len(rest) // 2 + 1)
        repeated = [Loop(offset + first, period, _repetitions(rest, period)) for period in periods]
        best = max(repeated, key=lambda loop: loop.period * loop.steps if loop.steps > 1 else 0, default=None)
        loops.append(best if best and best.steps > 1 else Loop(offset + first, 1, 1))
        first += loops[-1].period * loops[-1].steps
    return loops


def _repetitions(configs: tuple, period: int) -> int:
    """How many times the first `period` configs repeat from the start."""
    pattern = configs[:period]
    count = 1
    while configs[count * period : (count + 1) * period] == pattern:
        count += 1
    return count


def total(found: Sequence[Terms]) -> Totals:
    count = jax.numpy.float32(1)
    return add_totals(
        [Totals(terms.auxiliary, {name: (value, count) for name, value in terms.metrics.items()}) for terms in found]
    )


def add_totals(totals: Sequence[Totals]) -> Totals:
    """Of all layers of several Totals."""
    auxiliary = {}
    metrics = {}
    for terms in totals:
        auxiliary = add_by_name(auxiliary, terms.auxiliary)
        metrics = add_by_name(metrics, terms.metrics)
    return Totals(auxiliary, metrics)


@jax.custom_vjp
def unstack(tree) -> tuple:
    """Pytree of arrays [n, ...] -> n pytrees of arrays [...].

    The gradient is the concatenation of the layers' gradients. With plain indexing it would be a sum of n zero-padded
    arrays, and every XLA fusion that reads it would evaluate n terms per element. Up to MAX_PADDED layers it is that
    sum all the same: XLA has an emitter for concatenations of so few arrays that writes a single result, and the
    optimizer would read the gradients three times, for the parameters and for each moment.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(count))


def _stacked(*layers: jax.Array) -> jax.Array | None:
    """Arrays [...] -> [n, ...]; None: integers have no gradient."""
    if layers[0].dtype == jax.dtypes.float0:
        return None
    if len(layers) > MAX_PADDED:
        return jax.numpy.stack(layers)
    zero = layers[0].dtype.type(0)
    around = [(0, 0, 0)] * layers[0].ndim
    rows = [
        jax.lax.pad(layer[None], zero, [(number, len(layers) - 1 - number, 0), *around])
        for number, layer in enumerate(layers)
    ]
    return functools.reduce(jax.numpy.add, rows)


unstack.defvjp(
    lambda tree: (unstack(tree), None),
    lambda _, gradients: (jax.tree.map(_stacked, *gradients),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_rows(tree, sizes: tuple[int, ...]) -> tuple:
    """Pytree of arrays [sum(sizes), ...] -> for each size a pytree of arrays [size, ...]. As for `unstack`, the
    gradient is one concatenation."""
    if len(sizes) == 1:
        return (tree,)
    ends = list(itertools.accumulate(sizes))
    return tuple(
        jax.tree.map(lambda a, start=end - size, end=end: a[start:end], tree)
        for size, end in zip(sizes, ends, strict=True)
    )


def _join_rows(sizes, _, gradients):
    def join(*parts: jax.Array) -> jax.Array | None:
        return None if parts[0].dtype == jax.dtypes.float0 else jax.numpy.concatenate(parts)

    return (jax.tree.map(join, *gradients),)


split_rows.defvjp(lambda tree, sizes: (split_rows(tree, sizes), None), _join_rows)


def _layer(config, *, prevent_cse: bool):
    def run(state, x, inputs, cache, key):
        with computing(inputs):
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
def _layer_to_serve(config):
    """Traced once for all layers that are the same: an engine has many programs, and tracing is most of what is left of
    their time once they have been compiled. XLA inlines the calls."""
    return jax.jit(_layer(config, prevent_cse=True))


@functools.cache
def _graphdef(config):
    return nnx.split(abstract_layer(config))[0]


@functools.cache
def _structure(config) -> Structure:
    return Structure.of(nnx.split(abstract_layer(config))[1])


def abstract_layer(config: StackedConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0)))


def merged_layers(configs: Sequence[StackedConfig], weights: dict) -> dict:
    """Stacked weights of layers with these configs, in which transforms are merged into the matrices; what they put
    beside the matrices is still there."""
    found = []
    for row, config in enumerate(configs):
        state = _structure(config).to_state(jax.tree.map(lambda a, row=row: a[row], weights))
        module = nnx.merge(_graphdef(config), state)
        for _, matrix in matrices_of(module):
            matrix.weight.set_value(matrix.matrix())
        found.append(_structure(config).to_tree(nnx.split(module)[1]))
    return jax.tree.map(lambda *layers: jax.numpy.stack(layers), *found)


def rows_of_kind(configs: Sequence, kind: str, stages: Stages | None) -> np.ndarray:
    """Layer index of each row in the stacked arrays of a kind, int32 [layers of that kind] or as Stages.rows."""
    numbers = [number for number, config in enumerate(configs) if config.kind == kind]
    return np.array(numbers, np.int32) if stages is None else stages.rows(set(numbers))


def _build_stacked(
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
    return nnx.merge(_graphdef(configs[numbers.max()]), state)


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


def run_stage(configs: Sequence[StackedConfig], weights: Sequence[dict], x, inputs: Sequence):
    """Runs some layers in sequence -> (x, Totals).

    weights: nested dicts, one per layer; inputs: (inputs, dropout key or None), one per layer.
    """
    found = []
    for config, tree, (layer_inputs, key) in zip(configs, weights, inputs, strict=True):
        x, _, terms = _layer(config, prevent_cse=True)(_structure(config).to_state(tree), x, layer_inputs, None, key)
        found.append(terms)
    return x, total(found)


def fold(key: DropoutKey | None, number) -> DropoutKey | None:
    return None if key is None else key.fold(number)


def add_by_name(left: dict, right: dict) -> dict:
    both = [name for name in left if name in right]
    return left | right | {name: jax.tree.map(jax.numpy.add, left[name], right[name]) for name in both}
