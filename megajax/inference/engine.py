"""Generates text with a model: several prompts at once, one jitted prefill, then one jitted call per token.

Dimensions: B rows, T prompt tokens (padded on the right), S slots of the cache, D model width, V vocabulary.
B, T and S are rounded up to powers of two, so that a few programs serve all requests.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.data.tokenizers.tokenizer import Tokenizer, end_ids
from megajax.inference.load import load_model, serving_params
from megajax.inference.sampling import RowSampling, Sampling
from megajax.mesh import MeshConfig
from megajax.models.model import Model
from megajax.sharding import constrain

MIN_PROMPT = 16  # smallest T
MIN_CACHE = 64  # smallest S


class DecodeState(NamedTuple):
    """A generation in progress. `Engine.step` donates the caches; the other arrays remain readable."""

    caches: Any
    tokens_B: jax.Array
    """int32: the newest token of each row, not yet in the caches."""
    positions_B: jax.Array
    """int32: its position in the row."""
    sampling: RowSampling


class Engine:
    def __init__(
        self, model: Model, params: dict, mesh: Mesh, tokenizer: Tokenizer | None, *, start_ids: Sequence[int] = ()
    ):
        """params: sharded over `mesh`; matrices are cast to the compute dtype. tokenizer: may be None if only
        `generate_tokens` is used, which then has no end-of-document token. start_ids: tokens before each text
        prompt."""
        self.model = model
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.use(params)
        config = model.config
        self._vocab_size = min(config.vocab_size, tokenizer.vocab_size) if tokenizer else config.vocab_size
        self._max_length = config.max_length
        self._ends = end_ids(tokenizer) if tokenizer else frozenset()
        self._start = list(start_ids)
        self._prefill = jax.jit(functools.partial(_prefill, model, self._vocab_size), static_argnames="cache_length")
        self._decode = jax.jit(functools.partial(_decode, model, self._vocab_size), donate_argnames="caches")

    def use(self, params: dict) -> None:
        """Generates with these parameters from here on; no program is compiled again."""
        self.params = jax.tree.map(lambda a, like: a.astype(like.dtype), params, serving_params(self.model))

    @staticmethod
    def from_run(run_dir: str | Path, mesh: MeshConfig | None = None, step: int | None = None) -> "Engine":
        """The model of a run directory, with the parameters of one step (default: the newest), or of a Hugging Face
        folder, on any mesh.

        mesh: default one device; a mesh smaller than the machine takes its first devices. Raises ValueError if the
        directory holds no run, no checkpoint or not that step, if the step or the tokenizer is damaged or does not
        belong to the run, or if the mesh does not divide the model.
        """
        loaded = load_model(run_dir, mesh, step)
        parts = (loaded.model, loaded.params, loaded.mesh, loaded.tokenizer)
        return Engine(*parts, start_ids=loaded.start_ids)

    # ------------------------------------------------------------------ whole generations

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, up to the end of the document, a stop text or max_tokens.

        An empty prompt starts a new document. Raises ValueError for invalid sampling settings and for a prompt that is
        too long.
        """
        encoded = [self.encode(prompt) for prompt in prompts]
        generated = self.generate_tokens(encoded, sampling)
        return [_cut(self._text(prompt, new), sampling.stop) for prompt, new in zip(encoded, generated, strict=True)]

    def generate_tokens(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens that follow each prompt, without the token that ends it, but with a stop text."""
        sampling.check()
        self.check_prompts(prompts, sampling)
        rows = [_Row(list(prompt)) for prompt in prompts]
        if not rows:
            return []
        state = self.start(prompts, [sampling] * len(rows), sampling.max_tokens)
        for number in range(sampling.max_tokens):
            tokens_B = state.tokens_B
            if number + 1 < sampling.max_tokens:
                state = self.step(state)  # runs on the device while the host reads the previous tokens
            for row, token in zip(rows, np.asarray(tokens_B).tolist(), strict=False):  # without the padding rows
                self._add(row, token, sampling.stop)
            if all(row.is_finished for row in rows):
                break
        return [row.new for row in rows]

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; for an empty one, the end-of-document token."""
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer to encode a text prompt; use generate_tokens")
        ids = self._start + self.tokenizer.encode(prompt)
        if not ids and self.tokenizer.eod_id is None:
            raise ValueError("prompt='' has no tokens and the tokenizer has no end-of-document token to start from; "
                             "give a prompt")  # fmt: skip
        return ids or [self.tokenizer.eod_id]

    def room_for_prompt(self, max_tokens: int) -> int | None:
        """Maximum number of prompt tokens that leaves room for max_tokens; None: unlimited."""
        return None if self._max_length is None else self._max_length - max_tokens

    # ------------------------------------------------------------------ one device call each

    def start(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], max_tokens: int) -> DecodeState:
        """Prefills all prompts and samples the first token of each, with a cache that has room for max_tokens."""
        longest = max(map(len, prompts))
        num_rows = _bucket(len(prompts), 1)
        tokens_BT = np.zeros((num_rows, _bucket(longest, MIN_PROMPT)), np.int32)
        lengths_B = np.ones(num_rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            lengths_B[row] = len(prompt)
        rows = RowSampling.of([*sampling, *[Sampling(temperature=0.0)] * (num_rows - len(prompts))])
        cache_length = max(_bucket(longest + max_tokens, MIN_CACHE), tokens_BT.shape[1])
        with jax.set_mesh(self.mesh):
            prefilled = self._prefill(self.params, tokens_BT, lengths_B, rows, cache_length=cache_length)
            return DecodeState(*prefilled, jax.device_put(rows, jax.NamedSharding(self.mesh, P())))

    def step(self, state: DecodeState) -> DecodeState:
        """Generates one more token for every row; returns before the device has finished."""
        with jax.set_mesh(self.mesh):
            caches, tokens_B, positions_B = self._decode(
                self.params, tokens_B=state.tokens_B, positions_B=state.positions_B, sampling=state.sampling,
                caches=state.caches,
            )  # fmt: skip
        return DecodeState(caches, tokens_B, positions_B, state.sampling)

    # ------------------------------------------------------------------ host side

    def check_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop} needs a tokenizer; the engine has none")
        room = self.room_for_prompt(sampling.max_tokens)
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} has no tokens; give at least one")
            if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
                raise ValueError(
                    f"prompt {number} has token ids {min(prompt)} to {max(prompt)}; "
                    f"they must be below model.vocab_size={self.model.config.vocab_size}"
                )
            if room is not None and len(prompt) > room:
                way_out = f"use max_tokens={self._max_length - len(prompt)} or less"
                if len(prompt) >= self._max_length:
                    way_out = "give a shorter prompt"
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, which with max_tokens={sampling.max_tokens} exceeds "
                    f"the {self._max_length} tokens that the model supports; {way_out}"
                )

    def _add(self, row: "_Row", token: int, stop: tuple[str, ...]) -> None:
        if row.is_finished:
            return
        if token in self._ends:
            row.is_finished = True
            return
        row.new.append(token)
        if stop:
            # A token is rarely less than a byte; the whole text is decoded only if its tail contains a stop text.
            tail = row.new[-max(len(text.encode()) for text in stop) - 8 :]
            if _find(self.tokenizer.decode(tail), stop) is not None:
                row.is_finished = _find(self._text(row.prompt, row.new), stop) is not None

    def _text(self, prompt: list[int], new: list[int]) -> str:
        """Text of the new tokens as a continuation of the prompt: some tokenizers drop a leading space."""
        before = self.tokenizer.decode(prompt)
        whole = self.tokenizer.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)


@dataclasses.dataclass
class _Row:
    prompt: list[int]
    new: list[int] = dataclasses.field(default_factory=list)
    is_finished: bool = False


# ----------------------------------------------------------------------------- device side


def _prefill(model: Model, vocab_size: int, weights, tokens_BT, lengths_B, sampling: RowSampling, *, cache_length: int):
    """-> (caches, first new token of each row, its position), from prompts padded on the right."""
    module = model.module(weights)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    batch = {"tokens": tokens_BT, "positions": positions_BT}
    slots_BT = jnp.where(positions_BT < lengths_B[:, None], positions_BT, cache_length)
    caches = _at(model.config.new_caches(cache_length, model.execution), slots_BT)
    last_B1D, caches, positions_B = module.prefill(batch, lengths_B, caches)
    positions_B = jax.lax.with_sharding_constraint(positions_B, P())
    return caches, _next_tokens(module, last_B1D, vocab_size, positions_B, sampling), positions_B


def _decode(model: Model, vocab_size: int, weights, caches, tokens_B, positions_B, sampling: RowSampling):
    """-> (caches that include tokens_B, next token of each row, its position)."""
    module = model.module(weights)
    batch = {"tokens": tokens_B[:, None], "positions": positions_B[:, None]}
    x_B1D, caches = module.extend(batch, _at(caches, batch["positions"]))
    return caches, _next_tokens(module, x_B1D, vocab_size, positions_B + 1, sampling), positions_B + 1


def _at(caches: dict[str, tuple], slots_BT) -> dict[str, tuple]:
    return {name: tuple(cache.at(slots_BT) for cache in stack_caches) for name, stack_caches in caches.items()}


def _next_tokens(module, x_B1D, vocab_size: int, positions_B, sampling: RowSampling) -> jax.Array:
    """int32 [B], replicated; never an id that the tokenizer does not have."""
    logits_BV = constrain(module.logits(x_B1D)[:, 0], "batch", None)
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < vocab_size, logits_BV, -jnp.inf)
    return jax.lax.with_sharding_constraint(sampling.sample(logits_BV, positions_B), P())


# ----------------------------------------------------------------------------- helpers


def _bucket(count: int, smallest: int) -> int:
    """The smallest power of two that is at least count and `smallest`."""
    return max(smallest, 1 << (count - 1).bit_length())


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    """Index of the first stop text."""
    starts = [start for start in map(text.find, stop) if start >= 0]
    return min(starts, default=None)


def _cut(text: str, stop: tuple[str, ...]) -> str:
    return text[: _find(text, stop)]
