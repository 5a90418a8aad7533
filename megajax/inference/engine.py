"""Generates text with a model: several prompts at once, one jitted prefill, then one jitted call a token.

Dimensions: B rows, T prompt tokens (padded on the right), S places in the cache, D model width, V vocabulary.
B, T and S are rounded up to powers of two, so that a handful of programs serves all requests.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.steps import find_step, read_meta
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import Tokenizer, load_saved_tokenizer
from megajax.inference.sampling import RowSampling, Sampling
from megajax.mesh import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.sharding import constrain, with_shardings

logger = logging.getLogger("megajax")

MIN_PROMPT = 16  # smallest T
MIN_CACHE = 64  # smallest S


class DecodeState(NamedTuple):
    """A generation under way. `Engine.step` consumes the caches; the other arrays stay readable."""

    caches: Any
    tokens_B: jax.Array
    """int32: the newest token of each row, not yet in the caches."""
    positions_B: jax.Array
    """int32: its place in the row."""
    sampling: RowSampling


class Engine:
    def __init__(self, model: Model, params: dict, mesh: Mesh, tokenizer: Tokenizer | None):
        """params: laid out on `mesh`; matrices are kept in the compute dtype from here on. tokenizer: None for
        `generate_tokens` alone, which then does not know a token that ends a text."""
        self.model = model
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.use(params)
        config = model.config
        self._vocab_size = min(config.vocab_size, tokenizer.vocab_size) if tokenizer else config.vocab_size
        self._max_length = config.max_length
        self._end = tokenizer.eod_id if tokenizer else None
        self._prefill = jax.jit(functools.partial(_prefill, model, self._vocab_size), static_argnames="cache_length")
        self._decode = jax.jit(functools.partial(_decode, model, self._vocab_size), donate_argnames="caches")

    def use(self, params: dict) -> None:
        """Generates with these parameters from here on; no program is compiled again."""
        self.params = jax.tree.map(lambda a, like: a.astype(like.dtype), params, serving_params(self.model))

    @staticmethod
    def from_run(run_dir: str | Path, mesh: MeshConfig | None = None, step: int | None = None) -> "Engine":
        """The model of a run directory, with the parameters of one step (default: the newest), on any mesh.

        mesh: default one device; a mesh smaller than the machine takes its first devices. Raises ValueError if the
        directory holds no run, no checkpoint or not that step, if the step or the tokenizer is not what was trained, or
        if the model does not divide over the mesh.
        """
        step = find_step(run_dir, step)
        mesh_config = mesh or MeshConfig()
        config = Config.load(run_dir, step)
        if mesh_config.pipeline > 1:
            raise ValueError(
                f"mesh.pipeline={mesh_config.pipeline}: generation has no pipeline; use --mesh.tensor or --mesh.fsdp"
            )
        mesh_config.check()
        config.model.check(mesh_config, config.training.sequence_length, config.execution)
        tokenizer = tokenizer_of(run_dir, step, config.data.tokenizer)
        devices = jax.devices()
        if -1 in mesh_config.sizes().values() or mesh_config.num_devices > len(devices):
            mesh_config = mesh_config.resolve(len(devices))
            config.model.check(mesh_config, config.training.sequence_length, config.execution)
        mesh = make_mesh(mesh_config, devices[: mesh_config.num_devices])
        model = Model(config.model, config.precision, config.execution)
        with Checkpointer(run_dir, None) as checkpointer:
            target = with_shardings(serving_params(model), model.shardings(mesh))
            params = checkpointer.restore_params(step, target, model.layer_rows)
        logger.info("loaded %s, step %d", run_dir, step)
        return Engine(model, params, mesh, tokenizer)

    # ------------------------------------------------------------------ whole generations

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, up to the end of the document, a stop text or max_tokens.

        An empty prompt starts a new document. Raises ValueError for sampling settings that make no sense and for a
        prompt that does not fit.
        """
        encoded = [self.encode(prompt) for prompt in prompts]
        generated = self.generate_tokens(encoded, sampling)
        return [_cut(self._text(prompt, new), sampling.stop) for prompt, new in zip(encoded, generated, strict=True)]

    def generate_tokens(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens that follow each prompt; the end-of-document token is left out, a stop text is not."""
        sampling.check()
        self.check_prompts(prompts, sampling)
        rows = [_Row(list(prompt)) for prompt in prompts]
        if not rows:
            return []
        state = self.start(prompts, [sampling] * len(rows), sampling.max_tokens)
        for number in range(sampling.max_tokens):
            tokens_B = state.tokens_B
            if number + 1 < sampling.max_tokens:
                state = self.step(state)  # the device works on it while the host reads the tokens before
            for row, token in zip(rows, np.asarray(tokens_B).tolist(), strict=False):  # without the padding rows
                self._add(row, token, sampling.stop)
            if all(row.is_finished for row in rows):
                break
        return [row.new for row in rows]

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; an empty one is the end of the document before it."""
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer for a prompt of text; use generate_tokens")
        ids = self.tokenizer.encode(prompt)
        if not ids and self._end is None:
            raise ValueError("prompt='' has no tokens and the tokenizer has no end-of-document token to start from; "
                             "give a prompt")  # fmt: skip
        return ids or [self._end]

    def room_for_prompt(self, max_tokens: int) -> int | None:
        """Most prompt tokens that leave room for max_tokens; None: the model sets no limit."""
        return None if self._max_length is None else self._max_length - max_tokens

    # ------------------------------------------------------------------ one device call each

    def start(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], max_tokens: int) -> DecodeState:
        """Reads all prompts and draws the first token of each; makes a cache with room for max_tokens."""
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
        """One more token for every row; returns before the device has it."""
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
                    f"prompt {number} has {len(prompt)} tokens, with max_tokens={sampling.max_tokens} that is beyond "
                    f"the {self._max_length} tokens that the model can read; {way_out}"
                )

    def _add(self, row: "_Row", token: int, stop: tuple[str, ...]) -> None:
        if row.is_finished:
            return
        if token == self._end:
            row.is_finished = True
            return
        row.new.append(token)
        if stop:
            # A token is hardly ever less than a byte; the whole text is decoded only if its tail looks like a stop.
            tail = row.new[-max(len(text.encode()) for text in stop) - 8 :]
            if _find(self.tokenizer.decode(tail), stop) is not None:
                row.is_finished = _find(self._text(row.prompt, row.new), stop) is not None

    def _text(self, prompt: list[int], new: list[int]) -> str:
        """Text of the new tokens as it continues the prompt: some tokenizers drop a leading space."""
        before = self.tokenizer.decode(prompt)
        whole = self.tokenizer.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)


@dataclasses.dataclass
class _Row:
    prompt: list[int]
    new: list[int] = dataclasses.field(default_factory=list)
    is_finished: bool = False


def serving_params(model: Model):
    """Abstract weights as inference reads them: matrices in the compute dtype, all else as stored.

    Every layer casts its matrices to it anyway, so results are the same, and a token reads half the memory.
    """
    return model.cast_weights(model.precision.compute_dtype)


# ----------------------------------------------------------------------------- device side


def _prefill(model: Model, vocab_size: int, weights, tokens_BT, lengths_B, sampling: RowSampling, *, cache_length: int):
    """-> (caches, first new token of each row, its place), from prompts padded on the right."""
    module = model.module(weights)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    batch = {"tokens": tokens_BT, "positions": positions_BT}
    places_BT = jnp.where(positions_BT < lengths_B[:, None], positions_BT, cache_length)
    caches = _at(model.config.new_caches(cache_length, model.execution), places_BT)
    last_B1D, caches, positions_B = module.prefill(batch, lengths_B, caches)
    positions_B = jax.lax.with_sharding_constraint(positions_B, P())
    return caches, _next_tokens(module, last_B1D, vocab_size, positions_B, sampling), positions_B


def _decode(model: Model, vocab_size: int, weights, caches, tokens_B, positions_B, sampling: RowSampling):
    """-> (caches with tokens_B in place, next token of each row, its place)."""
    module = model.module(weights)
    batch = {"tokens": tokens_B[:, None], "positions": positions_B[:, None]}
    x_B1D, caches = module.extend(batch, _at(caches, batch["positions"]))
    return caches, _next_tokens(module, x_B1D, vocab_size, positions_B + 1, sampling), positions_B + 1


def _at(caches: dict[str, tuple], places_BT) -> dict[str, tuple]:
    return {name: tuple(cache.at(places_BT) for cache in of_stack) for name, of_stack in caches.items()}


def _next_tokens(module, x_B1D, vocab_size: int, positions_B, sampling: RowSampling) -> jax.Array:
    """int32 [B], on every device; ids that the tokenizer does not have never come."""
    logits_BV = constrain(module.logits(x_B1D)[:, 0], "batch", None)
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < vocab_size, logits_BV, -jnp.inf)
    return jax.lax.with_sharding_constraint(sampling.sample(logits_BV, positions_B), P())


# ----------------------------------------------------------------------------- small rules


def tokenizer_of(run_dir: str | Path, step: int, spec: str) -> Tokenizer:
    """Raises ValueError if it is not the one that the step was trained with."""
    tokenizer = load_saved_tokenizer(run_dir, spec)
    meta = read_meta(run_dir, step)
    found = {"tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
    other = [f"{name}: {meta[name]} -> {value}" for name, value in found.items() if meta.get(name, value) != value]
    if other:
        raise ValueError(
            f"run={run_dir}: step {step} was trained with another tokenizer ({'; '.join(other)}); put the files "
            "tokenizer* of the run back"
        )
    return tokenizer


def _bucket(count: int, smallest: int) -> int:
    """The power of two from `smallest` on that holds count."""
    return max(smallest, 1 << (count - 1).bit_length())


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the first stop text begins."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return min(places, default=None)


def _cut(text: str, stop: tuple[str, ...]) -> str:
    return text[: _find(text, stop)]
