"""Decodes image files: what transformers' load_image gives for the same bytes, or a ValueError that names the file."""

import contextlib
import importlib.util
import io
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import PIL.Image

# Pillow warns above this; decoded as RGB it is 256 MiB.
MAX_PIXELS = 89_478_485
# JPEG includes MPO, of cameras. Of the other formats that Pillow knows, one runs a program (EPS), and most are rare.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
ORIENTATION = 0x0112  # EXIF tag
SWAPPED = (5, 6, 7, 8)  # orientations in which rows become columns


def decode(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> "PIL.Image.Image":
    """The image as RGB, upright by its EXIF orientation; of an animation, the first frame.

    name: of the file, for messages. Raises ValueError if the data is empty, damaged, truncated, of another format than
    FORMATS, or has more than max_pixels, which is checked before any pixel is decoded.
    """
    with _opened(data, name, max_pixels) as image:
        import PIL.ImageOps

        return PIL.ImageOps.exif_transpose(image).convert("RGB")


def size_of(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(height, width) of what `decode` returns, from the header alone; a PNG without EXIF data at its beginning may
    have it at its end, so that one is decoded. Raises ValueError as `decode` does, as far as the header shows it."""
    with _opened(data, name, max_pixels) as image:
        return _upright_size(image)


def check(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(height, width), after reading the whole image. Raises ValueError whenever `decode` does.

    A JPEG is decoded at an eighth of its size, which reads all of it in a fraction of the time.
    """
    with _opened(data, name, max_pixels) as image:
        size = _upright_size(image)
        image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
        image.convert("RGB")
        return size


def require_pillow() -> None:
    """Raises ValueError without Pillow."""
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("images need the package Pillow; pip install 'megajax[images]'")


def _upright_size(image: "PIL.Image.Image") -> tuple[int, int]:
    swapped = image.getexif().get(ORIENTATION) in SWAPPED
    return (image.width, image.height) if swapped else (image.height, image.width)


@contextlib.contextmanager
def _opened(data: bytes, name: str, max_pixels: int) -> Generator["PIL.Image.Image"]:
    """The image, its pixels not yet decoded. What fails inside becomes a ValueError."""
    require_pillow()
    import PIL.Image

    if not data:
        raise ValueError(f"{name}: the image is empty")
    try:
        with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise PIL.Image.DecompressionBombError(
                    f"it has {image.width} x {image.height} pixels, more than {max_pixels:,}"
                )
            yield image
    except PIL.UnidentifiedImageError:
        raise ValueError(f"{name}: no image, or not in one of the formats {', '.join(FORMATS)}") from None
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"{name}: the image is too large ({error})") from None
    except Exception as error:  # every format has its own errors
        raise ValueError(f"{name}: the image is damaged ({type(error).__name__}: {error})") from None
