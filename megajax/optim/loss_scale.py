"""Loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740), with the rules of Megatron-LM.

float16 has no numbers below 6e-8, and most gradients of activations are smaller. The loss is multiplied by a scale
before it is differentiated, and the gradients are divided by it before anything else reads them. If a gradient
overflows, the step is skipped. With s the scale, and two counters g and h:

    overflow      g = 0,  h = h - 1,  and if h <= 0:  s = max(s / 2, minimum)
    otherwise     g = g + 1,  and if g = growth_interval:  s = 2 s,  g = 0,  h = hysteresis

So the first overflow after a growth is tolerated with hysteresis 2, and each further one halves the scale, until it has
grown again.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

GROWTH = 2.0
BACKOFF = 0.5


class LossScaleRule(NamedTuple):
    """optimizer.loss_scale."""

    initial: float
    """Scale of the first step."""
    minimum: float
    growth_interval: int
    """0: the scale is constant."""
    hysteresis: int

    @property
    def lowest(self) -> float:
        """With this scale an overflow is a fault, and not the sign of a scale that is too large."""
        return self.minimum if self.growth_interval else self.initial

    def check(self) -> None:
        if self.minimum > self.initial:
            raise ValueError(
                f"optimizer.loss_scale={self}: the minimum, the second number, must be at most the initial scale, the "
                "first; use the same number for both"
            )

    def __str__(self) -> str:
        """As it is typed."""
        return ",".join(f"{number:.10g}" for number in self)


Leaf = TypeVar("Leaf")


class LossScale(NamedTuple, Generic[Leaf]):
    """State between two steps: scalars, or their shapes or shardings."""

    scale: Leaf
    """float32."""
    finite_steps: Leaf
    """int32: consecutive steps without overflow, since the scale last grew."""
    overflows_left: Leaf
    """int32: the overflow that makes it 0, and each one after that, halves the scale."""

    @staticmethod
    def of(scale: float, finite_steps: int, overflows_left: int) -> "LossScale[jax.Array]":
        return LossScale(jnp.float32(scale), jnp.int32(finite_steps), jnp.int32(overflows_left))

    @staticmethod
    def initial(rule: LossScaleRule) -> "LossScale[jax.Array]":
        return LossScale.of(rule.initial, 0, rule.hysteresis)

    def unscaled(self: "LossScale[jax.Array]", gradients):
        """A pytree of float32 arrays, divided by the scale."""
        return jax.tree.map(lambda gradient: gradient * (1 / self.scale), gradients)

    def after(self: "LossScale[jax.Array]", overflowed: jax.Array, rule: LossScaleRule) -> "LossScale[jax.Array]":
        """The state after a step; overflowed: whether one of its gradients is not finite, bool scalar."""
        if rule.growth_interval == 0:
            return self
        overflows_left = self.overflows_left - overflowed.astype(jnp.int32)
        smaller = jnp.maximum(self.scale * BACKOFF, rule.minimum)
        fallen = jnp.where(overflowed & (overflows_left <= 0), smaller, self.scale)
        steps = jnp.where(overflowed, 0, self.finite_steps + 1)
        grows = steps == rule.growth_interval
        return LossScale(
            jnp.where(grows, self.scale * GROWTH, fallen),
            jnp.where(grows, 0, steps),
            jnp.where(grows, rule.hysteresis, overflows_left),
        )
