"""A pipeline with any schedule in one SPMD program: executes the tables of parallel/schedule.py.

The region is manual over `pipeline` only; XLA partitions the other axes. In every tick each rank runs at most one
forward and one backward pass of a stage, and all ranks together, each with its part of the vocabulary, at most one
embedding, one loss and one gradient of an embedding. Nothing is differentiated through the schedule: a forward pass
stores what its own backward pass reads (`jax.vjp`) in a ring buffer, and gradients accumulate in the carry of the scan
over ticks. Weights are not stored there but read again.

Stages may differ between ranks in the number and kinds of layers: each distinct stage is a branch.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.sharding import constrain
from megajax.parallel.schedule import Table

AXIS = "pipeline"
tree_map = jax.tree.map


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model as the executor sees it. batch: arrays of one microbatch; key: that of the microbatch, None without
    dropout.

    Weights come in two trees: trained ones, which are differentiated, and held ones, which are not.
    """

    embed: Callable[[Any, Any, dict, Any], tuple[jax.Array, dict]]
    """(shared trained, shared held, batch, key) -> (x, further inputs of the first stage {name: like x})."""
    key_of: Callable[[Any, jax.Array], Any]
    """(key of the step, number of a microbatch) -> its key."""
    inputs: Callable[[dict, Any], Any]
    """(batch, key) -> inputs of the layers other than x and weights."""
    stage: Callable[[Any, tuple, tuple, jax.Array, dict, Any], tuple[jax.Array, Any]]
    """(program, trained and held weights of its layers, x, what `embed` gives besides, inputs of each layer) -> (x,
    (auxiliary losses {name: sum}, metrics {name: (sum, number)}))."""
    layer_inputs: Callable[[Any, jax.Array], Any]
    """(inputs, number of the layer) -> inputs of that layer."""
    loss: Callable[[Any, Any, jax.Array, dict], tuple[jax.Array, Any]]
    """(shared trained, shared held, x, batch) -> (loss of the microbatch, pytree of float32 arrays to report), both
    weighted: a step sums them."""
    constrain_gradients: Callable[[str, Any], Any]
    """(kind, gradients of the weights of one layer of a rank, [V, ...] each) -> the same, sharded like the weights."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the stages run."""

    programs: tuple[tuple[Any, ...], ...]
    """The distinct stages: (config, kind) of each layer; kinds as `layers` names them."""
    of_stage: np.ndarray
    """int32 [V, P]: index of the program of chunk c of rank r."""
    numbers: np.ndarray
    """int32 [V, P, most layers]: numbers of the layers of a stage."""


class Placed(NamedTuple):
    """Weights in the form that the executor takes."""

    layers: dict
    """{kind: arrays [V, K of a rank times P, ...]}, in the compute dtype."""
    shared: dict
    """All others."""
    shared_specs: dict
    """How the shared weights are split over `pipeline`."""

    def specs(self):
        return tree_map(lambda _: P(None, AXIS), self.layers), self.shared_specs


def loss_and_gradients(
    parts: Parts, programs: Programs, table: Table, trained: Placed, held: Placed, batch: dict, key, *, train: bool,
    loss_scale: jax.Array | None = None,
):  # fmt: skip
    """-> (what the loss reports, (auxiliary, metrics), (gradients of trained layers, of trained shared weights) in
    float32).

    auxiliary: mean over microbatches of the sum over layers; metrics: {name: (sum, number)}. batch: arrays [M, B, ...].
    train=False: no gradients, None. loss_scale: float32 scalar; the gradients are those of the loss times this.
    """
    body = _Body(parts, programs, table, train, num_microbatches=jax.tree.leaves(batch)[0].shape[0])
    # The per-rank tables are arguments, so that each rank holds its own column.
    columns = {name: getattr(table, name) for name in _RANK_COLUMNS}
    run = jax.shard_map(
        body.run,
        axis_names={AXIS},
        in_specs=(trained.specs(), held.specs(), P(), P(), P(), P(None, AXIS)),
        out_specs=(P(), P(), trained.specs() if train else None),
    )
    return run(trained[:2], held[:2], batch, key, loss_scale, columns)


_RANK_COLUMNS = ("forward", "forward_chunk", "forward_slot", "backward", "backward_chunk", "backward_slot")
_COMMON_COLUMNS = ("embed", "loss", "loss_slot", "loss_slot_read", "embed_backward")


class _Body:
    """The program of one rank. Values that differ between ranks are marked as varying over `pipeline` throughout."""

    def __init__(self, parts: Parts, programs: Programs, table: Table, train: bool, num_microbatches: int):
        self.parts = parts
        self.programs = programs
        self.table = table
        self.train = train
        self.num_chunks, self.num_ranks = programs.of_stage.shape
        self.num_microbatches = num_microbatches

    def run(self, trained, held, batch, key, loss_scale, columns):
        self.rank = lax.axis_index(AXIS)
        layers, self.shared = trained
        held_layers, self.held_shared = held
        self.batch = batch
        self.key = key
        self.loss_scale = loss_scale
        # Split by layer, so that gradients are added to whole arrays: {kind: [tree of [V, ...]]}.
        self.layers = {kind: self._split(tree) for kind, tree in layers.items()}
        self.held_layers = {kind: self._split(tree) for kind, tree in held_layers.items()}
        self.blank = tree_map(
            lambda a: constrain(jnp.zeros(a.shape, a.dtype), "batch", "sequence", None),
            jax.eval_shape(lambda: self._embed(jnp.int32(0))),
        )
        self.zeros, entered = self.blank
        zero = _vary(self.zeros)

        def zeros(a):
            return _vary(jnp.zeros(a.shape, a.dtype))

        def float32_zeros(tree):
            return tree_map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

        reported = jax.eval_shape(lambda: self._report(self.zeros, jnp.int32(0)))
        carry = {
            "x": zero,
            "loss": tree_map(lambda a: jnp.zeros(a.shape, a.dtype), reported),
            "terms": tree_map(zeros, self._plan(zero, _vary(entered))),
        }
        if self.train:
            carry |= {
                "d_y": zero,
                "stash": [_vary(jnp.zeros((self.table.num_slots, *a.shape), a.dtype)) for a in self.stash],
                "d_loss": jnp.zeros((self.table.num_loss_slots, *zero.shape), zero.dtype),
                "d_layers": {kind: [self.parts.constrain_gradients(kind, _vary(float32_zeros(tree))) for tree in trees]
                             for kind, trees in self.layers.items()},
                "d_shared": tree_map(_as, float32_zeros(self.shared), self.shared),
            }  # fmt: skip
        rows = {name: a[:, 0] for name, a in columns.items()}
        rows |= {name: jnp.asarray(getattr(self.table, name)) for name in _COMMON_COLUMNS}
        carry = lax.scan(lambda carry, row: (self._tick(carry, row), None), carry, rows)[0]
        auxiliary, metrics = lax.psum(carry["terms"], AXIS)
        terms = tree_map(lambda a: a / self.num_microbatches, auxiliary), metrics
        if not self.train:
            return carry["loss"], terms, None
        d_layers = {kind: tree_map(lambda *layers: jnp.stack(layers, 1), *trees)
                    for kind, trees in carry["d_layers"].items()}  # fmt: skip
        return carry["loss"], terms, (d_layers, carry["d_shared"])

    def _split(self, tree) -> list:
        count = jax.tree.leaves(tree)[0].shape[1]
        return [tree_map(lambda a, k=k: a[:, k], tree) for k in range(count)]

    # ------------------------------------------------------------------ one tick

    def _tick(self, carry, row):
        carry = dict(carry)
        first = (self.rank == 0) & (row["forward_chunk"] == 0)
        fresh, entered = lax.cond(row["embed"] >= 0, lambda: self._embed(row["embed"]), lambda: self.blank)
        x = jnp.where(first, fresh, carry["x"])
        y, carry["terms"], stash = self._forward(row, x, _vary(entered), carry["terms"], carry.pop("stash", []))
        carry = lax.cond(row["loss"] >= 0, lambda carry: self._loss(row, y, carry), lambda carry: carry, carry)
        carry["x"] = self._send(y, forward=True)
        if not self.train:
            return carry
        carry["stash"] = stash
        from_loss = lax.dynamic_index_in_dim(carry["d_loss"], jnp.maximum(row["loss_slot_read"], 0), 0, False)
        last = (self.rank == self.num_ranks - 1) & (row["backward_chunk"] == self.num_chunks - 1)
        d_y = jnp.where(last, from_loss, carry["d_y"])
        d_x, d_entered, carry["d_layers"] = self._backward(row, d_y, carry["stash"], carry["d_layers"])
        embed_backward = functools.partial(self._embed_backward, row, (d_x, d_entered))
        carry["d_shared"] = lax.cond(row["embed_backward"] >= 0, embed_backward, lambda d: d, carry["d_shared"])
        carry["d_y"] = self._send(d_x, forward=False)
        return carry

    def _send(self, x, *, forward: bool):
        """Sends to the next or the previous rank; with several chunks the last and the first rank are neighbours."""
        count = self.num_ranks
        pairs = [(i, (i + 1) % count) for i in range(count if self.num_chunks > 1 else count - 1)]
        return lax.ppermute(x, AXIS, pairs if forward else [(to, frm) for frm, to in pairs])

    # ------------------------------------------------------------------ embedding and loss, by all ranks together

    def _microbatch(self, number):
        """-> (its arrays, its key)."""
        arrays = tree_map(lambda a: lax.dynamic_index_in_dim(a, number, 0, False), self.batch)
        return arrays, None if self.key is None else self.parts.key_of(self.key, number)

    def _embed(self, number):
        return self.parts.embed(self.shared, self.held_shared, *self._microbatch(number))

    def _from_rank(self, tree, rank: int):
        """Broadcasts arrays from one rank to all."""
        return tree_map(lambda a: compat.psum_within_auto(jnp.where(self.rank == rank, a, 0), AXIS), tree)

    def _loss(self, row, y, carry):
        y = self._from_rank(y, self.num_ranks - 1)
        if not self.train:
            return carry | {"loss": tree_map(jnp.add, carry["loss"], self._report(y, row["loss"]))}
        batch, _ = self._microbatch(row["loss"])

        def scaled(*arguments):
            loss, reported = self.parts.loss(*arguments)
            return self._scaled(loss), reported

        (d_shared, d_y), reported = jax.grad(scaled, (0, 2), has_aux=True)(self.shared, self.held_shared, y, batch)
        kept = lax.dynamic_update_index_in_dim(carry["d_loss"], d_y, row["loss_slot"], 0)
        d_shared = tree_map(_add, carry["d_shared"], d_shared)
        return carry | {"loss": tree_map(jnp.add, carry["loss"], reported), "d_loss": kept, "d_shared": d_shared}

    def _scaled(self, loss):
        return loss if self.loss_scale is None else loss * self.loss_scale

    def _report(self, y, number):
        """The values that the loss of a microbatch reports."""
        batch, _ = self._microbatch(number)
        return self.parts.loss(self.shared, self.held_shared, y, batch)[1]

    def _embed_backward(self, row, d_embedded, d_shared):
        arrays, key = self._microbatch(row["embed_backward"])
        _, vjp = jax.vjp(lambda shared: self.parts.embed(shared, self.held_shared, arrays, key), self.shared)
        return tree_map(_add, d_shared, vjp(self._from_rank(d_embedded, 0))[0])

    # ------------------------------------------------------------------ a stage, each rank its own

    def _plan(self, x, entered):
        """Traces every program once to find what it stores, and in which buffer. -> abstract terms of a step."""
        self.kept = []
        needed = Counter()
        found = ({}, {})
        for number in range(len(self.programs.programs)):
            kept = _Kept()
            _, terms, saved = jax.eval_shape(functools.partial(self._stage_vjp, number, 0, 0, kept=kept), x, entered)
            kept.auxiliary = tuple(terms[0])
            avals = [(a.shape, a.dtype) for a in saved]
            kept.buffers = []
            counts = Counter()
            for aval in avals:
                kept.buffers.append((aval, counts[aval]))
                counts[aval] += 1
            needed |= counts  # the maximum over all programs, for each shape
            self.kept.append(kept)
            auxiliary, metrics = terms
            found = (found[0] | auxiliary, found[1] | metrics)
        buffers = [(aval, number) for aval, count in needed.items() for number in range(count)]
        self.stash = [jax.ShapeDtypeStruct(*aval) for aval, _ in buffers]
        for kept in self.kept:
            kept.buffers = [buffers.index(buffer) for buffer in kept.buffers]
        return found

    def _live(self, program: int, chunk, microbatch):
        """-> (trained weights, held weights, inputs) of the layers of a stage: what the backward pass reads again
        instead of storing it."""
        counts = Counter()
        trained = []
        held = []
        inputs = []
        common = self.parts.inputs(*self._microbatch(microbatch))
        numbers = jnp.asarray(self.programs.numbers)[chunk, self.rank]
        for index, (_, kind) in enumerate(self.programs.programs[program]):
            for trees, found in ((self.layers, trained), (self.held_layers, held)):
                tree = trees[kind][counts[kind]] if kind in trees else {}
                found.append(tree_map(lambda a: _of_chunk(a, chunk), tree))
            inputs.append(self.parts.layer_inputs(common, numbers[index]))
            counts[kind] += 1
        return tuple(trained), tuple(held), tuple(inputs)

    def _stage(self, program: int, held, inputs):
        """-> function of (trained weights, x, entered) -> ((y, auxiliary losses), metrics)."""
        configs = tuple(config for config, _ in self.programs.programs[program])

        def run(trained, x, entered):
            y, (auxiliary, metrics) = self.parts.stage(configs, trained, held, x, entered, inputs)
            return (y, auxiliary), metrics

        return run

    def _stage_vjp(self, program: int, chunk, microbatch, x, entered, kept):
        """-> (y, terms, what the backward pass needs and cannot read again); fills in `kept`."""
        live = _vary(self._live(program, chunk, microbatch))
        trained, held, inputs = live
        (y, auxiliary), vjp, metrics = jax.vjp(self._stage(program, held, inputs), trained, x, entered, has_aux=True)
        leaves, kept.structure = jax.tree.flatten(vjp)
        live = jax.tree.leaves(live)
        kept.live = [next((n for n, a in enumerate(live) if a is leaf), None) for leaf in leaves]
        saved = [leaf for leaf, index in zip(leaves, kept.live, strict=True) if index is None]
        return y, (auxiliary, metrics), saved

    def _branch(self, microbatch, chunk):
        """0: nothing to do, else 1 + index of the program."""
        program = jnp.asarray(self.programs.of_stage)[chunk, self.rank]
        return jnp.where(microbatch >= 0, program + 1, 0)

    def _forward(self, row, x, entered, terms, stash):
        microbatch, chunk, slot = (row[name] for name in ("forward", "forward_chunk", "forward_slot"))

        def run(program, x, entered, terms, stash):
            if not self.train:
                trained, held, inputs = _vary(self._live(program, chunk, microbatch))
                (y, auxiliary), metrics = self._stage(program, held, inputs)(trained, x, entered)
                new = (auxiliary, metrics)
            else:
                kept = _Kept()
                y, new, saved = self._stage_vjp(program, chunk, microbatch, x, entered, kept)
                stash = list(stash)
                for buffer, leaf in zip(self.kept[program].buffers, saved, strict=True):
                    stash[buffer] = lax.dynamic_update_index_in_dim(stash[buffer], _vary(leaf), slot, 0)
            return _vary(y), self._added(terms, new), stash

        branches = [lambda x, _, terms, stash: (x, terms, stash)]
        branches += [lambda *operands, p=p: run(p, *operands) for p in range(len(self.programs.programs))]
        return lax.switch(self._branch(microbatch, chunk), branches, x, entered, terms, stash)

    def _added(self, terms, new):
        """The terms of a step so far plus those of a stage for one microbatch, which may lack some."""

        def add(total, more):
            return {
                name: tree_map(lambda a, b: _vary(a + b), a, more[name]) if name in more else a
                for name, a in total.items()
            }

        return tuple(add(*pair) for pair in zip(terms, new, strict=True))

    def _backward(self, row, d_y, stash, d_layers):
        microbatch, chunk, slot = (row[name] for name in ("backward", "backward_chunk", "backward_slot"))

        def run(program, d_y, d_layers):
            kept = self.kept[program]
            live = jax.tree.leaves(_vary(self._live(program, chunk, microbatch)))
            saved = iter([lax.dynamic_index_in_dim(stash[buffer], slot, 0, False) for buffer in kept.buffers])
            leaves = [next(saved) if index is None else live[index] for index in kept.live]
            vjp = jax.tree.unflatten(kept.structure, leaves)
            d_auxiliary = {name: _vary(self._scaled(jnp.float32(1 / self.num_microbatches))) for name in kept.auxiliary}
            d_weights, d_x, d_entered = vjp((d_y, d_auxiliary))
            counts = Counter()
            new = {kind: list(trees) for kind, trees in d_layers.items()}
            for d_layer, (_, kind) in zip(d_weights, self.programs.programs[program], strict=True):
                if kind not in new:  # all its weights are frozen
                    continue
                layer = counts[kind]
                add = functools.partial(_add_to_chunk, chunk=chunk)
                new[kind][layer] = self.parts.constrain_gradients(kind, tree_map(add, new[kind][layer], d_layer))
                counts[kind] += 1
            return *_vary((d_x, d_entered)), new

        branches = [lambda d_y, d_layers: (d_y, _vary(self.blank[1]), d_layers)]
        branches += [lambda *operands, p=p: run(p, *operands) for p in range(len(self.programs.programs))]
        return lax.switch(self._branch(microbatch, chunk), branches, d_y, d_layers)


class _Kept:
    """What is kept between the forward and the backward pass of a program."""

    structure: Any
    """Pytree structure of the vjp function."""
    live: list[int | None]
    """For each leaf of it the index of the weight or input that it is; None if it has to be stored."""
    buffers: list
    """For each stored leaf the index of its buffer in the stash."""
    auxiliary: tuple[str, ...]


def _vary(tree):
    return compat.vary(tree, (AXIS,))


def _as(a, other):
    """a, marked as varying if `other` is."""
    return compat.vary(a, compat.varying_axes(other))


def _add(total, gradient):
    return total + gradient.astype(jnp.float32)


def _of_chunk(a, chunk):
    return a[0] if a.shape[0] == 1 else lax.dynamic_index_in_dim(a, chunk, 0, False)


def _add_to_chunk(total, gradient, chunk):
    gradient = gradient.astype(jnp.float32)
    return total + gradient[None] if total.shape[0] == 1 else total.at[chunk].add(gradient)
