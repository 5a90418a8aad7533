"""A model as pure functions of one nested dict of arrays, its weights.

Code that trains, saves, plans or converts a model uses only this: the arrays, the record of each
(megajax/parameters.py), and the config (models/interface.py). The weights are the trained parameters, the frozen
parameters, and the variables that a step updates without a gradient; `split` separates them.
"""

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Flops, LayerConfig
from megajax.layers.linear import joinable
from megajax.layers.stacked import abstract_layer, merged_layers, rows_of_kind
from megajax.layers.transform import LowPrecision, Transform, transforming
from megajax.mesh.compat import options_to_run_once
from megajax.mesh.sharding import split_by, weight_shardings
from megajax.models.counting import CountedParameter, counted_parameters
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS, AnyModule, LossOptions, LossTerms, ModelConfig, Objective
from megajax.ops.matmul import Float32Gradient
from megajax.ops.token_scores import TokenScores
from megajax.parallel.schedule import Stages
from megajax.parameters import (
    Parameter,
    PerLayer,
    Structure,
    is_in_8_bits,
    is_per_layer,
    matches,
    merge,
    name_of,
    named,
    records,
    select,
    updated,
)
from megajax.precision import PrecisionConfig, cast_floating

logger = logging.getLogger("megajax")


class Weights(NamedTuple):
    params: dict
    """Parameters that are differentiated and have optimizer state."""
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
        adapters: tuple[Transform, ...] = (),
        stages: Stages | None = None,
        trained: tuple[str, ...] = (),
        frozen: tuple[str, ...] = (),
    ):
        """adapters: transforms of matrices besides those of the precision and of the family of the model (lora).
        stages: the pipeline stages for which layers are stored and that models/pipelined.py runs; None: no pipeline.
        trained, frozen: shell patterns of the parameters to train and to freeze; frozen takes precedence, and an empty
        `trained` means all. Allocates nothing.

        Raises ValueError for a pattern that matches nothing, and if everything is frozen.
        """
        self.config = config
        self.precision = precision
        self.execution = execution
        self.stages = stages
        self.adapters = adapters
        low = LowPrecision(precision.low_matrices, precision.recipe, precision.high_layers)
        self.transforms: tuple[Transform, ...] = (*([low] if precision.is_low else []), *config.transforms, *adapters)
        """Of the matrices of layers."""
        self.trains_adapters = any(transform.trains_alone for transform in self.transforms)
        """Whether frozen matrices are stored in the compute dtype, and only adapters are trained by default."""
        self._graphdef, state = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))
        self._structure = Structure.of(state)
        self.records = records(state)
        """Nested dict of the record of each weight: axes, role."""
        self._check_transforms()
        self._frozen = self._frozen_names(trained, frozen)
        self.abstract_weights = jax.eval_shape(self._cast, self._structure.to_tree(state))

    def _frozen_names(self, trained: tuple[str, ...], frozen: tuple[str, ...]) -> frozenset[str]:
        roles = {name: record.role for name, record in named(self.records).items()}
        names = [name for name, role in roles.items() if role != "variable"]
        for field, patterns in (("trained", trained), ("frozen", frozen)):
            for pattern in patterns:
                if not any(matches(name, [pattern]) for name in names):
                    raise ValueError(f"training.{field}: {pattern!r} matches no parameter; names look like {names[0]}")

        def is_trained(name: str) -> bool:
            is_default = roles[name] == "adapter" or not self.trains_adapters
            return (matches(name, trained) if trained else is_default) and not matches(name, frozen)

        found = frozenset(name for name in names if not is_trained(name))
        if len(found) == len(names):
            raise ValueError(f"training.frozen={','.join(frozen)} leaves no parameter to train; freeze fewer")
        return found | (roles.keys() - names if self.trains_adapters else frozenset())

    def _build(self, key: jax.Array) -> AnyModule:
        """The module with weights initialised from `key`."""
        rngs = nnx.Rngs(params=key)
        with transforming(self.transforms):
            module = self.config.build(rngs, self.precision.compute_dtype, self.execution, self.stages)
        if self.precision.head_recipe:
            module.head_recipe = self.precision.head_recipe
        return module

    def _check_transforms(self) -> None:
        stacks = [stack.split(".") for stack in self.layer_rows]
        layers = [self.records[stack][kind] for stack, kind in stacks]
        leaves = [leaf for layer in layers for leaf in jax.tree_util.tree_leaves_with_path(layer)]
        for transform in self.transforms:
            fitting = [path for path, record in leaves if record.role == "matrix" and transform.fits(record)]
            names = set(map(name_of, fitting))
            for pattern in transform.matrices:
                if not any(matches(name, [pattern]) for name in names):
                    raise ValueError(
                        f"{transform.field}: {pattern!r} matches no matrix; the layers have {', '.join(sorted(names))}"
                    )
        if self.precision.head_recipe and not self.config.has_output_layer:
            raise ValueError("precision.low_modules: 'head' is the output layer, which this model lacks; leave it out")

    def _init(self, key: jax.Array) -> dict:
        return self._cast(self._structure.to_tree(nnx.split(self._build(key))[1]))

    def _cast(self, weights: dict) -> dict:
        """The weights in the dtype in which they are stored."""

        def cast(path, a: jax.Array, record: Parameter) -> jax.Array:
            if not record.is_stored_rounded or is_in_8_bits(a):
                return a
            is_read = self.trains_adapters and name_of(path) in self._frozen
            return cast_floating(a, self.precision.compute_dtype if is_read else self.precision.params_dtype)

        return jax.tree_util.tree_map_with_path(cast, weights, self.records)

    # ------------------------------------------------------------------ the weights

    def shardings(self, mesh: Mesh | AbstractMesh) -> dict:
        return weight_shardings(self.records, mesh)

    def check_divides(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError for a parameter with a dim that mesh axes of these sizes do not divide."""
        leaves = jax.tree_util.tree_leaves_with_path(self.abstract_weights)
        for (path, leaf), record in zip(leaves, jax.tree.leaves(self.records), strict=True):
            names_of_dims = split_by(record.axes, record.num_experts, sizes)
            for dim, axis, names in zip(leaf.shape, record.axes, names_of_dims, strict=True):
                if dim % math.prod(sizes[name] for name in names):
                    product = " * ".join(f"mesh.{name}({sizes[name]})" for name in names)
                    raise ValueError(
                        f"{product} does not divide {dim}, the size of {name_of(path)} along {axis!r}; use a mesh that "
                        "divides it"
                    )

    def init(self, seed: int, mesh: Mesh | None = None, *, only: Collection[str] | None = None) -> dict:
        """Weights initialised from `seed`; each device computes only its own shard, and the numbers are the same on
        every mesh. Without a mesh: on the default device. only: names of the weights to return; None: all."""

        def selected(tree: dict) -> dict:
            return tree if only is None else select(tree, lambda name: name in only)

        def draw(seed: jax.Array) -> dict:
            return selected(self._init(jax.random.key(seed)))

        if mesh is None:
            return jax.jit(draw)(jnp.uint32(seed))
        with jax.set_mesh(mesh):
            options = dict(out_shardings=selected(self.shardings(mesh)), compiler_options=options_to_run_once())
            return jax.jit(draw, **options)(jnp.uint32(seed))

    def split(self, tree: dict) -> Weights:
        """Splits a tree with the structure of the weights (arrays, records, shardings) by how they are updated."""
        roles = {name: record.role for name, record in named(self.records).items()}

        def is_updated(name: str, by_gradient: bool) -> bool:
            return name not in self._frozen and by_gradient == (roles[name] != "variable")

        return Weights(
            select(tree, lambda name: is_updated(name, True)),
            select(tree, lambda name: name in self._frozen),
            select(tree, lambda name: is_updated(name, False)),
        )

    def cast_weights(self, dtype: jnp.dtype) -> dict:
        """Abstract weights: in `dtype` if layers cast them to it anyway, the others as they are stored."""

        def cast(a: jax.ShapeDtypeStruct, record: Parameter) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, dtype if record.is_cast and not is_in_8_bits(a) else a.dtype)

        return jax.tree.map(cast, self.abstract_weights, self.records)

    def per_layer(self, weights: dict) -> dict:
        """The weights with those of the layers as one array a layer, for programs that only read them."""

        def split(array: jax.Array, record: Parameter):
            if is_per_layer(array) or record.axes[:1] != ("layers",):
                return array
            return PerLayer(tuple(array[i] for i in range(array.shape[0])))

        return jax.tree.map(split, weights, self.records, is_leaf=is_per_layer)

    def joinable(self) -> Iterator[tuple[list[str], tuple[int, ...], int]]:
        """(names of parameters, shape, axis) of the matrices that layers multiply side by side (layers/linear.py
        `joinable`), for each kind of layer."""
        module = self.module(self.abstract_weights)
        for stack, rows in self.layer_rows.items():
            name, kind = stack.split(".")
            layer = abstract_layer(getattr(module, name).configs[rows.flat[0]])
            for names, shape, axis in joinable(layer):
                yield [f"{stack}.{matrix}" for matrix in names], shape, axis

    def merged(self, weights: dict) -> dict:
        """The weights of config.without_transforms, with the transforms of this model merged into them; without stages.

        Raises ValueError for a transform that cannot be merged."""
        module = self.module(self.abstract_weights)
        found = weights
        for stack, rows in self.layer_rows.items():
            name, kind = stack.split(".")
            configs = getattr(module, name).configs
            layers = merged_layers([configs[row] for row in rows], weights[name][kind])
            found = found | {name: found[name] | {kind: layers}}
        kept = jax.tree_util.tree_leaves_with_path(self.without_transforms.records)
        names = {name_of(path) for path, _ in kept}
        return select(found, lambda name: name in names)

    @property
    def without_transforms(self) -> "Model":
        """The model after `merged`, without stages."""
        return Model(self.config.without_transforms, self.precision, self.execution)

    @staticmethod
    def stacked(weights: dict) -> dict:
        """The opposite of `per_layer`."""
        return jax.tree.map(lambda a: a.stacked() if is_per_layer(a) else a, weights, is_leaf=is_per_layer)

    @property
    def trained(self) -> dict:
        """The records of the trained parameters."""
        return self.split(self.records).params

    def num_parameters(self) -> int:
        """Number of parameters, counted from the arrays, without padding rows and without variables."""
        return sum(parameter.size for parameter in self.parameters)

    def num_active_parameters(self) -> int:
        """Number of parameters that each token uses: of the experts only its own, as the FLOPs of the layers say."""
        of_experts = sum(p.size for p in self.parameters if "experts" in p.record.axes and p.record.is_multiplied)
        return self.num_parameters() - of_experts + round(self.forward_flops(1).routed / 2)

    def shares_read(self) -> dict:
        """Nested dict of the share of each weight that a forward pass of a few tokens reads at least: of matrices of
        experts those of one token; of tables in which rows are looked up next to nothing, unless they are the output
        layer as well; all of the others."""
        has_head = any(record.role == "head" for record in jax.tree.leaves(self.records))

        def share(record: Parameter) -> float:
            if "experts" in record.axes and record.is_multiplied:
                return self._chosen_share
            is_output = "vocab" in record.axes and not has_head
            return 0.0 if record.role == "embedding" and not is_output else 1.0

        return jax.tree.map(share, self.records)

    @property
    def _chosen_share(self) -> float:
        """Of the matrices of experts those by which a token is multiplied."""
        experts = [p for p in self.parameters if "experts" in p.record.axes and p.record.role == "matrix"]
        return self.config.forward_flops(1).routed / 2 / max(sum(p.size for p in experts), 1)

    @functools.cached_property
    def parameters(self) -> list[CountedParameter]:
        """One entry per parameter, for counting bytes and FLOPs."""
        return counted_parameters(self)

    def forward_flops(self, sequence_length: int) -> Flops:
        """FLOPs per token of the forward pass: those of the config, and of adapters."""
        sizes = Counter()
        for parameter in self.parameters:
            if parameter.record.role == "adapter":
                sizes["experts" in parameter.record.axes] += parameter.size
        routed = 2 * self._chosen_share * sizes[True]
        return self.config.forward_flops(sequence_length) + Flops(2 * sizes[False] + routed, routed=routed)

    def training_flops(self, sequence_length: int) -> Flops:
        """FLOPs per token of forward and backward pass. The backward pass takes twice the forward pass, minus the
        gradients of frozen matrices, estimated from their share of all matrices."""
        forward = self.forward_flops(sequence_length)
        matrices = [p for p in self.parameters if p.record.is_multiplied and not p.is_looked_up]
        trained = sum(p.size for p in matrices if p.is_trained) / max(sum(p.size for p in matrices), 1)
        of_weights = dataclasses.replace(forward, matmuls=forward.matmuls * trained, routed=forward.routed * trained)
        return forward * 2 + of_weights

    def flops_per_token(self, sequence_length: int, *, causal: bool) -> float:
        """FLOPs per token of forward and backward pass.

        causal: whether attention counts only what a token attends to (layers/layer.py).
        """
        return self.training_flops(sequence_length).total(causal=causal)

    @property
    def num_layers(self) -> int:
        """Number of layers of all stacks."""
        return len(self.config.layers(self.execution))

    @functools.cached_property
    def distinct_layers(self) -> dict[LayerConfig, list[int]]:
        """The numbers, in the layers of all stacks, of those that are the same."""
        found: dict[LayerConfig, list[int]] = {}
        for number, layer in enumerate(self.config.layers(self.execution)):
            found.setdefault(layer, []).append(number)
        return found

    @property
    def layers_run(self) -> tuple[LayerConfig, ...]:
        """The layers that a step runs; one that every rank of a pipeline runs on all tokens, a guessing one, is listed
        once per rank."""
        guessing = sum(self.config.stacks_of("guess", self.execution).values(), ())
        others = 0 if self.stages is None else self.stages.num_ranks - 1
        return self.config.layers(self.execution) + guessing * others

    @property
    def scans(self) -> bool:
        """Whether the layers run in a loop: over layers, or over the microbatches of a pipeline."""
        stacks = self.config.stacks(self.execution).values()
        return self.stages is not None or any(self.execution.scans(len(layers)) for layers in stacks)

    @property
    def layer_rows(self) -> dict[str, np.ndarray]:
        """{"stack.kind": layer number of each row of its arrays}, -1 for padding rows."""
        body = self.config.stacks_of("body", self.execution)
        return {
            f"{stack}.{kind}": rows_of_kind(layers, kind, self.stages if stack in body else None)
            for stack, layers in self.config.stacks(self.execution).items()
            for kind in dict.fromkeys(layer.kind for layer in layers)
        }

    # ------------------------------------------------------------------ computation

    def module(self, weights: dict) -> AnyModule:
        """The nnx.Module with these weights (arrays or tracers)."""
        return nnx.merge(self._graphdef, self._structure.to_state(self.for_matmuls(weights, self.records)))

    def for_matmuls(self, weights: dict, records: dict) -> dict:
        """Weights with these records in the form that ops/matmul.py takes: matrices as Float32Gradient if needed."""
        if not self.precision.has_float32_gradients:
            return weights

        def wrap(array: jax.Array, record: Parameter):
            if record.role != "matrix" or is_per_layer(array) or is_in_8_bits(array):  # no gradient
                return array
            return Float32Gradient(array)

        return jax.tree.map(wrap, weights, records, is_leaf=is_per_layer)

    def loss(
        self,
        weights: dict,
        batch: dict,
        objective: Objective,
        *,
        key: jax.Array | None = None,
        first_sample: int | jax.Array = 0,
        options: LossOptions = NO_REGULARISERS,
    ) -> LossTerms:
        """The loss of a batch, its auxiliary terms and metrics; `loss(...).total()` is what is differentiated.

        batch: arrays [B, ...] as the objective reads them, with loss_weights instead of loss_mask. key: for dropout;
        None: no dropout. first_sample: number of the first row in its step, so that the dropout of a sample does not
        depend on how a step is split into batches.

        Works without a mesh, on one device; use jax.jit for repeated calls.
        """
        dropout = None if key is None else DropoutKey(key, jnp.int32(first_sample))
        module = self.module(weights)
        h, of_layers = module.hidden(batch, dropout)
        return objective.loss(module, h, batch, options).with_layers(*of_layers)

    def scores(self, weights: dict, batch: dict) -> TokenScores:
        """The log-probability of each of batch["labels"], and the most likely token in its place; no dropout.

        batch: int32 arrays [B, T] as config.inputs names them, and labels.
        """
        module = self.module(weights)
        return module.log_probs(module.hidden(batch)[0], batch["labels"])

    def updated(self, variables: dict, observed: dict) -> dict:
        """The variables after a step, from its observations (parameters.py)."""
        return updated(variables, observed, self.split(self.records).variables)

    def gradient_pieces(self, gradients: dict) -> list[jax.Array]:
        """The gradients as the backward pass computes them: layer by layer if the stack is unrolled.

        An operation that only reads them (the norm) then reads each layer directly, instead of the concatenation.
        """
        if self.scans:
            return jax.tree.leaves(gradients)
        leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(self.trained), strict=True)
        return [piece for leaf, record in leaves for piece in (leaf if record.axes[:1] == ("layers",) else [leaf])]
