"""Rearranges the layers of a checkpoint into the rows that another run uses.

The layers of one kind are stacked in one array, layer after layer, or for a pipeline [chunks, rows of all ranks] with
padding rows (parallel/schedule.py). A checkpoint holds the arrays as the run that saved it had them, and records which
row is which layer.
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Rows = dict[str, np.ndarray]
"""{"stack.kind": int32 layer number of each row of its arrays, -1 for padding}."""


def recorded(rows: Rows) -> dict[str, dict[str, list]]:
    """The part of the metadata of a step from which `saved_rows` reads them."""
    return {"layer_rows": {stack: numbers.tolist() for stack, numbers in rows.items()}}


def saved_rows(meta: dict, wanted: Rows) -> Rows:
    """The rows of the arrays of a checkpoint, from its metadata. Raises ValueError if it does not have the wanted
    layers."""
    stored = {stack: np.array(rows) for stack, rows in meta.get("layer_rows", {}).items()}
    for stack, rows in wanted.items():
        here = np.unique(rows)
        in_checkpoint = np.unique(stored.get(stack, []))
        if not np.array_equal(here[here >= 0], in_checkpoint[in_checkpoint >= 0]):
            raise ValueError(
                f"{stack} has {np.sum(in_checkpoint >= 0)} layers in the checkpoint and {np.sum(here >= 0)} here, or "
                "different ones: use the model settings that it was saved with"
            )
    return stored


def stored_form(abstract, stored: Rows, wanted: Rows):
    """abstract: pytree of abstract arrays with the wanted shapes and shardings -> the same with the stored ones."""

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
    """Arrays of stored_form -> arrays like `abstract`; one after the other, so that at most one exists twice."""

    def form(target, kind, a):
        if kind is None or np.array_equal(stored[kind], wanted[kind]):
            return a

        def move(a):
            return in_rows(a, stored[kind], wanted[kind])

        moved = jax.block_until_ready(jax.jit(move, out_shardings=target.sharding)(a))
        a.delete()
        return moved

    return of_layers(form, abstract, wanted, tree)


def in_rows(a: jax.Array, stored: np.ndarray, wanted: np.ndarray) -> jax.Array:
    """The wanted layers of an array of stored ones; padding rows are zeros."""
    row_of = {number: row for row, number in enumerate(stored.ravel().tolist())}
    is_layer = wanted.ravel() >= 0
    # Padding rows are zeroed below; any source row will do.
    rows = np.array([row_of[number] if number >= 0 else 0 for number in wanted.ravel().tolist()])
    a = a.reshape(-1, *a.shape[stored.ndim :])[rows]
    a = jax.numpy.where(is_layer.reshape(-1, *[1] * (a.ndim - 1)), a, jax.numpy.zeros_like(a))
    return a.reshape(*wanted.shape, *a.shape[1:])


def of_layers(form: Callable, tree, wanted: Rows, *others):
    """Applies form(leaf, stack, *others) to each leaf; stack: its "stack.kind", a key of wanted, or None."""

    def apply(path, leaf, *others):
        name = ".".join(str(getattr(entry, "key", "")) for entry in path)
        return form(leaf, stack_of(name, wanted), *others)

    return jax.tree_util.tree_map_with_path(apply, tree, *others)


def stack_of(name: str, rows: Rows) -> str | None:
    """The "stack.kind" of an array with a name such as layers.dense.mlp.up, or None."""
    stacks = map(".".join, itertools.pairwise(name.split(".")))
    return next((stack for stack in stacks if stack in rows), None)
