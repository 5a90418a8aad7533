"""The state of a run: what a step updates and a checkpoint stores, with the sharding of every leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.models.model import Model
from megajax.optim.distributed import optimizer_shardings
from megajax.optim.optimizer import Optimizer
from megajax.parameters import merge


class TrainState(NamedTuple):
    step: jax.Array
    """int32: steps done."""
    skipped: jax.Array
    """int32: steps whose update was left out because a gradient was not finite."""
    params: Any
    """The weights that are trained: matrices and embeddings as precision.params says, others float32."""
    frozen: Any
    """Those that are not (training.frozen)."""
    variables: Any
    """What the step updates without a gradient."""
    optimizer: Any
    """Of the params alone."""

    @property
    def weights(self) -> dict:
        """All that the model computes with: what a checkpoint calls params, as it holds them together."""
        return merge(self.params, self.frozen, self.variables)


def state_shardings(model: Model, optimizer: Optimizer, mesh: Mesh, shard_over_data: bool) -> TrainState:
    replicated = NamedSharding(mesh, P())
    weights = model.split(model.shardings(mesh))
    abstract = model.split(model.abstract_weights).params
    state = optimizer_shardings(optimizer, abstract, weights.params, mesh=mesh, shard_over_data=shard_over_data)
    return TrainState(replicated, replicated, *weights, state)


def abstract_state(model: Model, optimizer: Optimizer) -> TrainState:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    weights = model.split(model.abstract_weights)
    return TrainState(scalar, scalar, *weights, jax.eval_shape(optimizer.init, weights.params))


def new_state(model: Model, optimizer: Optimizer, weights: dict, mesh: Mesh, shardings: TrainState) -> TrainState:
    """The state before the first step with these weights, laid out as the shardings say."""
    split = model.split(weights)
    with jax.set_mesh(mesh):
        return TrainState(
            jax.device_put(jnp.int32(0), shardings.step),
            jax.device_put(jnp.int32(0), shardings.skipped),
            *split,
            jax.jit(optimizer.init, out_shardings=shardings.optimizer)(split.params),
        )
