"""Feed-forward layer, plain or gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Dimensions: B batch, T sequence, D model width, F feed-forward width.
Tensor parallel: gate and up split F (Megatron's "column"), down splits F ("row"), one reduction at the end.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.ops.activation import GATED, Activation, activate
from megajax.ops.matmul import add_bias, matmul, matmul_side_by_side
from megajax.sharding import constrain, weight


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    embed_dim: int
    mlp_dim: int
    activation: Activation
    bias: bool
    init_std: float
    out_init_std: float

    @property
    def num_matrices(self) -> int:
        return 3 if self.activation in GATED else 2


class Mlp(nnx.Module):
    """x [B, T, D] -> down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x)))."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs):
        self.config = config
        wide, init = (config.embed_dim, config.mlp_dim), nnx.initializers.normal(config.init_std)
        self._wide_names = ("gate", "up") if config.activation in GATED else ("up",)
        for name in self._wide_names:
            setattr(self, name, weight(wide, ("embed", "mlp"), init, rngs))
        self.down = weight(wide[::-1], ("mlp", "embed"), nnx.initializers.normal(config.out_init_std), rngs)
        if config.bias:
            zeros = nnx.initializers.zeros
            for name in self._wide_names:
                setattr(self, f"{name}_bias", weight((config.mlp_dim,), ("mlp",), zeros, rngs))
            self.down_bias = weight((config.embed_dim,), ("norm",), zeros, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        weights = [getattr(self, name)[...][:, None] for name in self._wide_names]
        wide_BTWF = constrain(matmul_side_by_side(x_BTD, weights, axis=1), "batch", "time", None, "mlp")
        if self.config.bias:
            biases = [getattr(self, f"{name}_bias")[...] for name in self._wide_names]
            wide_BTWF = add_bias(wide_BTWF, jnp.stack(biases))
        hidden_BTF = activate(checkpoint_name(wide_BTWF, "mlp_wide"), self.config.activation)
        out_BTD = matmul(checkpoint_name(hidden_BTF, "mlp_hidden"), self.down[...])
        return add_bias(out_BTD, self.down_bias[...]) if self.config.bias else out_BTD
