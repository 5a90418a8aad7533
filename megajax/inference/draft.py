"""Guesses the next tokens with a smaller model (speculative decoding, Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192).

The draft model reads the same tokens as the model, and its keys and values are in pages with the same numbers, so that
whatever happens to a page happens to both. It samples with the settings and the random numbers of the request. What is
accepted is decided as in prompt lookup: a guess counts if it equals the token that the model samples at its position.
So the text is exactly that without a draft model. With a temperature, common random numbers make the two agree more
often than independent samples would (Gumbel-max coupling, Daliri et al. 2024, https://arxiv.org/abs/2408.07978).
"""

from collections.abc import Sequence as Items
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.config import ServingConfig
from megajax.inference.device.batches import Batches
from megajax.inference.device.executor import Executor
from megajax.inference.device.memory import has_states
from megajax.inference.device.programs import HostBeside, HostChooser, HostPrefillBatch
from megajax.inference.scheduling.work import Chunk, Decode, Guesses, Prefill, Run, Sequence
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.models.model import Model

NUM_COMPARED = 64  # tokens of two tokenizers


def check_same_tokens(run: str | Path, mine: Tokenizer, theirs: Tokenizer) -> None:
    """Raises ValueError if the tokenizer of the draft model in `run` is not that of the model."""
    ids = range(0, theirs.vocab_size, max(theirs.vocab_size // NUM_COMPARED, 1))
    is_same = mine.vocab_size == theirs.vocab_size and all(mine.decode([id]) == theirs.decode([id]) for id in ids)
    if not is_same:
        raise ValueError(
            f"draft_run={run} has another tokenizer ({mine.vocab_size} tokens) than the model ({theirs.vocab_size} "
            "tokens); use a draft model with the same one"
        )


def check_guesses(model: Model, serving: ServingConfig) -> None:
    """Raises ValueError if the model does not have the layers that are to guess."""
    count = len(model.config.stacks_of("guess", model.execution))
    if serving.num_guesses and not count:
        raise ValueError(
            f"draft_method={serving.draft_method}: the model has no layers of multi-token prediction; use "
            "draft_method=lookup, or a draft model"
        )
    if serving.num_guesses > count:
        raise ValueError(
            f"draft_tokens={serving.num_guesses}: draft_method={serving.draft_method} guesses one token with each "
            f"layer of multi-token prediction, of which the model has {count}; use draft_tokens={count}"
        )


def check_draft(models: Items[Model], serving: ServingConfig, vocab_size: int) -> None:
    """models: the model, then a draft model if there is one. Raises ValueError if that has nothing to guess, or knows
    fewer than vocab_size tokens."""
    for draft in models[1:]:
        if not serving.draft_tokens:
            raise ValueError("draft_tokens=0: the draft model guesses nothing; use draft_tokens=4, or no draft model")
        if serving.num_guesses:
            raise ValueError(
                f"draft_method={serving.draft_method}: the draft model guesses already; leave out one of them"
            )
        if draft.config.vocab_size < vocab_size:
            raise ValueError(
                f"the draft model has {draft.config.vocab_size} tokens and the model {vocab_size}; use a draft model "
                "with the same tokenizer"
            )


def check_states(models: Items[Model], pools: Items[PoolSizes], serving: ServingConfig) -> None:
    """Raises ValueError if the model, or its draft model, cannot take a wrong guess back."""
    for name, model, sizes in zip(("this model", "the draft model"), models, pools, strict=False):
        if serving.draft_tokens and has_states(model, sizes):
            raise ValueError(
                f"draft_tokens={serving.draft_tokens}: {name} has layers with a state per sequence, which cannot take "
                "a wrong guess back; use draft_tokens=0"
            )


class DraftModel:
    def __init__(self, model: Model, params: dict, mesh: Mesh, sizes: PoolSizes, batches: Batches, draft_tokens: int):
        """sizes: of its own pool. batches: of the engine."""
        self.params = params
        self._batches = batches
        # A step more than guesses, to store the keys and values of the last guess.
        self.executor = Executor(model, mesh, sizes, batches.vocab_size, draft_tokens + 1)

    def read(self, batch: HostPrefillBatch, chooser: HostChooser, beside: HostBeside | None) -> None:
        """Reads what the model reads."""
        self.executor.prefill(self.params, batch, chooser, beside, False)

    def guess(self, most: dict[Sequence, int], total: int) -> Guesses:
        """Up to the given number of tokens for each sequence, as far as its pages have room, and `total` for all, in
        equal parts."""
        runs = []
        for number, (sequence, count) in enumerate(most.items()):
            room = len(sequence.pages) * self._batches.sizes.page_size - sequence.length
            count = min(count, room, -(-total // (len(most) - number)))
            if count > 0:
                self._catch_up(sequence)
                runs.append(Run(sequence, sequence.length - 1, 1 + count))
                total -= count
        if not runs:
            return {}
        num_steps = max(run.count for run in runs)
        drawn = self.executor.decode(self.params, *self._batches.decode(Decode(runs, num_steps)), num_steps)
        tokens = np.asarray(drawn.tokens)
        for run in runs:
            run.sequence.num_drafted = run.start + run.count
        return {run.sequence: tuple(tokens[: run.count - 1, row].tolist()) for row, run in enumerate(runs)}

    def _catch_up(self, sequence: Sequence) -> None:
        """Reads the tokens of steps in which it was not asked: the rows of those steps were all in use."""
        last = len(sequence.tokens) - 1
        for start in range(sequence.num_drafted, last, self._batches.shapes.chunks[-1]):
            end = min(start + self._batches.shapes.chunks[-1], last)
            self.read(*self._batches.prefill(Prefill([Chunk(sequence, start, end)])))
