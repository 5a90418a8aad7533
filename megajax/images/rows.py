"""Rows of tokens and blocks of patches: what a model reads of texts with images.

Dimensions: T tokens of a row, with those of its images; K blocks of P patches each.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from megajax.images.layout import NEWLINE, TEXT, Layouts


@dataclasses.dataclass(frozen=True)
class ImageInputs:
    """How a model reads images."""

    layouts: Layouts
    token: int
    """Id that stands for an image, and for each of its tokens, in the text."""
    blocks: int
    patches: int
    """Of a block."""

    @property
    def merged(self) -> int:
        """Patches of a result."""
        return self.layouts.rule.merge**2

    def num_tokens(self, sizes: np.ndarray) -> np.ndarray:
        """int64 [images]: tokens of images with these heights and widths, int [images, 2]."""
        distinct, which = np.unique(np.asarray(sizes).reshape(-1, 2), axis=0, return_inverse=True)
        counts = np.array([len(self.layouts.of(*size).index) for size in distinct.tolist()], np.int64)
        return counts[which.reshape(-1)] if len(distinct) else np.zeros(0, np.int64)

    def views(self, sizes: np.ndarray) -> list[int]:
        """Patches of each view of these images."""
        layouts = [self.layouts.of(*size) for size in np.asarray(sizes).tolist()]
        return [int(number) for layout in layouts for number in np.diff(layout.bounds)]

    def fits(self, views: Sequence[int]) -> bool:
        """Whether views with these numbers of patches fit into the blocks of a row."""
        return self.widest_gap(views) is not None

    def widest_gap(self, views: Sequence[int]) -> int | None:
        """How many patches are left in the emptiest block when views with these numbers of patches are assigned; None:
        they do not fit."""
        block_of = assigned(views, self.blocks, self.patches)
        if block_of is None:
            return None
        return self.patches - int(np.bincount(block_of, views, self.blocks).min())

    def expanded(self, tokens: np.ndarray, sizes: np.ndarray) -> "Expanded":
        """tokens: int32 [tokens], in which each `token` stands for one of the images, in order.

        Raises ValueError unless there are as many of them as images.
        """
        tokens = np.asarray(tokens, np.int32)
        is_image = tokens == self.token
        if is_image.sum() != len(sizes):
            raise ValueError(
                f"a text has {is_image.sum()} tokens of model.image_token={self.token} and {len(sizes)} images; set "
                "model.image_token to the token that stands for an image in the data"
            )
        layouts = [self.layouts.of(*size) for size in np.asarray(sizes).reshape(-1, 2).tolist()]
        counts = np.ones(len(tokens), np.int64)
        counts[is_image] = [len(layout.index) for layout in layouts]
        image = np.zeros(len(tokens), np.int32)
        image[is_image] = np.arange(1, len(layouts) + 1)
        # Positions of the text go on after the larger side of an image.
        advances = np.ones(len(tokens), np.int64)
        advances[is_image] = [layout.advance for layout in layouts]
        starts = np.cumsum(advances) - advances
        positions = np.repeat(starts, counts)[:, None].repeat(3, 1)
        image_ids = np.repeat(image, counts)
        for number, layout in enumerate(layouts, 1):
            positions[image_ids == number] += layout.offsets
        return Expanded(np.repeat(tokens, counts), image_ids, positions.astype(np.int32), counts)

    def blocks_of(self, sizes: np.ndarray, read: Callable[[int], list[np.ndarray]]) -> dict[str, np.ndarray]:
        """The blocks of a row with these images, and for each of its image tokens, in order, the result that it reads:
        patches uint8 [K, P, values], patch_places int32 [K, P, 5], index int32 [image tokens].

        read: number of an image -> its views (ImageRule.pixels). Raises ValueError if the images do not fit.
        """
        layouts = [self.layouts.of(*size) for size in np.asarray(sizes).reshape(-1, 2).tolist()]
        chosen = assigned(self.views(sizes), self.blocks, self.patches)
        if chosen is None:
            raise ValueError(f"{len(layouts)} images do not fit into {self.blocks} blocks of {self.patches} patches")
        patches = np.zeros((self.blocks, self.patches, self.layouts.rule.patch_size**2 * 3), np.uint8)
        places = np.zeros((self.blocks, self.patches, 5), np.int32)
        filled = np.zeros(self.blocks, np.int64)
        num_views = np.zeros(self.blocks, np.int32)
        index = []
        view = 0
        for number, layout in enumerate(layouts):
            pixels = self.layouts.pixels(layout, read(number))
            result_of = np.empty(len(layout.places) // self.merged, np.int32)
            for begin, end in zip(layout.bounds[:-1].tolist(), layout.bounds[1:].tolist(), strict=True):
                block = chosen[view]
                start = int(filled[block])
                where = slice(start, start + end - begin)
                patches[block, where] = pixels[begin:end]
                places[block, where] = layout.places[begin:end]
                num_views[block] += 1
                places[block, where, 0] = np.where(places[block, where, 0] > 0, num_views[block], 0)
                first = (block * self.patches + start) // self.merged
                result_of[begin // self.merged : end // self.merged] = first + np.arange((end - begin) // self.merged)
                filled[block] += end - begin
                view += 1
            index.append(np.where(layout.index == NEWLINE, NEWLINE, result_of[layout.index]))
        joined = np.concatenate(index) if index else np.zeros(0, np.int32)
        return {"patches": patches, "patch_places": places, "index": joined.astype(np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class Expanded:
    """A text in which each image has as many tokens as the model reads of it."""

    tokens: np.ndarray
    """int32 [T]."""
    image_ids: np.ndarray
    """int32 [T]: number of the image of a token from 1; 0: text."""
    positions: np.ndarray
    """int32 [T, 3]: time, row and column (M-RoPE)."""
    counts: np.ndarray
    """int64: how many tokens each of the given tokens has become."""

    def image_index(self, index: np.ndarray) -> np.ndarray:
        """int32 [T], as MultimodalConfig.inputs has it. index: of the image tokens (ImageInputs.blocks_of)."""
        found = np.full(len(self.tokens), TEXT, np.int32)
        found[self.image_ids > 0] = index
        return found


def assigned(views: Sequence[int], blocks: int, patches: int) -> np.ndarray | None:
    """The block of each view, int64 [views]: the largest first, each into the emptiest block (Graham 1969, longest
    processing time); None: they do not fit. Depends on the sizes alone, up to views of the same size."""
    chosen = np.zeros(len(views), np.int64)
    filled = np.zeros(blocks, np.int64)
    for view in np.argsort(-np.asarray(views, np.int64), kind="stable"):
        block = int(filled.argmin())
        filled[block] += views[view]
        chosen[view] = block
        if filled[block] > patches:
            return None
    return chosen
