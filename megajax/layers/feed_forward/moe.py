"""Mixture of experts: several feed-forward networks, of which the router chooses a few for each token.

Dimensions: B batch, T sequence, D model width, F width of an expert, E experts, K experts per token, R rows.
y = sum over the K experts of a token of weight * down(activation(gate(x)) * up(x)), plus the shared experts.
The weight multiplies the hidden state of an expert, as in Megatron, so its gradient does not need the output of `down`.
No token is dropped, unless the router has a capacity. parallel/expert.py sends tokens to experts and back.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.fields.ranges import PositiveInt, changed_fields
from megajax.layers.dropout import DropoutKey
from megajax.layers.feed_forward.mlp import Mlp, MlpConfig
from megajax.layers.feed_forward.router import Choice, Router, RouterConfig
from megajax.layers.layer import PADDING, Activation, Branch, Flops, Terms, check_divisible
from megajax.layers.linear import GatheredLinear, GroupedLinear
from megajax.mesh.config import MeshConfig
from megajax.ops import activation as nonlinearity
from megajax.ops.activation import GATED
from megajax.ops.few_tokens import few_tokens
from megajax.ops.few_tokens import problem as few_tokens_problem
from megajax.ops.grouped_matmul import GroupedWeight, grouped_matmul
from megajax.ops.mailboxes import summed_over_parts
from megajax.ops.weighted_activation import weighted_activation
from megajax.parallel.context import ContextMethod
from megajax.parallel.expert import (
    AllGather,
    Dispatch,
    Exchange,
    choose_exchange,
    combine,
    dispatch,
    exchange_of,
    in_rounds,
    log_exchange,
    make_plan,
    rounds_needed,
)

# When generating: room for all rows of this many tokens is little, and asking whether there is a further round makes
# the host wait for the device in every layer.
FEW_TOKENS = 512
MAX_FEW = 64  # tokens whose experts are computed by ops/few_tokens.py
TYPICAL_TOKENS = 4096  # of a device; any number gives the same rows per token, but for rounding


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """The section model.moe."""

    num_experts: PositiveInt | None = None
    """Experts per layer; None: all layers are dense."""
    expert_dim: PositiveInt | None = None
    """Feed-forward width of an expert; None = that of a dense layer."""
    shared_dim: PositiveInt | None = None
    """Total feed-forward width of the shared experts, which process every token; None: there are none."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by a sigmoid gate of each token (Qwen2-MoE)."""
    router: RouterConfig = RouterConfig()

    def check(self, *, has_bias: bool) -> None:
        """Raises ValueError for contradictory fields, and for experts with biases, which are not supported."""
        if self.num_experts is None:
            if changed := changed_fields(self, MoeConfig()):
                raise ValueError(
                    f"model.moe: {', '.join(changed)} set, but no experts; set --model.moe.num_experts, or leave "
                    "them out"
                )
            return
        if has_bias:
            raise ValueError(
                "model.moe.num_experts: biases of experts are not supported; leave mlp out of model.biases"
            )
        if self.shared_gate and self.shared_dim is None:
            raise ValueError("model.moe.shared_gate=True needs shared experts: set --model.moe.shared_dim")
        self.router.check(self.num_experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MlpConfig):
    """Experts that are MLPs of these sizes, in the place of one."""

    num_experts: int
    router: RouterConfig
    shared: MlpConfig | None
    """The shared experts, as one MLP."""
    shared_gate: bool
    context: ContextMethod
    dispatch: Dispatch
    buffer: float
    """execution.expert_buffer."""

    kind = "moe"

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {
            "dispatch": ("expert_rows",),
            "activation": ("mlp_hidden",),
            "mlp": ("expert_rows", "mlp_wide", "mlp_hidden"),
        }

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def build(self, rngs: nnx.Rngs) -> Branch:
        return Experts(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        check_divisible("expert", mesh.expert, {"moe.num_experts": self.num_experts})
        widths = {"moe.expert_dim": self.mlp_dim, "embed_dim": self.embed_dim}
        if self.shared is not None:
            widths["moe.shared_dim"] = self.shared.mlp_dim
        check_divisible("tensor", mesh.tensor, widths)

    @property
    def out_flops(self) -> float:
        shared = self.shared.out_flops if self.shared else 0
        return super().out_flops * self.top_k + shared

    def flops(self, sequence_length: int) -> Flops:
        router = 2 * self.embed_dim * (self.num_experts + self.shared_gate)
        routed = 2 * self.embed_dim * (self.wide_dim + self.mlp_dim) * self.top_k
        shared = self.shared.flops(sequence_length) if self.shared else Flops()
        return Flops(router + routed, routed=routed) + shared

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        K = self.top_k
        shared = self.shared.activations(sequence_length) if self.shared else {}
        wide = 2 * self.embed_dim * self.wide_dim * K
        of_experts = {
            "expert_rows": self._rows(self.embed_dim),
            "mlp_wide": self._rows(self.wide_dim, Flops(wide, routed=wide)),
            "mlp_hidden": self._rows(self.mlp_dim),
        }
        of_experts |= {name: of_experts[name].and_also(one) for name, one in shared.items()}
        # Logits, experts and plan, in four bytes.
        return {"routing": Activation(2 * (self.num_experts + 5 * K))} | of_experts

    def _rows(self, width: int, flops: Flops = Flops()) -> Activation:
        """An array of the rows of experts."""

        def empty(mesh: MeshConfig) -> float:
            return (self._exchange(mesh).num_rows / TYPICAL_TOKENS - self.top_k) * width

        return Activation(self.top_k * width, flops, empty=empty)

    def _exchange(self, mesh: MeshConfig) -> Exchange:
        return exchange_of(
            TYPICAL_TOKENS, mesh.expert, self.num_experts, self.top_k, dispatch=self.dispatch, buffer=self.buffer
        )

    def sent(self, mesh: MeshConfig, itemsize: int, passes: int) -> dict[str, float]:
        message = passes * 2 * self.embed_dim * itemsize
        exchange = self._exchange(mesh)
        messages = mesh.expert if isinstance(exchange, AllGather) else exchange.num_rows / TYPICAL_TOKENS
        shared = 1 if self.shared else 0
        return {"tensor": (self.top_k + shared) * message, "expert": messages * message}


class Experts(nnx.Module):
    """x [B, T, D] -> (y [B, T, D], cache, Terms)."""

    input_axis = "time"
    """Logical axis of the sequence in the layer's input."""

    def __init__(self, config: ExpertsConfig, *, rngs: nnx.Rngs):
        self.config = config
        E = config.num_experts
        D = config.embed_dim
        F = config.mlp_dim
        self.router = Router(config.router, D, E, config.init_std, config.context, rngs=rngs)
        if config.activation in GATED:
            self.gate = GroupedLinear(E, D, F, ("embed", "mlp"), config.init_std, rngs=rngs)
        self.up = GroupedLinear(E, D, F, ("embed", "mlp"), config.init_std, rngs=rngs)
        self.down = GroupedLinear(E, F, D, ("mlp", "embed"), config.out_init_std, rngs=rngs)
        if config.shared is not None:
            self.shared = Mlp(config.shared, rngs=rngs)
        if config.shared_gate:
            axes = ("embed", "router")
            self.shared_gate = GatheredLinear((D,), (1,), axes, config.init_std, rngs=rngs, role="router")

    def __call__(
        self, x_BTD: jax.Array, inputs: dict | None = None, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        """With a cache a few tokens come at a time; the router then treats each token by itself."""
        generates = cache is not None
        choice, terms = self.router(x_BTD, generates=generates)
        if inputs is not None and PADDING in inputs:
            choice = choice.dropped(inputs[PADDING][..., None], self.config.num_experts)
        linears = (self.gate, self.up, self.down) if self.config.activation in GATED else (self.up, self.down)
        matrices = [linear.multiplied() for linear in linears]
        if generates:
            body = functools.partial(_generated, self.config)
            y_BTD = summed_over_parts(body, (x_BTD, choice), matrices, [linear.record.axes for linear in linears])
        else:
            y_BTD, needed = _routed(self.config, self.config.buffer, x_BTD, choice, matrices)
            if needed is not None:
                terms.metrics["expert_rounds"] = needed.astype(jnp.float32)
        if self.config.shared is not None:
            y_BTD += self._shared(x_BTD, cache)
        return y_BTD, cache, terms

    def _shared(self, x_BTD: jax.Array, cache: Any) -> jax.Array:
        y_BTD, _, _ = self.shared(x_BTD, cache=cache)
        if self.config.shared_gate:
            gate_BT1 = jax.nn.sigmoid(self.shared_gate(x_BTD.astype(jnp.float32)))
            y_BTD = (y_BTD.astype(jnp.float32) * gate_BT1).astype(y_BTD.dtype)
        return y_BTD


def _generated(config: ExpertsConfig, tokens: tuple[jax.Array, Choice], matrices: Sequence[GroupedWeight]) -> jax.Array:
    """The output of the experts for tokens (x [B, T, D], their choice) that come a few at a time."""
    x_BTD, choice = tokens
    num_tokens = x_BTD.shape[0] * x_BTD.shape[1]
    y_BTD = _few(config, x_BTD, choice, matrices) if num_tokens <= MAX_FEW else None
    if y_BTD is None:
        buffer = math.inf if num_tokens <= FEW_TOKENS else config.buffer
        y_BTD, _ = _routed(config, buffer, x_BTD, choice, matrices)
    return y_BTD


def _few(config: ExpertsConfig, x_BTD, choice: Choice, matrices: Sequence[GroupedWeight]) -> jax.Array | None:
    """By ops/few_tokens.py; None: it does not take them."""
    arrays = [w for w in matrices if isinstance(w, jax.Array)]
    x_nD, experts_nK, weights_nK = (a.reshape(-1, a.shape[-1]) for a in (x_BTD, *choice))
    if len(arrays) < len(matrices) or few_tokens_problem(experts_nK, arrays, x_BTD.dtype, config.activation):
        return None
    *wide, down = arrays
    return few_tokens(x_nD, experts_nK, weights_nK, wide, down, config.activation).reshape(x_BTD.shape)


def _routed(
    config: ExpertsConfig, buffer: float, x_BTD, choice: Choice, matrices: Sequence[GroupedWeight]
) -> tuple[jax.Array, jax.Array | None]:
    """-> (output, the number of rounds it took, int32, if there may be several)."""
    how = dict(dispatch=config.dispatch, buffer=buffer)
    exchange = choose_exchange(x_BTD.shape[:2], config.num_experts, config.top_k, **how)
    log_exchange(exchange)
    run = functools.partial(_round, config.activation, exchange)
    # Further rounds are a loop, for which XLA would copy matrices in the dtype in which they are stored. Gradients of
    # the rounds are added in the compute dtype, as those of devices are, unless they are of a Float32Gradient.
    *wide, down = (w.astype(x_BTD.dtype) if isinstance(w, jax.Array) else w for w in matrices)
    operands = (x_BTD, choice.weights_BTK, wide, down)
    if exchange.num_rounds == 1:
        return run(0, choice.experts_BTK, operands), None
    needed = rounds_needed(choice.experts_BTK, exchange)
    return in_rounds(run, needed, choice.experts_BTK, operands), needed


def _round(
    activation: nonlinearity.Activation, exchange: Exchange, turn, experts_BTK: jax.Array, operands
) -> jax.Array:
    """The output of the experts for the tokens that are sent to them in this round.

    operands: x [B, T, D], the weights of the choices [B, T, K], the matrices before the activation, that after it.
    """
    x_BTD, weights_BTK, wide, down = operands
    plan = checkpoint_name(make_plan(experts_BTK, exchange, turn), "routing")
    rows_RD, weights_R = dispatch(x_BTD, weights_BTK, plan, exchange)
    rows_RD = checkpoint_name(rows_RD, "expert_rows")
    wide_RWF = checkpoint_name(grouped_matmul(rows_RD, wide, plan.sizes, ("embed", "mlp")), "mlp_wide")
    hidden_RF = weighted_activation(wide_RWF, weights_R, plan.sizes, activation)
    hidden_RF = checkpoint_name(hidden_RF, "mlp_hidden")
    out_RD = grouped_matmul(hidden_RF, [down], plan.sizes, ("mlp", "embed"))[:, 0]
    return combine(out_RD, plan, exchange, x_BTD.shape[:2])
