"""The Mamba-2 mixer (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): a selective state space instead of attention.

Dimensions: those of layers/recurrent/mixer.py.
gate, x, B, C, dt = projections of the input; x, B, C pass a causal convolution; y = ssd(x, dt, A, B, C) (ops/ssd.py);
out = projection of norm(y * silu(gate)).
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.fields.ranges import MAY_CHANGE, Coefficient, Multiplier, PositiveInt, Range
from megajax.layers.layer import check_divisible
from megajax.layers.recurrent.cache import Inputs, Runs, Sizes
from megajax.layers.recurrent.mixer import RecurrentMixer, RecurrentMixerConfig, SavedNames
from megajax.mesh.config import MeshConfig
from megajax.ops.norm import gated_rms_norm
from megajax.ops.ssd import ssd, ssd_step, time_steps
from megajax.parameters import weight

# For estimates: how much longer the recurrence takes than its reads and writes, because its products are small and some
# arrays are copied into other layouts. Fitted to a step of mamba2_130m on an H200.
MORE_TIME = 1.7


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """The section model.mamba."""

    num_heads: PositiveInt | None = None
    """Heads; None: as many as make 2 * embed_dim channels."""
    head_dim: PositiveInt = 64
    """Channels of a head."""
    state_dim: PositiveInt = 128
    """Width of the state of each channel."""
    num_groups: PositiveInt = 1
    """Groups of heads that share B and C, and that the gated norm normalises separately; mesh.tensor splits them if
    there are several."""
    conv_width: Annotated[int, Range(at_least=2)] = 4
    """Tokens that the convolution sees, its own included."""
    conv_bias: bool = True
    """Bias of the convolution."""
    dt_min: Coefficient = 0.0
    """Lower limit of the time step, after softplus."""
    dt_max: Multiplier | None = None
    """Upper limit of the time step; None: there is none."""
    chunk: PositiveInt = dataclasses.field(default=128, metadata=MAY_CHANGE)
    """Tokens of a chunk: 64 to 256. It changes speed and memory, not what is computed."""

    def mixer(self, **options) -> "MambaMixerConfig":
        return MambaMixerConfig(section=self, **options)


@dataclasses.dataclass(frozen=True)
class MambaMixerConfig(RecurrentMixerConfig):
    """The branch of a layer M (layers/sublayer.py)."""

    section: MambaConfig

    kind = "mamba"
    names = SavedNames("mamba_in", "mamba_conv", "ssd_out", "mamba_hidden")
    state_flops = 4  # the update, the product with C; Megatron counts 7

    @property
    def sizes(self) -> Sizes:
        mamba = self.section
        heads = mamba.num_heads or 2 * self.embed_dim // mamba.head_dim
        return Sizes(
            num_heads=heads,
            head_dim=mamba.head_dim,
            num_groups=mamba.num_groups,
            state_dim=mamba.state_dim,
            conv_width=mamba.conv_width,
            conv_bias=mamba.conv_bias,
            num_gates=1,
        )

    @property
    def inside(self) -> int:
        """Of ops/ssd.py: the weights of the tokens of a chunk, computed twice, and their gradient; inputs in chunks,
        states and products with them."""
        return round(MORE_TIME * (3 * self.sizes.num_heads * self.section.chunk + 7 * self.sizes.inner_dim))

    def build(self, rngs: nnx.Rngs) -> "Mamba":
        return Mamba(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        mamba = self.section
        num_heads = self.sizes.num_heads
        if mamba.num_heads is None and 2 * self.embed_dim % mamba.head_dim:
            raise ValueError(
                f"model.mamba.head_dim={mamba.head_dim} does not divide 2 * model.embed_dim={2 * self.embed_dim}; "
                "set --model.mamba.num_heads explicitly"
            )
        if num_heads % mamba.num_groups:
            raise ValueError(
                f"model.mamba.num_groups={mamba.num_groups} does not divide the {num_heads} heads of a Mamba "
                f"layer; use --model.mamba.num_groups={math.gcd(mamba.num_groups, num_heads)}"
            )
        if mamba.dt_max is not None and mamba.dt_max <= mamba.dt_min:
            raise ValueError(
                f"model.mamba.dt_max={mamba.dt_max} must be more than model.mamba.dt_min={mamba.dt_min}; use "
                "a larger limit, or leave it out"
            )
        split = {"mamba.num_heads": num_heads}
        if mamba.num_groups > 1:
            split["mamba.num_groups"] = mamba.num_groups
        check_divisible("tensor", mesh.tensor, split)
        super().check(mesh, sequence_length)


class Mamba(RecurrentMixer):
    """x [B, T, D] -> [B, T, D]."""

    input_names = Inputs("x", "B", "C")
    gate_names = ("dt",)

    def __init__(self, config: MambaMixerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.section = config.section
        H = config.sizes.num_heads
        P = config.sizes.head_dim
        self.D = weight((H,), ("heads",), nnx.initializers.ones, rngs, "vector")
        self.norm_scale = weight((H, P), ("heads", "head_dim"), nnx.initializers.ones, rngs, "vector")

    def gates(self, *projected_BTH: jax.Array) -> jax.Array:
        """-> the time steps."""
        (dt_BTH,) = projected_BTH
        return time_steps(dt_BTH, self.dt_bias[...], (self.section.dt_min, self.section.dt_max))

    def recurrence(self, read: Inputs[jax.Array], gates: jax.Array, **options) -> tuple[jax.Array, jax.Array]:
        arrays = (read.x, gates, self.decay_rates(), read.b, read.c, self.D[...])
        return ssd(*arrays, chunk=self.section.chunk, **options)

    def step(self, read: Inputs[jax.Array], gates: jax.Array, state_BHPN: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ssd_step(read.x, gates, self.decay_rates(), read.b, read.c, self.D[...], state_BHPN)

    def extend(
        self, read: Inputs[jax.Array], gates: jax.Array, runs: Runs, states: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """All sequences start from zeros in one call of `ssd`; what their states before it add is one product for each
        sequence."""
        y, _ = self.recurrence(read, gates, starts_BT=runs.starts_T[None])
        more_y, states = self._continue(Inputs(*(a[0] for a in read)), gates[0], runs, states)
        return (y.astype(jnp.float32) + more_y).astype(y.dtype), states

    def _continue(self, read: Inputs[jax.Array], dt_TH: jax.Array, runs: Runs, states: jax.Array):
        """-> (what the states before this call add to y, float32 [T, H, P]; the states after it)."""
        run_T = runs.numbers_T
        # dt A summed from the first token of each sequence on, and from the token after to its last.
        logs_TH = dt_TH * self.decay_rates()
        since_TH = _sums_of_runs(logs_TH, runs.starts_T)
        heads = dt_TH.shape[1] // read.b.shape[1]
        x, b, c = (a.astype(jnp.float32) for a in read)

        def of_sequence(number, carry):
            y, states = carry
            mine_T = run_T == number
            first = jnp.argmax(mine_T)
            last = first + jnp.sum(mine_T) - 1
            row = runs.rows_T[first]
            before = jnp.where(runs.positions_T[first] > 0, states[row], 0.0)
            grouped = before.reshape(-1, heads, *before.shape[1:])
            past = jnp.einsum("tgn,grpn->tgrp", c, grouped, precision=lax.Precision.HIGHEST).reshape(y.shape)
            y += jnp.where(mine_T[:, None], jnp.exp(jnp.where(mine_T[:, None], since_TH, 0.0)), 0.0)[..., None] * past
            left = jnp.where(mine_T[:, None], since_TH[last] - since_TH, -jnp.inf)
            scaled = x * (jnp.exp(left) * dt_TH)[..., None]
            scaled = scaled.reshape(len(scaled), -1, heads, scaled.shape[-1])
            added = jnp.einsum("tgrp,tgn->grpn", scaled, b, precision=lax.Precision.HIGHEST).reshape(before.shape)
            return y, states.at[row].set(before * jnp.exp(since_TH[last])[:, None, None] + added)

        return lax.fori_loop(0, run_T[-1] + 1, of_sequence, (jnp.zeros_like(x), states))

    def normed(self, y_BTHP: jax.Array, gate_BTHP: jax.Array) -> jax.Array:
        num_groups = self.section.num_groups
        return gated_rms_norm(y_BTHP, gate_BTHP, self.norm_scale[...], num_groups, self.config.norm_epsilon)


def _sums_of_runs(array_TH: jax.Array, starts_T: jax.Array) -> jax.Array:
    """The cumulative sum over T, begun again at each start."""

    def combine(left, right):
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    starts = jnp.broadcast_to(starts_T[:, None], array_TH.shape)
    return lax.associative_scan(combine, (array_TH, starts))[0]
