"""What mixers with a recurrent state share: Mamba-2 (mamba.py) and the gated delta net (delta_net.py).

Dimensions: B batch, T sequence, D model width, H heads of width P, G groups of heads, N width of the state, W taps of
the convolution, R sequences of an engine (layers/recurrent/cache.py).
gate, x, b, c and the gates of each head = projections of the input; x, b, c pass a causal convolution; a recurrence
with a state [P, N] per head turns them into y; out = projection of y, normalised and gated. In the terms of linear
attention x, b, c are values, keys and queries.
Tensor parallel: heads and groups are split, as in attention; one group is computed on every device. Over `context` a
device gets the state and the last tokens of the piece of the sequence before its own (parallel/context.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, BranchConfig, Flops, Terms
from megajax.layers.linear import Linear
from megajax.layers.recurrent.cache import Inputs, Runs, Sizes, SlotStates, map_inputs
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.ops.causal_conv import causal_conv, convolved
from megajax.parallel.context import ContextMethod, before_pieces, current_pieces
from megajax.parameters import weight

# As published (Dao and Gu 2024): dt begins between these, A between -1 and -16.
DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4
A_RANGE = (1.0, 16.0)


class SavedNames(NamedTuple):
    """Names of the activations of a mixer, in the order of the forward pass."""

    projected: str
    convolved: str
    mixed: str
    hidden: str


@dataclasses.dataclass(frozen=True)
class RecurrentMixerConfig(BranchConfig):
    """The branch of a recurrent layer (layers/sublayer.py). A mixer derives its own, with its section of the model's
    config, the attributes below, and the methods that raise here."""

    norm_epsilon: float
    context: ContextMethod
    init_std: float
    out_init_std: float

    kind = ""
    """Name of the layer, of the section of the model's config, and of the module in execution.recompute."""
    names = SavedNames("", "", "", "")
    state_flops = 0
    """FLOPs of the recurrence per token and entry of the state."""

    @property
    def sizes(self) -> Sizes:
        raise NotImplementedError

    @property
    def inside(self) -> int:
        """Activation.inside of the recurrence."""
        raise NotImplementedError

    @property
    def modules(self) -> dict[str, Sequence[str]]:
        return {"activation": (self.names.convolved, self.names.hidden), self.kind: self.names}

    @property
    def projected(self) -> str:
        return self.names.projected

    @property
    def in_flops(self) -> float:
        """FLOPs per token of the projections of the input."""
        sizes = self.sizes
        return 2 * self.embed_dim * (2 * sizes.inner_dim + sizes.shared_dim + sizes.num_gates * sizes.num_heads)

    @property
    def out_flops(self) -> float:
        return 2 * self.embed_dim * self.sizes.inner_dim

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        pieces = 1 if mesh.context == 1 else mesh.context * (1 if self.context == "all_to_all" else 2)
        taps = self.sizes.conv_width - 1
        if sequence_length % pieces or sequence_length // pieces < taps:
            length = max(-(-sequence_length // pieces), taps) * pieces
            raise ValueError(
                f"training.sequence_length={sequence_length} cannot be split into the {pieces} equal pieces of "
                f"mesh.context={mesh.context} of at least model.{self.kind}.conv_width - 1 = {taps} tokens; use "
                f"--training.sequence_length={length}"
            )

    def flops(self, sequence_length: int) -> Flops:
        scan = self.state_flops * self.sizes.inner_dim * self.sizes.state_dim
        return Flops(self.in_flops + self.out_flops, mixing=scan, mixing_causal=scan)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        sizes = self.sizes
        convolved_dim = sizes.inner_dim + sizes.shared_dim
        projected_dim = sizes.inner_dim + convolved_dim + sizes.num_gates * sizes.num_heads
        return {
            self.names.projected: Activation(projected_dim, Flops(self.in_flops)),
            self.names.convolved: Activation(convolved_dim),
            self.names.mixed: Activation(
                sizes.inner_dim, dataclasses.replace(self.flops(sequence_length), matmuls=0.0), inside=self.inside
            ),
            self.names.hidden: Activation(sizes.inner_dim),
        }

    def new_pages(self, sizes: PoolSizes) -> SlotStates:
        return SlotStates.zeros(self.sizes, sizes)


class CausalConv(nnx.Module):
    """The taps of one convolution, [W, *channels]."""

    def __init__(self, sizes: Sizes, channels: Sequence[int], axes: Sequence[str], *, rngs: nnx.Rngs):
        bound = 1 / math.sqrt(sizes.conv_width)  # of PyTorch's Conv1d

        def init(key, shape):
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        # Not a matrix: neither decayed nor orthogonalised.
        self.weight = weight((sizes.conv_width, *channels), ("head_dim", *axes), init, rngs, "vector")
        if sizes.conv_bias:
            self.bias = weight(channels, axes, init, rngs, "vector")

    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        return self.weight[...], self.bias[...] if hasattr(self, "bias") else None


class RecurrentMixer(nnx.Module):
    """x [B, T, D] -> [B, T, D]. A mixer has the names below, parameters of its own, and the methods that raise here."""

    input_axis = "time"
    """Logical axis of the sequence in the layer's input."""
    input_names: Inputs[str]
    """Of the Linears of x, b and c; their CausalConvs are named after them."""
    gate_names: tuple[str, ...]
    """Of Linears with one output per head."""

    def __init__(self, config: RecurrentMixerConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        H = config.sizes.num_heads
        P = config.sizes.head_dim
        G = config.sizes.num_groups
        N = config.sizes.state_dim
        heads = ("heads", "head_dim")
        groups = ("kv_heads" if G > 1 else "head_dim", "head_dim")
        channels = Inputs(((H, P), heads), ((G, N), groups), ((G, N), groups))
        std = config.init_std
        self.gate = Linear((D,), (H, P), ("embed", *heads), std, rngs=rngs)
        for name, (shape, axes) in zip(self.input_names, channels, strict=True):
            setattr(self, name, Linear((D,), shape, ("embed", *axes), std, rngs=rngs))
        for name in self.gate_names:
            setattr(self, name, Linear((D,), (H,), ("embed", "heads"), std, rngs=rngs))
        self.out = Linear((H, P), (D,), ("heads", "head_dim", "embed"), config.out_init_std, rngs=rngs)
        for name, (shape, axes) in zip(self.input_names, channels, strict=True):
            setattr(self, f"conv_{name}", CausalConv(config.sizes, shape, axes, rngs=rngs))
        self.dt_bias = weight((H,), ("heads",), _initial_dt_bias, rngs, "vector")
        self.A_log = weight((H,), ("heads",), _initial_a_log, rngs, "vector")

    @property
    def sizes(self) -> Sizes:
        return self.config.sizes

    def inputs(self) -> Inputs[Linear]:
        """The Linears of x, b and c."""
        return Inputs(*(getattr(self, name) for name in self.input_names))

    def convs(self) -> Inputs[CausalConv]:
        """Their CausalConvs."""
        return Inputs(*(getattr(self, f"conv_{name}") for name in self.input_names))

    def decay_rates(self) -> jax.Array:
        """A of each head, negative, float32 [H]."""
        return -jnp.exp(self.A_log[...].astype(jnp.float32))

    def gates(self, *projected_BTH: jax.Array) -> Any:
        """The outputs of the Linears `gate_names` -> what the recurrence reads, a pytree of float32 [B, T, H]; a token
        with gates of 0 leaves the state as it is."""
        raise NotImplementedError

    def recurrence(
        self,
        read: Inputs[jax.Array],
        gates: Any,
        *,
        starts_BT: jax.Array | None = None,
        state_BHPN: jax.Array | None = None,
        pieces: Sequence[int] = (0,),
    ) -> tuple[jax.Array, jax.Array]:
        """-> (y [B, T, H, P] in x's dtype, the state after the last token, float32 [B, H, P, N]).

        starts: bool, tokens that begin a document, with a state of zeros. state: before the first token; None: zeros.
        pieces: the number in the sequence of each stored piece of T.
        """
        raise NotImplementedError

    def step(self, read: Inputs[jax.Array], gates: Any, state_BHPN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`recurrence` of one token per row; arrays without T."""
        raise NotImplementedError

    def extend(self, read: Inputs[jax.Array], gates: Any, runs: Runs, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`recurrence` of several sequences in a batch of one, each from its row of the states, float32
        [R + 1, H, P, N] -> (y, the states after it). Computes all tokens once for each sequence."""

        def of_sequence(number, carry):
            y, states = carry
            is_mine_T = runs.numbers_T == number
            first = jnp.argmax(is_mine_T)
            row = runs.rows_T[first]
            before = jnp.where(runs.positions_T[first] > 0, states[row], 0.0)
            own_gates = jax.tree.map(lambda gate: jnp.where(is_mine_T[:, None], gate, 0.0), gates)
            own_y, last = self.recurrence(read, own_gates, state_BHPN=before[None])
            y = jnp.where(is_mine_T[:, None, None], own_y, y)
            return y, states.at[row].set(last[0])

        return lax.fori_loop(0, runs.numbers_T[-1] + 1, of_sequence, (jnp.zeros_like(read.x), states))

    def normed(self, y_BTHP: jax.Array, gate_BTHP: jax.Array) -> jax.Array:
        """y, normalised and gated."""
        raise NotImplementedError

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        """-> (out, cache, no Terms).

        inputs: optionally `segment_ids`, int32 [B, T]. cache: has `mix(mixer, inputs, gates) -> (y, cache)`; None in
        training.
        """
        names = self.config.names
        gate_BTHP, read, gates = self._project(x_BTD)
        if cache is None:
            y_BTHP = self._mix(read, gates, inputs.get("segment_ids"))
        else:
            y_BTHP, cache = cache.mix(self, read, gates)
        y_BTHP = checkpoint_name(constrain(y_BTHP, "batch", "time", "heads", None), names.mixed)
        hidden = constrain(self.normed(y_BTHP, gate_BTHP), "batch", "time", "heads", None)
        return self.out(checkpoint_name(hidden, names.hidden)), cache, Terms()

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, Inputs[jax.Array], Any]:
        """-> (gate, Inputs, gates of the heads)."""
        linears = (self.gate, *self.inputs(), *(getattr(self, name) for name in self.gate_names))
        # One product for each: the kernels of the convolution and the norm take whole arrays, not parts of one.
        projected = [checkpoint_name(linear(x_BTD), self.config.names.projected) for linear in linears]
        axes = ("heads", "heads", "kv_heads", "kv_heads")
        wide = [constrain(y, "batch", "time", axis, None) for y, axis in zip(projected, axes, strict=False)]
        gate_BTHP, x_BTHP, b_BTGN, c_BTGN = wide
        per_head = projected[len(wide) :]
        gates = self.gates(*(constrain(gate_BTH, "batch", "time", "heads") for gate_BTH in per_head))
        return gate_BTHP, Inputs(x_BTHP, b_BTGN, c_BTGN), gates

    def _mix(self, read: Inputs[jax.Array], gates: Any, segment_ids: jax.Array | None) -> jax.Array:
        """Convolution and recurrence of whole sequences, from zeros."""
        pieces = current_pieces(self.config.context)
        taps = self.sizes.conv_width - 1
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
            out = causal_conv(array, *conv.parameters(), before_BI=before, segments=segments, axes=axes)
            return checkpoint_name(constrain(out, "batch", "time", *axes), self.config.names.convolved)

        read = map_inputs(conv, read, self.convs(), Inputs("heads", "kv_heads", "kv_heads"))
        return self.recurrence(read, gates, starts_BT=starts, pieces=pieces)[0]

    def convolved(self, windows: Sequence[Inputs[jax.Array]]) -> Inputs[jax.Array]:
        """The convolutions of W tokens, the oldest first, one result for each entry of the leading dims."""
        arrays = Inputs(*zip(*windows, strict=True))
        return map_inputs(lambda taps, conv: convolved(taps, *conv.parameters()), arrays, self.convs())


def _initial_dt_bias(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The inverse softplus of time steps whose logarithm is uniform over DT_RANGE."""
    low, high = map(math.log, DT_RANGE)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high)), DT_FLOOR)
    return dt + jnp.log(-jnp.expm1(-dt))


def _initial_a_log(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, *A_RANGE))
