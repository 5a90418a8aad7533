"""The stack of layers: parameters stored stacked by kind, run unrolled or scanned, recomputed as asked.

Layers (layers/layer.py) of one kind are stored as one layer whose parameters have a leading dim [layers of that kind].
The stored form does not depend on how the stack is run, but for a pipeline: there the dim is
[chunks, layers of a chunk on all ranks], see parallel/schedule.py.
"""

import functools
import logging
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from megajax.layers.layer import LayerConfig, Terms
from megajax.parallel.schedule import Stages
from megajax.parameters import Structure, is_variable

logger = logging.getLogger("megajax")


class Stack(nnx.Module):
    def __init__(self, layers: Sequence[LayerConfig], *, scan: bool, rngs: nnx.Rngs, stages: Stages | None = None):
        """stages: of the pipeline that runs the layers, with run_stage; None: they run here, by being called."""
        self.configs = tuple(layers) if stages is None else tuple(layer.saving_by_name() for layer in layers)
        self.scan = scan
        key = rngs.params()
        for kind in dict.fromkeys(config.kind for config in self.configs):
            numbers = rows_of_kind(self.configs, kind, stages)
            setattr(self, kind, _build_stacked(self.configs[numbers.max()], key, numbers))

    def __call__(self, x, inputs: dict, caches: Sequence | None = None, key: jax.Array | None = None):
        """Runs all layers -> (x, caches, their Terms as `total` gives them).

        caches: one a layer, or None (training). key: for dropout, folded with the layer's number; None: no dropout.
        """
        # In the order of the layers, the same in every process: all must trace the same program.
        kinds = dict.fromkeys(config.kind for config in self.configs)
        states = {kind: nnx.split(getattr(self, kind))[1] for kind in kinds}
        if self.scan and caches is None:
            x, terms = self._scanned(x, inputs, states, key)
            return x, None, terms
        new_caches, found = [], []
        caches = caches or (None,) * len(self.configs)
        slices = {kind: iter(unstack(state)) for kind, state in states.items()}
        for number, (config, cache) in enumerate(zip(self.configs, caches, strict=True)):
            layer, state = _layer(config, prevent_cse=True), next(slices[config.kind])
            x, cache, terms = layer(state, x, inputs, cache, fold(key, number))
            new_caches.append(cache)
            found.append(terms)
        return x, tuple(new_caches), total(found)

    def _scanned(self, x, inputs, states, key):
        """One step of the scan is one period of the pattern of configs."""
        period = _period(self.configs)
        pattern, steps = self.configs[:period], len(self.configs) // period
        if steps == 1 and period > 1:
            logger.warning("no pattern of the %d layers repeats: they are unrolled, not a loop", period)
        states = jax.tree.map(lambda a: a.reshape(steps, a.shape[0] // steps, *a.shape[1:]), states)

        def step(x, slices):
            states, first = slices
            found = []
            for number, config in enumerate(pattern):
                place = sum(other.kind == config.kind for other in pattern[:number])
                state = jax.tree.map(lambda a, place=place: a[place], states[config.kind])
                layer = _layer(config, prevent_cse=False)
                x, _, terms = layer(state, x, inputs, None, fold(key, first + number))
                found.append(terms)
            return x, total(found)

        x, terms = jax.lax.scan(step, x, (states, period * jax.numpy.arange(steps)))
        return x, jax.tree.map(lambda a: a.sum(0), terms)


def total(found: Sequence[Terms]) -> Terms:
    """Terms of several layers as one: auxiliary {name: sum}, metrics {name: (sum, number of layers)}."""
    auxiliary, metrics = {}, {}
    for terms in found:
        auxiliary = add_by_name(auxiliary, terms.auxiliary)
        metrics = add_by_name(metrics, {name: (value, jax.numpy.float32(1)) for name, value in terms.metrics.items()})
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


def _build_stacked(config, key: jax.Array, numbers: np.ndarray) -> nnx.Module:
    """One layer whose parameters are [*numbers.shape, ...], each row drawn from its own key; zeros where -1."""

    def build(number):
        state = nnx.split(config.build(nnx.Rngs(params=jax.random.fold_in(key, number))))[1]
        return jax.tree.map(lambda a: jax.numpy.where(number >= 0, a, jax.numpy.zeros_like(a)), state)

    state, lead = build, ("chunks", "layers")[-numbers.ndim :]
    for _ in lead:
        state = jax.vmap(state)
    stacked = lambda p: p.replace(p.get_value(), record=p.get_metadata()["record"].stacked(lead))
    state = jax.tree.map(stacked, state(jax.numpy.asarray(numbers)), is_leaf=is_variable)
    return nnx.merge(_graphdef(config), state)


def run_stage(configs: Sequence[LayerConfig], weights: Sequence[dict], x, inputs: Sequence):
    """Some layers one after the other -> (x, their Terms as `total` gives them).

    weights: of each layer, as nested dicts; inputs: (inputs, dropout key or None) of each.
    """
    found = []
    for config, tree, (given, key) in zip(configs, weights, inputs, strict=True):
        x, _, terms = _layer(config, prevent_cse=True)(_structure(config).to_state(tree), x, given, None, key)
        found.append(terms)
    return x, total(found)


def _period(configs: tuple) -> int:
    """Shortest pattern whose repetition is the whole stack."""
    count = len(configs)
    return next(p for p in range(1, count + 1) if count % p == 0 and configs == configs[:p] * (count // p))


def fold(key: jax.Array | None, number) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def add_by_name(left: dict, right: dict) -> dict:
    both = [name for name in left if name in right]
    return left | right | {name: jax.tree.map(jax.numpy.add, left[name], right[name]) for name in both}
