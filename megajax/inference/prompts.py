"""From texts and images to the prompts of an engine: their tokens, and what it refuses."""

import dataclasses
import functools
import logging
from collections.abc import Sequence

from megajax.data.tokenizers.chat_template import image_text
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.scheduling.images import PromptImage, PromptImages, read_image, with_images
from megajax.inference.scheduling.work import check_prompt
from megajax.inference.tokens.grammar import Grammars
from megajax.inference.tokens.sampling import Sampling
from megajax.media.kinds import IMAGE
from megajax.models.interface import ModelConfig

logger = logging.getLogger("megajax")


@dataclasses.dataclass(eq=False)
class Prompts:
    config: ModelConfig
    given_tokenizer: Tokenizer | None
    start_ids: Sequence[int]
    """Tokens before each text."""
    vocab_size: int
    """Tokens that can be drawn."""
    max_length: int
    """Tokens of a sequence that the engine has room for."""
    adapters: tuple[str, ...]
    """Those that a request can choose."""
    most_results: int
    """Of the tower, of an image (ServingConfig.image_tokens)."""
    most_image_tokens: int | None
    """Tokens of an image, for a model that computes those of an image in one call; None: unlimited."""
    trained_length: int | None
    """Tokens of the sequences that the model was trained on."""

    @functools.cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.given_tokenizer, self.vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError without a tokenizer."""
        if self.given_tokenizer is None:
            raise ValueError("the engine has no tokenizer to encode a text prompt; use generate_tokens")
        return self.given_tokenizer

    def room(self, max_tokens: int) -> int:
        """Maximum number of prompt tokens that leaves room for max_tokens."""
        return self.max_length - max_tokens

    # ------------------------------------------------------------------ texts

    def encode(self, prompt: str, num_images: int = 0) -> list[int]:
        """The tokens of a prompt; for an empty one, the end-of-document token.

        num_images: stand where the text marks their places (image_text), or before it. Raises ValueError for another
        number of marks, and for images that the model does not read.
        """
        if num_images:
            return self._encode_with_images(prompt, num_images)
        end = self.tokenizer.eod_id
        ids = [*self.start_ids, *self.tokenizer.encode(prompt)]
        if not ids and end is None:
            raise ValueError("prompt='' has no tokens and the tokenizer has no end-of-document token to start from; "
                             "give a prompt")  # fmt: skip
        return ids if end is None else ids or [end]

    def check(self, prompt: Sequence[int], sampling: Sampling, name: str = "prompt") -> None:
        """Raises ValueError, naming the prompt, for settings that are invalid, and for one that does not fit."""
        sampling.check()
        if sampling.stop and self.given_tokenizer is None:
            raise ValueError(f"stop={sampling.stop} needs a tokenizer; the engine has none")
        if sampling.adapter not in (None, *self.adapters):
            raise ValueError(
                f"adapter={sampling.adapter} is not one of this engine, which has {', '.join(self.adapters) or 'none'}"
            )
        self.grammars.start(sampling)
        for field in ("stop_token_ids", "logit_bias"):
            wrong = [token for token in getattr(sampling, field) if not 0 <= token < self.vocab_size]
            if wrong:
                raise ValueError(f"{field}={wrong[0]} is not a token; tokens are 0 to {self.vocab_size - 1}")
        for inputs in self.config.media:
            if inputs.kind != IMAGE and inputs.token in prompt:
                raise ValueError(
                    f"{name} has the token {inputs.token}, which stands for a {inputs.kind.noun} "
                    f"(model.{inputs.kind.token}); engines read none, so leave it out"
                )
        self._check_length(name, prompt, sampling)

    def warn_beyond_training(self, num_tokens: int) -> None:
        """Warns once that a sequence may become longer than those that the model was trained on."""
        if self.trained_length is not None and num_tokens > self.trained_length:
            logger.warning(
                "prompt and max_tokens are up to %d tokens, and the model was trained on %d; text beyond is often bad",
                num_tokens,
                self.trained_length,
            )
            self.trained_length = None

    def _check_length(self, name: str, prompt: Sequence[int], sampling: Sampling) -> None:
        config = self.config
        check_prompt(name, prompt, sampling.max_tokens, self.max_length, config.max_length, config.vocab_size)

    # ------------------------------------------------------------------ images

    @property
    def image_token(self) -> str | None:
        """The name of the special token that stands for an image; None: the model reads none, or it has no name."""
        inputs = self.config.image_inputs
        if inputs is None or self.given_tokenizer is None:
            return None
        tokens = self.given_tokenizer.special_tokens
        return next((name for name, number in tokens.items() if number == inputs.token), None)

    @property
    def media_tokens(self) -> dict[str, str]:
        """As a ChatTemplate takes them."""
        return {} if self.image_token is None else {"image": self.image_token}

    def _encode_with_images(self, prompt: str, num_images: int) -> list[int]:
        if self.image_token is None:
            raise ValueError("the model has no token that stands for an image; give a prompt without images")
        marker, text = image_text(self.image_token)
        pieces = prompt.split(marker)
        if len(pieces) == 1:
            pieces = [""] * num_images + pieces
        if len(pieces) != num_images + 1:
            raise ValueError(f"the prompt marks {len(pieces) - 1} images with {marker}, and {num_images} are given")
        tokens = self.encode(pieces[0]) if pieces[0] else list(self.start_ids)
        for piece in pieces[1:]:
            tokens += self.tokenizer.encode_template(text) + self.tokenizer.encode(piece)
        return tokens

    def read_image(self, data: bytes, name: str = "image") -> PromptImage:
        """An image file, ready to be submitted; any thread may call this. Raises ValueError if it cannot be read, or
        the model reads no images."""
        inputs = self.config.image_inputs
        if inputs is None:
            raise ValueError(f"{name}: model.kind={self.config.kind} reads no images")
        return read_image(data, inputs, name)

    def with_images(
        self, prompt: Sequence[int], images: Sequence[PromptImage], sampling: Sampling
    ) -> tuple[list[int], PromptImages]:
        """The prompt with a token for each result that the model reads of the images. Raises ValueError for images that
        do not fit."""
        inputs = self.config.image_inputs
        if inputs is None:
            raise ValueError(f"images: model.kind={self.config.kind} reads none")
        if sampling.prompt_logprobs is not None:
            raise ValueError(f"prompt_logprobs={sampling.prompt_logprobs} is not supported with images; leave it out")
        tokens, of_images = with_images(prompt, images, inputs)
        for number, image in enumerate(images):
            name = f"image {number} of {image.width} x {image.height} pixels"
            if image.num_results > self.most_results:
                raise ValueError(
                    f"{name} has {image.num_results} results of the tower, more than image_tokens="
                    f"{self.most_results}; use image_tokens={image.num_results}, or a smaller image"
                )
            if self.most_image_tokens is not None and image.num_tokens > self.most_image_tokens:
                raise ValueError(
                    f"{name} has {image.num_tokens} tokens, which one call has to compute; use max_batch_tokens="
                    f"{image.num_tokens}"
                )
        self._check_length("prompt", [max(token, 0) for token in tokens], sampling)
        return tokens, of_images
