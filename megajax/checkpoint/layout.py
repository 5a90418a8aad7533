"""Layers of a checkpoint in the rows in which another run keeps them.

The layers of one kind are stacked in one array, layer after layer, or for a pipeline [chunks, rows of all ranks] with
rows of padding (parallel/schedule.py). A checkpoint holds the arrays as the run that saved it had them, and says which
row is which layer.
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Rows = dict[str, np.ndarray]
"""{"stack.kind": int32 number of the layer in each row of its arrays, -1 for padding}."""


def saved_rows(meta: dict, wanted: Rows) -> Rows:
    """Of the arrays of a checkpoint, from its meta data; those of before there were several stacks name the kind alone,
    and before there were pipelines, nothing. Raises ValueError if it has not the layers that are wanted."""
    if "layer_rows" not in meta:
        return {place: np.arange(rows.max() + 1) for place, rows in wanted.items()}
    stored = {
        place if "." in place else f"layers.{place}": np.array(rows) for place, rows in meta["layer_rows"].items()
    }
    for place, rows in wanted.items():
        here = np.unique(rows)
        there = np.unique(stored.get(place, []))
        if not np.array_equal(here[here >= 0], there[there >= 0]):
            raise ValueError(
                f"{place} has {np.sum(there >= 0)} layers in the checkpoint and {np.sum(here >= 0)} here, or others: "
                "describe the model as it was saved"
            )
    return stored


def stored_form(abstract, stored: Rows, wanted: Rows):
    """abstract: pytree of arrays with shardings, as they are wanted -> the same as they are stored."""

    def form(a, kind):
        if kind is None or np.array_equal(stored[kind], wanted[kind]):
            return a
        shape = (*stored[kind].shape, *a.shape[wanted[kind].ndim :])
        mesh = a.sharding.mesh
        spec = [*a.sharding.spec, *[None] * (a.ndim - len(a.sharding.spec))]
        fits = stored[kind].shape[-1] % mesh.shape["pipeline"] == 0
        lead = [*[None] * (stored[kind].ndim - 1), "pipeline" if fits else None]
        sharding = NamedSharding(mesh, P(*lead, *spec[wanted[kind].ndim :]))
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=sharding)

    return of_layers(form, abstract, wanted)


def wanted_form(tree, abstract, stored: Rows, wanted: Rows):
    """Arrays of stored_form -> arrays like `abstract`, one after the other, so that one of them is there twice."""

    def form(target, kind, a):
        if kind is None or np.array_equal(stored[kind], wanted[kind]):
            return a
        row_of = {number: row for row, number in enumerate(stored[kind].ravel().tolist())}
        is_layer = wanted[kind].ravel() >= 0
        # Padding is zeros, from whichever row.
        rows = np.array([row_of[number] if number >= 0 else 0 for number in wanted[kind].ravel().tolist()])

        def move(a):
            a = a.reshape(-1, *a.shape[stored[kind].ndim :])[rows]
            a = jax.numpy.where(is_layer.reshape(-1, *[1] * (a.ndim - 1)), a, jax.numpy.zeros_like(a))
            return a.reshape(target.shape)

        moved = jax.block_until_ready(jax.jit(move, out_shardings=target.sharding)(a))
        a.delete()
        return moved

    return of_layers(form, abstract, wanted, tree)


def of_layers(form: Callable, tree, wanted: Rows, *others):
    """form(leaf, place, *others) of each leaf; place: the "stack.kind" that it belongs to, a key of wanted, or None."""

    def apply(path, leaf, *others):
        name = ".".join(str(getattr(entry, "key", "")) for entry in path)
        return form(leaf, place_of(name, wanted), *others)

    return jax.tree_util.tree_map_with_path(apply, tree, *others)


def place_of(name: str, rows: Rows) -> str | None:
    """The "stack.kind" that an array belongs to, by its name such as layers.dense.mlp.up, or None."""
    places = map(".".join, itertools.pairwise(name.split(".")))
    return next((place for place in places if place in rows), None)
