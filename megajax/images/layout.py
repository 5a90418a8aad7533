"""Where the patches of an image are in a row of patches, and what its tokens in the text read: from its size alone.

An image is one or more views (images/rules.py), each attended to by itself. A tower may have a class token after the
patches of each view, and windows, whose patches are then adjacent.
"""

import dataclasses
import functools

import numpy as np

from megajax.images import rules
from megajax.images.rules import ImageRule

TEXT = -1
"""In `image_index`: a token of the text."""
NEWLINE = -2
"""In `image_index`: the learned token that ends a row of tiles."""
CLASS_TOKEN = -1
"""Row of a class token in `patch_places`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Of an image of one size. The patches of merge * merge rows that become one result are adjacent."""

    places: np.ndarray
    """int32 [P, 5]: number of the view from 1, 0 for padding; row and column in it, CLASS_TOKEN for its class token;
    its rows and columns."""
    order: np.ndarray
    """int32 [P]: number of the patch, counted over the views as ImageRule.patches has them; -1: no pixels."""
    index: np.ndarray
    """int32 [tokens]: number of the result that each token of the image reads, or NEWLINE."""
    offsets: np.ndarray
    """int32 [tokens, 3]: time, row and column of each token, from those of the image (M-RoPE); of one view."""
    advance: int
    """Positions that the image takes: the larger side of its grid of results."""
    bounds: np.ndarray
    """int32 [views + 1]: where each view begins in `places`, its class token included."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Of images with this rule in a tower."""

    rule: ImageRule
    has_class_token: bool = False
    window: int = 0
    """Side of the windows in patches; 0: none."""

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def of(self, height: int, width: int) -> Layout:
        """Raises ValueError for sizes that the rule refuses."""
        merge = self.rule.merge
        views = self.rule.views(height, width)
        places: list[np.ndarray] = []
        order: list[np.ndarray] = []
        result_of: list[np.ndarray] = []
        bounds = [0]
        num_patches = 0
        num_results = 0
        for number, (rows, cols) in enumerate(views, 1):
            squares = self._squares(rows // merge, cols // merge)
            row, col = self._patches(squares, cols // merge)
            grid = np.broadcast_to((rows, cols), (len(row), 2))
            places.append(np.column_stack([np.full(len(row), number), row, col, grid]))
            order.append(num_patches + (squares[:, None] * merge**2 + np.arange(merge**2)).ravel())
            result_of.append(num_results + np.argsort(squares))
            num_patches += rows * cols
            num_results += len(squares)
            if self.has_class_token:
                of_class = np.zeros((merge**2, 5), np.int64)
                of_class[0] = number, CLASS_TOKEN, CLASS_TOKEN, rows, cols
                places.append(of_class)
                order.append(np.full(merge**2, -1))
                num_results += 1
            bounds.append(num_results * merge**2)
        tokens = self.rule.token_order(height, width)
        index = np.where(tokens == rules.NEWLINE, NEWLINE, np.concatenate(result_of)[tokens])
        rows, cols = (side // merge for side in views[0])
        row, col = np.divmod(np.arange(len(tokens)), cols)
        return Layout(
            np.concatenate(places).astype(np.int32),
            np.concatenate(order).astype(np.int32),
            index.astype(np.int32),
            np.column_stack([np.zeros_like(row), row, col]).astype(np.int32),
            max(rows, cols),
            np.array(bounds, np.int32),
        )

    def pixels(self, layout: Layout, views: list[np.ndarray]) -> np.ndarray:
        """The patches of an image in the order of its layout, uint8 [P, values of a patch]; views: ImageRule.pixels."""
        patches = np.concatenate([self.rule.patches(view) for view in views])
        return np.where(layout.order[:, None] >= 0, patches[layout.order], 0).astype(np.uint8)

    def _squares(self, rows: int, cols: int) -> np.ndarray:
        """Numbers of the squares, row by row, in the order in which they are stored: window by window."""
        number = np.arange(rows * cols)
        if not self.window:
            return number
        side = self.window // self.rule.merge
        row, col = np.divmod(number, cols)
        return np.lexsort((col, row, col // side, row // side))

    def _patches(self, squares: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each patch of these squares."""
        merge = self.rule.merge
        row, col = np.divmod(squares, cols)
        inner_row, inner_col = np.divmod(np.arange(merge**2), merge)
        return (row[:, None] * merge + inner_row).ravel(), (col[:, None] * merge + inner_col).ravel()
