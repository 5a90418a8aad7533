"""Feed-forward layer, plain or gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Dimensions: B batch, T sequence, D model width, F feed-forward width.
Tensor parallel: gate and up split F (Megatron's "column"), down splits F ("row"), one reduction at the end.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, Branch, BranchConfig, Flops, Terms, check_divisible
from megajax.layers.linear import Linear, input_axis, side_by_side, stacked_biases
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.ops import activation as nonlinearity
from megajax.ops.activation import GATED, activate


@dataclasses.dataclass(frozen=True)
class MlpConfig(BranchConfig):
    mlp_dim: int
    activation: nonlinearity.Activation
    bias: bool
    init_std: float
    out_init_std: float

    kind = "dense"
    projected = "mlp_wide"

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {"activation": ("mlp_hidden",), "mlp": ("mlp_wide", "mlp_hidden")}

    @property
    def wide_dim(self) -> int:
        """Width of the input of the activation: gate and up, or up alone."""
        return self.mlp_dim * (2 if self.activation in GATED else 1)

    @property
    def out_flops(self) -> float:
        return 2 * self.embed_dim * self.mlp_dim

    def build(self, rngs: nnx.Rngs) -> Branch:
        return Mlp(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        check_divisible("tensor", mesh.tensor, {"mlp_dim": self.mlp_dim})

    def flops(self, sequence_length: int) -> Flops:
        return Flops(2 * self.embed_dim * self.wide_dim + self.out_flops)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        return {
            "mlp_wide": Activation(self.wide_dim, Flops(2 * self.embed_dim * self.wide_dim)),
            "mlp_hidden": Activation(self.mlp_dim),
        }


class Mlp(nnx.Module):
    """x [B, T, D] -> (down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x))), cache, no Terms)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        F = config.mlp_dim
        if config.activation in GATED:
            self.gate = Linear((D,), (F,), ("embed", "mlp"), config.init_std, rngs=rngs)
        self.up = Linear((D,), (F,), ("embed", "mlp"), config.init_std, rngs=rngs)
        self.down = Linear((F,), (D,), ("mlp", "embed"), config.out_init_std, rngs=rngs)
        if config.bias:
            for linear in (*self._wide(), self.down):
                linear.add_bias_parameter(rngs)

    @property
    def input_axis(self) -> str:
        """Logical axis of the sequence in the layer's input."""
        return input_axis(self._wide())

    def __call__(
        self, x_BTD: jax.Array, inputs: dict | None = None, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        config = self.config
        wide = self._wide()
        shape = (config.embed_dim, 1, config.mlp_dim)
        joined_BTWF = side_by_side(x_BTD, wide, shape, axis=1, has_gradient=cache is None)
        wide_BTWF = constrain(joined_BTWF, "batch", "time", None, "mlp")
        bias_WF = stacked_biases(wide)
        if bias_WF is not None:
            wide_BTWF += jax.lax.stop_gradient(bias_WF).astype(wide_BTWF.dtype)
        hidden_BTF = activate(checkpoint_name(wide_BTWF, "mlp_wide"), config.activation, bias_WF)
        return self.down(checkpoint_name(hidden_BTF, "mlp_hidden")), cache, Terms()

    def _wide(self) -> tuple[Linear, ...]:
        return (self.gate, self.up) if self.config.activation in GATED else (self.up,)
