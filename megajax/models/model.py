"""A model as pure functions of one nested dict of arrays, its weights.

Whatever trains, saves, plans or converts a model sees only this: the arrays, the record of each
(megajax/parameters.py), and the config (models/interface.py). The weights are the parameters that are trained, those
that are frozen, and the variables that a step updates without a gradient; `split` tells them apart.
"""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from megajax.layers.block import rows_of_kind
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS, LossOptions, LossTerms, ModelConfig
from megajax.parallel.schedule import Stages
from megajax.parameters import Role, Structure, matches, merge, name_of, records, select
from megajax.precision import PrecisionConfig, cast_floating
from megajax.sharding import weight_shardings

logger = logging.getLogger("megajax")


class Weights(NamedTuple):
    params: dict
    """What is differentiated and has optimizer state."""
    frozen: dict
    variables: dict

    def merged(self) -> dict:
        return merge(*self)


class Model:
    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig = PrecisionConfig(),
        execution: ExecutionConfig = ExecutionConfig(),
        *,
        stages: Stages | None = None,
        frozen: tuple[str, ...] = (),
    ):
        """stages: of the pipeline that its layers are stored for, and models/pipelined.py then runs; None: no pipeline.
        frozen: shell patterns of the parameters that are not trained. Allocates nothing.

        Raises ValueError for a pattern that matches nothing, and if everything is frozen.
        """
        self.config, self.precision, self.execution, self.stages = config, precision, execution, stages
        build = functools.partial(config.build, dtype=precision.compute_dtype, execution=execution, stages=stages)
        self._build = lambda key: build(nnx.Rngs(params=key))
        self._graphdef, state = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))
        self._structure = Structure.of(state)
        self.records = records(state)
        """Nested dict of the record of each weight: axes, role."""
        self.abstract_weights = jax.eval_shape(lambda: self._init(jax.random.key(0)))
        self._frozen = self._names_of(frozen)

    def _names_of(self, patterns: tuple[str, ...]) -> frozenset[str]:
        everything = jax.tree_util.tree_leaves_with_path(self.records)
        names = [name_of(path) for path, record in everything if record.role != "variable"]
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(f"training.frozen: {pattern!r} matches no parameter; they are called like {names[0]}")
        frozen = frozenset(name for name in names if matches(name, patterns))
        if len(frozen) == len(names):
            raise ValueError(f"training.frozen={','.join(patterns)} leaves no parameter to train; freeze fewer")
        return frozen

    def _init(self, key: jax.Array) -> dict:
        weights, dtype = self._structure.to_tree(nnx.split(self._build(key))[1]), self.precision.params_dtype
        # The others take little memory, and bfloat16 would lose their updates: those of a norm scale, which is near 1,
        # are below half a unit in its last place, 2^-9.
        cast = lambda a, record: cast_floating(a, dtype) if record.is_cast else a
        return jax.tree.map(cast, weights, self.records)

    # ------------------------------------------------------------------ the weights

    def shardings(self, mesh: Mesh) -> dict:
        return weight_shardings(self.records, mesh)

    def init(self, seed: int, mesh: Mesh | None = None) -> dict:
        """Weights drawn from `seed`, each device making its own part only; the same numbers on every mesh, and without
        one, on the default device."""
        if mesh is None:
            return jax.jit(self._init)(jax.random.key(seed))
        with jax.set_mesh(mesh):
            return jax.jit(self._init, out_shardings=self.shardings(mesh))(jax.random.key(seed))

    def split(self, tree: dict) -> Weights:
        """A tree of the structure of the weights (arrays, records, shardings), by how they are updated."""
        roles = {name_of(path): record.role for path, record in jax.tree_util.tree_leaves_with_path(self.records)}
        variable = lambda name: roles[name] == "variable"
        return Weights(
            select(tree, lambda name: not variable(name) and name not in self._frozen),
            select(tree, lambda name: name in self._frozen),
            select(tree, variable),
        )

    def cast_weights(self, dtype: jnp.dtype) -> dict:
        """Abstract weights with those in `dtype` that layers cast to it anyway, the others as they are stored."""
        cast = lambda a, record: jax.ShapeDtypeStruct(a.shape, dtype if record.is_cast else a.dtype)
        return jax.tree.map(cast, self.abstract_weights, self.records)

    @property
    def trained(self) -> dict:
        """The records of what is trained."""
        return self.split(self.records).params

    def num_parameters(self) -> int:
        """Counted from the arrays, without rows of padding, and without variables."""
        inside = tuple(f"{place}." for place in self.layer_rows)
        outside = select(self._parameters(), lambda name: not name.startswith(inside))
        return size_of(outside) + self.num_layer_parameters()

    def num_trained_parameters(self) -> int:
        """Of these those that are not frozen, with rows of padding where some are."""
        return size_of(self.split(self.abstract_weights).params) if self._frozen else self.num_parameters()

    def num_layer_parameters(self) -> int:
        """Of these those of the stacks."""
        tree, total = self._parameters(), 0
        for place, rows in self.layer_rows.items():
            stack, kind = place.split(".")
            total += size_of(tree[stack][kind]) // rows.size * int((rows >= 0).sum())
        return total

    def _parameters(self) -> dict:
        return merge(*self.split(self.abstract_weights)[:2])

    @property
    def output_size(self) -> int:
        """Entries of the matrix of the output layer: the head, or the embedding of the vocabulary that it shares."""
        return self._size_of("head") or self._size_of("embedding", "vocab")

    @property
    def looked_up_size(self) -> int:
        """Entries of the embedding of the vocabulary, if only its rows are read."""
        return self._size_of("embedding", "vocab") if self._size_of("head") else 0

    def _size_of(self, role: Role, axis: str = "") -> int:
        """Entries of the parameters with this role, and with this axis if one is given."""
        pairs = zip(jax.tree.leaves(self.abstract_weights), jax.tree.leaves(self.records), strict=True)
        return sum(leaf.size for leaf, record in pairs if record.role == role and (not axis or axis in record.axes))

    @property
    def num_layers(self) -> int:
        """Of all stacks."""
        return len(self.config.layers(self.execution))

    @property
    def scans(self) -> bool:
        """Whether the layers are a loop of the program, or lie in one over the microbatches of a pipeline."""
        stacks = self.config.stacks(self.execution).values()
        return self.stages is not None or any(self.execution.scans(len(layers)) for layers in stacks)

    @property
    def layer_rows(self) -> dict[str, np.ndarray]:
        """{"stack.kind": number of the layer in each row of its arrays}, -1 for a row that stands for none."""
        return {
            f"{stack}.{kind}": rows_of_kind(layers, kind, self.stages)
            for stack, layers in self.config.stacks(self.execution).items()
            for kind in dict.fromkeys(layer.kind for layer in layers)
        }

    # ------------------------------------------------------------------ what it computes

    def module(self, weights: dict) -> nnx.Module:
        """The nnx.Module with these weights (arrays or tracers)."""
        return nnx.merge(self._graphdef, self._structure.to_state(weights))

    def loss(
        self, weights: dict, batch: dict, *, key: jax.Array | None = None, options: LossOptions = NO_REGULARISERS
    ) -> LossTerms:
        """The loss of a batch and what belongs to it; `loss(...).total()` is what is differentiated.

        batch: as config.batch names its arrays, each [B, ...], but loss_weights float32 [B, T], what each token counts,
        in place of loss_mask. key: for dropout; None: no dropout. Works without a mesh, on one device.
        """
        return self.module(weights).terms(batch, key, options)

    def updated(self, variables: dict, observed: dict) -> dict:
        """The variables after a step, from what was observed in it (LossTerms.observed)."""
        new = {}
        for stack, layers in self.config.stacks(self.execution).items():
            for kind, seen in observed.get(stack, {}).items():
                config = next(layer for layer in layers if layer.kind == kind)
                update = config.updated
                for _ in range(self.layer_rows[f"{stack}.{kind}"].ndim):
                    update = jax.vmap(update)
                new = merge(new, {stack: {kind: update(variables[stack][kind], seen)}})
        return merge(variables, new)

    def gradient_pieces(self, gradients: dict) -> list[jax.Array]:
        """The gradients as the backward pass makes them: layer by layer where the stack is unrolled.

        What only reads them (a norm) then reads each where it lies, instead of through the concatenation of all layers.
        """
        if self.scans:
            return jax.tree.leaves(gradients)
        leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(self.trained), strict=True)
        return [piece for leaf, record in leaves for piece in (leaf if record.axes[:1] == ("layers",) else [leaf])]


def size_of(tree) -> int:
    """Elements of all arrays of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
