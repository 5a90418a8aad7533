"""What the device computes in one call: chunks of prompts, perhaps with one decoding step beside them, or some decoding
steps.

Dimensions: B rows of a decoding step, T prompt tokens of a call, M sequences whose prompt ends in it, P pages, R rows
of the engine (one more for padding), V vocabulary, D model width.
B, T and P are rounded up to a few sizes, so that a few programs serve all requests. The newest token of each sequence
stays on the device: a call can follow another one before the host has seen what that one generated.
"""

import math
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.inference.tokens.sampling import A, Logprobs, RowSampling, unpacked
from megajax.layers.attention.kv_cache import Places, PoolSizes, Singles
from megajax.layers.layer import ADAPTERS, MAILBOXES, PADDING
from megajax.media.kinds import IMAGE
from megajax.media.rows import TEXT
from megajax.mesh.sharding import constrain, replicated
from megajax.models.interface import AnyModule
from megajax.models.model import Model

PIECE = 128  # prompt tokens whose logits exist at the same time


class Rows(NamedTuple):
    """What the device remembers of each running sequence; row R - 1 belongs to none and takes the padding."""

    newest_R: jax.Array
    """int32: the newest token, not yet in the caches."""
    counts_RV: jax.Array
    """int32: how often each token has been generated, plus PROMPT_TOKEN if it is in the prompt."""
    bias_RV: jax.Array
    """float32, added to the logits."""

    @staticmethod
    def zeros(num_rows: int, vocab_size: int) -> "Rows":
        shape = (num_rows + 1, vocab_size)
        return Rows(jnp.zeros(shape[0], jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def start(self, row: jax.Array, counts_V: jax.Array, bias_V: jax.Array) -> "Rows":
        """Sets what the penalties and the bias of a row depend on."""
        return self._replace(counts_RV=self.counts_RV.at[row].set(counts_V), bias_RV=self.bias_RV.at[row].set(bias_V))

    def add(self, rows_B: jax.Array, tokens_B: jax.Array) -> "Rows":
        newest_R = self.newest_R.at[rows_B].set(tokens_B)
        return self._replace(newest_R=newest_R, counts_RV=self.counts_RV.at[rows_B, tokens_B].add(1))


class Drawn(NamedTuple):
    """The tokens that a call generates, and their log-probabilities if a row asks for them."""

    tokens: jax.Array
    logprobs: Logprobs | None
    """None, on the host: no row wants them."""
    guesses: jax.Array | None = None
    """int32 [..., num_guesses]: the tokens that may follow each; None if the model guesses none."""


class Chooser(NamedTuple, Generic[A]):
    """How the next tokens are sampled."""

    rows_B: A
    sampling: RowSampling[A]
    mask_BW: A | jax.Array
    """uint32: allowed tokens, one bit each (sampling.py `unpacked`); rows without has_mask_B allow all."""
    has_mask_B: A


class DecodeBatch(NamedTuple, Generic[A]):
    tokens_B: A
    """int32: the newest token of each sequence; -1: the one that the device remembers."""
    positions_B: A
    """int32: its position."""
    ends_B: A
    """int32: positions from here on are not computed."""
    table_BP: A
    deltas_B: A | None = None
    """int32: of a model with position_ids, what is added to the position of a token (M-RoPE)."""
    adapters_B: A | None = None
    """int32: of an engine with adapters, the number of that of each sequence; NO_ADAPTER."""


class PrefillBatch(NamedTuple, Generic[A]):
    """T tokens of up to M sequences, one after the other."""

    tokens_T: A
    positions_T: A
    slots_T: A
    rows_T: A
    lower_T: A
    upper_T: A
    targets_T: A
    """int32: the token after each, whose log-probability is wanted."""
    table_P: A
    last_M: A
    """int32: index of the last token of a prompt."""
    image_T: A | None = None
    """int32: of a model that reads images, the slot of the features of a token; TEXT; NEWLINE."""
    position_ids_T3: A | None = None
    ahead_T: A | None = None
    """int32, as in Places."""
    adapters_T: A | None = None
    """As in DecodeBatch."""


class Beside(NamedTuple, Generic[A]):
    """A decoding step in a call with prompts: both read the weights once."""

    batch: DecodeBatch[A]
    chooser: Chooser[A]


HostBeside = Beside[np.ndarray]
HostChooser = Chooser[np.ndarray]
HostDecodeBatch = DecodeBatch[np.ndarray]
HostPrefillBatch = PrefillBatch[np.ndarray]


def decode(
    model: Model, vocab_size: int, sizes: PoolSizes, max_steps: int, params: dict, caches: dict, rows: Rows,
    batch: DecodeBatch[jax.Array], chooser: Chooser[jax.Array], num_steps: jax.Array,
    mailboxes: jax.Array | None = None
) -> tuple[dict, Rows, Drawn]:  # fmt: skip
    """-> (caches, rows, Drawn with leading dims [max_steps, B], of which the first num_steps count).

    mailboxes: addresses of those of the GPUs (ops/mailboxes.py), within `exchanging`."""
    module = model.module(params)
    batch_size = batch.positions_B.shape[0]
    wants_logprobs = jnp.any(chooser.sampling.has_logprobs_B)

    def one_step(carry):
        step, caches, rows, drawn = carry
        tokens_B, positions_B, slots_B, rows_B, upper_B = _newest(batch, chooser.rows_B, rows, sizes, step)
        places = Places(slots_B[:, None], positions_B[:, None], rows_B[:, None], batch.table_BP, None, upper_B[:, None])
        inputs = {"tokens": tokens_B[:, None], "positions": positions_B[:, None]}
        inputs[PADDING] = (slots_B >= sizes.num_slots)[:, None]
        if batch.deltas_B is not None:
            inputs["position_ids"] = jnp.tile((positions_B + batch.deltas_B)[:, None, None], 3)
        if batch.adapters_B is not None:
            inputs[ADAPTERS] = batch.adapters_B[:, None]
        if mailboxes is not None:
            inputs[MAILBOXES] = mailboxes
        caches = _at(caches, places)
        x_B1D, extended = module.extend(inputs, caches)
        caches |= extended
        one, rows = _choose(module, x_B1D, vocab_size, positions_B + 1, rows, chooser, wants_logprobs)
        if sizes.num_guesses:
            # The rows of a draft follow each other. The token after the one that a row has drawn is that of the next
            # row, if that was computed for this token.
            follows_B = _follows(rows_B, positions_B) & (jnp.roll(tokens_B, -1) == one.tokens)
            inputs |= {"tokens": one.tokens[:, None]}
            every_B = jnp.arange(batch_size)
            of = (module, sizes, vocab_size, x_B1D, inputs, follows_B, every_B, chooser.sampling, caches)
            guesses, caches = _guess(*of)
            one = one._replace(guesses=guesses)
        drawn = jax.tree.map(lambda all_steps, new: all_steps.at[step].set(new), drawn, one)
        return step + 1, caches, rows, drawn

    guesses = jnp.zeros((batch_size, sizes.num_guesses), jnp.int32) if sizes.num_guesses else None
    drawn = Drawn(jnp.zeros(batch_size, jnp.int32), Logprobs.zeros(batch_size, vocab_size), guesses)
    drawn = jax.tree.map(lambda a: jnp.zeros((max_steps, *a.shape), a.dtype), drawn)
    carry = (jnp.int32(0), caches, rows, drawn)
    _, caches, rows, drawn = jax.lax.while_loop(lambda carry: carry[0] < num_steps, one_step, carry)
    return caches, rows, replicated(drawn)


def _newest(
    batch: DecodeBatch[jax.Array], rows_B: jax.Array, rows: Rows, sizes: PoolSizes, step: jax.Array | int
) -> tuple[jax.Array, ...]:
    """Of the token that each sequence reads in a step -> (itself, its position, slot and row, and how many slots it
    attends to); as padding where the sequence has ended."""
    tokens_B = jnp.where((step > 0) | (batch.tokens_B < 0), rows.newest_R[rows_B], batch.tokens_B)
    positions_B = batch.positions_B + step
    is_active_B = positions_B < batch.ends_B
    positions_B = jnp.where(is_active_B, positions_B, 0)
    page_B = jnp.take_along_axis(batch.table_BP, (positions_B // sizes.page_size)[:, None], 1)[:, 0]
    slots_B = page_B * sizes.page_size + positions_B % sizes.page_size
    slots_B = jnp.where(is_active_B, slots_B, sizes.num_slots + jnp.arange(slots_B.size))
    rows_B = jnp.where(is_active_B, rows_B, sizes.num_rows)
    return tokens_B, positions_B, slots_B, rows_B, jnp.where(is_active_B, positions_B + 1, 0)


def prefill(
    model: Model, vocab_size: int, sizes: PoolSizes, params: dict, caches: dict, rows: Rows,
    batch: PrefillBatch[jax.Array], chooser: Chooser[jax.Array], beside: Beside[jax.Array] | None,
    wants_prompt: jax.Array, features: jax.Array | None, mailboxes: jax.Array | None = None
) -> tuple[dict, Rows, Drawn, Logprobs, Drawn | None]:  # fmt: skip
    """-> (caches, rows, Drawn [M], Logprobs of targets_T, Drawn [1, B] of beside).

    beside: sequences that decode, not of a model that guesses. wants_prompt: bool scalar; False: the Logprobs are
    zeros, at no cost. features: those of images (encode_images). mailboxes: as in `decode`.
    """
    num_tokens = batch.tokens_T.size
    num_prompts = batch.last_M.size
    singles = None
    if beside is not None:
        batch, singles = _joined(batch, beside, rows, sizes)
        chooser = jax.tree.map(lambda *parts: jnp.concatenate(parts), chooser, beside.chooser)
    module = model.module(params)
    arrays = (batch.slots_T, batch.positions_T, batch.rows_T)
    slots, positions, row_numbers = (a[None] for a in arrays)
    ahead = None if batch.ahead_T is None else batch.ahead_T[None]
    bounds = (batch.lower_T[None], batch.upper_T[None])
    places = Places(slots, positions, row_numbers, batch.table_P[None], *bounds, ahead, singles)
    places = jax.lax.optimization_barrier(places)  # else XLA would compute them in every layer
    inputs = {"tokens": batch.tokens_T[None], "positions": positions, PADDING: slots >= sizes.num_slots}
    if batch.image_T is not None:
        inputs |= {IMAGE.index: batch.image_T[None], IMAGE.features: features}
    if batch.position_ids_T3 is not None:
        inputs["position_ids"] = batch.position_ids_T3[None]
    if batch.adapters_T is not None:
        inputs[ADAPTERS] = batch.adapters_T[None]
    if mailboxes is not None:
        inputs[MAILBOXES] = mailboxes
    caches = _at(caches, places)
    x_1TD, extended = module.extend(inputs, caches)
    caches |= extended
    x_TD = constrain(x_1TD, None, None, None)[0]
    wants_logprobs = jnp.any(chooser.sampling.has_logprobs_B)
    new_positions_M = batch.positions_T[batch.last_M] + 1
    last_M1D = x_TD[batch.last_M][:, None]
    drawn, rows = _choose(module, last_M1D, vocab_size, new_positions_M, rows, chooser, wants_logprobs)
    if sizes.num_guesses:
        last_M = jnp.where(chooser.rows_B < sizes.num_rows, batch.last_M, batch.tokens_T.size)  # beyond: padding
        inputs |= {"tokens": batch.targets_T.at[last_M].set(drawn.tokens, mode="drop")[None]}
        follows_T = _follows(batch.rows_T, batch.positions_T)
        of = (module, sizes, vocab_size, x_1TD, inputs, follows_T, last_M, chooser.sampling, caches)
        guesses, caches = _guess(*of)
        drawn = drawn._replace(guesses=guesses)
    of_prompt = jax.lax.cond(
        wants_prompt,
        lambda: _prompt_logprobs(module, x_TD[:num_tokens], vocab_size, batch.targets_T),
        lambda: Logprobs.zeros(num_tokens, vocab_size),
    )
    drawn = replicated(drawn)
    of_beside = None
    if beside is not None:
        of_beside = jax.tree.map(lambda a: a[None, num_prompts:], drawn)
        drawn = jax.tree.map(lambda a: a[:num_prompts], drawn)
    return caches, rows, drawn, replicated(of_prompt), of_beside


def _joined(
    batch: PrefillBatch[jax.Array], beside: Beside[jax.Array], rows: Rows, sizes: PoolSizes
) -> tuple[PrefillBatch[jax.Array], Singles]:
    """The tokens of prompts, then the newest ones of the sequences that decode. targets_T are of the prompts alone."""
    decoding = beside.batch
    tokens_B, positions_B, slots_B, rows_B, upper_B = _newest(decoding, beside.chooser.rows_B, rows, sizes, 0)
    bounds_B = jnp.broadcast_to(batch.upper_T[-1], tokens_B.shape)  # nothing: what they read is in Singles
    deltas_B = 0 if decoding.deltas_B is None else decoding.deltas_B
    newest: dict[str, Any] = dict(
        tokens_T=tokens_B,
        positions_T=positions_B,
        slots_T=slots_B,
        rows_T=rows_B,
        lower_T=bounds_B,
        upper_T=bounds_B,
        last_M=batch.tokens_T.size + jnp.arange(tokens_B.size, dtype=jnp.int32),
        image_T=jnp.full_like(tokens_B, TEXT),
        position_ids_T3=jnp.tile((positions_B + deltas_B)[:, None], 3),
        ahead_T=jnp.zeros_like(tokens_B),
        adapters_T=decoding.adapters_B,
    )
    of_prompts = {name: array for name in newest if (array := getattr(batch, name)) is not None}
    batch = batch._replace(**{name: jnp.concatenate([a, newest[name]]) for name, a in of_prompts.items()})
    return batch, Singles(decoding.table_BP, upper_B)


def encode_images(
    model: Model, params: dict, features: jax.Array, patches_1KPp: jax.Array, places_1KP5: jax.Array,
    slots_F: jax.Array
) -> jax.Array:  # fmt: skip
    """Writes the features of images into their slots [slots, 1 + levels, D]."""
    index_1F = jnp.arange(slots_F.shape[0], dtype=jnp.int32)[None]
    batch = {"patches": patches_1KPp, "patch_places": places_1KP5}
    found = constrain(model.module(params).encode_images(batch, index_1F), None, None, None, None)[0]
    return features.at[slots_F].set(found.astype(features.dtype), mode="drop")


def _prompt_logprobs(module: AnyModule, x_TD: jax.Array, vocab_size: int, targets_T: jax.Array) -> Logprobs:
    length = x_TD.shape[0]
    piece = math.gcd(PIECE, length)

    def one_piece(number, found):
        places = number * piece + jnp.arange(piece)  # gathered: a CUDA graph holds no slice that depends on the loop
        logits = _logits(module, x_TD[places][:, None], vocab_size)
        new = Logprobs.of(logits, targets_T[places], jnp.bool(True))
        return jax.tree.map(lambda a, b: a.at[places].set(b), found, new)

    return jax.lax.fori_loop(0, length // piece, one_piece, Logprobs.zeros(length, vocab_size))


def _choose(
    module: AnyModule, x_B1D: jax.Array, vocab_size: int, positions_B: jax.Array, rows: Rows,
    chooser: Chooser[jax.Array], wants_logprobs: jax.Array
) -> tuple[Drawn, Rows]:  # fmt: skip
    """Samples the tokens at positions_B -> (Drawn [B], rows that include them)."""
    sampling = chooser.sampling
    raw_BV = _logits(module, x_B1D, vocab_size)
    has_mask = jnp.any(chooser.has_mask_B)
    is_adjusted = jnp.any(sampling.is_adjusted_B)

    def adjusted():
        return sampling.adjusted(raw_BV, rows.counts_RV[chooser.rows_B], rows.bias_RV[chooser.rows_B])

    def choose():
        logits_BV = jax.lax.cond(is_adjusted, adjusted, lambda: raw_BV)
        is_allowed_BV = unpacked(chooser.mask_BW, vocab_size) | ~chooser.has_mask_B[:, None]
        masked_BV = jax.lax.cond(has_mask, lambda: jnp.where(is_allowed_BV, logits_BV, -jnp.inf), lambda: logits_BV)
        tokens_B = sampling.sample(masked_BV, positions_B)
        return Drawn(tokens_B, Logprobs.of(raw_BV, tokens_B, wants_logprobs))

    def most_likely():
        return Drawn(jnp.argmax(raw_BV, -1).astype(jnp.int32), Logprobs.zeros(*raw_BV.shape))

    # One branch for what is common: on a GPU the host waits for the condition of each.
    is_greedy = ~(jnp.any(sampling.temperature_B > 0) | is_adjusted | has_mask | wants_logprobs)
    drawn = jax.lax.cond(is_greedy, most_likely, choose)
    return drawn, rows.add(chooser.rows_B, drawn.tokens)


def _follows(rows_N: jax.Array, positions_N: jax.Array) -> jax.Array:
    """bool [N]: whether the next of these tokens is that after this one in the same sequence."""
    return (jnp.roll(rows_N, -1) == rows_N) & (jnp.roll(positions_N, -1) == positions_N + 1)


def _guess(
    module: AnyModule, sizes: PoolSizes, vocab_size: int, x_BTD: jax.Array, inputs: dict, follows_N: jax.Array,
    last_M: jax.Array, sampling: RowSampling[jax.Array], caches: dict
) -> tuple[jax.Array, dict]:  # fmt: skip
    """The tokens that may come after the next token of each sequence -> (int32 [M, num_guesses], caches).

    N = B T tokens, whose hidden states are x. inputs: their positions and, as tokens, the next token of each. last_M:
    index of the last token of each sequence; N: none. follows_N: whether token n + 1 is the next token of token n; if
    it is not, what comes after the next token is a guess. If that is wrong, layers beyond the first keep keys and
    values that depend on it: their later guesses are worse, but what is accepted is not.
    """
    found = []
    positions_M = inputs["positions"].reshape(-1).at[last_M].get(mode="clip")
    tokens_N = inputs["tokens"].reshape(-1)
    for depth in range(1, sizes.num_guesses + 1):
        inputs |= {"tokens": tokens_N.reshape(inputs["tokens"].shape)}
        x_BTD, new = module.guess(depth, x_BTD, inputs, caches)
        caches |= new
        h_MD = constrain(x_BTD, None, None, None).reshape(-1, x_BTD.shape[-1]).at[last_M].get(mode="clip")
        logits_MV = _finished(module.token_logits(h_MD[:, None]), vocab_size)
        found.append(_coupled(logits_MV, positions_M + depth + 1, sampling))
        tokens_N = jnp.where(follows_N, jnp.roll(tokens_N, -1), tokens_N.at[last_M].set(found[-1], mode="drop"))
    return jnp.stack(found, -1), caches


def _coupled(logits_BV: jax.Array, positions_B: jax.Array, sampling: RowSampling[jax.Array]) -> jax.Array:
    """Guesses int32 [B] of the tokens at these positions, with the random numbers of these tokens: then the two are
    more often equal (inference/draft.py)."""
    return jax.lax.cond(
        jnp.any(sampling.temperature_B > 0),
        lambda: sampling.sample(logits_BV, positions_B),
        lambda: jnp.argmax(logits_BV, -1).astype(jnp.int32),
    )


def _logits(module: AnyModule, x_B1D: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [B, V], only of ids that the tokenizer has."""
    return _finished(module.logits(x_B1D), vocab_size)


def _finished(logits_B1V: jax.Array, vocab_size: int) -> jax.Array:
    return constrain(logits_B1V[:, 0], "batch", None)[:, :vocab_size]


def copy_state(targets: list[jax.Array], sources: list[jax.Array], to: jax.Array, row: jax.Array) -> list[jax.Array]:
    """Copies a row of each array -> the targets."""
    return [target.at[to].set(source[row]) for target, source in zip(targets, sources, strict=True)]


def _at(caches: dict[str, tuple], places: Places) -> dict[str, tuple]:
    return {name: tuple(cache.at(places) for cache in of_stack) for name, of_stack in caches.items()}
