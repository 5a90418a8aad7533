"""A loaded model as functions of texts: how likely a text is, and how it continues.

A text becomes tokens as in infer.py: `start_ids` of the tokenizer (<s>) precede it if the weights come from another
framework. A document begins after `TextModel.prefix`, which for runs is the end-of-document token, as in training.
"""

import collections
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.data.tokenizers.chat_template import ChatTemplate, load_chat_template
from megajax.data.tokenizers.tokenizer import Tokenizer, configured_tokens
from megajax.evaluation.scorer import Scorer
from megajax.evaluation.windows import windows
from megajax.inference.config import WeightDtype
from megajax.inference.engine import Engine, ServingConfig, outputs_of
from megajax.inference.load import OpenedModel, open_model
from megajax.inference.shapes import BATCH_TOKENS
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig
from megajax.weights.sources import SavedStep, Source, open_source

logger = logging.getLogger("megajax")

WINDOWS_AT_ONCE = 1024  # that are sorted by length into batches
MAX_NEW_TOKENS = 256  # of a continuation whose settings do not say it (lm-eval's number)


class TokenText(NamedTuple):
    """Tokens of which the first `num_context` are only read."""

    tokens: Sequence[int]
    num_context: int


class Likelihood(NamedTuple):
    log_prob: float
    """Sum over the tokens."""
    is_greedy: bool
    """Whether each was the most likely token."""


class TextModel:
    def __init__(self, opened: OpenedModel, *, max_length: int | None = None, batch_tokens: int = BATCH_TOKENS):
        """Loads the weights. max_length: tokens that are read of a text; default: training.sequence_length. Raises
        ValueError if the model does not support it."""
        config = opened.source.config
        config.model.check_generates()
        most = config.model.max_length
        max_length = config.training.sequence_length if max_length is None else max_length
        if max_length < 1 or (most is not None and max_length > most):
            limit = "" if most is None else f" and at most model.max_positions={most}"
            raise ValueError(f"max_length={max_length} must be at least 1{limit}")
        self.tokenizer: Tokenizer = opened.tokenizer
        self.max_length = max_length
        self.scorer = Scorer(opened.model, opened.restore(), opened.mesh, batch_tokens=batch_tokens)
        self._opened = opened
        self.start = list(opened.start_ids)
        """Tokens that precede every text."""

    @staticmethod
    def load(
        path: str | Path,
        mesh: MeshConfig | None = None,
        step: int | None = None,
        compute: Literal["float32", "bfloat16"] | None = None,
        weights: WeightDtype = "auto",
        **options,
    ) -> "TextModel":
        """The model of a run directory or a Hugging Face folder; see `open_model`. options: of the constructor."""
        return TextModel(open_model(path, mesh, step, compute, weights), **options)

    @property
    def source(self) -> Source:
        """Where the weights come from."""
        return self._opened.source

    def use_step(self, step: int) -> None:
        """Continues with the weights of another step of the same run; nothing is compiled again."""
        assert isinstance(self.source, SavedStep), self.source
        self._opened = dataclasses.replace(self._opened, source=open_source(self.source.run_dir, step))
        has_engine = "engine" in self.__dict__
        self.scorer.params = {}  # frees the memory of the old weights
        if has_engine:
            self.engine.params = {}
        self.scorer.params = self._opened.restore()
        if has_engine:
            self.engine.use(self.scorer.params)

    # ------------------------------------------------------------------ tokens

    @property
    def prefix(self) -> list[int]:
        """The tokens that a document begins after: `start`, or else the token that the tokenizer of another framework
        calls bos_token, or else the end-of-document token. Empty if there is none."""
        path = getattr(self.tokenizer, "path", None)
        name = configured_tokens(path).get("bos_token") if path and self.source.is_foreign else None
        begin = self.tokenizer.eod_id if name is None else self.tokenizer.token_id(name)
        return self.start or ([] if begin is None else [begin])

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """The tokens of a prompt. is_rendered: by a chat template, so that names of special tokens become these
        tokens, and the start of the text is not repeated."""
        if not is_rendered:
            return self.start + self.tokenizer.encode(text)
        tokens = self.tokenizer.encode_template(text)
        return tokens if tokens[: len(self.start)] == self.start else self.start + tokens

    def document(self, text: str) -> TokenText:
        """All tokens of the text are scored, except the first if there is no prefix."""
        return self.document_of(self.tokenizer.encode(text))

    def document_of(self, tokens: Sequence[int]) -> TokenText:
        return TokenText([*self.prefix, *tokens], max(len(self.prefix), 1))

    def continuation(self, context: str, text: str, *, is_rendered: bool = False) -> TokenText:
        """The tokens of `text` after a context are those that context + text has beyond the tokens of the context;
        white space at the end of the context counts as part of the text, since many tokenizers join it to a word.
        Without a context the text begins a document.

        Raises ValueError if that leaves no tokens, or the first one without a token before it.
        """
        kept = context.rstrip()
        before = self.encode(kept, is_rendered=is_rendered) if kept else []
        if before:
            found = TokenText(self.encode(context + text, is_rendered=is_rendered), len(before))
        else:
            found = TokenText([*self.prefix, *self.tokenizer.encode(context + text)], len(self.prefix))
        if not 0 < found.num_context < len(found.tokens):
            way_out = "the tokenizer has no token that begins a document" if found.num_context == 0 else "it is empty"
            raise ValueError(f"the text {text!r} after {context[-40:]!r} cannot be scored: {way_out}")
        return found

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        return load_chat_template(self.tokenizer)

    # ------------------------------------------------------------------ likelihood

    def likelihoods(self, texts: Sequence[TokenText]) -> list[Likelihood]:
        """Of the tokens after the context, given it. Of longer texts the beginning is not read."""
        cut = [text.tokens[-self.max_length - 1 :] for text in texts]
        num_cut = sum(len(kept) < len(text.tokens) for kept, text in zip(cut, texts, strict=True))
        if num_cut:
            logger.warning("%d of %d texts are longer than max_length=%d: their beginning is not read",
                           num_cut, len(texts), self.max_length)  # fmt: skip
        results = []
        for text, scores in zip(texts, self.scorer.score(cut), strict=True):
            count = min(len(text.tokens) - text.num_context, len(scores.log_probs))
            log_prob = float(scores.log_probs[-count:].sum(dtype=np.float64))
            results.append(Likelihood(log_prob, bool(scores.is_top[-count:].all())))
        return results

    def log_probs(
        self, texts: Iterable[TokenText], window: int, overlap: int, *, shifts_last: bool = True
    ) -> Iterator[float]:
        """Yields the log-probability of each text after its context, of any length, read in windows (windows.py)."""
        sums = []
        waiting = []
        for text in texts:
            found = windows(len(text.tokens), text.num_context, window, overlap, shifts_last=shifts_last)
            waiting += [(len(sums), text.tokens[part.begin : part.end], part.num_scored) for part in found]
            sums.append(0.0)
            if len(waiting) >= WINDOWS_AT_ONCE:
                yield from self._summed(sums, waiting)
                sums = []
                waiting = []
        yield from self._summed(sums, waiting)

    def _summed(self, sums: list[float], parts: list[tuple[int, Sequence[int], int]]) -> list[float]:
        """sums, plus the log-probability of the last tokens of each part: (index in sums, tokens, number)."""
        scores = self.scorer.score([tokens for _, tokens, _ in parts])
        for (index, _, count), found in zip(parts, scores, strict=True):
            sums[index] += float(found.log_probs[-count:].sum(dtype=np.float64))
        return sums

    # ------------------------------------------------------------------ generation

    @functools.cached_property
    def engine(self) -> Engine:
        scorer = self.scorer
        serving = ServingConfig(max_length=self.max_length)
        return Engine(scorer.model, scorer.params, scorer.mesh, self.tokenizer, serving=serving)

    def generate(self, requests: Sequence[tuple[str, Sampling]], *, is_rendered: bool = False) -> list[str]:
        """The continuation of each context, without the stop text that ends it and without special tokens.

        Of a context that leaves no room for max_tokens the beginning is not read. Requests with the same context and
        settings get different seeds.
        """
        prompts = []
        repeats: collections.Counter = collections.Counter()
        for context, sampling in requests:
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise ValueError(
                    f"max_tokens={sampling.max_tokens} leaves no room for a context in max_length={self.max_length}; "
                    "use a larger --max_length"
                )
            key = context, repr(sampling)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + repeats[key])
            repeats[key] += 1
            tokens = self.encode(context, is_rendered=is_rendered) or self.prefix
            prompts.append((tokens[-room:], sampling))
        new: list[list[int]] = [[] for _ in prompts]
        for number, output in outputs_of(self.engine, prompts):
            new[number] += output.tokens
        return [
            _until(self._text_after(tokens, found), sampling.stop)
            for (tokens, sampling), found in zip(prompts, new, strict=True)
        ]

    def _text_after(self, tokens: Sequence[int], new: Sequence[int]) -> str:
        """Text of the new tokens as a continuation (some tokenizers drop a leading space), without special tokens."""
        special = set(self.tokenizer.special_tokens.values())
        new = [token for token in new if token not in special]
        before = self.tokenizer.decode(tokens)
        whole = self.tokenizer.decode([*tokens, *new])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)


def sampling_of(settings: Mapping) -> Sampling:
    """The settings of a generation in lm-eval's names: until, max_gen_toks, do_sample, temperature, top_p, top_k.

    Without do_sample, a temperature above 0 samples; without either the most likely token is taken. Other settings are
    ignored, with a warning.
    """
    settings = dict(settings)
    until = settings.pop("until", None) or ()
    lengths = [settings.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    temperature = float(settings.pop("temperature", None) or 0.0)
    do_sample = settings.pop("do_sample", None)
    if do_sample is False:
        temperature = 0.0
    elif do_sample and not temperature:
        temperature = 1.0
    known = {"top_p": float, "top_k": int, "seed": int}
    given: dict[str, Any] = {
        name: kind(settings.pop(name)) for name, kind in known.items() if settings.get(name) is not None
    }
    if settings:
        logger.warning("generation settings are ignored: %s", ", ".join(f"{k}={v}" for k, v in settings.items()))
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    max_tokens = next((int(length) for length in lengths if length is not None), MAX_NEW_TOKENS)
    return Sampling(max_tokens=max_tokens, temperature=temperature, stop=stop, **given)


def _until(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop text."""
    return text[: min((start for start in map(text.find, stop) if start >= 0), default=None)]
