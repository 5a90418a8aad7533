"""Where the patches of an image are in a row of patches, and what its tokens in the text read: from its size alone.

An image is one or more views (images/rules.py), each attended to by itself. A tower may have a class token after the
patches of each view, and windows, whose patches are then adjacent. `places` of a patch are number of the view, row and
column in it, CLASS_TOKEN for its class token, and the rows and columns of the view.
"""

import dataclasses

import numpy as np

from megajax.images import rules
from megajax.images.decode import decode
from megajax.images.rules import ImageRule
from megajax.media.kinds import IMAGE
from megajax.media.rows import NEWLINE, Layout, Layouts

CLASS_TOKEN = -1
"""Row of a class token in `patch_places`."""


@dataclasses.dataclass(frozen=True)
class ImageLayouts(Layouts):
    """Of images with this rule in a tower."""

    rule: ImageRule
    has_class_token: bool = False
    window: int = 0
    """Side of the windows in patches; 0: none."""

    kind = IMAGE

    @property
    def merged(self) -> int:
        return self.rule.merge**2

    @property
    def value_dim(self) -> int:
        return self.rule.patch_size**2 * 3

    @property
    def view_size(self) -> int | None:
        if self.rule.resize in ("pixels", "patches"):
            return None
        return int(np.diff(self.of(self.rule.size, self.rule.size).bounds).max())

    def owns(self, sizes: np.ndarray) -> np.ndarray:
        return sizes[:, 1] > 0

    def layout(self, first: int, second: int) -> Layout:
        """first, second: height and width."""
        merge = self.rule.merge
        views = self.rule.views(first, second)
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
        tokens = self.rule.token_order(first, second)
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

    def read(self, data: bytes, name: str) -> tuple[tuple[int, int], list[np.ndarray]]:
        image = decode(data, name)
        try:
            return (image.height, image.width), self.rule.pixels(image)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def rows(self, view: np.ndarray) -> np.ndarray:
        return self.rule.patches(view)

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
