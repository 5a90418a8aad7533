"""The optimizer update: clip, AdamW / SGD / Lion, decoupled weight decay, and the step that is skipped.

With g the gradient clipped to `clip_norm`, lr the learning rate, d the decay of a parameter (0 where the mask says so):

    AdamW (Loshchilov, Hutter 2019, arXiv 1711.05101)
        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        p = p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon) + d p)
    Lion (Chen et al. 2023, arXiv 2302.06675)
        p = p - lr * (sign(b1 m + (1 - b1) g) + d p),  m = b2 m + (1 - b2) g
    SGD with momentum; the decay joins the gradient before the momentum, as in PyTorch and so in Megatron-LM
        m = momentum m + g + d p,  p = p - lr * m

A step whose gradient norm (or loss) is not finite, or whose norm is above `most_grad_norm`, changes nothing:
parameters, moments and the step count of the bias correction stay bit for bit what they were. It is a select inside the
same program, so no host decision is waited for.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from megajax.optim.schedule import Schedule, ScheduleStyle, WsdStyle

PyTree = Any

# Keeps the clip coefficient finite when every gradient is zero; Megatron-LM's constant.
CLIP_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, its constants, and the learning-rate schedule."""

    name: Literal["adamw", "sgd", "lion"] = "adamw"
    """Update rule."""
    learning_rate: float = 3e-4
    """Learning rate after the warm-up, the peak of the schedule."""
    min_learning_rate: float = 3e-5
    """Learning rate at the end of the decay and after it (schedule constant: not used)."""
    initial_learning_rate: float = 0.0
    """Where the warm-up starts."""
    schedule: ScheduleStyle = "cosine"
    """Shape of the decay after the warm-up; formulas in megajax/optim/schedule.py."""
    warmup_steps: int = 0
    """Steps of linear warm-up; 0 starts at learning_rate."""
    decay_steps: int | None = None
    """Step at which min_learning_rate is reached, warm-up included; None: training.steps."""
    wsd_decay_steps: int = 0
    """Schedule wsd: how many of the last steps before decay_steps anneal."""
    wsd_style: WsdStyle = "exponential"
    """Schedule wsd: curve of the annealing."""
    beta1: float = 0.9
    """AdamW, Lion: decay of the first moment (Lion: of the interpolation that gives the sign)."""
    beta2: float = 0.95
    """AdamW: decay of the second moment. Lion: decay of its only moment (0.98 or 0.99 are usual there)."""
    epsilon: float = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: float = 0.9
    """SGD: decay of the momentum."""
    weight_decay: float = 0.1
    """Decay of weights and embeddings; biases and norm scales never decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0: no clipping."""
    most_grad_norm: float = 0.0
    """An update with a larger gradient norm, before clipping, is skipped; 0: whatever is finite is used."""
    shard_over_data: bool = False
    """Split the optimizer state over the mesh axis data too (ZeRO-1)."""
    offload_state: bool = False
    """Keep the moments in host memory between updates; slow where the host hangs on PCIe, see docs/memory.md."""

    def check(self, training_steps: int) -> None:
        """Raises ValueError on the first number that cannot work; `training_steps` is training.steps."""
        _check_range("learning_rate", self.learning_rate, above=0.0)
        _check_range("initial_learning_rate", self.initial_learning_rate, at_least=0.0, at_most=self.learning_rate)
        for name in ("warmup_steps", "wsd_decay_steps", "weight_decay", "clip_norm", "most_grad_norm"):
            _check_range(name, getattr(self, name), at_least=0)
        for name in ("beta1", "beta2", "momentum"):
            _check_range(name, getattr(self, name), at_least=0.0, below=1.0)
        _check_range("epsilon", self.epsilon, above=0.0)
        if self.decay_steps is not None:
            _check_range("decay_steps", self.decay_steps, above=0)
        if self.schedule == "constant":
            return
        _check_range("min_learning_rate", self.min_learning_rate, at_least=0.0, at_most=self.learning_rate)
        decay_steps = training_steps if self.decay_steps is None else self.decay_steps
        if self.warmup_steps >= decay_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.warmup_steps} must be less than the decay steps ({decay_steps}: "
                "optimizer.decay_steps, or training.steps where that is None); "
                "warm up for fewer steps or use --optimizer.schedule=constant"
            )
        if self.schedule == "wsd" and not 0 < self.wsd_decay_steps <= decay_steps - self.warmup_steps:
            raise ValueError(
                f"optimizer.wsd_decay_steps={self.wsd_decay_steps} must lie in 1..{decay_steps - self.warmup_steps} "
                f"(decay steps {decay_steps} less warm-up {self.warmup_steps}); "
                f"for example --optimizer.wsd_decay_steps={max(1, (decay_steps - self.warmup_steps) // 5)}"
            )

    def make_schedule(self, training_steps: int) -> Schedule:
        """The learning-rate schedule of a run of `training_steps` steps; checks the config first."""
        self.check(training_steps)
        return Schedule(
            style=self.schedule,
            peak=self.learning_rate,
            minimum=self.min_learning_rate,
            initial=self.initial_learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=training_steps if self.decay_steps is None else self.decay_steps,
            wsd_decay_steps=self.wsd_decay_steps,
            wsd_style=self.wsd_style,
        )


class Optimizer:
    """Turns gradients into new parameters; every method is pure and runs inside jit.

    Args:
        config: the optimizer section.
        records: pytree of megajax.parameters.Parameter with the structure of the parameters.
    """

    def __init__(self, config: OptimizerConfig, records: PyTree):
        self.config, self._decay_mask = config, jax.tree.map(lambda record: record.decays, records)
        self._transform = _make_transform(config, self._decay_mask)

    def init(self, params: PyTree) -> PyTree:
        """State before the first step: zero moments in float32, whatever the dtype of the parameters."""
        return self._transform.init(_float32(params))

    def update(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        learning_rate: jax.Array,
        loss: jax.Array | None = None,
        grad_norm: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """One step.

        Args:
            grads: float32, structure and shapes of `params`.
            state: from `init` or the last `update`.
            params: nested dict of arrays; the result keeps their dtypes, the arithmetic is float32.
            learning_rate: float32 scalar, from the Schedule on the host.
            loss: optional scalar; if it is not finite the step is skipped even though the gradients are.
            grad_norm: global_norm of the gradients, where the caller can compute it with fewer reads.

        Returns:
            new parameters, new state, and metrics: `grad_norm` (float32, before clipping) and `skipped`
            (int32, 1 when the step changed nothing).
        """
        grads = _float32(grads)
        grad_norm = global_norm(grads) if grad_norm is None else grad_norm
        usable = jnp.isfinite(grad_norm)
        if self.config.most_grad_norm > 0:
            usable &= grad_norm <= self.config.most_grad_norm
        if loss is not None:
            usable &= jnp.isfinite(loss)
        if self.config.clip_norm > 0:
            coefficient = jnp.minimum(1.0, self.config.clip_norm / (grad_norm + CLIP_EPSILON))
            grads = jax.tree.map(lambda grad: grad * coefficient, grads)

        step = self._step_in_turn if self.config.offload_state else self._step
        new_params, new_state = step(grads, state, params, learning_rate, usable)
        return new_params, new_state, {"grad_norm": grad_norm, "skipped": (~usable).astype(jnp.int32)}

    def _step(self, grads, state, params, learning_rate, finite):
        return _step(self._transform, grads, state, params, learning_rate, finite)

    def _step_in_turn(self, grads, state, params, learning_rate, finite):
        """_step for one parameter after the other, with moments that lie on the host.

        They come when all gradients are there and the moments of the parameter before the last have left again, so a
        device holds those of two. XLA by itself would fetch all of them at the start of the program. What makes them
        wait is the token, which is `finite` itself: XLA drops from a barrier what nobody uses.
        """
        structure = jax.tree.structure(params)
        is_moments = lambda node: jax.tree.structure(node) == structure
        trees, state_structure = jax.tree.flatten(state, is_leaf=is_moments)
        new_params, new_leaves, tokens = [], [], [finite, finite]
        everything = zip(*(jax.tree.leaves(tree) for tree in (grads, params, self._decay_mask)), strict=True)
        for number, (grad, param, decays) in enumerate(everything):
            leaves = [jax.tree.leaves(tree)[number] if is_moments(tree) else tree for tree in trees]
            leaves, token = jax.lax.optimization_barrier((leaves, tokens[number % 2]))
            one = jax.tree.unflatten(state_structure, jax.device_put(leaves, jax.memory.Space.Device))
            param, one = _step(_make_transform(self.config, decays), grad, one, param, learning_rate, token)
            leaves = [jax.device_put(leaf, jax.memory.Space.Host) if is_moments(tree) else leaf
                      for leaf, tree in zip(jax.tree.leaves(one), trees, strict=True)]  # fmt: skip
            leaves, tokens[number % 2] = jax.lax.optimization_barrier((leaves, token))
            new_params.append(param)
            new_leaves.append(leaves)
        new_trees = [jax.tree.unflatten(structure, column) if is_moments(tree) else column[0]
                     for column, tree in zip(zip(*new_leaves, strict=True), trees, strict=True)]  # fmt: skip
        return jax.tree.unflatten(structure, new_params), jax.tree.unflatten(state_structure, new_trees)


def _step(transform, grads, state, params, learning_rate, finite):
    """-> (params, state) after the step, or as they were if it is not finite."""
    params32 = _float32(params)
    # Optax multiplies Python floats with its int32 step count, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
        directions, proposed_state = transform.update(grads, state, params32)
    proposed = jax.tree.map(
        lambda old, direction, param: (old - learning_rate * direction).astype(param.dtype),
        params32,
        directions,
        params,
    )

    def keep(new, old):
        return jnp.where(finite, new, old)

    return jax.tree.map(keep, proposed, params), jax.tree.map(keep, proposed_state, state)


def global_norm(tree: PyTree) -> jax.Array:
    """L2 norm over all leaves together; float32 scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _make_transform(config: OptimizerConfig, decay_mask: PyTree) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.name == "adamw":
        return optax.chain(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), decay)
    if config.name == "lion":
        return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), decay)
    if config.name == "sgd":
        return optax.chain(decay, optax.trace(config.momentum))
    raise ValueError(f"optimizer.name={config.name!r} is unknown; use adamw, sgd or lion")


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _check_range(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raises unless `value` keeps every given bound (NaN keeps none)."""
    rules = [
        (above, "greater than", lambda bound: value > bound),
        (at_least, "at least", lambda bound: value >= bound),
        (below, "less than", lambda bound: value < bound),
        (at_most, "at most", lambda bound: value <= bound),
    ]
    given = [(words, bound, holds) for bound, words, holds in rules if bound is not None]
    if not all(holds(bound) for _, bound, holds in given):
        wanted = " and ".join(f"{words} {bound:g}" for words, bound, _ in given)
        raise ValueError(f"optimizer.{name}={value} must be {wanted}; set --optimizer.{name} to such a value")
