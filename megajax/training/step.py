"""The train step and the evaluation step: one jitted program each, state donated, gradients accumulated in float32."""

import jax
import jax.numpy as jnp

from megajax.mesh.sharding import row_major
from megajax.models import pipelined
from megajax.models.interface import EVALUATION, LossTerms, Objective
from megajax.models.model import Model, Weights
from megajax.optim.optimizer import Optimizer, global_norm
from megajax.tasks.interface import Task
from megajax.training.config import LossMean, TrainingConfig
from megajax.training.state import TrainState


def loss_weights(loss_mask: jax.Array, mean: LossMean, group: int | None) -> jax.Array:
    """Weight of each token, so that the loss is a plain sum: float32 like loss_mask [microbatches, batch, T], or, of a
    task that has one number per sample, [microbatches, batch].

    mean "token": equal for all unmasked tokens of the batch. "microbatch": mean over groups of `group` consecutive
    sequences (None: a microbatch) of the mean over their tokens, Megatron's default. Weights depend on the batch only,
    not on the mesh.
    """
    mask = loss_mask.astype(jnp.float32)
    if mean == "token":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    grouped = mask.reshape(-1, group or mask.shape[1], *mask.shape[2:])
    tokens = jnp.maximum(jnp.sum(grouped, range(1, grouped.ndim), keepdims=True), 1.0)
    return (grouped / tokens / grouped.shape[0]).reshape(mask.shape)


def make_train_step(model: Model, objective: Objective, optimizer: Optimizer, training: TrainingConfig):
    """-> (state, batch, learning rate float32) -> (state, metrics); to be jitted with the state donated.

    batch: each array [microbatches, batch, ...]. metrics: loss, grad_norm, the auxiliary terms of the loss and the
    model's metrics, float32; int32 skipped, total_skipped; with loss scaling loss_scale, that of the next step. The
    loss is the main term plus the mean of the auxiliary terms over microbatches. The dropout of a token depends on
    (seed, step, sample, layer, position) only.
    """
    options = training.loss_options

    def gradients(weights: Weights, batch, key, number, num_microbatches: int, scale):
        first_sample = number * batch["loss_weights"].shape[0]

        def loss(params, variables):
            current = weights._replace(params=params, variables=variables)
            terms = model.loss(current.merged(), batch, objective, key=key, first_sample=first_sample, options=options)
            terms = terms.share(num_microbatches)
            total = terms.total()
            return total if scale is None else total * scale, terms

        (grads, updates), terms = jax.grad(loss, (0, 1), has_aux=True)(weights.params, weights.variables)
        grads = row_major(jax.tree.map(lambda g: g.astype(jnp.float32), grads), model.trained)
        return terms, grads, jax.tree.map(lambda a: a / num_microbatches, updates)

    def train_step(state: TrainState, batch: dict, learning_rate: jax.Array):
        counts = loss_weights(batch["loss_mask"], training.loss_mean, training.microbatch_size)
        batch = {name: array for name, array in batch.items() if name != "loss_mask"} | {"loss_weights": counts}
        key = jax.random.fold_in(jax.random.key(training.seed), state.step)
        num_microbatches = counts.shape[0]
        weights = Weights(state.params, state.frozen, state.variables)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        if model.stages is not None:
            terms, grads, updates = pipelined.loss_and_gradients(model, weights, batch, objective, key, options, scale)
            grads = row_major(grads, model.trained)
        elif num_microbatches == 1:
            first = jax.tree.map(lambda a: a[0], batch)
            terms, grads, updates = gradients(weights, first, key, 0, 1, scale)
        else:
            traced_once = jax.jit(gradients, static_argnums=4)  # for the shapes of its results and in the loop

            def of_microbatch(number, microbatch):
                return traced_once(weights, microbatch, key, number, num_microbatches, scale)

            def accumulate(total, microbatch):
                return jax.tree.map(jnp.add, total, of_microbatch(*microbatch)), None

            shapes = jax.eval_shape(of_microbatch, jnp.int32(0), jax.tree.map(lambda a: a[0], batch))
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            (terms, grads, updates), _ = jax.lax.scan(accumulate, zeros, (jnp.arange(num_microbatches), batch))
        loss = terms.total()
        grad_norm = global_norm(model.gradient_pieces(grads))
        loss_scale = state.loss_scale
        if loss_scale is not None:
            grads, grad_norm = loss_scale.unscaled((grads, grad_norm))
            loss_scale = loss_scale.after(~jnp.isfinite(grad_norm), optimizer.config.loss_scale_rule)
        params, optimizer_state, metrics = optimizer.update(
            grads, state.optimizer, state.params, learning_rate, loss=loss, grad_norm=grad_norm
        )
        variables = model.updated(state.variables, updates)
        kept = jax.tree.map(lambda new, old: jnp.where(metrics["skipped"], old, new), variables, state.variables)
        skipped = state.skipped + metrics["skipped"]
        new_state = TrainState(state.step + 1, skipped, params, state.frozen, kept, optimizer_state, loss_scale)
        of_model = (terms.auxiliary, terms.further, terms.metrics)
        of_scale = {} if loss_scale is None else {"loss_scale": loss_scale.scale}
        parts = ({"loss": loss}, *of_model, metrics, {"total_skipped": skipped}, of_scale)
        names = [name for part in parts for name in part]
        if len(set(names)) < len(names):
            raise ValueError(f"two terms or metrics of the model have the same name: {', '.join(sorted(names))}")
        return new_state, {name: value for part in parts for name, value in part.items()}

    return train_step


def jit_train_step(
    model: Model,
    objective: Objective,
    optimizer: Optimizer,
    training: TrainingConfig,
    shardings: TrainState,
    compiler_options: dict[str, str],
):
    """Jits make_train_step: the state is donated and keeps its shardings."""
    step = make_train_step(model, objective, optimizer, training)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options)


def make_eval_step(model: Model, task: Task):
    """-> (weights, batch [1, batch, ...]) -> {name: (numerator, denominator)}, float32: `loss`, the sum of the token
    losses (the main term, without regularisers or dropout) and the number of tokens, and the rates of the task; of
    its controls NAME_CONTROL.

    With a pipeline, the batch may have any number of microbatches.
    """

    def terms_of(weights, batch: dict) -> LossTerms:
        if model.stages is not None:
            return pipelined.loss(model, model.split(weights), batch, task, EVALUATION)
        return model.loss(weights, jax.tree.map(lambda a: a[0], batch), task, options=EVALUATION)

    def eval_step(weights, batch: dict):
        counts = batch["loss_mask"].astype(jnp.float32)
        batch = {name: array for name, array in batch.items() if name != "loss_mask"} | {"loss_weights": counts}
        terms = terms_of(weights, batch)
        total = jnp.sum(counts)
        found = {"loss": (terms.main, total)} | terms.rates
        for control, changed in task.controls(batch).items():
            of_control = terms_of(weights, changed)
            shown = of_control.rates or {"loss": (of_control.main, total)}
            found |= {f"{name}_{control}": value for name, value in shown.items()}
        return found

    return eval_step
