"""Writes texts with an encoder-decoder: encodes the prompts once, then decodes with contiguous caches.

Dimensions: B prompts, S tokens of the longest, K beams, R = B K rows, T new tokens, V vocabulary.
One program writes all tokens of a batch. The paged engine and its server continue texts and do not run these models.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.data.tokenizers.span_tokens import SpanTokens
from megajax.inference.load import OpenedModel
from megajax.inference.shapes import text_batches
from megajax.inference.tokens.sampling import RowSampling, Sampling
from megajax.models.model import Model

MOST_ROWS = 64  # of a batch, whose decoder has caches
SUPPORTED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
"""Fields of Sampling that have an effect outside the engine."""


class Written(NamedTuple):
    """What the model wrote for a prompt."""

    prompt_tokens: int
    tokens: list[int]
    """New tokens, without the one that ends the text."""
    text: str
    finish_reason: str
    """stop: the model ended the text, or a stop text was found; length: max_tokens were written."""


class SequenceToSequence:
    def __init__(self, opened: OpenedModel):
        """Raises ValueError if the tokenizer has no end-of-document token."""
        self.model = opened.model
        self.mesh = opened.mesh
        self.tokens = SpanTokens.of(opened.tokenizer)
        self._ends_prompts = opened.source.is_foreign
        """Models of other frameworks have learned from texts with the token that ends them."""
        with jax.set_mesh(self.mesh):
            self.params = opened.restore()

    def write(self, prompts: Sequence[str], sampling: Sampling, num_beams: int = 1) -> list[Written]:
        """The text that follows from each prompt.

        num_beams: above 1 beam search, for the text with the highest mean log-probability per token; it needs
        temperature 0. Raises ValueError for settings that have no effect here, and for a prompt that is empty or
        longer than the model reads.
        """
        self._check(sampling, num_beams)
        encoded = [self._encode(prompt) for prompt in prompts]
        found: dict[int, Written] = {}
        batches = text_batches(list(map(len, encoded)), self.mesh, self.model.config.max_length, most_rows=MOST_ROWS)
        for numbers, shape in batches:
            written = self._write_batch([encoded[number] for number in numbers], shape, sampling, num_beams)
            found |= zip(numbers, written, strict=True)
        return [found[number] for number in range(len(encoded))]

    def _check(self, sampling: Sampling, num_beams: int) -> None:
        check_supported(self.model, sampling)
        if num_beams < 1:
            raise ValueError(f"num_beams={num_beams} must be at least 1")
        if num_beams > 1 and sampling.temperature > 0:
            raise ValueError(
                f"num_beams={num_beams} searches for the most likely text, and temperature={sampling.temperature} "
                "samples; use --temperature=0"
            )
        longest = self.model.config.max_length
        if longest is not None and sampling.max_tokens > longest:
            raise ValueError(f"max_tokens={sampling.max_tokens}: the model writes at most {longest} tokens")

    def _encode(self, prompt: str) -> list[int]:
        tokens = self.tokens.encode(prompt) + ([self.tokens.eos_id] if self._ends_prompts else [])
        longest = self.model.config.max_length
        if not tokens:
            raise ValueError("prompt='' has no tokens; give a text of at least one")
        if longest is not None and len(tokens) > longest:
            raise ValueError(f"a prompt has {len(tokens)} tokens, and the model reads at most {longest}; shorten it")
        return tokens

    def _write_batch(
        self, prompts: list[list[int]], shape: tuple[int, int], sampling: Sampling, num_beams: int
    ) -> list[Written]:
        source_BS = np.full(shape, self.tokens.pad_id, np.int32)
        is_text_BS = np.zeros_like(source_BS)
        is_text_BS[:, 0] = 1  # also in the rows that only fill the batch
        for row, prompt in enumerate(prompts):
            source_BS[row, : len(prompt)] = prompt
            is_text_BS[row, : len(prompt)] = 1
        with jax.set_mesh(self.mesh):
            found_BT = _write(
                self.params,
                source_BS,
                is_text_BS,
                RowSampling.of([sampling] * shape[0]),
                model=self.model,
                tokens=(
                    self.tokens.vocab_size,
                    self.tokens.pad_id,
                    None if sampling.ignore_eos else self.tokens.eos_id,
                ),
                max_tokens=sampling.max_tokens,
                num_beams=num_beams,
            )
        rows = np.asarray(found_BT)[: len(prompts)].tolist()
        return [self._written(len(prompt), row, sampling) for prompt, row in zip(prompts, rows, strict=True)]

    def _written(self, prompt_tokens: int, row: list[int], sampling: Sampling) -> Written:
        end = self.tokens.eos_id
        is_ended = end in row and not sampling.ignore_eos
        tokens = row[: row.index(end)] if is_ended else row
        text = self.tokens.decode(tokens)
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        is_ended = is_ended or bool(stops)
        return Written(prompt_tokens, tokens, text[: min(stops, default=None)], "stop" if is_ended else "length")


def check_supported(model: Model, sampling: Sampling) -> None:
    """Raises ValueError for settings that have no effect outside the engine."""
    sampling.check()
    for name, default in vars(Sampling()).items():
        value = getattr(sampling, name)
        if name not in SUPPORTED and value != default:
            raise ValueError(f"{name}={value} is not supported by model.kind={model.config.kind}; leave it out")


class _State(NamedTuple):
    step: jax.Array
    caches: dict
    logits_RV: jax.Array
    """float32, of the next token."""
    tokens_RT: jax.Array
    """int32, those of the steps so far."""
    score_R: jax.Array
    """float32: log-probability of the tokens so far, with beams."""
    is_ended_R: jax.Array


@functools.partial(jax.jit, static_argnames=("model", "tokens", "max_tokens", "num_beams"))
def _write(
    params: dict, source_BS: jax.Array, is_text_BS: jax.Array, sampling: RowSampling, *, model: Model,
    tokens: tuple[int, int, int | None], max_tokens: int, num_beams: int
) -> jax.Array:  # fmt: skip
    """-> int32 [B, T]. tokens: number of ids that may be written, the first token of the decoder, and the token that
    ends a text or None."""
    vocab_size, start_id, end_id = tokens
    module = model.module(params)
    batch = {"encoder_tokens": source_BS, "encoder_segment_ids": is_text_BS}
    encoded_RSD, is_text_RS = (jnp.repeat(a, num_beams, 0) for a in (module.encode(batch), is_text_BS))
    num_rows = is_text_RS.shape[0]

    def read(token_R, place, caches, encoded=None):
        positions_R1 = jnp.full((num_rows, 1), place, jnp.int32)
        inputs = {"tokens": token_R[:, None], "positions": positions_R1, "encoder_segment_ids": is_text_RS}
        x_R1D, caches = module.extend(inputs | {"encoded": encoded}, caches)
        return module.logits(x_R1D)[:, 0, :vocab_size], caches

    def go_on(state: _State) -> jax.Array:
        return (state.step < max_tokens) & ~jnp.all(state.is_ended_R)

    def write_one(state: _State) -> _State:
        if num_beams > 1:
            state, token_R = _best_beams(state, num_beams, end_id)
        else:
            token_R = sampling.sample(state.logits_RV, jnp.full(num_rows, state.step, jnp.int32))
        if end_id is not None:
            token_R = jnp.where(state.is_ended_R, end_id, token_R)
            state = state._replace(is_ended_R=state.is_ended_R | (token_R == end_id))
        logits_RV, caches = read(token_R, state.step + 1, state.caches)
        tokens_RT = state.tokens_RT.at[:, state.step].set(token_R)
        return state._replace(step=state.step + 1, caches=caches, logits_RV=logits_RV, tokens_RT=tokens_RT)

    start_R = jnp.full(num_rows, start_id, jnp.int32)
    logits_RV, caches = read(start_R, 0, module.new_caches(num_rows, max_tokens), encoded_RSD)
    score_R = jnp.where(jnp.arange(num_rows) % num_beams == 0, 0.0, -jnp.inf)  # all beams begin alike
    end = 0 if end_id is None else end_id
    tokens_RT = jnp.full((num_rows, max_tokens), end, jnp.int32)
    state = _State(jnp.int32(0), caches, logits_RV, tokens_RT, score_R, jnp.zeros(num_rows, bool))
    state = jax.lax.while_loop(go_on, write_one, state)
    if num_beams == 1:
        return state.tokens_RT
    lengths_R = max_tokens if end_id is None else jnp.sum(state.tokens_RT != end, 1) + 1
    best_B = jnp.argmax((state.score_R / lengths_R).reshape(-1, num_beams), 1)
    return state.tokens_RT.reshape(-1, num_beams, max_tokens)[jnp.arange(len(best_B)), best_B]


def _best_beams(state: _State, num_beams: int, end_id: int | None) -> tuple[_State, jax.Array]:
    """The K most likely continuations of the K beams of each prompt -> (their rows of the state, their next tokens). A
    beam that has ended is its own only continuation."""
    num_rows, vocab_size = state.logits_RV.shape
    log_probs_RV = jax.nn.log_softmax(state.logits_RV)
    if end_id is not None:
        stays_V = jnp.where(jnp.arange(vocab_size) == end_id, 0.0, -jnp.inf)
        log_probs_RV = jnp.where(state.is_ended_R[:, None], stays_V, log_probs_RV)
    totals_BX = (state.score_R[:, None] + log_probs_RV).reshape(-1, num_beams * vocab_size)
    score_BK, chosen_BK = jax.lax.top_k(totals_BX, num_beams)
    first_B1 = jnp.arange(0, num_rows, num_beams)[:, None]
    row_R = (first_B1 + chosen_BK // vocab_size).ravel()
    kept = (state.caches, state.tokens_RT, state.is_ended_R)
    caches, tokens_RT, is_ended_R = jax.tree.map(lambda a: a[row_R], kept)
    state = state._replace(caches=caches, tokens_RT=tokens_RT, is_ended_R=is_ended_R, score_R=score_BK.ravel())
    return state, (chosen_BK % vocab_size).ravel().astype(jnp.int32)
