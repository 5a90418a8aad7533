"""The gated delta net (Yang, Kautz and Hatamizadeh 2024, https://arxiv.org/abs/2412.06464), as in Qwen3-Next.

Dimensions: those of layers/recurrent/mixer.py, with x, b and c the values, keys and queries.
gate, value, key, query, dt, beta = projections of the input; value, key and query pass a causal convolution;
y = gated_delta(query, key, value, A dt, beta) (ops/gated_delta.py); out = projection of norm(y) * silu(gate).
"""

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import MAY_CHANGE, PositiveInt, Range
from megajax.layers.layer import check_divisible
from megajax.layers.recurrent.cache import Inputs, Sizes
from megajax.layers.recurrent.mixer import RecurrentMixer, RecurrentMixerConfig, SavedNames
from megajax.mesh.config import MeshConfig
from megajax.ops.gated_delta import gated_delta, gated_delta_step
from megajax.ops.norm import rms_norm_then_gate
from megajax.ops.ssd import time_steps
from megajax.parameters import weight

# For estimates, as in mamba.py; fitted to a step of mamba2_130m with these layers.
MORE_TIME = 2.9


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """The section model.delta_net."""

    num_value_heads: PositiveInt | None = None
    """Heads, each with a state; None: as many as make 2 * embed_dim channels."""
    value_head_dim: PositiveInt = 128
    """Channels of a head."""
    num_key_heads: PositiveInt | None = None
    """Heads of queries and keys, each shared by consecutive heads of values; None: as many as heads of values.
    mesh.tensor splits them if there are several."""
    key_head_dim: PositiveInt = 128
    """Width of queries and keys, and of the state of each channel."""
    conv_width: Annotated[int, Range(at_least=2)] = 4
    """Tokens that the convolution sees, its own included."""
    chunk: PositiveInt = dataclasses.field(default=64, metadata=MAY_CHANGE)
    """Tokens of a chunk: 32 to 128. It changes speed and memory, not what is computed."""

    def mixer(self, **options) -> "DeltaNetMixerConfig":
        return DeltaNetMixerConfig(section=self, **options)


@dataclasses.dataclass(frozen=True)
class DeltaNetMixerConfig(RecurrentMixerConfig):
    """The branch of a layer G (layers/sublayer.py)."""

    section: DeltaNetConfig

    kind = "delta_net"
    names = SavedNames("delta_in", "delta_conv", "delta_out", "delta_hidden")
    state_flops = 6  # the product with the key, the update, the product with the query

    @property
    def sizes(self) -> Sizes:
        section = self.section
        heads = section.num_value_heads or 2 * self.embed_dim // section.value_head_dim
        return Sizes(
            num_heads=heads,
            head_dim=section.value_head_dim,
            num_groups=section.num_key_heads or heads,
            state_dim=section.key_head_dim,
            conv_width=section.conv_width,
            conv_bias=False,
            num_gates=2,
        )

    @property
    def inside(self) -> int:
        """Of ops/gated_delta.py: the system, its inverse by halves, the weights of the tokens of a chunk, computed
        twice, and their gradient; values in chunks, states and products with them; keys and queries of each head."""
        sizes = self.sizes
        counted = 6 * self.section.chunk + 7 * sizes.head_dim + 5 * sizes.state_dim
        return round(MORE_TIME * sizes.num_heads * counted)

    def build(self, rngs: nnx.Rngs) -> "DeltaNet":
        return DeltaNet(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        section = self.section
        if section.num_value_heads is None and 2 * self.embed_dim % section.value_head_dim:
            raise ValueError(
                f"model.delta_net.value_head_dim={section.value_head_dim} does not divide 2 * model.embed_dim="
                f"{2 * self.embed_dim}; set --model.delta_net.num_value_heads explicitly"
            )
        num_heads = self.sizes.num_heads
        num_groups = self.sizes.num_groups
        if num_heads % num_groups:
            raise ValueError(
                f"model.delta_net.num_key_heads={num_groups} does not divide the {num_heads} heads of values; use "
                f"--model.delta_net.num_key_heads={math.gcd(num_groups, num_heads)}"
            )
        split = {"delta_net.num_value_heads": num_heads}
        if num_groups > 1:
            split["delta_net.num_key_heads"] = num_groups
        check_divisible("tensor", mesh.tensor, split)
        super().check(mesh, sequence_length)


class DeltaNet(RecurrentMixer):
    """x [B, T, D] -> [B, T, D]."""

    input_names = Inputs("value", "key", "query")
    gate_names = ("dt", "beta")

    def __init__(self, config: DeltaNetMixerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.section = config.section
        P = config.sizes.head_dim
        self.norm_scale = weight((P,), ("head_dim",), nnx.initializers.ones, rngs, "vector")

    def gates(self, *projected_BTH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """-> (logarithms of the decays, betas between 0 and 1)."""
        dt_BTH, beta_BTH = projected_BTH
        steps_BTH = time_steps(dt_BTH, self.dt_bias[...], (0.0, None))
        return steps_BTH * self.decay_rates(), jax.nn.sigmoid(beta_BTH.astype(jnp.float32))

    def recurrence(self, read: Inputs[jax.Array], gates: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return gated_delta(read.c, read.b, read.x, *gates, chunk=self.section.chunk, **options)

    def step(self, read: Inputs[jax.Array], gates: Any, state_BHPN: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_decay_BH, beta_BH = gates
        return gated_delta_step(read.c, read.b, read.x, log_decay_BH, beta_BH, state_BHPN)

    def normed(self, y_BTHP: jax.Array, gate_BTHP: jax.Array) -> jax.Array:
        return rms_norm_then_gate(y_BTHP, gate_BTHP, self.norm_scale[...], self.config.norm_epsilon)
