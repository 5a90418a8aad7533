"""The state of a run: what a step updates and a checkpoint stores, with the sharding of every leaf."""

from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.models.model import Model
from megajax.optim.distributed import optimizer_shardings
from megajax.optim.loss_scale import LossScale
from megajax.optim.optimizer import Optimizer
from megajax.parameters import merge

Leaf = TypeVar("Leaf")


class TrainState(NamedTuple, Generic[Leaf]):
    """Of arrays, or of their shapes, or of their shardings."""

    step: Leaf
    """int32: steps done."""
    skipped: Leaf
    """int32: steps whose update was skipped."""
    params: Any
    """Trained weights: matrices and embeddings in precision.params, others float32."""
    frozen: Any
    """Weights that are not trained (training.frozen)."""
    variables: Any
    """Variables that the step updates without a gradient."""
    optimizer: Any
    """Optimizer state, for `params` only."""
    loss_scale: LossScale[Leaf] | None = None
    """For precision.recipe=fp16."""

    @property
    def weights(self) -> dict:
        """All weights and variables of the model; a checkpoint stores them together, as params."""
        return merge(self.params, self.frozen, self.variables)


def state_shardings(
    model: Model, optimizer: Optimizer, mesh: Mesh | AbstractMesh, shard_over_data: bool
) -> TrainState[NamedSharding]:
    replicated = NamedSharding(mesh, P())
    weights = model.split(model.shardings(mesh))
    abstract = model.split(model.abstract_weights).params
    state = optimizer_shardings(optimizer, abstract, weights.params, mesh=mesh, shard_over_data=shard_over_data)
    loss_scale = LossScale(*[replicated] * 3) if model.precision.scales_loss else None
    return TrainState(replicated, replicated, *weights, state, loss_scale)


def abstract_state(model: Model, optimizer: Optimizer) -> TrainState[jax.ShapeDtypeStruct]:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    weights = model.split(model.abstract_weights)
    state = optimizer.abstract_state(weights.params)
    return TrainState(scalar, scalar, *weights, state, jax.eval_shape(lambda: first_loss_scale(model, optimizer)))


def first_loss_scale(model: Model, optimizer: Optimizer) -> LossScale | None:
    return LossScale.initial(optimizer.config.loss_scale_rule) if model.precision.scales_loss else None


def new_state(model: Model, optimizer: Optimizer, weights: dict, mesh: Mesh, shardings: TrainState) -> TrainState:
    """The state before the first step, with these weights, which have the given shardings."""
    split = model.split(weights)
    with jax.set_mesh(mesh):
        return TrainState(
            jax.device_put(jnp.int32(0), shardings.step),
            jax.device_put(jnp.int32(0), shardings.skipped),
            *split,
            jax.jit(optimizer.init, out_shardings=shardings.optimizer)(split.params),
            jax.device_put(first_loss_scale(model, optimizer), shardings.loss_scale),
        )
