"""Settings of the engine."""

import dataclasses
from typing import Literal, get_args

from megajax.ranges import PositiveInt

PageDtype = Literal["compute", "int8", "float8"]
WeightDtype = Literal["auto", "compute", "int8", "float8"]
DraftMethod = Literal["lookup", "mtp"]


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    max_rows: PositiveInt = 128
    """Sequences that are decoded at the same time."""
    max_batch_tokens: PositiveInt = 4096
    """Prompt tokens per call; longer prompts are computed in chunks."""
    max_length: PositiveInt | None = None
    """Maximum tokens of a sequence, prompt included; None: what the model supports, or 8192 if it has no limit."""
    page_size: PositiveInt = 64
    """Tokens per page."""
    num_pages: PositiveInt | None = None
    """Pages of the pool; None: from memory_fraction."""
    memory_fraction: float = 0.9
    """Fraction of the device memory that JAX may use for weights and pages together; the rest is for activations."""
    page_dtype: PageDtype = "compute"
    """How keys and values are stored: in the compute dtype, or in 8 bits."""
    weight_dtype: WeightDtype = "auto"
    """How matrices of layers are stored: in the compute dtype, or in 8 bits; auto: as a quantised Hugging Face folder
    has them, else in the compute dtype."""
    prefix_cache: bool = True
    """Keep pages of finished requests, and states of layers that have one, for prompts that begin the same way."""
    decode_steps: PositiveInt = 4
    """Tokens per sequence of one call of the device."""
    draft_tokens: int = 0
    """Speculative decoding: guess up to this many tokens per sequence and step; the result is the same. 0: off."""
    draft_method: DraftMethod = "lookup"
    """What guesses without a draft model: the text of the sequence itself (prompt lookup), or the model's own layers of
    multi-token prediction, one token each."""

    @property
    def num_guesses(self) -> int:
        """Tokens per sequence and step that layers of the model guess."""
        return self.draft_tokens if self.draft_method == "mtp" else 0

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        if self.draft_tokens < 0:
            raise ValueError(f"draft_tokens={self.draft_tokens} must not be negative; 0: no speculative decoding")
        for name, allowed in (("page_dtype", PageDtype), ("weight_dtype", WeightDtype), ("draft_method", DraftMethod)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}={getattr(self, name)} is unknown; use {', '.join(get_args(allowed))}")
        if self.draft_method == "mtp" and not self.draft_tokens:
            raise ValueError("draft_method=mtp: draft_tokens=0 guesses nothing; use draft_tokens=1")
        for name in ("max_rows", "max_batch_tokens", "page_size", "decode_steps", "max_length", "num_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
