"""Feed-forward layer, plain or gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Dimensions: B batch, T sequence, D model width, F feed-forward width.
Tensor parallel: gate and up split F (Megatron's "column"), down splits F ("row"), one reduction at the end.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.ops.matmul import matmul
from megajax.sharding import constrain, weight

Activation = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "squared_relu"]

_ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=False),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = ("swiglu", "geglu")


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
        if config.activation in GATED:
            self.gate = weight(wide, ("embed", "mlp"), init, rngs)
        self.up = weight(wide, ("embed", "mlp"), init, rngs)
        self.down = weight(wide[::-1], ("mlp", "embed"), nnx.initializers.normal(config.out_init_std), rngs)
        if config.bias:
            zeros = nnx.initializers.zeros
            if config.activation in GATED:
                self.gate_bias = weight((config.mlp_dim,), ("mlp",), zeros, rngs)
            self.up_bias = weight((config.mlp_dim,), ("mlp",), zeros, rngs)
            self.down_bias = weight((config.embed_dim,), ("norm",), zeros, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        activation = _ACTIVATIONS[self.config.activation]
        up_BTF = self._wide(x_BTD, "up")
        if self.config.activation in GATED:
            hidden_BTF = activation(self._wide(x_BTD, "gate")) * up_BTF
        else:
            hidden_BTF = activation(up_BTF)
        out_BTD = matmul(hidden_BTF, self.down[...])
        return out_BTD + self.down_bias[...].astype(out_BTD.dtype) if self.config.bias else out_BTD

    def _wide(self, x_BTD: jax.Array, name: str) -> jax.Array:
        y_BTF = matmul(x_BTD, getattr(self, name)[...])
        if self.config.bias:
            y_BTF += getattr(self, f"{name}_bias")[...].astype(y_BTF.dtype)
        return constrain(y_BTF, "batch", "time", "mlp")
