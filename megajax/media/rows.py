"""Rows of tokens and blocks of what encoders read: what a model reads of texts with images and audio.

A medium is one or more views (the tiles of an image, the pieces of a long clip), each encoded by itself, and a view is
positions (patches, frames of sound), of which a few adjacent ones become one token of the text. All this follows from
the size of the medium: two numbers, height and width of an image, samples of a clip and 0.

Dimensions: T tokens of a row, with those of its media; K blocks of P positions each.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from megajax.media.kinds import Kind

TEXT = -1
"""In the index of a kind: a token that reads no medium of it."""
NEWLINE = -2
"""In `image_index`: the learned token that ends a row of tiles."""

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Of a medium of one size. The positions that become one result are adjacent."""

    places: np.ndarray
    """int32 [P, places]: number of the view from 1, 0 for padding; the others say where in the view it is."""
    order: np.ndarray
    """int32 [P]: number of the position, counted over the views as Layouts.rows has them; -1: none."""
    index: np.ndarray
    """int32 [tokens]: number of the result that each token of the medium reads, or NEWLINE."""
    offsets: np.ndarray
    """int32 [tokens, 3]: time, row and column of each token, from those of the medium (M-RoPE); of one view."""
    advance: int
    """Positions of the text that the medium takes."""
    bounds: np.ndarray
    """int32 [views + 1]: where each view begins in `places`."""


class Layouts:
    """How media of one kind are cut. A kind derives from it a frozen dataclass, with the methods that raise here."""

    kind: ClassVar[Kind]

    @property
    def merged(self) -> int:
        """Positions that become one result."""
        raise NotImplementedError

    @property
    def value_dim(self) -> int:
        """Values of a position."""
        raise NotImplementedError

    @property
    def view_size(self) -> int | None:
        """Positions of every view; None: they depend on the medium."""
        raise NotImplementedError

    def owns(self, sizes: np.ndarray) -> np.ndarray:
        """Which media are of this kind, bool [media], by their sizes int [media, 2]."""
        raise NotImplementedError

    def layout(self, first: int, second: int) -> Layout:
        """Of a medium of this size. Raises ValueError for a size that is refused."""
        raise NotImplementedError

    def read(self, data: bytes, name: str) -> tuple[Size, list[np.ndarray]]:
        """Bytes of a file -> (its size, its views as `rows` takes them). Raises ValueError, with the name, for what
        cannot be read or has a size that is refused."""
        raise NotImplementedError

    def rows(self, view: np.ndarray) -> np.ndarray:
        """A view -> its positions in order [positions, value_dim]."""
        raise NotImplementedError

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def of(self, first: int, second: int) -> Layout:
        """`layout`, which is made once for each size."""
        return self.layout(first, second)


def ordered(layouts: Layouts, layout: Layout, views: Sequence[np.ndarray]) -> np.ndarray:
    """The values of a medium in the order of its layout [P, value_dim]; zeros for what it lacks."""
    rows = np.concatenate([layouts.rows(view) for view in views])
    return np.where(layout.order[:, None] >= 0, rows[layout.order], 0).astype(layouts.kind.values_dtype)


@dataclasses.dataclass(frozen=True)
class MediaInputs:
    """How a model reads media of one kind."""

    layouts: Layouts
    token: int
    """Id that stands for a medium, and for each of its tokens, in the text."""
    blocks: int
    block_size: int
    """Positions of a block."""
    sees_itself: bool = False
    """Whether the tokens of a medium see each other in both directions."""

    @property
    def kind(self) -> Kind:
        return self.layouts.kind

    @property
    def merged(self) -> int:
        return self.layouts.merged

    @property
    def room(self) -> str:
        """For messages: what holds the media of a row."""
        name = f"model.{self.kind.section}"
        return f"{name}.blocks={self.blocks} of {name}.{self.kind.values}={self.block_size}"

    def num_tokens(self, sizes: np.ndarray) -> np.ndarray:
        """int64 [media]: tokens of media with these sizes, int [media, 2]."""
        distinct, which = np.unique(np.asarray(sizes).reshape(-1, 2), axis=0, return_inverse=True)
        counts = np.array([len(self.layouts.of(*size).index) for size in distinct.tolist()], np.int64)
        return counts[which.reshape(-1)] if len(distinct) else np.zeros(0, np.int64)

    def views(self, sizes: np.ndarray) -> list[int]:
        """Positions of each view of these media."""
        layouts = [self.layouts.of(*size) for size in np.asarray(sizes).tolist()]
        return [int(number) for layout in layouts for number in np.diff(layout.bounds)]

    def fits(self, views: Sequence[int]) -> bool:
        """Whether views with these numbers of positions fit into the blocks of a row."""
        return self.widest_gap(views) is not None

    def widest_gap(self, views: Sequence[int]) -> int | None:
        """Positions left in the emptiest block by views with these numbers of positions; None: they do not fit."""
        block_of = assigned(views, self.blocks, self.block_size)
        if block_of is None:
            return None
        return self.block_size - int(np.bincount(block_of, views, self.blocks).min())

    def expanded(self, tokens: np.ndarray, sizes: np.ndarray) -> "Expanded":
        """`expanded` for a text with media of this kind alone."""
        return expanded(tokens, [(self, sizes)])

    def blocks_of(
        self, sizes: np.ndarray, read: Callable[[int], list[np.ndarray]], first: int = 0
    ) -> dict[str, np.ndarray]:
        """The blocks of a row with these media, and for each of their tokens, in order, the result that it reads:
        the arrays of the kind, [K, P, value_dim] and int32 [K, P, places], and index int32 [tokens].

        read: number of a medium -> its views (Layouts.read). first: as `assigned` takes it. Raises ValueError if they
        do not fit.
        """
        layouts = [self.layouts.of(*size) for size in np.asarray(sizes).reshape(-1, 2).tolist()]
        chosen = assigned(self.views(sizes), self.blocks, self.block_size, first)
        if chosen is None:
            raise ValueError(f"{len(layouts)} {self.kind.plural} do not fit into {self.room}")
        shape = (self.blocks, self.block_size)
        values = np.zeros((*shape, self.layouts.value_dim), self.kind.values_dtype)
        places = np.zeros((*shape, self.kind.num_places), np.int32)
        filled = np.zeros(self.blocks, np.int64)
        num_views = np.zeros(self.blocks, np.int32)
        index = []
        view = 0
        for number, layout in enumerate(layouts):
            own = ordered(self.layouts, layout, read(number))
            result_of = np.empty(len(layout.places) // self.merged, np.int32)
            for begin, end in zip(layout.bounds[:-1].tolist(), layout.bounds[1:].tolist(), strict=True):
                block = chosen[view]
                start = int(filled[block])
                where = slice(start, start + end - begin)
                values[block, where] = own[begin:end]
                places[block, where] = layout.places[begin:end]
                num_views[block] += 1
                places[block, where, 0] = np.where(places[block, where, 0] > 0, num_views[block], 0)
                first = (block * self.block_size + start) // self.merged
                result_of[begin // self.merged : end // self.merged] = first + np.arange((end - begin) // self.merged)
                filled[block] += end - begin
                view += 1
            index.append(np.where(layout.index == NEWLINE, NEWLINE, result_of[layout.index]))
        joined = np.concatenate(index) if index else np.zeros(0, np.int32)
        return {self.kind.values: values, self.kind.places: places, "index": joined.astype(np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class Expanded:
    """A text in which each medium has as many tokens as the model reads of it."""

    tokens: np.ndarray
    """int32 [T]."""
    numbers: tuple[np.ndarray, ...]
    """int32 [T] for each kind, as given: number of the medium of a token from 1; 0: another token."""
    positions: np.ndarray
    """int32 [T, 3]: time, row and column (M-RoPE)."""
    counts: np.ndarray
    """int64: how many tokens each of the given tokens has become."""


def expanded(tokens: np.ndarray, media: Sequence[tuple[MediaInputs, np.ndarray]]) -> Expanded:
    """tokens: int32 [tokens], in which each token of a kind stands for one of its media, in order; media: each kind
    with the sizes of its media, int [media, 2].

    Raises ValueError unless there are as many tokens of each kind as media.
    """
    tokens = np.asarray(tokens, np.int32)
    counts = np.ones(len(tokens), np.int64)
    # Positions of the text go on after those of a medium, which may be fewer than its tokens.
    advances = np.ones(len(tokens), np.int64)
    numbers = []
    layouts = []
    for inputs, sizes in media:
        is_mine = tokens == inputs.token
        if is_mine.sum() != len(sizes):
            name = f"model.{inputs.kind.token}"
            raise ValueError(
                f"a text has {is_mine.sum()} tokens of {name}={inputs.token} and {len(sizes)} {inputs.kind.plural}; "
                f"set {name} to the token that stands for one of them in the data"
            )
        found = [inputs.layouts.of(*size) for size in np.asarray(sizes).reshape(-1, 2).tolist()]
        counts[is_mine] = [len(layout.index) for layout in found]
        advances[is_mine] = [layout.advance for layout in found]
        numbers.append(np.cumsum(is_mine, dtype=np.int32) * is_mine)
        layouts.append(found)
    starts = np.cumsum(advances) - advances
    positions = np.repeat(starts, counts)[:, None].repeat(3, 1)
    numbers = [np.repeat(number, counts) for number in numbers]
    for number_T, found in zip(numbers, layouts, strict=True):
        for number, layout in enumerate(found, 1):
            positions[number_T == number] += layout.offsets
    return Expanded(np.repeat(tokens, counts), tuple(numbers), positions.astype(np.int32), counts)


def assigned(views: Sequence[int], blocks: int, block_size: int, first: int = 0) -> np.ndarray | None:
    """The block of each view, int64 [views]: the largest first, each into the emptiest block (Graham 1969, longest
    processing time); None: they do not fit. Depends on the sizes alone, up to views of the same size.

    first: block modulo `blocks` of the largest view. If rows begin with different blocks, the devices that hold the
    same block of several rows get large and small ones.
    """
    chosen = np.zeros(len(views), np.int64)
    filled = np.zeros(blocks, np.int64)
    for view in np.argsort(-np.asarray(views, np.int64), kind="stable"):
        block = int(filled.argmin())
        filled[block] += views[view]
        chosen[view] = block
        if filled[block] > block_size:
            return None
    return (chosen + first) % blocks


def of_kind(media: Sequence[MediaInputs], kind: Kind) -> MediaInputs | None:
    return next((inputs for inputs in media if inputs.kind is kind), None)
