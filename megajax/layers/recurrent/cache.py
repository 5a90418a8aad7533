"""The states of the sequences seen so far: what a layer with a recurrent mixer (mixer.py) remembers of them.

Dimensions: B batch, T new tokens, H heads of width P, G groups of heads, N width of the state, W taps of the
convolution, R sequences of an engine.
A cache holds per sequence the state and the inputs of the last W - 1 tokens of the convolution. The rows of SlotStates
are those of Places.rows_BT: a sequence whose token has position 0 begins with zeros, so nothing is ever cleared; the
last row, num_rows, takes what belongs to padding. All arrays have the rows first, so to save, restore or share the
state of a sequence is to copy a row of each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layers.attention.kv_cache import Places, PoolSizes
from megajax.mesh.sharding import constrain

if TYPE_CHECKING:
    from megajax.layers.recurrent.mixer import RecurrentMixer

Of = TypeVar("Of")


class Sizes(NamedTuple):
    """Sizes of a mixer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    num_gates: int
    """Numbers per token and head besides x, b and c."""

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def shared_dim(self) -> int:
        """Of b and c together."""
        return 2 * self.num_groups * self.state_dim


class Inputs(NamedTuple, Generic[Of]):
    """What the convolution reads, and all that it passes to the recurrence: arrays, or what makes them."""

    x: Of
    """[B, T, H, P]."""
    b: Of
    """[B, T, G, N]."""
    c: Of
    """[B, T, G, N]."""


class Runs(NamedTuple):
    """The sequences whose tokens a call reads, one after the other."""

    rows_T: jax.Array
    """int32: row of the sequence; padding has the last row."""
    positions_T: jax.Array
    """int32: position in the sequence."""
    starts_T: jax.Array
    """bool: first token of its sequence here."""

    @property
    def numbers_T(self) -> jax.Array:
        """int32: index of the sequence in the call."""
        return jnp.cumsum(self.starts_T) - 1


def map_inputs(function: Callable[..., Of], *inputs: "Inputs[Any]") -> "Inputs[Of]":
    """Applies a function to x, b and c separately."""
    return Inputs(*map(function, *inputs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotStates:
    """The states of the sequences of an engine; see the top of the file."""

    recent: Inputs[jax.Array]
    """float32 [R + 1, W - 1, ...], inputs of the convolution."""
    states: jax.Array
    """float32 [R + 1, H, P, N]."""

    @staticmethod
    def zeros(sizes: Sizes, pool: PoolSizes) -> "SlotStates":
        num_rows = pool.num_rows + 1
        taps = (num_rows, sizes.conv_width - 1)
        x = constrain(jnp.zeros((*taps, sizes.num_heads, sizes.head_dim)), None, None, "heads", None)
        shared = (*taps, sizes.num_groups, sizes.state_dim)
        b, c = (constrain(jnp.zeros(shared), None, None, "kv_heads", None) for _ in range(2))
        states = jnp.zeros((num_rows, sizes.num_heads, sizes.head_dim, sizes.state_dim))
        return SlotStates(Inputs(x, b, c), constrain(states, None, "heads", None, None))

    def at(self, places: Places) -> "PlacedStates":
        return PlacedStates(self.recent, self.states, places)


class PlacedStates(NamedTuple):
    """SlotStates, ready for the tokens at these places."""

    recent: Inputs[jax.Array]
    states: jax.Array
    places: Places

    def mix(self, mixer: "RecurrentMixer", read: Inputs[jax.Array], gates: Any) -> tuple[jax.Array, SlotStates]:
        """-> (y [B, T, H, P], the cache after these tokens)."""
        one_each = self.places.rows_BT.shape[1] == 1
        return (self._step if one_each else self._extend)(mixer, read, gates)

    def _step(self, mixer, read, gates):
        """One token of each row."""
        rows_B = self.places.rows_BT[:, 0]
        is_first = self.places.positions_BT[:, 0] == 0
        before = map_inputs(lambda a: _unless(is_first, a[rows_B]), self.recent)
        joined = map_inputs(lambda old, new: jnp.concatenate([old.astype(new.dtype), new], 1), before, read)
        windows = [map_inputs(lambda a, w=w: a[:, w], joined) for w in range(joined.x.shape[1])]
        read = mixer.convolved(windows)
        states = _unless(is_first, self.states[rows_B])
        y, states = mixer.step(read, jax.tree.map(lambda gate: gate[:, 0], gates), states)
        recent = map_inputs(lambda a, new: a.at[rows_B].set(new[:, 1:].astype(a.dtype)), self.recent, joined)
        return y[:, None], SlotStates(recent, self.states.at[rows_B].set(states))

    def _extend(self, mixer, read, gates):
        """Tokens of several sequences one after the other."""
        rows_T = self.places.rows_BT[0]
        positions_T = self.places.positions_BT[0]
        T = rows_T.shape[0]
        changes_T = rows_T[1:] != rows_T[:-1]
        starts_T = jnp.concatenate([jnp.ones(1, bool), changes_T])
        ends_T = jnp.concatenate([changes_T, jnp.ones(1, bool)])
        is_padding_T = rows_T == self.states.shape[0] - 1
        first_T = lax.cummax(jnp.where(starts_T, jnp.arange(T), 0))  # of the same sequence
        windows = self._windows(read, jnp.arange(T) - first_T)
        read = map_inputs(lambda a: a[None], mixer.convolved(windows))
        gates = jax.tree.map(lambda gate: jnp.where(is_padding_T[:, None], 0.0, gate), gates)
        y, states = mixer.extend(read, gates, Runs(rows_T, positions_T, starts_T), self.states)
        ends_at = jnp.where(ends_T, rows_T, self.states.shape[0] - 1)
        newest = map_inputs(lambda *taps: jnp.stack(taps, 1), *windows[1:])
        recent = map_inputs(lambda a, new: a.at[ends_at].set(new.astype(a.dtype)), self.recent, newest)
        return y, SlotStates(recent, states)

    def _windows(self, read: Inputs[jax.Array], index_T: jax.Array) -> list[Inputs[jax.Array]]:
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

        return [map_inputs(functools.partial(window, back=back), self.recent, read) for back in range(taps, -1, -1)]


def _unless(condition: jax.Array, array: jax.Array) -> jax.Array:
    """The rows of the array, zeros where the condition holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (array.ndim - 1)), 0, array)
