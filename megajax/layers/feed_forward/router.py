"""Router of a mixture of experts: chooses the experts of each token and their weights, and balances the experts' load.

Dimensions: B batch, T sequence, D model width, E experts, K experts per token.
All is float32, including the router's matrix. With z = x W the logits of a token:

    softmax         the K largest z; weights are their softmax
    softmax_all     the K largest of the softmax over all E; weights are these, not renormalised
    sigmoid         the K largest sigmoid(z) + bias; weights are their sigmoid(z), divided by the sum over the K
    sqrt_softplus   the same with sqrt(log(1 + exp(z)))

The semantics are those of Megatron Core; balance losses after Fedus et al. 2021 (https://arxiv.org/abs/2101.03961),
z-loss after Zoph et al. 2022 (https://arxiv.org/abs/2202.08906), balance by a bias after Wang et al. 2024
(https://arxiv.org/abs/2408.15664), groups after DeepSeek-V2 (https://arxiv.org/abs/2405.04434).
"""

import dataclasses
import functools
import logging
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.fields.ranges import MAY_CHANGE, Coefficient, PositiveFloat, PositiveInt
from megajax.layers.layer import Terms
from megajax.layers.linear import GatheredLinear
from megajax.mesh.current import manual
from megajax.mesh.sharding import activation_spec, axes_of, constrain
from megajax.ops.matmul import matmul_in_parts
from megajax.ops.ranking import largest
from megajax.parallel.context import ContextMethod, current_order
from megajax.parameters import observe, variable

logger = logging.getLogger("megajax")

EPSILON = 1e-20  # of sums of scores that are divided by
SINKHORN_TOLERANCE = 1e-4
MIN_IN_PARTS = 64  # tokens; for fewer, dividing the matrix would read and write more than the product reads
LOAD_ROUNDING = 1e-6  # of the mean load of a batch


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    top_k: PositiveInt = 2
    """Experts per token."""
    score: Literal["softmax", "softmax_all", "sigmoid", "sqrt_softplus"] = "softmax"
    """Function from logits to weights: softmax over the chosen experts of a token, or over all experts (softmax_all);
    sigmoid and sqrt_softplus are normalised over the chosen ones."""
    scale: PositiveFloat = 1.0
    """Factor of the weights (DeepSeek-V3: 2.5)."""
    groups: tuple[PositiveInt, PositiveInt] = (1, 1)
    """Groups of consecutive experts, and groups per token: it chooses among the experts of its best groups."""
    bias_update_rate: PositiveFloat | None = None
    """Balance without a loss: a bias per expert, added to the scores for the choice only, changes by this much after
    each step, up if the load was below the mean and down if above. None: no bias."""
    assignment: Literal["top_k", "sinkhorn", "balanced_benchmark"] = "top_k"
    """Choose the experts with the largest scores, balance the choice with Sinkhorn's algorithm, or (for benchmarks
    only) use the experts in turn whatever their scores are."""
    aux_loss: Coefficient = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Coefficient of the balance loss."""
    aux_loss_scope: Literal["microbatch", "sequence", "batch"] = "microbatch"
    """What the balance loss is over: each microbatch; or, independent of their number, each sequence, or the batch with
    the load of the previous step."""
    z_loss: Coefficient = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Coefficient of the mean of logsumexp(logits) squared."""
    capacity_factor: PositiveFloat | None = None
    """Limit of an expert's tokens of each sequence, relative to an even share; the others are dropped. None: nothing is
    dropped. Generation never drops."""
    drop: Literal["probability", "position"] = "probability"
    """With a capacity: drop the tokens with the smallest weights, or the last ones."""

    @property
    def is_softmax(self) -> bool:
        return self.score.startswith("softmax")

    def check(self, num_experts: int) -> None:
        """Raises ValueError for contradictory fields."""
        name = "model.moe.router"
        if self.top_k > num_experts:
            raise ValueError(
                f"{name}.top_k={self.top_k} is more than model.moe.num_experts={num_experts}; use "
                f"--{name}.top_k={num_experts} or less"
            )
        num_groups, top_groups = self.groups
        typed = f"{name}.groups={num_groups},{top_groups}"
        if num_experts % num_groups:
            raise ValueError(
                f"{typed}: {num_groups} groups do not divide model.moe.num_experts={num_experts}; use "
                f"{math.gcd(num_experts, num_groups)} groups"
            )
        if top_groups > num_groups or self.top_k % top_groups:
            raise ValueError(
                f"{typed}: the groups per token must be at most the number of groups and divide {name}.top_k="
                f"{self.top_k}; use --{name}.groups={num_groups},{math.gcd(num_groups, self.top_k)}"
            )
        if self.top_k > top_groups * (num_experts // num_groups):
            raise ValueError(
                f"{name}.top_k={self.top_k} is more than the {top_groups * (num_experts // num_groups)} experts of the "
                f"groups of a token, {typed}; choose more groups"
            )
        if self.is_softmax and self.bias_update_rate is not None:
            raise ValueError(
                f"{name}.bias_update_rate={self.bias_update_rate} is for scores from 0 to 1; use --{name}.score=sigmoid"
            )


class Choice(NamedTuple):
    """Of each token."""

    experts_BTK: jax.Array
    """int32, all different; E where a token is dropped."""
    weights_BTK: jax.Array
    """float32; of a dropped one 0."""

    def dropped(self, where: jax.Array, num_experts: int) -> "Choice":
        """Without those where this is true: bool [B, T, K], or [B, T, 1]."""
        experts_BTK = jnp.where(where, num_experts, self.experts_BTK)
        return Choice(experts_BTK, jnp.where(where, 0.0, self.weights_BTK))


@dataclasses.dataclass(frozen=True)
class TowardsBalance:
    """The update of the bias, from the load of each expert over the mean."""

    rate: float

    def __call__(self, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
        missing_E = 1.0 - load_E
        # Rounding of the mean must not move the bias of an expert with an even load.
        return bias_E + self.rate * jnp.sign(jnp.where(jnp.abs(missing_E) > LOAD_ROUNDING, missing_E, 0.0))


def _as_observed(value: jax.Array, observed: jax.Array) -> jax.Array:
    return observed


class Router(GatheredLinear):
    """x [B, T, D] -> (Choice, Terms)."""

    def __init__(
        self, config: RouterConfig, embed_dim: int, num_experts: int, init_std: float, context: ContextMethod, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        super().__init__((embed_dim,), (num_experts,), ("embed", "router"), init_std, rngs=rngs, role="router")
        self.config = config
        self.context = context
        shape = (num_experts,)
        if config.bias_update_rate is not None:
            update = TowardsBalance(config.bias_update_rate)
            self.expert_bias = variable(shape, ("router",), nnx.initializers.zeros, rngs, update)
        if config.aux_loss_scope == "batch":
            self.expert_load = variable(shape, ("router",), nnx.initializers.ones, rngs, _as_observed)

    def __call__(self, x_BTD: jax.Array, *, generates: bool = False) -> tuple[Choice, Terms]:
        """generates: with a cache; a token's experts then do not depend on other tokens."""
        config = self.config
        logits_BTE = constrain(self._logits(x_BTD), "batch", "time", None)
        logits_BTE = checkpoint_name(logits_BTE, "routing")
        num_experts = logits_BTE.shape[-1]
        scores_BTE = _SCORES[config.score](logits_BTE)
        experts_BTK = checkpoint_name(self._experts(logits_BTE, scores_BTE, generates), "routing")
        weights_BTK = self._weights(logits_BTE, scores_BTE, experts_BTK)
        mean_load_E = load(experts_BTK, num_experts).mean(0)
        terms = self._terms(logits_BTE, scores_BTE, experts_BTK, mean_load_E)
        if config.bias_update_rate is not None:
            weights_BTK = observe(weights_BTK, self.expert_bias, mean_load_E)
        if config.aux_loss_scope == "batch":
            weights_BTK = observe(weights_BTK, self.expert_load, mean_load_E)
        if config.capacity_factor is not None and not generates:
            kept_BTK = self._within_capacity(experts_BTK, weights_BTK, num_experts)
            terms.metrics["router_dropped"] = 1.0 - jnp.mean(kept_BTK.astype(jnp.float32))
            return Choice(experts_BTK, weights_BTK).dropped(~kept_BTK, num_experts), terms
        return Choice(experts_BTK, weights_BTK), terms

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        weight = self.weight[...]
        is_in_bfloat16 = x_BTD.dtype == jnp.bfloat16 and isinstance(weight, jax.Array) and weight.dtype == jnp.float32
        if is_in_bfloat16 and math.prod(x_BTD.shape[:2]) >= MIN_IN_PARTS:
            return self.add_bias(matmul_in_parts(x_BTD, constrain(weight, None, None)))
        return super().__call__(x_BTD.astype(jnp.float32))

    def _experts(self, logits_BTE, scores_BTE, generates: bool) -> jax.Array:
        config = self.config
        if config.assignment == "balanced_benchmark":
            return _in_turn(logits_BTE.shape, config.top_k)
        # The best groups of the one need not be those of the other: their values are sums.
        preferred_BTE = logits_BTE if config.score == "softmax" else scores_BTE
        if config.bias_update_rate is not None:
            preferred_BTE = preferred_BTE + self.expert_bias[...]
        if config.assignment == "sinkhorn" and not generates:
            preferred_BTE = sinkhorn(lax.stop_gradient(logits_BTE))
        return _largest(preferred_BTE, config.top_k, *config.groups)

    def _weights(self, logits_BTE, scores_BTE, experts_BTK) -> jax.Array:
        config = self.config
        # A product with zeros and ones: XLA cannot partition a gather, or the scatter in its gradient, in all places.
        chosen_BTKE = jax.nn.one_hot(experts_BTK, logits_BTE.shape[-1])

        def of_chosen(values_BTE):
            return jnp.sum(chosen_BTKE * values_BTE[..., None, :], -1)

        if config.score == "softmax":
            weights_BTK = jax.nn.softmax(of_chosen(logits_BTE), -1)
        else:
            weights_BTK = of_chosen(scores_BTE)
        if not config.is_softmax and config.top_k > 1:
            weights_BTK /= jnp.sum(weights_BTK, -1, keepdims=True) + EPSILON
        return config.scale * weights_BTK

    def _terms(self, logits_BTE, scores_BTE, experts_BTK, mean_load_E) -> Terms:
        config = self.config
        shares_BTE = scores_BTE
        if not config.is_softmax:
            shares_BTE /= jnp.sum(scores_BTE, -1, keepdims=True) + EPSILON
        auxiliary = {}
        if config.aux_loss:
            auxiliary["router_aux_loss"] = config.aux_loss * self._imbalance(shares_BTE)
        if config.z_loss:
            auxiliary["router_z_loss"] = config.z_loss * jnp.mean(jax.nn.logsumexp(logits_BTE, -1) ** 2)
        shares_BTE = lax.stop_gradient(shares_BTE)
        metrics = {
            "router_entropy": -jnp.mean(jnp.sum(shares_BTE * jnp.log(shares_BTE + EPSILON), -1)),
            "router_max_load": jnp.max(mean_load_E),
            "expert_load": mean_load_E,
        }
        return Terms(auxiliary, metrics)

    def _imbalance(self, shares_BTE) -> jax.Array:
        """The sum over experts of share of the scores times load: 1 if both are even."""
        if self.config.aux_loss_scope == "batch":
            return jnp.sum(jnp.mean(shares_BTE, (0, 1)) * self.expert_load[...])
        # The load without bias, groups or another assignment, as in Megatron.
        load_BE = load(_largest(shares_BTE, self.config.top_k), shares_BTE.shape[-1])
        shares_BE = jnp.mean(shares_BTE, 1)
        if self.config.aux_loss_scope == "sequence":
            return jnp.mean(jnp.sum(shares_BE * load_BE, -1))
        return jnp.sum(shares_BE.mean(0) * load_BE.mean(0))

    def _within_capacity(self, experts_BTK, weights_BTK, num_experts: int) -> jax.Array:
        """bool [B, T, K]: whether the expert has room for the token."""
        config = self.config
        length = experts_BTK.shape[1]
        capacity = math.ceil(length * config.top_k / num_experts * config.capacity_factor)
        spec = activation_spec(experts_BTK.shape, ("batch", "time", None))
        time_axes = axes_of(spec[1])
        places_T = jnp.asarray(current_order(length, self.context), jnp.float32)
        by_place = config.drop == "position"

        def body(experts_BTK, weights_BTK):
            own = experts_BTK.shape[1]
            if time_axes:
                experts_BTK, weights_BTK = lax.all_gather((experts_BTK, weights_BTK), time_axes, axis=1, tiled=True)
            places_BTK = jnp.broadcast_to(places_T[:, None], experts_BTK.shape)
            first = places_BTK if by_place else -weights_BTK
            kept_BTK = jax.vmap(functools.partial(_first_of_each, count=capacity))(experts_BTK, first)
            start = lax.axis_index(time_axes) * own if time_axes else 0
            return lax.dynamic_slice_in_dim(kept_BTK, start, own, 1)

        return manual(body, (spec, spec), spec)(experts_BTK, lax.stop_gradient(weights_BTK))


_SCORES = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "softmax_all": functools.partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


def load(experts_BTK: jax.Array, num_experts: int) -> jax.Array:
    """Tokens per expert of each sequence, relative to the mean over experts: float32 [B, E]."""
    counts_BE = jnp.sum(jax.nn.one_hot(experts_BTK, num_experts), (1, 2))
    return counts_BE * (num_experts / (experts_BTK.shape[1] * experts_BTK.shape[2]))


def sinkhorn(logits_BTE: jax.Array) -> jax.Array:
    """exp(logits) with rows and columns scaled so that each token gives 1 / tokens and each expert takes 1 / experts
    (Sinkhorn and Knopp 1967), up to a mean change of SINKHORN_TOLERANCE; no gradient."""
    num_experts = logits_BTE.shape[-1]
    num_tokens = logits_BTE.size // num_experts
    costs_BTE = jnp.exp(logits_BTE - jnp.max(logits_BTE, -1, keepdims=True))

    def of_tokens(of_experts_E):
        return 1 / (num_tokens * (jnp.sum(costs_BTE * of_experts_E, -1, keepdims=True) + 1e-8))

    def step(state):
        of_experts_E, _ = state
        sums_E = jnp.sum(of_tokens(of_experts_E) * costs_BTE, (0, 1))
        new_E = 1 / (num_experts * (sums_E + 1e-8))
        return new_E, jnp.mean(jnp.abs(new_E - of_experts_E))

    start = jnp.ones_like(costs_BTE[0, 0]), jnp.float32(jnp.inf)
    of_experts_E, _ = lax.while_loop(lambda state: state[1] > SINKHORN_TOLERANCE, step, start)
    return of_tokens(of_experts_E) * costs_BTE * of_experts_E


def _largest(preferred_BTE, top_k: int, num_groups: int = 1, top_groups: int = 1) -> jax.Array:
    """int32 [B, T, K]: the experts with the largest values, of the best groups; the first of equal ones."""
    spec = activation_spec(preferred_BTE.shape, ("batch", "time", None))

    def body(preferred_BTE):
        if num_groups > 1:
            groups_BTGe = preferred_BTE.reshape(*preferred_BTE.shape[:2], num_groups, -1)
            best_BTG = jnp.sum(lax.top_k(groups_BTGe, top_k // top_groups)[0], -1)
            chosen_BTG = jnp.sum(jax.nn.one_hot(lax.top_k(best_BTG, top_groups)[1], num_groups), -2) > 0
            groups_BTGe = jnp.where(chosen_BTG[..., None], groups_BTGe, -jnp.inf)
            preferred_BTE = groups_BTGe.reshape(preferred_BTE.shape)
        experts_nK = largest(preferred_BTE.reshape(-1, preferred_BTE.shape[-1]), top_k)
        return experts_nK.reshape(*preferred_BTE.shape[:2], top_k)

    return manual(body, (spec,), spec)(lax.stop_gradient(preferred_BTE))


def _in_turn(shape, top_k: int) -> jax.Array:
    """int32 [B, T, K]: 0, 1, 2, ... from token to token."""
    _warn_of_benchmark()
    batch, length, num_experts = shape
    first_BT = top_k * (length * jnp.arange(batch, dtype=jnp.int32)[:, None] + jnp.arange(length, dtype=jnp.int32))
    experts_BTK = (first_BT[..., None] + jnp.arange(top_k, dtype=jnp.int32)) % num_experts
    return constrain(experts_BTK, "batch", "time", None)


@functools.cache
def _warn_of_benchmark() -> None:
    logger.warning("model.moe.router.assignment=balanced_benchmark: tokens go to the experts in turn and ignore the "
                   "router; for speed measurements, not for training")  # fmt: skip


def _first_of_each(experts_TK, keys_TK, count: int) -> jax.Array:
    """bool [T, K]: whether a token is among the `count` of its expert with the smallest keys; ties: the earlier one."""
    experts = experts_TK.ravel()
    numbers = jnp.arange(experts.size, dtype=jnp.int32)
    sorted_experts, _, order = lax.sort((experts, keys_TK.ravel(), numbers), num_keys=2, is_stable=True)
    rank = numbers - jnp.searchsorted(sorted_experts, sorted_experts, side="left").astype(jnp.int32)
    return jnp.zeros(experts.shape, bool).at[order].set(rank < count).reshape(experts_TK.shape)
