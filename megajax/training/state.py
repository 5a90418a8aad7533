"""The state of a run: what a step changes and a checkpoint holds, with the sharding of every leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.models.model import Model
from megajax.optim.distributed import optimizer_shardings
from megajax.optim.optimizer import Optimizer


class TrainState(NamedTuple):
    step: jax.Array
    """int32: steps done."""
    skipped: jax.Array
    """int32: steps whose update was left out because a gradient was not finite."""
    params: Any
    optimizer: Any


def state_shardings(model: Model, optimizer: Optimizer, mesh: Mesh, shard_over_data: bool) -> TrainState:
    replicated, params = NamedSharding(mesh, P()), model.shardings(mesh)
    state = optimizer_shardings(optimizer, model.abstract_params, params, mesh=mesh, shard_over_data=shard_over_data)
    return TrainState(replicated, replicated, params, state)


def abstract_state(model: Model, optimizer: Optimizer) -> TrainState:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(scalar, scalar, model.abstract_params, jax.eval_shape(optimizer.init, model.abstract_params))


def init_state(model: Model, optimizer: Optimizer, seed: int, mesh: Mesh, shardings: TrainState) -> TrainState:
    """The state before the first step, made in place on all devices."""
    params = model.init(seed, mesh)
    with jax.set_mesh(mesh):
        return TrainState(
            jax.device_put(jnp.int32(0), shardings.step),
            jax.device_put(jnp.int32(0), shardings.skipped),
            params,
            jax.jit(optimizer.init, out_shardings=shardings.optimizer)(params),
        )
