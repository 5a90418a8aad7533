"""Images of prompts: how they are read, and what a prompt becomes with them.

In a prompt of the engine each token of an image is a number below 0 made of a digest of its pixels, so that whatever
compares tokens compares images: pages of the prefix cache are shared for the same image, and for no other.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from megajax.media.rows import TEXT, Layout, MediaInputs, ordered


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImage:
    """An image, ready to be encoded."""

    height: int
    width: int
    digest: bytes
    """Of its pixels, after they were resized."""
    layout: Layout
    patches: np.ndarray
    """uint8 [patches, values of a patch], in the order of the layout."""
    num_results: int
    """Of the tower."""

    @property
    def num_tokens(self) -> int:
        return len(self.layout.index)


def read_image(data: bytes, inputs: MediaInputs, name: str = "image") -> PromptImage:
    """The bytes of an image file. Raises ValueError, naming it, if it cannot be read or its size is refused."""
    (height, width), views = inputs.layouts.read(data, name)
    layout = inputs.layouts.of(height, width)
    patches = ordered(inputs.layouts, layout, views)
    digest = hashlib.blake2b(patches.tobytes() + layout.places.tobytes(), digest_size=16).digest()
    return PromptImage(height, width, digest, layout, patches, len(patches) // inputs.merged)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
    """Of a prompt with images, by its tokens."""

    images: tuple[PromptImage, ...]
    numbers: np.ndarray
    """int32 [T]: number of the image of a token from 1; 0: text."""
    places: np.ndarray
    """int32 [T]: which result of its image a token reads; TEXT; NEWLINE."""
    position_ids: np.ndarray
    """int32 [T, 3]: time, row and column."""
    delta: int
    """Positions of later tokens, minus their numbers in the sequence."""

    def span(self, number: int) -> tuple[int, int]:
        """The tokens (begin, end) of an image, which are adjacent."""
        found = np.flatnonzero(self.numbers == number)
        return int(found[0]), int(found[-1]) + 1

    def within(self, start: int, end: int) -> list[PromptImage]:
        """Those with a token from start to end - 1."""
        return [self.images[number - 1] for number in self._numbers_within(start, end)]

    def _numbers_within(self, start: int, end: int) -> list[int]:
        return [number for number in np.unique(self.numbers[start:end]).tolist() if number]

    def end_within(self, start: int, end: int, room: float, *, whole: bool) -> tuple[int, int]:
        """How far a chunk of tokens from start up to end may go -> (its end, results that its images have).

        room: results that there is room for. whole: it cuts no image.
        """
        if whole and end < len(self.numbers) and self.numbers[end] and self.numbers[end] == self.numbers[end - 1]:
            end = max(self.span(int(self.numbers[end]))[0], start)
        used = 0
        for number in self._numbers_within(start, end):
            count = self.images[number - 1].num_results
            if used + count > room:
                return max(self.span(number)[0], start), used
            used += count
        return end, used


def with_images(
    prompt: Sequence[int], images: Sequence[PromptImage], inputs: MediaInputs
) -> tuple[list[int], PromptImages]:
    """The tokens of a prompt, in which inputs.token stands for each image -> (the tokens of the engine, their images).

    Raises ValueError unless there are as many such tokens as images.
    """
    sizes = np.array([(image.height, image.width) for image in images], np.int32).reshape(-1, 2)
    expanded = inputs.expanded(np.array(prompt, np.int32), sizes)
    (numbers_T,) = expanded.numbers
    tokens = expanded.tokens.copy()
    places = np.full(len(tokens), TEXT, np.int32)
    for number, image in enumerate(images, 1):
        here = numbers_T == number
        places[here] = image.layout.index
        tokens[here] = _numbers(image)
    # The last token is text: a prompt that ends with an image is followed by the largest of its positions.
    delta = int(expanded.positions.max()) + 1 - len(tokens)
    return tokens.tolist(), PromptImages(tuple(images), numbers_T, places, expanded.positions, delta)


def _numbers(image: PromptImage) -> np.ndarray:
    """int32 [tokens of the image], below 0."""
    stream = hashlib.shake_128(image.digest).digest(4 * image.num_tokens)
    return -1 - (np.frombuffer(stream, np.uint32) >> 1).astype(np.int64)
