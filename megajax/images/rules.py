"""How an image becomes patches: resized, cropped or tiled, and cut, as Hugging Face processors do it with Pillow.

    crop        shortest edge to `size`, then the centre (CLIP, LLaVA-1.5)
    squash      to a square, whatever the aspect (SigLIP, Gemma 3, PaliGemma)
    pinpoints   the whole squashed, then tiles of the image padded to one of the sizes in `pinpoints` (LLaVA-NeXT)
    tiles       up to `max_tiles` tiles of a grid with about the same aspect, then the whole squashed (InternVL)
    pixels      near its own size, between `min_pixels` and `max_pixels` (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)
    patches     the largest size with at most `max_patches` patches (SigLIP2 NaFlex)

A view is an image that the encoder sees: the whole image, or a tile of it. Sizes are (height, width), grids
(rows, columns).
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from megajax.fields.ranges import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from PIL import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Qwen's limit. With crop, one dim of the resized image grows with the aspect before it is cropped.
MAX_ASPECT = 200
NEWLINE = -1

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ImageRule:
    """How images become patches; fields that the chosen `resize` does not name are not read."""

    resize: Literal["crop", "squash", "pinpoints", "tiles", "pixels", "patches"] = "crop"
    """How an image gets its size: shortest edge and centre crop (crop), to a square (squash), tiles of a listed size
    (pinpoints) or of the nearest aspect (tiles), a range of pixels (pixels), a number of patches (patches)."""
    size: PositiveInt = 336
    """Side of a view in pixels, with resize=crop, squash, pinpoints and tiles."""
    patch_size: PositiveInt = 14
    """Side of a patch in pixels."""
    merge: PositiveInt = 1
    """Side of the square of patches that becomes one token of the text: 1 in LLaVA, 2 in Qwen, 4 in Gemma 3."""
    pinpoints: tuple[PositiveInt, ...] = ()
    """With resize=pinpoints: height, width, height, width, ... of the sizes in pixels, multiples of size."""
    max_tiles: PositiveInt = 12
    """With resize=tiles: most tiles, not counting the squashed image."""
    min_pixels: PositiveInt = 56 * 56
    """With resize=pixels: images with fewer pixels are enlarged."""
    max_pixels: PositiveInt = 1280 * 28 * 28
    """With resize=pixels: images with more pixels are reduced."""
    max_patches: PositiveInt = 256
    """With resize=patches: most patches."""
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    """Kernel of the resize, antialiased."""
    mean: tuple[float, float, float] = CLIP_MEAN
    """Subtracted from red, green and blue between 0 and 1."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = CLIP_STD
    """Divides what mean is subtracted from."""

    def check(self, prefix: str = "") -> None:
        """Raises ValueError for fields that contradict each other. prefix: before names, as "model.vision.image."."""
        block = self.patch_size * self.merge
        whole_blocks = self._side >= self.merge and self._side % self.merge == 0
        if self.resize not in ("pixels", "patches") and not whole_blocks:
            raise ValueError(
                f"{prefix}size={self.size} has {self._side} patches of {prefix}patch_size={self.patch_size} a side, "
                f"not a multiple of {prefix}merge={self.merge}; use {prefix}size={max(self.size // block, 1) * block}"
            )
        if bool(self.pinpoints) != (self.resize == "pinpoints"):
            raise ValueError(
                f"{prefix}pinpoints={','.join(map(str, self.pinpoints))} with {prefix}resize={self.resize}: "
                "resize=pinpoints needs some, and no other reads them"
            )
        if len(self.pinpoints) % 2 or any(side % self.size for side in self.pinpoints):
            raise ValueError(
                f"{prefix}pinpoints={','.join(map(str, self.pinpoints))} must be pairs height,width of multiples of "
                f"{prefix}size={self.size}"
            )
        if self.resize == "pixels" and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"{prefix}min_pixels={self.min_pixels} is above {prefix}max_pixels={self.max_pixels}; exchange them"
            )
        if self.resize == "patches" and self.merge > 1:
            raise ValueError(
                f"{prefix}merge={self.merge}: {prefix}resize=patches gives sides of any number of patches; use "
                f"{prefix}merge=1"
            )

    # ------------------------------------------------------------------ sizes alone, no pixels

    @property
    def pinpoint_sizes(self) -> tuple[Size, ...]:
        return tuple(zip(self.pinpoints[::2], self.pinpoints[1::2], strict=True))

    def views(self, height: int, width: int) -> tuple[Size, ...]:
        """The patch grid of each view of an image of this size, in the order of the Hugging Face processor.

        Raises ValueError for an image without pixels, and with resize=crop or pixels for an aspect above MAX_ASPECT.
        """
        canvas = self._canvas(height, width)
        if self.resize in ("pixels", "patches"):
            return ((canvas[0] // self.patch_size, canvas[1] // self.patch_size),)
        rows, cols = self._tiles(canvas)
        num_views = rows * cols + (self.resize == "pinpoints" or rows * cols > 1)
        return ((self._side, self._side),) * num_views

    def token_order(self, height: int, width: int) -> np.ndarray:
        """The tokens of an image of this size as they stand in the text -> [tokens] int32.

        Each is the number of a square of `merge` x `merge` patches: row by row in a view, counted through the views;
        or NEWLINE, which ends each row of LLaVA-NeXT's tiles.
        """
        num_tokens = sum(rows * cols for rows, cols in self.views(height, width)) // self.merge**2
        order = np.arange(num_tokens, dtype=np.int32)
        if self.resize != "pinpoints":
            return order
        side = self._side // self.merge
        rows, cols = self._tiles(self._canvas(height, width))
        whole, tiles = np.split(order, [side * side])
        grid = tiles.reshape(rows, cols, side, side).swapaxes(1, 2).reshape(rows * side, cols * side)
        grid = _without_padding(grid, height, width)
        grid = np.pad(grid, ((0, 0), (0, 1)), constant_values=NEWLINE)
        return np.concatenate([whole, grid.ravel()])

    # ------------------------------------------------------------------ pixels

    def pixels(self, image: "Image.Image") -> list[np.ndarray]:
        """The views of an RGB image, each [height, width, 3] uint8. Raises ValueError as `views` does."""
        from PIL import Image  # optional; an image proves that it is installed

        if image.mode != "RGB":
            raise ValueError(f"an image has mode {image.mode}, not RGB; use image.convert('RGB')")

        def resized(size: Size) -> Image.Image:
            return image.resize((size[1], size[0]), Image.Resampling[self.resample.upper()])

        height, width = self._canvas(image.height, image.width)
        if self.resize in ("squash", "pixels", "patches"):
            return [np.array(resized((height, width)))]
        if self.resize == "crop":
            top = (height - self.size) // 2
            left = (width - self.size) // 2
            return [np.array(resized((height, width)).crop((left, top, left + self.size, top + self.size)))]
        whole = np.array(resized((self.size, self.size)))
        if self.resize == "pinpoints":
            inner = resized(_within((height, width), image.height, image.width))
            canvas = Image.new("RGB", (width, height))
            canvas.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
            return [whole, *self._cut(np.array(canvas))]
        tiles = self._cut(np.array(resized((height, width))))
        return [*tiles, whole] if len(tiles) > 1 else tiles

    def patches(self, view: np.ndarray) -> np.ndarray:
        """[height, width, 3] -> [patches, patch_size * patch_size * 3], each patch as (row, column, channel).

        The patches of a square that is merged stand together: squares row by row, and in each its patches row by row.
        Pixels to the right and below that fill no patch are left out, as a convolution does.
        """
        size = self.patch_size
        merge = self.merge
        rows = view.shape[0] // size
        cols = view.shape[1] // size
        whole = view[: rows * size, : cols * size]
        blocks = whole.reshape(rows // merge, merge, size, cols // merge, merge, size, 3)
        return blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * cols, size * size * 3)

    def normalized(self, pixels: np.ndarray) -> np.ndarray:
        """(pixels / 255 - mean) / std, for [..., 3] or patches [..., patch_size * patch_size * 3] uint8 -> float32."""
        colours = pixels.reshape(*pixels.shape[:-1], -1, 3).astype(np.float32) / 255
        normal = (colours - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return normal.reshape(pixels.shape)

    # ------------------------------------------------------------------ parts

    @property
    def _side(self) -> int:
        return self.size // self.patch_size

    def _tiles(self, canvas: Size) -> Size:
        return (1, 1) if self.resize == "crop" else (canvas[0] // self.size, canvas[1] // self.size)

    def _cut(self, canvas: np.ndarray) -> list[np.ndarray]:
        rows, cols = self._tiles(canvas.shape[:2])
        tiles = canvas.reshape(rows, self.size, cols, self.size, 3).swapaxes(1, 2)
        return list(tiles.reshape(-1, self.size, self.size, 3))

    def _canvas(self, height: int, width: int) -> Size:
        """The size to which an image is resized, and with pinpoints padded, before it is cropped or cut."""
        if min(height, width) < 1:
            raise ValueError(f"an image of {width} x {height} pixels is empty; leave it out")
        if self.resize in ("crop", "pixels") and max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(
                f"an image of {width} x {height} pixels is too long: resize={self.resize} takes a ratio of sides of "
                f"{MAX_ASPECT} at most; crop it or leave it out"
            )
        if self.resize == "crop":
            longest = int(self.size * max(height, width) / min(height, width))
            return (longest, self.size) if width <= height else (self.size, longest)
        if self.resize == "pinpoints":
            return _best_pinpoint(self.pinpoint_sizes, height, width)
        if self.resize == "tiles":
            return _best_tiles(self.size, self.max_tiles, height, width)
        if self.resize == "pixels":
            return self._within_pixels(height, width)
        if self.resize == "patches":
            return self._within_patches(height, width)
        return self.size, self.size

    def _within_pixels(self, height: int, width: int) -> Size:
        """Multiples of the side of a merged square."""
        block = self.patch_size * self.merge
        rows = round(height / block)
        cols = round(width / block)
        if rows * cols * block**2 > self.max_pixels:
            reduction = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / reduction / block))
            cols = max(1, math.floor(width / reduction / block))
        elif rows * cols * block**2 < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * factor / block)
            cols = math.ceil(width * factor / block)
        return rows * block, cols * block

    def _within_patches(self, height: int, width: int) -> Size:
        """Bisects the scale; with another precision, or the exact scale, some images would get another size."""
        precision = 1e-5
        low = precision / 10
        high = 100.0

        def grid(scale: float) -> Size:
            rows = math.ceil(height * scale / self.patch_size)
            cols = math.ceil(width * scale / self.patch_size)
            return max(1, rows), max(1, cols)

        while high - low >= precision:
            middle = (low + high) / 2
            if math.prod(grid(middle)) <= self.max_patches:
                low = middle
            else:
                high = middle
        rows, cols = grid(low)
        return rows * self.patch_size, cols * self.patch_size


def _best_pinpoint(sizes: tuple[Size, ...], height: int, width: int) -> Size:
    """The one that keeps most pixels of the image, then the smallest, then the first."""

    def kept_and_wasted(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - math.prod(size)

    return max(sizes, key=kept_and_wasted)


def _within(size: Size, height: int, width: int) -> Size:
    """The largest size with the aspect of the image within this one."""
    if size[1] / width < size[0] / height:
        return min(math.ceil(height * (size[1] / width)), size[0]), size[1]
    return size[0], min(math.ceil(width * (size[0] / height)), size[1])


def _best_tiles(side: int, max_tiles: int, height: int, width: int) -> Size:
    """The size of the grid with the nearest aspect; of several the largest that is less than twice the image, if any
    is."""
    grids = [(rows, cols) for cols in range(1, max_tiles + 1) for rows in range(1, max_tiles // cols + 1)]
    grids.sort(key=math.prod)
    distances = [abs(width / height - cols / rows) for rows, cols in grids]
    least = min(distances)
    nearest = [grid for grid, distance in zip(grids, distances, strict=True) if distance == least]
    filled = [grid for grid in nearest if height * width > 0.5 * side * side * math.prod(grid)]
    rows, cols = filled[-1] if filled else nearest[0]
    return rows * side, cols * side


def _without_padding(grid: np.ndarray, height: int, width: int) -> np.ndarray:
    """The part of a grid of tokens that an image of this size, centred, covers."""
    rows, cols = grid.shape
    if width / height > cols / rows:
        padding = (rows - int(round(height * (cols / width), 7))) // 2
        return grid[padding : rows - padding]
    padding = (cols - int(round(width * (rows / height), 7))) // 2
    return grid[:, padding : cols - padding]
