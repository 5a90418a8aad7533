"""Continues texts while looking up neighbours in a database (models/retro.py).

Each time a chunk of the text is complete, its neighbours are looked up, and the tokens from its last one on read them.
Every token is computed from the whole text so far: one program for all lengths, without a cache, for research rather
than serving.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.inference.load import OpenedModel
from megajax.inference.sequence_to_sequence import Written, check_supported
from megajax.inference.tokens.sampling import RowSampling, Sampling
from megajax.models.model import Model
from megajax.retrieval.inputs import NO_TOKEN

LookUp = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Chunks int32 [M] -> their neighbours int32 [chunks, K, R], NO_TOKEN for padding."""


class WriterWithDatabase:
    def __init__(self, opened: OpenedModel, look_up: LookUp | None):
        """look_up: None: the model reads no neighbours."""
        self.model = opened.model
        self.mesh = opened.mesh
        self.tokenizer = opened.tokenizer
        self.look_up = look_up
        self._start_ids = opened.start_ids
        with jax.set_mesh(self.mesh):
            self.params = opened.restore()

    def write(self, prompts: Sequence[str], sampling: Sampling) -> list[Written]:
        """The continuation of each prompt. Raises ValueError for settings that have no effect here, and for a prompt
        that is empty or does not fit."""
        check_supported(self.model, sampling)
        encoded = [[*self._start_ids, *self.tokenizer.encode(prompt)] for prompt in prompts]
        longest = self.model.config.max_length
        for tokens in encoded:
            if not tokens:
                raise ValueError("prompt='' has no tokens; give a text of at least one")
            if longest is not None and len(tokens) + sampling.max_tokens > longest:
                raise ValueError(
                    f"a prompt has {len(tokens)} tokens, with max_tokens={sampling.max_tokens} more than the {longest} "
                    "that the model reads; shorten it"
                )
        return [self._continued(tokens, sampling) for tokens in encoded]

    def _continued(self, prompt: list[int], sampling: Sampling) -> Written:
        form = self.model.config.neighbours
        assert form is not None
        num_chunks = -(-(len(prompt) + sampling.max_tokens) // form.chunk_length)
        text_T = np.zeros(num_chunks * form.chunk_length, np.int32)
        text_T[: len(prompt)] = prompt
        found_UKR = np.full((num_chunks, form.count, form.length), NO_TOKEN, np.int32)
        end = None if sampling.ignore_eos else self.tokenizer.eod_id
        num_known = 0  # chunks whose neighbours have been looked up
        new: list[int] = []
        text = ""
        while len(new) < sampling.max_tokens:
            length = len(prompt) + len(new)
            complete = length // form.chunk_length
            if self.look_up is not None and complete > num_known:
                chunks = text_T[: complete * form.chunk_length].reshape(complete, -1)[num_known:]
                found_UKR[num_known:complete] = self.look_up(list(chunks))
                num_known = complete
            with jax.set_mesh(self.mesh):
                rows = RowSampling.of([sampling])
                token = int(_next(self.params, text_T, found_UKR, length, rows, len(new), model=self.model))
            if token == end:
                return Written(len(prompt), new, text, "stop")
            text_T[length] = token
            new.append(token)
            text = self.tokenizer.decode(new)
            if stops := [text.index(stop) for stop in sampling.stop if stop in text]:
                return Written(len(prompt), new, text[: min(stops)], "stop")
        return Written(len(prompt), new, text, "length")


@functools.partial(jax.jit, static_argnames="model")
def _next(
    params: dict, text_T: jax.Array, found_UKR: jax.Array, length: int, sampling: RowSampling, step: int, *,
    model: Model,
) -> jax.Array:  # fmt: skip
    """The token after the first `length` of the text, int32; those beyond are ignored."""
    module = model.module(params)
    positions_T = jnp.arange(len(text_T), dtype=jnp.int32)
    batch = {"tokens": text_T[None], "positions": positions_T[None], "neighbour_tokens": found_UKR[None]}
    h_1TD, _ = module.hidden(batch)
    last_11D = jax.lax.dynamic_slice_in_dim(h_1TD, length - 1, 1, 1)
    logits_1V = module.logits(last_11D)[:, 0, : model.config.vocab_size]
    return sampling.sample(logits_1V, jnp.full(1, step, jnp.int32))[0]
