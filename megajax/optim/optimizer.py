"""The optimizer update: clip, an update rule, decoupled weight decay, and the step that is skipped.

With g the gradient clipped to `clip_norm`, lr the learning rate, d the decay of a parameter (0 for biases and norm
scales; parameter groups may change lr and d, see megajax/optim/groups.py):

    AdamW (Loshchilov, Hutter 2019, arXiv 1711.05101)
        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        p = p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon) + d p)
    Lion (Chen et al. 2023, arXiv 2302.06675)
        p = p - lr * (sign(b1 m + (1 - b1) g) + d p),  m = b2 m + (1 - b2) g
    SGD with momentum; the decay joins the gradient before the momentum, as in PyTorch and so in Megatron-LM
        m = momentum m + g + d p,  p = p - lr * m
    Muon and NorMuon, for the matrices of layers, AdamW for everything else: megajax/optim/muon.py

With optimizer.cautious_decay (Chen et al. 2025, arXiv 2510.12402) the decay is d p where u p >= 0, u being the update
before it, and 0 elsewhere: what u moves away from zero does not decay.

A step whose gradient norm (or loss) is not finite, or whose norm is above `skip_grad_norm_above`, changes nothing:
parameters, moments and the step count of the bias correction are unchanged, bit for bit. This is a select inside the
same program, so it does not wait for the host.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.optim.config import OptimizerConfig
from megajax.optim.groups import OF_MATRICES, rules_of
from megajax.optim.moments import with_moments
from megajax.optim.muon import muon_flops, scale_by_muon, scale_by_normuon
from megajax.optim.remainders import WithRemainders, has_remainders, packed, unpacked
from megajax.parameters import name_of, parameter_of, select

PyTree = Any

# Keeps the clip coefficient finite when every gradient is zero; Megatron-LM's constant.
CLIP_EPSILON = 1e-6


class Optimizer:
    """Turns gradients into new parameters; every method is pure and runs inside jit.

    Args:
        config: the optimizer section.
        records: nested dict of megajax.parameters.Parameter with the structure of the parameters.

    Raises ValueError for a group of parameters that the records do not have.
    """

    def __init__(self, config: OptimizerConfig, records: PyTree):
        self.config = config
        self.rules = rules_of(records, config.groups, config.name, config.weight_decay)
        """Nested dict of the Rule of each parameter."""
        self._abstract_states: dict[Any, PyTree] = {}

    def transform(self, rules: PyTree) -> optax.GradientTransformation:
        """Gradients to directions: p = p - lr * direction. A subclass may return any transformation of Optax instead.

        Args:
            rules: self.rules, or the rule of a single parameter: with optimizer.offload_state each parameter is updated
                separately, with the leaves of the state that its own transformation would have.
        """
        names = {rule.optimizer for rule in jax.tree.leaves(self.rules)}
        coupled = names & {"sgd"}
        decoupled = names - {"sgd"}
        cautious = self.config.cautious_decay
        before = [_add_decay(rules, coupled, cautious=False)] if coupled else []
        after = [_add_decay(rules, decoupled, cautious=cautious)] if decoupled else []
        chain = optax.chain(*before, _update_rule(self.config, names, rules), *after)
        return with_moments(chain, self.config.moments, rules)

    def init(self, params: PyTree) -> PyTree:
        """State before the first step: zero moments in optimizer.moments, and the remainders of bfloat16 parameters."""
        return self._init(self.rules, params, with_remainders=has_remainders(params))

    def _init(self, rules: PyTree, params: PyTree, *, with_remainders: bool) -> PyTree:
        params32 = _float32(params)
        state = self.transform(rules).init(params32)
        return WithRemainders(state, packed(params32, params)[1]) if with_remainders else state

    def abstract_state(self, abstract_params: PyTree) -> PyTree:
        """Shapes and dtypes of what `init` returns, found once: a search for a mesh asks for them hundreds of times."""
        leaves, structure = jax.tree.flatten(abstract_params)
        key = structure, *leaves
        if key not in self._abstract_states:
            self._abstract_states[key] = jax.eval_shape(self.init, abstract_params)
        return self._abstract_states[key]

    def flops(self, abstract_params: PyTree) -> int:
        """Floating-point operations of the matmuls in one update; only Muon has any."""

        def parameter_flops(param, rule) -> int:
            return muon_flops(param.shape, rule.record) if rule.optimizer in OF_MATRICES else 0

        return sum(jax.tree.leaves(jax.tree.map(parameter_flops, abstract_params, self.rules)))

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
            params: nested dict of arrays in float32, or in bfloat16, of which the state has the remainders
                (megajax/optim/remainders.py); the result keeps their dtypes, the arithmetic is float32.
            learning_rate: float32 scalar, from the Schedule on the host.
            loss: optional scalar; if it is not finite the step is skipped even if the gradients are finite.
            grad_norm: global_norm of the gradients, if the caller can compute it with fewer reads.

        Returns:
            new parameters, new state, and metrics: `grad_norm` (float32, before clipping) and `skipped`
            (int32, 1 when the step changed nothing).
        """
        grads = _float32(grads)
        grad_norm = global_norm(grads) if grad_norm is None else grad_norm
        usable = jnp.isfinite(grad_norm)
        if self.config.skip_grad_norm_above > 0:
            usable &= grad_norm <= self.config.skip_grad_norm_above
        if loss is not None:
            usable &= jnp.isfinite(loss)
        if self.config.clip_norm > 0:
            coefficient = jnp.minimum(1.0, self.config.clip_norm / (grad_norm + CLIP_EPSILON))
            grads = jax.tree.map(lambda grad: grad * coefficient, grads)

        if self.config.offload_state:
            new_params, new_state = self._step_in_turn(grads, state, params, learning_rate, usable)
        else:
            new_params, new_state = self._step(self.rules, grads, state, params, learning_rate, usable)
        return new_params, new_state, {"grad_norm": grad_norm, "skipped": (~usable).astype(jnp.int32)}

    def _step(self, rules, grads, state, params, learning_rate, finite):
        """-> (params, state) after the step, unchanged if `finite` is false."""
        with_remainders = isinstance(state, WithRemainders)
        params32 = unpacked(params, state.remainders) if with_remainders else params
        moments = state.state if with_remainders else state
        # Optax multiplies Python floats with its int32 step count, which strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            directions, moments = self.transform(rules).update(grads, moments, params32)

        def moved(old, direction, rule):
            rate = learning_rate if rule.learning_rate_scale == 1 else rule.learning_rate_scale * learning_rate
            return old - rate * direction

        def keep(new, old):
            return jnp.where(finite, new, old)

        proposed, remainders = packed(jax.tree.map(moved, params32, directions, rules), params)
        proposed_state = WithRemainders(moments, remainders) if with_remainders else moments
        return jax.tree.map(keep, (proposed, proposed_state), (params, state))

    def _step_in_turn(self, grads, state, params, learning_rate, finite):
        """_step for one parameter after the other, with moments that are kept on the host.

        The moments of a parameter are fetched when all gradients have been computed and the moments of the parameter
        before the previous one have been copied back, so a device holds those of two parameters. Left alone, XLA would
        fetch all of them at the start of the program. The token makes them wait; it is `finite` itself, because XLA
        drops unused values from a barrier.

        The state of one parameter is that of the same transformation applied to it alone: leaves of the whole state, at
        the same paths. Leaves shared by all parameters, like a step count, get the same value each time.
        """
        with_remainders = isinstance(state, WithRemainders)
        leaf_at = dict(jax.tree_util.tree_leaves_with_path(state))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        new_params = []
        new_leaf_at = {}
        tokens = [finite, finite]
        for number, path in enumerate(paths):
            name = name_of(path)
            rules, grad, param = (_only(name, tree) for tree in (self.rules, grads, params))
            like = jax.eval_shape(functools.partial(self._init, rules, with_remainders=with_remainders), param)
            leaf_paths = [leaf_path for leaf_path, _ in jax.tree_util.tree_leaves_with_path(like)]
            leaves = [leaf_at[leaf_path] for leaf_path in leaf_paths]
            leaves, token = jax.lax.optimization_barrier((leaves, tokens[number % 2]))
            moments = jax.tree.unflatten(jax.tree.structure(like), jax.device_put(leaves, jax.memory.Space.Device))
            param, moments = self._step(rules, grad, moments, param, learning_rate, token)
            leaves = [jax.device_put(leaf, jax.memory.Space.Host) if parameter_of(leaf_path, paths) else leaf
                      for leaf_path, leaf in zip(leaf_paths, jax.tree.leaves(moments), strict=True)]  # fmt: skip
            leaves, tokens[number % 2] = jax.lax.optimization_barrier((leaves, token))
            new_params += jax.tree.leaves(param)
            new_leaf_at = dict(zip(leaf_paths, leaves, strict=True)) | new_leaf_at
        new_leaves = [new_leaf_at[leaf_path] for leaf_path in leaf_at]
        structure = jax.tree.structure
        return jax.tree.unflatten(structure(params), new_params), jax.tree.unflatten(structure(state), new_leaves)


def global_norm(tree: PyTree) -> jax.Array:
    """L2 norm over all leaves together; float32 scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _update_rule(config: OptimizerConfig, names: set[str], rules: PyTree) -> optax.GradientTransformation:
    """Combines these update rules; each has moments only for its own parameters."""

    def matrices(name: str) -> PyTree:
        return jax.tree.map(lambda rule: rule.record if rule.optimizer == name else optax.MaskedNode(), rules)

    transforms = {
        "adamw": optax.scale_by_adam(*config.betas, config.epsilon),
        "lion": optax.scale_by_lion(*config.betas),
        "sgd": optax.trace(config.momentum),
        "muon": scale_by_muon(config.momentum, matrices("muon")),
        "normuon": scale_by_normuon(config.momentum, config.betas[1], config.epsilon, matrices("normuon")),
    }
    if len(names) == 1:
        return transforms[next(iter(names))]
    return optax.partition(
        {name: transforms[name] for name in sorted(names)}, jax.tree.map(lambda rule: rule.optimizer, rules)
    )


def _add_decay(rules: PyTree, names: set[str], *, cautious: bool) -> optax.GradientTransformation:
    """Adds decay * parameter to the updates of parameters with one of these update rules; cautious: where both have
    the same sign."""
    decays = jax.tree.map(lambda rule: rule.weight_decay if rule.optimizer in names else 0.0, rules)
    of_decaying = jax.tree.map(lambda decay: decay or optax.MaskedNode(), decays)

    def added(update: jax.Array, param: jax.Array, decay: float) -> jax.Array:
        decayed = update + decay * param
        return jnp.where(update * param >= 0, decayed, update) if cautious else decayed

    def add(updates: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(added, updates, params, of_decaying)

    return optax.masked(optax.stateless(add), jax.tree.map(bool, decays))


def _only(name: str, tree: PyTree) -> PyTree:
    """The nested dict with only this leaf."""
    return select(tree, lambda other: other == name)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
