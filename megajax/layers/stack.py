"""The stack of layers: parameters are stacked by kind of layer; layers run unrolled or scanned, with recomputation.

Layers (layers/layer.py) of one kind are stored as one layer whose parameters have a leading dim [layers of that kind].
The stored form does not depend on how the stack is run, except in a pipeline, where the leading dims are
[chunks, layers of a chunk on all ranks], see parallel/schedule.py.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
from flax import nnx

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import MAILBOXES, LayerConfig, Saved, StackedConfig, Terms, Totals
from megajax.layers.linear import matrices_of
from megajax.layers.loops import Loop, loops_of
from megajax.layers.rows import Row, rows_of, split_rows, unstack
from megajax.layers.stacked import build_stacked, graphdef, rows_of_kind, structure
from megajax.layers.transform import Transform, computing, current_transforms
from megajax.mesh.current import exchanging
from megajax.parallel.schedule import Stages
from megajax.parameters import LAYER_AXES, is_per_layer

logger = logging.getLogger("megajax")


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
            setattr(self, kind, build_stacked(self.configs, key, rows, axes))

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
        slices = {kind: iter(self._rows(kind, state, serves)) for kind, state in states.items()}
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
        slices = {kind: iter(self._rows(kind, state, serves=False)) for kind, state in states.items()}
        found = []
        for number, config in enumerate(self.configs):
            x, _, _ = _layer(config, prevent_cse=True)(next(slices[config.kind]), x, inputs, None, None)
            if number in numbers:
                found.append(x)
        return [*found, x]

    def _rows(self, kind: str, state, serves: bool) -> Sequence:
        """The state of each layer of a kind, for `_layer_to_serve` or for `_layer`."""
        if not _has_per_layer(state):
            return unstack(state) if serves else rows_of(state)
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

    def _scan(self, loop: Loop, x, inputs, states, key):
        pattern = self.configs[loop.first : loop.first + loop.period]
        states = jax.tree.map(lambda a: a.reshape(loop.steps, a.shape[0] // loop.steps, *a.shape[1:]), states)

        def step(x, slices):
            states, first = slices
            found = []
            for number, config in enumerate(pattern):
                row = sum(other.kind == config.kind for other in pattern[:number])
                layer = _layer(config, prevent_cse=loop.steps == 1)
                x, _, terms = layer(Row(states[config.kind], row), x, inputs, None, fold(key, first + number))
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


def _layer(config, *, prevent_cse: bool):
    def run(state, x, inputs, cache, key):
        # Here, and not around the stack: what is traced once must not read an array of one trace.
        with computing(inputs), exchanging(inputs.get(MAILBOXES)):
            state = state.read() if isinstance(state, Row) else state
            return nnx.merge(graphdef(config), state)(x, inputs, cache, key)

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


def run_stage(configs: Sequence[StackedConfig], weights: Sequence[dict], x, inputs: Sequence):
    """Runs some layers in sequence -> (x, Totals).

    weights: nested dicts, one per layer; inputs: (inputs, dropout key or None), one per layer.
    """
    found = []
    for config, tree, (layer_inputs, key) in zip(configs, weights, inputs, strict=True):
        x, _, terms = _layer(config, prevent_cse=True)(structure(config).to_state(tree), x, layer_inputs, None, key)
        found.append(terms)
    return x, total(found)


def fold(key: DropoutKey | None, number) -> DropoutKey | None:
    return None if key is None else key.fold(number)


def add_by_name(left: dict, right: dict) -> dict:
    both = [name for name in left if name in right]
    return left | right | {name: jax.tree.map(jax.numpy.add, left[name], right[name]) for name in both}
