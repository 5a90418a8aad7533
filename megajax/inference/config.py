"""Settings of the engine, of a request, and of what is measured. Has no slow imports."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from megajax.fields.ranges import PositiveInt, Range, check_fields

PageDtype = Literal["compute", "int8", "float8"]
WeightDtype = Literal["auto", "compute", "int8", "float8"]
Pooling = Literal["mean", "cls"]
"""How hidden states become one vector: their mean, or that of the first token."""
DraftMethod = Literal["lookup", "mtp"]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]
Rate = Annotated[float, Range(above=0, at_most=math.inf)]
Measured = Annotated[int, Range(at_least=1, at_most=1_000_000)]
"""Tokens, requests, rows or repetitions of a measurement."""

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256  # of one
FORMS = ("schema", "regex", "grammar")
"""Fields of Sampling that restrict the text."""


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    max_rows: Annotated[int, Range(at_least=1, at_most=2**16)] | None = None
    """Sequences that are decoded at the same time; default: 256, on a CPU 16."""
    max_batch_tokens: Annotated[int, Range(at_least=1, at_most=2**24)] | None = None
    """Tokens per call, those that are decoded beside prompts included; longer prompts are computed in chunks. Default:
    8192, on a CPU 256."""
    max_length: PositiveInt | None = None
    """Maximum tokens of a sequence, prompt included; default: what the model supports, or 8192 if it has no limit."""
    page_size: Annotated[int, Range(at_least=1, at_most=2**16)] = 64
    """Tokens per page."""
    num_pages: PositiveInt | None = None
    """Pages of the pool; default: from memory_fraction."""
    memory_fraction: Annotated[float, Range(above=0, at_most=1)] = 0.9
    """Fraction of the device memory that JAX may use for weights and pages together; the rest is for activations."""
    page_dtype: PageDtype = "compute"
    """How keys and values are stored: in the compute dtype, or in 8 bits."""
    weight_dtype: WeightDtype = "auto"
    """How matrices of layers are stored: in the compute dtype, or in 8 bits; auto: as a quantised Hugging Face folder
    has them, in 8 or 4 bits, else in the compute dtype."""
    prefix_cache: bool = True
    """Keep pages of finished requests, and states of layers that have one, for prompts that begin the same way."""
    decode_steps: Annotated[int, Range(at_least=1, at_most=4096)] = 4
    """Tokens per sequence of one call of the device, at most; fewer where the engine measures that steps are slow."""
    image_tokens: PositiveInt = 8192
    """Results of images on the device whose prompts are being computed; further images wait."""
    draft_tokens: Annotated[int, Range(at_least=0, at_most=1024)] = 0
    """Speculative decoding: guess up to this many tokens per sequence and step; the result is the same. 0: off."""
    draft_method: DraftMethod = "lookup"
    """What guesses without a draft model: the text of the sequence itself (prompt lookup), or the model's own layers of
    multi-token prediction, one token each."""

    def on(self, platform: str) -> "SettledConfig":
        """With the defaults of the platform ("cpu", "gpu") instead of None.

        Larger calls do not make a CPU faster, and each size is a program to compile.
        """
        rows, tokens = (16, 256) if platform == "cpu" else (256, 8192)
        settled: dict[str, Any] = dict(max_rows=self.max_rows or rows, max_batch_tokens=self.max_batch_tokens or tokens)
        return SettledConfig(**vars(self) | settled)

    @property
    def num_guesses(self) -> int:
        """Tokens per sequence and step that layers of the model guess."""
        return self.draft_tokens if self.draft_method == "mtp" else 0

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        check_fields(self)
        if self.draft_method == "mtp" and not self.draft_tokens:
            raise ValueError("draft_method=mtp: draft_tokens=0 guesses nothing; use draft_tokens=1")


@dataclasses.dataclass(frozen=True)
class SettledConfig(ServingConfig):
    """Of an engine on its devices."""

    max_rows: int = 0
    max_batch_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Sampling:
    max_tokens: int = 128
    """Maximum number of tokens to generate. 0 only with prompt_logprobs."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 0
    """Sample only from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Sample only tokens that are at least this probable, relative to the most likely one; 0: all."""
    seed: Seed = 0
    """The same seed, prompt and settings give the same text, alone or in a batch. Sample i of n uses seed + i."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation, at most 16 of up to 256 characters; they are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation, besides the end of the document; they are not part of the result."""
    ignore_eos: bool = False
    """Continue after the end of the document."""
    n: int = 1
    """Number of samples of the same prompt."""
    logprobs: int | None = None
    """Report the log-probability of each new token and of this many most likely tokens; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that have been generated."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it has been generated."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the generated text (Keskar et
    al. 2019, https://arxiv.org/abs/1909.05858)."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of these tokens."""
    schema: str | None = None
    """JSON schema that the text must follow."""
    regex: str | None = None
    """Regular expression that the text must match."""
    grammar: str | None = None
    """Lark grammar, in llguidance's dialect, that the text must follow."""
    adapter: str | None = None
    """Name of the adapter of the engine that generates; None: its model alone."""

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        self._check_numbers()
        self._check_logprobs()
        if "" in self.stop:
            raise ValueError("stop='' would end every text immediately; give a text of at least one character")
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop=... has {len(self.stop)} texts; give at most {MAX_STOPS}")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop=... has a text of {longest} characters; use at most {MAX_STOP_CHARACTERS}")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias={{{token}: {bias}}} must be finite; use -100 to forbid a token")
        if len(forms := [name for name in FORMS if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(forms)}: a text can follow only one of them; leave the others out")

    def _check_numbers(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (the most likely token) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative; 0 allows all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 allows all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1; 0 allows all tokens")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be finite; 0 is no penalty")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is no penalty")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name}={count} must be from 0 to {MAX_LOGPROBS}, or None")
        if self.max_tokens < (self.prompt_logprobs is None):
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1 (0 only with prompt_logprobs)")

    @property
    def has_adjusted_logits(self) -> bool:
        """Whether logits depend on more than the model: penalties or bias."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias)

    @property
    def is_constrained(self) -> bool:
        return self.form is not None

    @property
    def form(self) -> tuple[str, str] | None:
        """The field that restricts the text, and its value."""
        return next(((name, getattr(self, name)) for name in FORMS if getattr(self, name) is not None), None)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked of an engine or a server to measure it."""

    num_requests: Measured = 100
    """Requests per load."""
    prompt_tokens: Measured = 128
    """Tokens of each prompt."""
    max_tokens: Measured = 64
    """Tokens to generate per request; the end of a document does not end it."""
    seed: Seed = 0
    """Of the random times of arrival."""
