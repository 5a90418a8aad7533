"""The model, its task, its optimizer and the mesh of a run."""

import dataclasses
import functools
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import with_shardings
from megajax.models.interface import BatchArray
from megajax.models.model import Model
from megajax.optim.loss_scale import LossScale
from megajax.optim.optimizer import Optimizer
from megajax.tasks.interface import Task
from megajax.training.config import TrainingConfig
from megajax.training.state import TrainState, abstract_state, first_loss_scale, new_state, state_shardings
from megajax.training.step import jit_train_step

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


@dataclasses.dataclass(frozen=True)
class Program(Generic[AnyMesh]):
    model: Model
    task: Task
    optimizer: Optimizer
    mesh: AnyMesh
    """Abstract for a plan, which needs no devices."""
    mesh_config: MeshConfig
    """Config of that mesh, without -1."""
    compiler_options: dict[str, str]
    """Options of the train step (training/compiler_options.py)."""

    @functools.cached_property
    def shardings(self) -> TrainState:
        shard_over_data = self.optimizer.config.shard_over_data
        return state_shardings(self.model, self.optimizer, self.mesh, shard_over_data)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings."""
        return with_shardings(abstract_state(self.model, self.optimizer), self.shardings)

    def first_state(self: "Program[Mesh]", seed: int, weights: dict | None = None) -> TrainState:
        """The state before the first step, with these weights, already sharded, or newly initialised ones."""
        weights = self.model.init(seed, self.mesh) if weights is None else weights
        return new_state(self.model, self.optimizer, weights, self.mesh, self.shardings)

    def restored_state(self, step: int, weights: dict, optimizer_state, meta: dict[str, Any]) -> TrainState:
        """The state after `step` steps, from the content of a checkpoint."""

        def scalar(value: int) -> jax.Array:
            return jax.device_put(jnp.int32(value), self.shardings.step)

        loss_scale = first_loss_scale(self.model, self.optimizer)
        if loss_scale is not None and "loss_scale" in meta:
            loss_scale = LossScale.of(**meta["loss_scale"])
        return TrainState(
            scalar(step),
            scalar(meta["skipped"]),
            *self.model.split(weights),
            optimizer_state,
            jax.device_put(loss_scale, self.shardings.loss_scale),
        )

    def arrays(self, training: TrainingConfig) -> dict[str, BatchArray]:
        """The arrays of a batch, of the model and of the task."""
        return self.task.arrays(self.model.config, training.sequence_length)

    def train_step(self, training: TrainingConfig) -> jax.stages.Wrapped:
        """Jitted function for the current mesh: (state, batch, learning rate) -> (state, metrics). The same one for the
        same `training`, so that it is compiled once."""
        if training not in self._train_steps:
            parts = (self.model, self.task, self.optimizer, training, self.shardings, self.compiler_options)
            self._train_steps[training] = jit_train_step(*parts)
        return self._train_steps[training]

    @functools.cached_property
    def _train_steps(self) -> dict[TrainingConfig, jax.stages.Wrapped]:
        return {}
