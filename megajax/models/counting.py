"""The parameters of a model as numbers, from which plans count bytes and FLOPs."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax

from megajax.layers.transform import LowPrecision
from megajax.mesh.sharding import SHARING_AXES, num_parts
from megajax.parameters import Parameter, name_of

if TYPE_CHECKING:
    from megajax.models.model import Model


class CountedParameter(NamedTuple):
    size: int
    """Number of elements, without padding rows."""
    record: Parameter
    is_trained: bool
    is_in_a_layer: bool
    is_output: bool
    """The matrix of the output layer: the head, or the tied vocabulary embedding."""
    is_looked_up: bool
    """The vocabulary embedding if it is not tied, so that only rows of it are read."""
    num_experts: int
    """Experts whose matrices it holds; 1 for other parameters."""
    low_size: int
    """Elements that are multiplied in a low-precision format (precision.recipe)."""

    def split(self, sizes: Mapping[str, int], *, but: Collection[str] = ()) -> float:
        """Elements per device on a mesh with axes of these sizes; the axes in `but` count as 1."""
        return self.size / num_parts(self.record.axes, sizes, but=but)

    def computed(self, sizes: Mapping[str, int]) -> float:
        """Elements that a device computes with: gathered along the axes that share one copy of the weights; for
        parameters of layers, those of all stages."""
        return self.split(sizes, but=(*SHARING_AXES, "pipeline") if self.is_in_a_layer else SHARING_AXES)


def counted_parameters(model: "Model") -> list[CountedParameter]:
    """All but variables."""
    found = []
    rows_of = model.layer_rows
    has_head = any(record.role == "head" for record in jax.tree.leaves(model.records))
    trained = {name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.trained)}
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract_weights)
    for (path, leaf), record in zip(leaves, jax.tree.leaves(model.records), strict=True):
        name = name_of(path)
        if record.role == "variable":
            continue
        stack = next((stack for stack in rows_of if name.startswith(f"{stack}.")), None)
        is_vocabulary = record.role == "embedding" and "vocab" in record.axes
        is_output = record.role == "head" or (is_vocabulary and not has_head)
        if stack is None:
            size = leaf.size
            low_size = size if is_output and model.precision.head_recipe else 0
        else:
            rows = rows_of[stack]
            size_of_row = leaf.size // rows.size
            size = size_of_row * int((rows >= 0).sum())
            low_size = size_of_row * _num_low_rows(model, stack, name.removeprefix(f"{stack}."), record)
        found.append(
            CountedParameter(
                size=size,
                low_size=low_size,
                record=record,
                is_trained=name in trained,
                is_in_a_layer=stack is not None,
                is_output=is_output,
                is_looked_up=is_vocabulary and has_head,
                num_experts=dict(zip(record.axes, leaf.shape, strict=True)).get("experts", 1),
            )
        )
    return found


def _num_low_rows(model: "Model", stack: str, name: str, record: Parameter) -> int:
    """In how many layers the parameter of this name is multiplied in a low-precision format. stack: a key of
    layer_rows."""
    low = next((transform for transform in model.transforms if isinstance(transform, LowPrecision)), None)
    if low is None or record.role != "matrix" or not low.takes(name, record):
        return 0
    number = len(model.config.stacks(model.execution)[stack.split(".")[0]])
    return sum(row >= 0 and low.in_layer(row, number).is_active for row in model.layer_rows[stack].ravel().tolist())
