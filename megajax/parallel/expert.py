"""Expert parallelism: sends tokens to the devices that hold their experts, and brings results back.

Dimensions: B batch, T sequence, D model width, E experts, K experts per token, P devices along `expert`. Per device:
n tokens, m = n K choices of an expert, R rows (tokens sent to its experts, sorted by expert), C rows per destination in
one round.

    all_gather   every device gathers the tokens of all P and selects those for its experts. A token travels once to a
                 device, however many of its experts are there. With P = 1 this only sorts tokens; nothing is sent.
    all_to_all   a token is sent once for each of its experts, only to the devices that hold them.

Buffers have a static size, `buffer` times the rows of an even load. Tokens for which there is no room are sent in
further rounds, until no device has any left; nothing is dropped.

`dispatch` is linear in the tokens and `combine` is its transpose, so each is the derivative of the other. A plan of
integers says which token goes where. `tensor` splits the width of the rows (ops/grouped_matmul.py).
"""

import dataclasses
import functools
import logging
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import axis_size, free_axes, manual
from megajax.mesh.sharding import ACTIVATION_AXES, WEIGHT_AXES, activation_spec, axes_of, rows_spec
from megajax.ops.ranking import ends_of, in_order

logger = logging.getLogger("megajax")

(AXIS,) = WEIGHT_AXES["experts"]
Dispatch = Literal["auto", "all_to_all", "all_gather"]


class Plan(NamedTuple):
    """Of one round; int32, concatenated over devices."""

    sizes: jax.Array
    """Rows of each expert."""
    sent: jax.Array
    """Choice in each slot of the send buffer; m: the slot is empty. Not used by all_gather."""
    sorted: jax.Array
    """Index of each row in what was received; out of range: the row is empty."""
    unsorted: jax.Array
    """Its inverse. Not used by all_gather."""
    home: jax.Array
    """Index of each choice in what is returned; out of range: it was not sent in this round."""


@dataclasses.dataclass(frozen=True)
class AllGather:
    num_ranks: int
    num_experts: int
    top_k: int
    num_tokens: int
    """Of a device."""
    num_rows: int
    """R."""

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_rounds(self) -> int:
        """Enough for as many choices of the experts of one device as there can be."""
        return math.ceil(self.num_ranks * self.num_tokens * min(self.top_k, self.local_experts) / self.num_rows)

    def rounds_needed(self, experts_nK: jax.Array) -> jax.Array:
        """int32: by any device."""
        to_rank = lax.psum(_to_ranks(experts_nK, self.num_ranks, self.local_experts), AXIS)
        return -(-jnp.max(to_rank) // self.num_rows)

    def plan(self, experts_nK: jax.Array, turn) -> Plan:
        chosen = lax.all_gather(experts_nK, AXIS, axis=0, tiled=True).ravel()
        local = chosen - lax.axis_index(AXIS) * self.local_experts
        local = jnp.where((local >= 0) & (local < self.local_experts), local, self.local_experts)
        first = turn * self.num_rows
        place, ends = in_order(local, self.local_experts + 1)
        place -= first
        ends = ends[:-1]
        is_here = (local < self.local_experts) & (place >= 0) & (place < self.num_rows)
        home = jnp.where(is_here, place, self.num_rows)
        sizes = jnp.diff(jnp.clip(ends - first, 0, self.num_rows), prepend=0)
        nothing = jnp.zeros_like(place[:0])
        return Plan(sizes, nothing, _inverse(home, self.num_rows), nothing, home)

    def send(self, values, plan: Plan, per_choice: int):
        """values [choices / per_choice, ...] -> rows [R, ...]."""
        arrived = lax.all_gather(values, AXIS, axis=0, tiled=True)
        return _taken(arrived, plan.sorted // per_choice)

    def bring_back(self, rows, plan: Plan, per_choice: int):
        """The transpose of send."""
        return lax.psum_scatter(_summed(rows, plan.home, per_choice), AXIS, scatter_dimension=0, tiled=True)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    num_ranks: int
    num_experts: int
    top_k: int
    num_tokens: int
    room: int
    """C."""

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_rows(self) -> int:
        return self.num_ranks * self.room

    @property
    def num_rounds(self) -> int:
        """Enough for a device whose choices all go to one other device."""
        return math.ceil(self.num_tokens * min(self.top_k, self.local_experts) / self.room)

    def rounds_needed(self, experts_nK: jax.Array) -> jax.Array:
        """int32: by this device."""
        return -(-jnp.max(_to_ranks(experts_nK, self.num_ranks, self.local_experts)) // self.room)

    def plan(self, experts_nK: jax.Array, turn) -> Plan:
        chosen = experts_nK.ravel()
        places, ends = in_order(chosen, self.num_experts + 1)
        order = _inverse(places, chosen.size)
        ends_PE = ends[:-1].reshape(self.num_ranks, -1)
        starts_PE = jnp.concatenate([jnp.zeros_like(ends_PE[:1, 0]), ends_PE.ravel()[:-1]]).reshape(ends_PE.shape)
        first_P1 = starts_PE[:, :1] + turn * self.room
        place_PC = first_P1 + jnp.arange(self.room, dtype=jnp.int32)
        sent_PC = jnp.where(place_PC < ends_PE[:, -1:], _taken(order, place_PC), chosen.size)
        counts_PE = jnp.minimum(ends_PE, first_P1 + self.room) - jnp.maximum(starts_PE, first_P1)
        arrived_PE = lax.all_to_all(jnp.maximum(counts_PE, 0), AXIS, 0, 0, tiled=True)
        after_PE = jnp.cumsum(arrived_PE, 1)
        number_C = jnp.arange(self.room, dtype=jnp.int32)
        expert_PC = jnp.sum(number_C[None, :, None] >= after_PE[:, None, :], -1)  # number of experts: no row
        unsorted, _ = in_order(expert_PC.ravel(), self.local_experts + 1)
        sorted_ = _inverse(unsorted, self.num_rows)
        sent = sent_PC.ravel()
        return Plan(jnp.sum(arrived_PE, 0), sent, sorted_, unsorted, _inverse(sent, chosen.size))

    def send(self, values, plan: Plan, per_choice: int):
        """values [choices / per_choice, ...] -> rows [R, ...]."""
        arrived = lax.all_to_all(_taken(values, plan.sent // per_choice), AXIS, 0, 0, tiled=True)
        return _taken(arrived, plan.sorted)

    def bring_back(self, rows, plan: Plan, per_choice: int):
        """The transpose of send."""
        returned = lax.all_to_all(_taken(rows, plan.unsorted), AXIS, 0, 0, tiled=True)
        return _summed(returned, plan.home, per_choice)


Exchange = AllGather | AllToAll


def choose_exchange(shape_BT: tuple[int, int], num_experts: int, top_k: int, dispatch: Dispatch, buffer: float):
    """The exchange for tokens [B, T] on the current mesh. auto: the one by which a device receives less."""
    sizes = free_axes()
    parts = math.prod(sizes[axis] for entry in activation_spec(shape_BT, ("batch", "time")) for axis in axes_of(entry))
    sizes = dict(num_ranks=axis_size(AXIS), num_experts=num_experts, top_k=top_k)
    return exchange_of(math.prod(shape_BT) // parts, dispatch=dispatch, buffer=buffer, **sizes)


def exchange_of(
    num_tokens: int, num_ranks: int, num_experts: int, top_k: int, dispatch: Dispatch, buffer: float
) -> Exchange:
    """As choose_exchange, for this many tokens per device. buffer: math.inf has room for all rows that can arrive."""
    sizes = dict(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens)
    even = buffer * num_tokens * top_k
    most = num_tokens * min(top_k, num_experts // num_ranks)
    gathered = AllGather(**sizes, num_rows=math.ceil(min(even, num_ranks * most)))
    exchanged = AllToAll(**sizes, room=math.ceil(min(even / num_ranks, most)))
    if num_ranks == 1 or dispatch == "all_gather":
        return gathered
    if dispatch == "all_to_all":
        return exchanged
    return gathered if num_tokens <= exchanged.room else exchanged


@functools.cache
def log_exchange(exchange: Exchange) -> None:
    if exchange.num_ranks == 1:
        return
    name = "all_gather" if isinstance(exchange, AllGather) else "all_to_all"
    rounds = f" in up to {exchange.num_rounds} rounds" if exchange.num_rounds > 1 else ""
    logger.info("dispatch to experts on %d devices: %s%s; %d tokens and a buffer of %d rows per device",
                exchange.num_ranks, name, rounds, exchange.num_tokens, exchange.num_rows)  # fmt: skip


# ----------------------------------------------------------------------------- on all devices


def make_plan(experts_BTK: jax.Array, exchange: Exchange, turn=0) -> Plan:
    """The plan of round `turn` (an int or int32 scalar). Choices that are not sent in it have expert number E.

    Where several devices hold the same tokens (a batch too small to split), one of them sends them.
    """
    spec = activation_spec(experts_BTK.shape, ("batch", "time", None))

    def body(experts_BTK, turn):
        return exchange.plan(_sent_from_here(experts_BTK, spec, exchange), turn)

    return manual(body, (spec, P()), rows_spec())(experts_BTK, jnp.int32(turn))


def rounds_needed(experts_BTK: jax.Array, exchange: Exchange) -> jax.Array:
    """int32 scalar, the same on every device, since all take part in every round."""
    spec = activation_spec(experts_BTK.shape, ("batch", "time", None))

    def body(experts_BTK):
        needed = exchange.rounds_needed(_sent_from_here(experts_BTK, spec, exchange))
        varying = compat.varying_axes(needed)
        return lax.pmax(needed, tuple(axis for axis in axes if axis in varying))

    axes = tuple(free_axes())
    return manual(body, (spec,), P())(experts_BTK)


def _sent_from_here(experts_BTK, spec: P, exchange: Exchange):
    """-> the choices of a device's tokens [n, K]; E where another device with the same tokens sends them."""
    same = _same_tokens(spec)
    if same:
        experts_BTK = jnp.where(lax.axis_index(same) == 0, experts_BTK, exchange.num_experts)
    return experts_BTK.reshape(-1, exchange.top_k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(run, needed: jax.Array, experts_BTK: jax.Array, operands):
    """The sum of run(turn, experts, operands) over `needed` rounds, at least one.

    The gradient is that with respect to operands. Only the first round saves anything for it; the others, which are
    rarely needed, are computed again. A loop adds their gradients to those of the first in place: a branch would
    return copies of all weights, and gradients of zero where it is not taken.
    """
    return _further_rounds(run, needed, experts_BTK, operands, run(0, experts_BTK, operands))


def _further_rounds(run, needed, experts_BTK, operands, first):
    def another(carry):
        turn, total = carry
        return turn + 1, jax.tree.map(jnp.add, total, run(turn, experts_BTK, operands))

    return lax.while_loop(lambda carry: carry[0] < needed, another, (jnp.int32(1), first))[1]


def _in_rounds_forward(run, needed, experts_BTK, operands):
    first, pullback = jax.vjp(lambda operands: run(0, experts_BTK, operands), operands)
    y = _further_rounds(run, needed, experts_BTK, operands, first)
    return y, (needed, experts_BTK, operands, pullback)


def _in_rounds_backward(run, residuals, d_y):
    needed, experts_BTK, operands, pullback = residuals

    def gradients_of(turn, experts_BTK, operands):
        _, pullback = jax.vjp(lambda operands: run(turn, experts_BTK, operands), operands)
        return pullback(d_y)

    (gradients,) = _further_rounds(gradients_of, needed, experts_BTK, operands, pullback(d_y))
    return None, None, gradients


in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)


def dispatch(x_BTD: jax.Array, weights_BTK: jax.Array, plan: Plan, exchange: Exchange) -> tuple[jax.Array, jax.Array]:
    """-> (rows [R, D] in x's dtype, their weights [R]); empty rows are zero."""
    return _dispatch(x_BTD, weights_BTK, plan, exchange)


def combine(rows_RD: jax.Array, plan: Plan, exchange: Exchange, shape_BT: tuple[int, int]) -> jax.Array:
    """The sum over the rows of each token -> [B, T, D] in their dtype; laid out as batch, time, embed.

    A device sums in float32; all_gather then adds the sums of the devices in the dtype of the rows.
    """
    return _combine(rows_RD, plan, exchange, shape_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(x_BTD, weights_BTK, plan, exchange):
    def body(x_BTD, weights_BTK, plan):
        rows_RD = exchange.send(x_BTD.reshape(-1, x_BTD.shape[-1]), plan, exchange.top_k)
        return rows_RD, exchange.send(weights_BTK.ravel(), plan, 1)

    in_specs = (*_token_specs(x_BTD.shape[:2], x_BTD.shape[2]), rows_spec())
    return manual(body, in_specs, (rows_spec("embed"), rows_spec()))(x_BTD, weights_BTK, plan)


def _dispatch_forward(x_BTD, weights_BTK, plan, exchange):
    return _dispatch(x_BTD, weights_BTK, plan, exchange), (plan, x_BTD.shape[:2])


def _dispatch_backward(exchange, residuals, gradients):
    plan, shape_BT = residuals
    d_rows_RD, d_weights_R = gradients
    specs = _token_specs(shape_BT, d_rows_RD.shape[1])

    def body(d_rows_RD, d_weights_R, plan):
        d_x_nD = exchange.bring_back(d_rows_RD, plan, exchange.top_k)
        d_weights_m = exchange.bring_back(d_weights_R, plan, 1)
        return _as_tokens(d_x_nD, shape_BT, specs[0]), _as_tokens(d_weights_m, shape_BT, specs[1])

    in_specs = (rows_spec("embed"), rows_spec(), rows_spec())
    return *manual(body, in_specs, specs)(d_rows_RD, d_weights_R, plan), None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _combine(rows_RD, plan, exchange, shape_BT):
    spec, _ = _token_specs(shape_BT, rows_RD.shape[1])

    def body(rows_RD, plan):
        return _as_tokens(exchange.bring_back(rows_RD, plan, exchange.top_k), shape_BT, spec)

    return manual(body, (rows_spec("embed"), rows_spec()), spec)(rows_RD, plan)


def _combine_forward(rows_RD, plan, exchange, shape_BT):
    return _combine(rows_RD, plan, exchange, shape_BT), plan


def _combine_backward(exchange, shape_BT, plan, d_y_BTD):
    spec, _ = _token_specs(shape_BT, d_y_BTD.shape[2])

    def body(d_y_BTD, plan):
        return exchange.send(d_y_BTD.reshape(-1, d_y_BTD.shape[-1]), plan, exchange.top_k)

    return manual(body, (spec, rows_spec()), rows_spec("embed"))(d_y_BTD, plan), None


_combine.defvjp(_combine_forward, _combine_backward)


def _token_specs(shape_BT, width: int) -> tuple[P, P]:
    """-> those of x [B, T, D] and of the weights [B, T, K]."""
    batch, time, embed = activation_spec((*shape_BT, width), ("batch", "time", "embed"))
    return P(batch, time, embed), P(batch, time, None)


def _as_tokens(values, shape_BT, spec):
    """Values of a device's tokens [n, ...] or choices -> its part of [B, T, ...]. Devices with the same tokens, of
    which make_plan let one send, all get its result."""
    batch, time, _ = (math.prod(lax.axis_size(axis) for axis in axes_of(entry)) for entry in spec)
    values = values.reshape(shape_BT[0] // batch, shape_BT[1] // time, -1)
    same = _same_tokens(spec)
    return lax.psum(jnp.where(lax.axis_index(same) == 0, values, 0), same) if same else values


def _same_tokens(spec: P) -> tuple[str, ...]:
    """The axes along which devices hold the same tokens."""
    split_over = [axis for entry in spec for axis in axes_of(entry)]
    return tuple(axis for axis in ACTIVATION_AXES["rows"] if axis not in split_over)


# ----------------------------------------------------------------------------- on one device


def _to_ranks(experts_nK, num_ranks: int, local_experts: int):
    """int32 [P]: choices of the experts of each device."""
    ends_E = ends_of(experts_nK.ravel(), num_ranks * local_experts)
    return jnp.diff(ends_E[local_experts - 1 :: local_experts], prepend=0)


def _inverse(places, length: int):
    """int32 [length]: the index in `places` of each number; len(places) for one that is not there."""
    numbers = jnp.arange(places.shape[0], dtype=jnp.int32)
    return jnp.full((length,), places.shape[0], jnp.int32).at[places].set(numbers, mode="drop")


def _taken(values, places):
    """values[places]; 0 where out of range."""
    return values.at[places].get(mode="fill", fill_value=0)


def _summed(values, places, group: int):
    """_taken, then sums over groups of this many consecutive values, in float32."""
    taken = _taken(values, places)
    if group == 1:
        return taken
    grouped = taken.reshape(-1, group, *taken.shape[1:])
    return jnp.sum(grouped, 1, dtype=jnp.float32).astype(values.dtype)
