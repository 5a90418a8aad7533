"""Settings of the engine."""

import dataclasses
from typing import Annotated, Literal

from megajax.fields.ranges import PositiveInt, Range, check_fields

PageDtype = Literal["compute", "int8", "float8"]
WeightDtype = Literal["auto", "compute", "int8", "float8"]
DraftMethod = Literal["lookup", "mtp"]


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    max_rows: Annotated[int, Range(at_least=1, at_most=2**16)] | None = None
    """Sequences that are decoded at the same time; None: 256, on a CPU 16."""
    max_batch_tokens: Annotated[int, Range(at_least=1, at_most=2**24)] | None = None
    """Prompt tokens per call; longer prompts are computed in chunks. None: 8192, on a CPU 256."""
    max_length: PositiveInt | None = None
    """Maximum tokens of a sequence, prompt included; None: what the model supports, or 8192 if it has no limit."""
    page_size: Annotated[int, Range(at_least=1, at_most=2**16)] = 64
    """Tokens per page."""
    num_pages: PositiveInt | None = None
    """Pages of the pool; None: from memory_fraction."""
    memory_fraction: Annotated[float, Range(above=0, at_most=1)] = 0.9
    """Fraction of the device memory that JAX may use for weights and pages together; the rest is for activations."""
    page_dtype: PageDtype = "compute"
    """How keys and values are stored: in the compute dtype, or in 8 bits."""
    weight_dtype: WeightDtype = "auto"
    """How matrices of layers are stored: in the compute dtype, or in 8 bits; auto: as a quantised Hugging Face folder
    has them, else in the compute dtype."""
    prefix_cache: bool = True
    """Keep pages of finished requests, and states of layers that have one, for prompts that begin the same way."""
    decode_steps: Annotated[int, Range(at_least=1, at_most=4096)] = 4
    """Tokens per sequence of one call of the device."""
    draft_tokens: Annotated[int, Range(at_least=0, at_most=1024)] = 0
    """Speculative decoding: guess up to this many tokens per sequence and step; the result is the same. 0: off."""
    draft_method: DraftMethod = "lookup"
    """What guesses without a draft model: the text of the sequence itself (prompt lookup), or the model's own layers of
    multi-token prediction, one token each."""

    def on(self, platform: str) -> "ServingConfig":
        """With the defaults of the platform ("cpu", "gpu") instead of None.

        Larger calls do not make a CPU faster, and each size is a program to compile.
        """
        default_rows, default_tokens = (16, 256) if platform == "cpu" else (256, 8192)
        return dataclasses.replace(
            self,
            max_rows=self.max_rows or default_rows,
            max_batch_tokens=self.max_batch_tokens or default_tokens,
        )

    @property
    def num_guesses(self) -> int:
        """Tokens per sequence and step that layers of the model guess."""
        return self.draft_tokens if self.draft_method == "mtp" else 0

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        check_fields(self)
        if self.draft_method == "mtp" and not self.draft_tokens:
            raise ValueError("draft_method=mtp: draft_tokens=0 guesses nothing; use draft_tokens=1")
