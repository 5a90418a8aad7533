"""The Mamba-2 mixer (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): a selective state space instead of attention.

Dimensions: B batch, T sequence, D model width, H heads of width P, G groups of heads, N width of the state, W taps of
the convolution, R sequences of an engine.
gate, x, B, C, dt = projections of the input; x, B, C pass a causal convolution; y = ssd(x, dt, A, B, C) (ops/ssd.py);
out = projection of norm(y * silu(gate)).
Tensor parallel: heads and groups are split, as in attention; one group is computed on every device. Over `context` a
device gets the state and the last tokens of the piece of the sequence before its own (parallel/context.py).

A cache holds per sequence the state and the inputs of the last W - 1 tokens of the convolution. The rows of SlotStates
are those of Places.rows_BT: a sequence whose token has position 0 begins with zeros, so nothing is ever cleared; the
last row, num_rows, takes what belongs to padding. All arrays have the rows first, so to save, restore or share the
state of a sequence is to copy a row of each.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.kv_cache import Places, PoolSizes
from megajax.layers.layer import Activation, Flops, check_divisible
from megajax.layers.linear import Linear, side_by_side
from megajax.mesh import MeshConfig
from megajax.ops.norm import gated_rms_norm
from megajax.ops.ssd import causal_conv, convolved, ssd, ssd_step, time_steps
from megajax.parallel.context import ContextMethod, before_pieces, current_pieces
from megajax.parameters import weight
from megajax.ranges import MAY_CHANGE, NonNegativeFloat, PositiveFloat, PositiveInt, Range
from megajax.sharding import constrain

# As published: dt begins between these, A between -1 and -16.
DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4
A_RANGE = (1.0, 16.0)

_STATE_AXES = (None, "heads", None, None)


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
    dt_min: NonNegativeFloat = 0.0
    """Lower limit of the time step, after softplus."""
    dt_max: PositiveFloat | None = None
    """Upper limit of the time step; None: there is none."""
    chunk: PositiveInt = dataclasses.field(default=128, metadata=MAY_CHANGE)
    """Tokens of a chunk: 64 to 256. It changes speed and memory, not what is computed."""


@dataclasses.dataclass(frozen=True)
class MambaMixerConfig:
    """The branch of a layer M (layers/sublayer.py)."""

    mamba: MambaConfig
    embed_dim: int
    norm_epsilon: float
    context: ContextMethod
    init_std: float
    out_init_std: float

    kind = "mamba"
    modules = {
        "activation": ("mamba_conv", "mamba_hidden"),
        "mamba": ("mamba_in", "mamba_conv", "ssd_out", "mamba_hidden"),
    }

    @property
    def num_heads(self) -> int:
        return self.mamba.num_heads or 2 * self.embed_dim // self.mamba.head_dim

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.mamba.head_dim

    @property
    def shared_dim(self) -> int:
        """Of B and C together."""
        return 2 * self.mamba.num_groups * self.mamba.state_dim

    @property
    def gathered_dim(self) -> int:
        """Width of what is gathered over `tensor` for the heads."""
        return self.embed_dim

    @property
    def in_flops(self) -> float:
        """FLOPs per token of the projections of the input."""
        return 2 * self.embed_dim * (2 * self.inner_dim + self.shared_dim + self.num_heads)

    @property
    def out_flops(self) -> float:
        """FLOPs per token of the output projection."""
        return 2 * self.embed_dim * self.inner_dim

    def build(self, rngs: nnx.Rngs) -> "Mamba":
        return Mamba(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        if self.mamba.num_heads is None and 2 * self.embed_dim % self.mamba.head_dim:
            raise ValueError(
                f"model.mamba.head_dim={self.mamba.head_dim} does not divide 2 * model.embed_dim={2 * self.embed_dim}; "
                "set --model.mamba.num_heads explicitly"
            )
        if self.num_heads % self.mamba.num_groups:
            raise ValueError(
                f"model.mamba.num_groups={self.mamba.num_groups} does not divide the {self.num_heads} heads of a Mamba "
                f"layer; use --model.mamba.num_groups={math.gcd(self.mamba.num_groups, self.num_heads)}"
            )
        if self.mamba.dt_max is not None and self.mamba.dt_max <= self.mamba.dt_min:
            raise ValueError(
                f"model.mamba.dt_max={self.mamba.dt_max} must be more than model.mamba.dt_min={self.mamba.dt_min}; use "
                "a larger limit, or leave it out"
            )
        split = {"mamba.num_heads": self.num_heads}
        if self.mamba.num_groups > 1:
            split["mamba.num_groups"] = self.mamba.num_groups
        check_divisible("tensor", mesh.tensor, split)
        self._check_context(mesh, sequence_length)

    def _check_context(self, mesh: MeshConfig, sequence_length: int) -> None:
        pieces = 1 if mesh.context == 1 else mesh.context * (1 if self.context == "all_to_all" else 2)
        taps = self.mamba.conv_width - 1
        if sequence_length % pieces or sequence_length // pieces < taps:
            length = max(-(-sequence_length // pieces), taps) * pieces
            raise ValueError(
                f"training.sequence_length={sequence_length} cannot be split into the {pieces} equal pieces of "
                f"mesh.context={mesh.context} of at least model.mamba.conv_width - 1 = {taps} tokens; use "
                f"--training.sequence_length={length}"
            )

    def flops(self, sequence_length: int) -> Flops:
        # Of the recurrence: the update of the state and its product with C, per entry. Megatron counts 7 instead of 4.
        scan = 4 * self.inner_dim * self.mamba.state_dim
        return Flops(self.in_flops + self.out_flops, mixing=scan, mixing_causal=scan)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        convolved_dim = self.inner_dim + self.shared_dim
        # Of ops/ssd.py: the weights of the tokens of a chunk, computed twice, and their gradient; inputs in chunks,
        # states and products with them.
        inside = 3 * self.num_heads * self.mamba.chunk + 7 * self.inner_dim
        return {
            "mamba_in": Activation(self.inner_dim + convolved_dim + self.num_heads, Flops(self.in_flops)),
            "mamba_conv": Activation(convolved_dim),
            "ssd_out": Activation(self.inner_dim, self.flops(sequence_length)._replace(matmuls=0.0), inside=inside),
            "mamba_hidden": Activation(self.inner_dim),
        }

    def sent(self, mesh: MeshConfig, itemsize: int) -> float:
        """Bytes per token sent over `context`: none, but a state per piece of the sequence."""
        return 0.0

    def new_cache(self, length: int) -> "EmptyStates":
        return EmptyStates(length)

    def new_pages(self, sizes: PoolSizes) -> "SlotStates":
        return SlotStates(*_zeros(self, sizes.num_rows + 1, jnp.float32))


class Inputs(NamedTuple):
    """What the convolution reads, and all that it passes to the state space."""

    x: jax.Array
    """[B, T, H, P]."""
    b: jax.Array
    """[B, T, G, N]."""
    c: jax.Array
    """[B, T, G, N]."""


class CausalConv(nnx.Module):
    """The taps of one convolution, [W, *channels]."""

    def __init__(self, config: MambaConfig, channels: Sequence[int], axes: Sequence[str], *, rngs: nnx.Rngs):
        bound = 1 / math.sqrt(config.conv_width)  # of PyTorch's Conv1d

        def init(key, shape):
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        # Not a matrix: neither decayed nor orthogonalised.
        self.weight = weight((config.conv_width, *channels), ("head_dim", *axes), init, rngs, "vector")
        if config.conv_bias:
            self.bias = weight(channels, axes, init, rngs, "vector")

    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        return self.weight[...], self.bias[...] if hasattr(self, "bias") else None


class Mamba(nnx.Module):
    """x [B, T, D] -> [B, T, D]."""

    input_axis = "time"
    """Logical axis of the sequence in the layer's input."""

    def __init__(self, config: MambaMixerConfig, *, rngs: nnx.Rngs):
        self.config = config
        mamba = config.mamba
        D = config.embed_dim
        H = config.num_heads
        P = mamba.head_dim
        G = mamba.num_groups
        N = mamba.state_dim
        heads = ("heads", "head_dim")
        groups = ("kv_heads" if G > 1 else "head_dim", "head_dim")
        std = config.init_std
        self.gate = Linear((D,), (H, P), ("embed", *heads), std, rngs=rngs)
        self.x = Linear((D,), (H, P), ("embed", *heads), std, rngs=rngs)
        self.B = Linear((D,), (G, N), ("embed", *groups), std, rngs=rngs)
        self.C = Linear((D,), (G, N), ("embed", *groups), std, rngs=rngs)
        self.dt = Linear((D,), (H,), ("embed", "heads"), std, rngs=rngs)
        self.out = Linear((H, P), (D,), ("heads", "head_dim", "embed"), config.out_init_std, rngs=rngs)
        self.conv_x = CausalConv(mamba, (H, P), heads, rngs=rngs)
        self.conv_B = CausalConv(mamba, (G, N), groups, rngs=rngs)
        self.conv_C = CausalConv(mamba, (G, N), groups, rngs=rngs)
        self.dt_bias = weight((H,), ("heads",), _initial_dt_bias, rngs, "vector")
        self.A_log = weight((H,), ("heads",), _initial_a_log, rngs, "vector")
        self.D = weight((H,), ("heads",), nnx.initializers.ones, rngs, "vector")
        self.norm_scale = weight((H, P), heads, nnx.initializers.ones, rngs, "vector")

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache=None, key=None):
        """-> (out, cache).

        inputs: optionally `segment_ids`, int32 [B, T]. cache: has `mix(layer, inputs, dt) -> (y, cache)`; None in
        training.
        """
        gate_BTHP, read, dt_BTH = self._project(x_BTD)
        if cache is None:
            y_BTHP = self._mix(read, dt_BTH, inputs.get("segment_ids"))
        else:
            y_BTHP, cache = cache.mix(self, read, dt_BTH)
        y_BTHP = checkpoint_name(constrain(y_BTHP, "batch", "time", "heads", None), "ssd_out")
        config = self.config
        hidden = gated_rms_norm(y_BTHP, gate_BTHP, self.norm_scale[...], config.mamba.num_groups, config.norm_epsilon)
        hidden = constrain(hidden, "batch", "time", "heads", None)
        return self.out(checkpoint_name(hidden, "mamba_hidden")), cache

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, Inputs, jax.Array]:
        """-> (gate, Inputs, dt before softplus, float32)."""
        D = self.config.embed_dim
        mamba = self.config.mamba
        wide = side_by_side(x_BTD, (self.gate, self.x), (D, 1, self.config.inner_dim), axis=1)
        wide = checkpoint_name(constrain(wide, "batch", "time", None, "mlp"), "mamba_in")
        shared = side_by_side(x_BTD, (self.B, self.C), (D, 1, mamba.num_groups * mamba.state_dim), axis=1)
        shared = checkpoint_name(shared, "mamba_in")
        dt_BTH = checkpoint_name(self.dt(x_BTD), "mamba_in")

        def part(joined, number, size, axis):
            y = joined[:, :, number].reshape(*x_BTD.shape[:2], -1, size)
            return constrain(y, "batch", "time", axis, None)

        gate_BTHP = part(wide, 0, mamba.head_dim, "heads")
        x_BTHP = part(wide, 1, mamba.head_dim, "heads")
        b_BTGN = part(shared, 0, mamba.state_dim, "kv_heads")
        c_BTGN = part(shared, 1, mamba.state_dim, "kv_heads")
        limits = (mamba.dt_min, mamba.dt_max)
        dt_BTH = time_steps(constrain(dt_BTH, "batch", "time", "heads"), self.dt_bias[...], limits)
        return gate_BTHP, Inputs(x_BTHP, b_BTGN, c_BTGN), dt_BTH

    def _mix(self, read: Inputs, dt_BTH: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Convolution and state space of whole sequences, from zeros."""
        pieces = current_pieces(self.config.context)
        taps = self.config.mamba.conv_width - 1
        segments = None
        starts = None
        if segment_ids is not None:
            earlier_BI = before_pieces(segment_ids, taps, pieces, ())
            segments = (segment_ids, earlier_BI)
            by_piece = segment_ids.reshape(*earlier_BI.shape[:2], -1)
            previous = jnp.concatenate([earlier_BI[:, :, -1:], by_piece[:, :, :-1]], 2)
            starts = (by_piece != previous).reshape(segment_ids.shape)

        def conv(array, conv, axis):
            axes = (axis, None)
            before = before_pieces(array, taps, pieces, axes)
            out = causal_conv(array, *conv.parameters(), before_BI=before, segments=segments)
            return checkpoint_name(constrain(out, "batch", "time", *axes), "mamba_conv")

        x_BTHP = conv(read.x, self.conv_x, "heads")
        b_BTGN = conv(read.b, self.conv_B, "kv_heads")
        c_BTGN = conv(read.c, self.conv_C, "kv_heads")
        return self.ssd(x_BTHP, dt_BTH, b_BTGN, c_BTGN, starts_BT=starts, pieces=pieces)[0]

    def ssd(self, x_BTHP, dt_BTH, b_BTGN, c_BTGN, **options):
        """ops/ssd.py's `ssd` with the parameters of this layer."""
        chunk = self.config.mamba.chunk
        return ssd(x_BTHP, dt_BTH, self.decay_rates(), b_BTGN, c_BTGN, self.D[...], chunk=chunk, **options)

    def decay_rates(self) -> jax.Array:
        """A of each head, negative, float32 [H]."""
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def convolved(self, windows: Sequence[Inputs]) -> Inputs:
        """The convolutions of W tokens, the oldest first, one result for each entry of the leading dims."""
        convs = (self.conv_x, self.conv_B, self.conv_C)
        arrays = zip(*windows, strict=True)
        return Inputs(*(convolved(taps, *conv.parameters()) for taps, conv in zip(arrays, convs, strict=True)))


def _initial_dt_bias(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The inverse softplus of time steps whose logarithm is uniform over DT_RANGE."""
    low, high = map(math.log, DT_RANGE)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high)), DT_FLOOR)
    return dt + jnp.log(-jnp.expm1(-dt))


def _initial_a_log(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, *A_RANGE))


# ----------------------------------------------------------------------------- caches


def _zeros(config: MambaMixerConfig, num_rows: int, dtype) -> tuple[Inputs, jax.Array]:
    """-> (the last W - 1 inputs of the convolution, the states), with the rows first."""
    mamba = config.mamba
    taps = (num_rows, mamba.conv_width - 1)
    x = constrain(jnp.zeros((*taps, config.num_heads, mamba.head_dim), dtype), None, None, "heads", None)
    shared = (*taps, mamba.num_groups, mamba.state_dim)
    b, c = (constrain(jnp.zeros(shared, dtype), None, None, "kv_heads", None) for _ in range(2))
    states = (num_rows, config.num_heads, mamba.head_dim, mamba.state_dim)
    return Inputs(x, b, c), constrain(jnp.zeros(states, jnp.float32), *_STATE_AXES)


def _map(function, *inputs: Inputs) -> Inputs:
    return Inputs(*map(function, *inputs))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("positions",), meta_fields=("length",))
@dataclasses.dataclass(frozen=True)
class EmptyStates:
    """The cache of a layer before the first token, for programs without an engine."""

    length: int
    positions: jax.Array | None = None

    def at(self, positions_BT: jax.Array) -> "EmptyStates":
        return dataclasses.replace(self, positions=positions_BT)

    def mix(self, layer: Mamba, read: Inputs, dt_BTH: jax.Array) -> tuple[jax.Array, "RowStates"]:
        recent, states = _zeros(layer.config, read.x.shape[0], read.x.dtype)
        return RowStates(self.length, recent, states, self.positions).mix(layer, read, dt_BTH)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("recent", "states", "positions"), meta_fields=("length",)
)
@dataclasses.dataclass(frozen=True)
class RowStates:
    """The states of the rows of a batch. Padding follows the tokens of a row, with positions from `length` on."""

    length: int
    recent: Inputs
    """[B, W - 1, ...], inputs of the convolution."""
    states: jax.Array
    """float32 [B, H, P, N]."""
    positions: jax.Array | None = None
    """int32 [B, T], of the next tokens. Set by `at`."""

    def at(self, positions_BT: jax.Array) -> "RowStates":
        return dataclasses.replace(self, positions=positions_BT)

    def mix(self, layer: Mamba, read: Inputs, dt_BTH: jax.Array) -> tuple[jax.Array, "RowStates"]:
        """-> (y [B, T, H, P], the cache after these tokens)."""
        T = dt_BTH.shape[1]
        is_token_BT = self.positions < self.length
        joined = _map(lambda old, new: jnp.concatenate([old.astype(new.dtype), new], 1), self.recent, read)
        taps = joined.x.shape[1] - T
        windows = [_map(lambda a, w=w: a[:, w : w + T], joined) for w in range(taps + 1)]
        x, b, c = layer.convolved(windows)
        dt_BTH = jnp.where(is_token_BT[..., None], dt_BTH, 0.0)
        y, states = layer.ssd(x, dt_BTH, b, c, state_BHPN=self.states)
        last = jnp.sum(is_token_BT, 1, dtype=jnp.int32)[:, None] + jnp.arange(taps, dtype=jnp.int32)
        recent = _map(lambda a: jnp.take_along_axis(a, last.reshape(*last.shape, 1, 1), 1), joined)
        return y, RowStates(self.length, recent, states)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("recent", "states", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class SlotStates:
    """The states of the sequences of an engine; see the top of the file."""

    recent: Inputs
    """float32 [R + 1, W - 1, ...], inputs of the convolution."""
    states: jax.Array
    """float32 [R + 1, H, P, N]."""
    places: Places | None = None
    """Set by `at`."""

    def at(self, places: Places) -> "SlotStates":
        return dataclasses.replace(self, places=places)

    def mix(self, layer: Mamba, read: Inputs, dt_BTH: jax.Array) -> tuple[jax.Array, "SlotStates"]:
        """-> (y [B, T, H, P], the cache after these tokens)."""
        one_each = self.places.rows_BT.shape[1] == 1
        return (self._step if one_each else self._extend)(layer, read, dt_BTH)

    def _step(self, layer, read, dt_BTH):
        """One token of each row."""
        rows_B = self.places.rows_BT[:, 0]
        is_first = self.places.positions_BT[:, 0] == 0
        before = _map(lambda a: _unless(is_first, a[rows_B]), self.recent)
        joined = _map(lambda old, new: jnp.concatenate([old.astype(new.dtype), new], 1), before, read)
        windows = [_map(lambda a, w=w: a[:, w], joined) for w in range(joined.x.shape[1])]
        x, b, c = layer.convolved(windows)
        states = _unless(is_first, self.states[rows_B])
        y, states = ssd_step(x, dt_BTH[:, 0], layer.decay_rates(), b, c, layer.D[...], states)
        recent = _map(lambda a, new: a.at[rows_B].set(new[:, 1:].astype(a.dtype)), self.recent, joined)
        return y[:, None], SlotStates(recent, self.states.at[rows_B].set(states))

    def _extend(self, layer, read, dt_BTH):
        """Tokens of several sequences one after the other. All of them start from zeros in one call of `ssd`; what
        their states before it add is computed sequence by sequence, for those that have tokens here."""
        rows_T = self.places.rows_BT[0]
        positions_T = self.places.positions_BT[0]
        T = rows_T.shape[0]
        changes_T = rows_T[1:] != rows_T[:-1]
        starts_T = jnp.concatenate([jnp.ones(1, bool), changes_T])
        ends_T = jnp.concatenate([changes_T, jnp.ones(1, bool)])
        is_padding_T = rows_T == self.states.shape[0] - 1
        first_T = lax.cummax(jnp.where(starts_T, jnp.arange(T), 0))  # of the same sequence
        windows = self._windows(read, jnp.arange(T) - first_T)
        x, b, c = _map(lambda a: a[None], layer.convolved(windows))
        dt_BTH = jnp.where(is_padding_T[:, None], 0.0, dt_BTH)
        y, _ = layer.ssd(x, dt_BTH, b, c, starts_BT=starts_T[None])
        more_y, states = self._continue(layer, Inputs(x[0], b[0], c[0]), dt_BTH[0], starts_T, positions_T)
        ends_at = jnp.where(ends_T, rows_T, self.states.shape[0] - 1)
        newest = _map(lambda *taps: jnp.stack(taps, 1), *windows[1:])
        recent = _map(lambda a, new: a.at[ends_at].set(new.astype(a.dtype)), self.recent, newest)
        return (y.astype(jnp.float32) + more_y).astype(y.dtype), SlotStates(recent, states)

    def _windows(self, read: Inputs, index_T: jax.Array) -> list[Inputs]:
        """The inputs of the last W tokens up to each token, the oldest first, [T, ...] each. index: of each token among
        those of its sequence in this call."""
        rows_T = self.places.rows_BT[0]
        taps = self.recent.x.shape[1]
        has_past_T = self.places.positions_BT[0] > index_T

        def window(recent, new, back):
            own = jnp.roll(new[0], back, 0)
            # The token `back` places before index i is in this call if i >= back, otherwise in the cache.
            earlier = recent[rows_T, jnp.clip(taps - back + index_T, 0, taps - 1)]
            earlier = _unless(~has_past_T, earlier).astype(own.dtype)
            return jnp.where((index_T >= back).reshape(-1, 1, 1), own, earlier)

        return [_map(functools.partial(window, back=back), self.recent, read) for back in range(taps, -1, -1)]

    def _continue(self, layer, read: Inputs, dt_TH, starts_T, positions_T):
        """-> (what the states before this call add to y, float32 [T, H, P]; the states after it)."""
        rows_T = self.places.rows_BT[0]
        run_T = jnp.cumsum(starts_T) - 1
        # dt A summed from the first token of each sequence on, and from the token after to its last.
        logs_TH = dt_TH * layer.decay_rates()
        since_TH = _sums_of_runs(logs_TH, starts_T)
        heads = dt_TH.shape[1] // read.b.shape[1]
        x, b, c = _map(lambda a: a.astype(jnp.float32), read)

        def of_sequence(number, carry):
            y, states = carry
            mine_T = run_T == number
            first = jnp.argmax(mine_T)
            last = first + jnp.sum(mine_T) - 1
            row = rows_T[first]
            before = jnp.where(positions_T[first] > 0, states[row], 0.0)
            grouped = before.reshape(-1, heads, *before.shape[1:])
            past = jnp.einsum("tgn,grpn->tgrp", c, grouped, precision=lax.Precision.HIGHEST).reshape(y.shape)
            y += jnp.where(mine_T[:, None], jnp.exp(jnp.where(mine_T[:, None], since_TH, 0.0)), 0.0)[..., None] * past
            left = jnp.where(mine_T[:, None], since_TH[last] - since_TH, -jnp.inf)
            scaled = x * (jnp.exp(left) * dt_TH)[..., None]
            scaled = scaled.reshape(len(scaled), -1, heads, scaled.shape[-1])
            added = jnp.einsum("tgrp,tgn->grpn", scaled, b, precision=lax.Precision.HIGHEST).reshape(before.shape)
            return y, states.at[row].set(before * jnp.exp(since_TH[last])[:, None, None] + added)

        return lax.fori_loop(0, run_T[-1] + 1, of_sequence, (jnp.zeros_like(x), self.states))


def _unless(condition: jax.Array, array: jax.Array) -> jax.Array:
    """The rows of the array, zeros where the condition holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (array.ndim - 1)), 0, array)


def _sums_of_runs(array_TH: jax.Array, starts_T: jax.Array) -> jax.Array:
    """The cumulative sum over T, begun again at each start."""

    def combine(left, right):
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    starts = jnp.broadcast_to(starts_T[:, None], array_TH.shape)
    return lax.associative_scan(combine, (array_TH, starts))[0]
