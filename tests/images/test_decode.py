"""Images of files: pixels as Pillow gives them, upright, or an error that names the file."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from megajax.images.decode import check, decode, size_of

HEIGHT, WIDTH = 24, 40


def picture() -> PIL.Image.Image:
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    pixels = np.stack([rows * 10, columns * 6, (rows + columns) * 3], -1).astype(np.uint8)
    return PIL.Image.fromarray(pixels)


def stored(image: PIL.Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def oriented(orientation: int, form: str) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return stored(picture(), form, exif=exif)


@pytest.mark.parametrize("form", ["JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_format_is_decoded_as_rgb(form):
    data = stored(picture(), form)
    image = decode(data, "a")
    assert image.mode == "RGB"
    assert image.size == (WIDTH, HEIGHT)
    assert size_of(data, "a") == check(data, "a") == (HEIGHT, WIDTH)
    # lossy formats and palettes stay near, a wrong image does not
    assert np.abs(np.asarray(image).astype(int) - np.asarray(picture())).mean() < 8


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_what_convert_gives(mode):
    source = picture().convert("I").convert("I;16") if mode == "I;16" else picture().convert(mode)
    data = stored(source, "TIFF")
    assert np.array_equal(np.asarray(decode(data, "a")), np.asarray(source.convert("RGB")))
    assert check(data, "a") == (HEIGHT, WIDTH)


def test_transparency_is_dropped_as_transformers_does():
    source = picture().convert("RGBA")
    source.putalpha(0)
    assert np.array_equal(np.asarray(decode(stored(source, "PNG"), "a")), np.asarray(picture()))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_and_so_are_their_sizes(form, orientation):
    data = oriented(orientation, form)
    image = decode(data, "a")
    size = (WIDTH, HEIGHT) if orientation >= 5 else (HEIGHT, WIDTH)
    assert (image.height, image.width) == size_of(data, "a") == check(data, "a") == size
    if form == "PNG":  # exact
        pixels = np.asarray(picture()) if orientation < 5 else np.asarray(picture()).swapaxes(0, 1)
        # which of rows and columns are reversed, https://exiv2.org/tags.html, Exif.Image.Orientation
        down, right = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}[
            orientation
        ]
        assert np.array_equal(np.asarray(image), pixels[::down, ::right])


def test_pixels_equal_those_of_transformers(tmp_path):
    load_image = pytest.importorskip("transformers.image_utils").load_image
    for data in (stored(picture(), "JPEG"), oriented(6, "JPEG"), stored(picture().convert("P"), "PNG")):
        (tmp_path / "image").write_bytes(data)
        want = np.asarray(load_image(str(tmp_path / "image")))
        assert np.array_equal(np.asarray(decode(data, "a")), want)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("part", [0.3, 0.6])
def test_a_truncated_image_is_refused_by_name(form, part):
    data = stored(picture(), form)
    for read in (decode, check):
        with pytest.raises(ValueError, match=r"^a\.b: "):
            read(data[: int(part * len(data))], "a.b")


def test_what_is_no_image_is_refused_by_name():
    for data, why in (
        (b"", "is empty"),
        (b"GIF89a", "damaged|no image"),
        (b"{}", "no image"),
        (b"%!PS-Adobe", "no image"),
    ):
        for read in (decode, check, size_of):
            with pytest.raises(ValueError, match=rf"^some\.jpg: .*({why})"):
                read(data, "some.jpg")


def png_header(width: int, height: int) -> bytes:
    """A PNG of any size, with no more than its first row."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(3 * width + 1))) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    for data, limit in ((png_header(200_000, 200_000), {}), (stored(picture(), "JPEG"), {"max_pixels": 959})):
        for read in (decode, check, size_of):
            with pytest.raises(ValueError, match=r"^b: the image is too large \("):
                read(data, "b", **limit)
    assert decode(stored(picture(), "JPEG"), "b", max_pixels=960).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (9, 7)])
def test_the_smallest_images_are_read(size):
    for form in ("JPEG", "PNG"):
        data = stored(PIL.Image.new("RGB", size), form)
        assert check(data, "a") == size_of(data, "a") == size[::-1]
        assert decode(data, "a").size == size
