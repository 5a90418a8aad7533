"""The train step and the evaluation step: one jitted program each, state donated, gradients accumulated in float32."""

import jax
import jax.numpy as jnp

from megajax.models import pipelined
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, global_norm
from megajax.sharding import row_major
from megajax.training.config import LossMean
from megajax.training.state import TrainState


def loss_weights(loss_mask: jax.Array, mean: LossMean, group: int | None) -> jax.Array:
    """What each token counts, so that the loss is a plain sum: float32 like loss_mask [microbatches, batch, T].

    mean "token": every counted token of the whole batch the same. "microbatch": the mean over groups of `group`
    consecutive sequences (None: a microbatch) of the mean over their tokens, Megatron's default. Weights depend on the
    batch only, not on the mesh.
    """
    mask = loss_mask.astype(jnp.float32)
    if mean == "token":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    grouped = mask.reshape(-1, group or mask.shape[1], mask.shape[2])
    tokens = jnp.maximum(jnp.sum(grouped, (1, 2), keepdims=True), 1.0)
    return (grouped / tokens / grouped.shape[0]).reshape(mask.shape)


def make_train_step(model: Model, optimizer: Optimizer, *, loss_mean: LossMean, group: int | None, seed: int):
    """-> (state, batch, learning rate float32) -> (state, metrics); to be jitted with the state donated.

    batch: each array [microbatches, batch, T]. metrics: float32 scalars loss, grad_norm and the auxiliary losses;
    int32 skipped, total_skipped. The dropout of a token depends on (seed, step, microbatch, layer, place) only.
    """

    def gradients(params, batch, key):
        def loss(params):
            return model.loss(params, batch, key=key, train=True)

        (value, auxiliary), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, auxiliary, row_major(jax.tree.map(lambda g: g.astype(jnp.float32), grads), model.axes)

    def train_step(state: TrainState, batch: dict, learning_rate: jax.Array):
        weights = loss_weights(batch["loss_mask"], loss_mean, group)
        batch = {name: array for name, array in batch.items() if name != "loss_mask"} | {"loss_weights": weights}
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        num_microbatches = weights.shape[0]
        if model.stages is not None:
            loss, auxiliary, grads = pipelined.loss_and_gradients(model, state.params, batch, key, train=True)
            grads = row_major(grads, model.axes)
        elif num_microbatches == 1:
            first = jax.tree.map(lambda a: a[0], batch)
            loss, auxiliary, grads = gradients(state.params, first, jax.random.fold_in(key, 0))
        else:

            def accumulate(total, microbatch):
                number, microbatch = microbatch
                new = gradients(state.params, microbatch, jax.random.fold_in(key, number))
                return jax.tree.map(jnp.add, total, new), None

            shapes = jax.eval_shape(gradients, state.params, jax.tree.map(lambda a: a[0], batch), key)
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            (loss, auxiliary, grads), _ = jax.lax.scan(accumulate, zeros, (jnp.arange(num_microbatches), batch))
        params, optimizer_state, metrics = optimizer.update(
            grads,
            state.optimizer,
            state.params,
            learning_rate,
            loss=loss,
            grad_norm=global_norm(model.gradient_pieces(grads)),
        )
        new_state = TrainState(state.step + 1, state.skipped + metrics["skipped"], params, optimizer_state)
        return new_state, {"loss": loss, **auxiliary, **metrics, "total_skipped": new_state.skipped}

    return train_step


def jit_train_step(
    model: Model,
    optimizer: Optimizer,
    shardings: TrainState,
    compiler_options: dict[str, str],
    *,
    loss_mean: LossMean,
    group: int | None,
    seed: int,
):
    """make_train_step as every caller compiles it: the state is donated, and lies as it lay before."""
    step = make_train_step(model, optimizer, loss_mean=loss_mean, group=group, seed=seed)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options)


def make_eval_step(model: Model):
    """-> (params, batch [1, batch, T]) -> (sum of token losses, number of tokens), float32; no dropout.

    With a pipeline the batch may have any number of microbatches.
    """

    def eval_step(params, batch: dict):
        weights = batch["loss_mask"].astype(jnp.float32)
        batch = {name: array for name, array in batch.items() if name != "loss_mask"} | {"loss_weights": weights}
        if model.stages is not None:
            loss, auxiliary, _ = pipelined.loss_and_gradients(model, params, batch, None, train=False)
        else:
            loss, auxiliary = model.loss(params, jax.tree.map(lambda a: a[0], batch), key=None, train=False)
        return loss - sum(auxiliary.values(), jnp.float32(0)), jnp.sum(weights)

    return eval_step
