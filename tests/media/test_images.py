"""Images to pixels."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.media_files import RED, encode, image_file
from trioserve.errors import InvalidMediaError
from trioserve.media import images
from trioserve.media.limits import MediaLimits
from trioserve.media.sniff import sniff

LIMITS = MediaLimits()


def pixels(data: bytes, limits: MediaLimits = LIMITS) -> NDArray[np.uint8]:
    """The pixels of a file: height, width, RGB."""
    image = images.decode(data, sniff(data).name, limits)
    rows = b"".join(images.rows(image))
    return np.frombuffer(rows, np.uint8).reshape(image.height, image.width, 3)


def drawing() -> Image.Image:
    """An image of several bands, in which neighbors differ a little."""
    rows, columns = np.mgrid[0:1000, 0:300]
    colors = np.stack([rows // 4, columns * 5 // 6, (rows + columns) // 8], 2)
    return Image.fromarray(colors.astype(np.uint8))


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_every_pixel_has_its_place(format: str) -> None:
    image = drawing()
    options = {"lossless": True} if format == "WEBP" else {}
    assert (pixels(encode(image, format, **options)) == np.asarray(image)).all()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_is_read(options: dict[str, int]) -> None:
    image = drawing()
    found = pixels(encode(image, "JPEG", quality=95, **options)).astype(int)
    assert np.abs(found - np.asarray(image)).max() < 16


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.new("I;16", (2, 2), 0xC0FF)
        expected = np.full((2, 2, 3), 0xC0)
    else:
        image = Image.new("RGB", (2, 2), (192, 192, 192)).convert(mode)
        expected = np.asarray(image.convert("RGB")).astype(int)
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG")
    assert np.abs(pixels(data) - expected).max() <= 2


def test_transparency_is_dropped_as_llama_server_drops_it() -> None:
    image = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert (pixels(encode(image)) == (10, 20, 30)).all()


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_exif_data_say(orientation: int) -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), RED)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(encode(image, "PNG", exif=exif))
    where = tuple(int(place) for place in np.argwhere(found[:, :, 0])[0])
    places = {2: (0, 3), 3: (1, 3), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (3, 1), 8: (3, 0)}
    assert where == places.get(orientation, (0, 0))
    assert found.shape[:2] == ((4, 2) if orientation in (5, 6, 7, 8) else (2, 4))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"MM\0*\xff\xff\xff\xff\0", b"XX\0*\0\0\0\x08", b"MM"])
def test_exif_data_that_make_no_sense_turn_nothing(exif: bytes) -> None:
    data = encode(Image.new("RGB", (4, 2), RED), "JPEG", exif=b"Exif\0\0" + exif)
    assert pixels(data).shape == (2, 4, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_image_is_taken(format: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (pixels(data) == RED).all()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises much and has little of it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000)))):
        chunk = name + body
        chunks += struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 1), (8193, 8192)])
def test_an_image_that_is_too_large_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMediaError, match=f"has {size[0]} x {size[1]} pixels"):
        pixels(png_header(*size))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_half_of_an_image_is_none(format: str) -> None:
    data = encode(drawing(), format)
    with pytest.raises(Exception, match=r"truncated|broken|decod|identify|incomplete"):
        pixels(data[: len(data) // 2])


@pytest.mark.parametrize("format", ["TIFF", "ICO", "PPM", "TGA", "PDF", "EPS", "ICNS", "JPEG2000"])
def test_other_formats_are_not_taken(format: str) -> None:
    with pytest.raises(InvalidMediaError, match="none of the files that are taken: PNG, JPEG"):
        pixels(image_file(format, size=(16, 16)))


@pytest.mark.parametrize("text", [b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"x"])
def test_neither_is_text(text: bytes) -> None:
    with pytest.raises(InvalidMediaError, match="none of the files"):
        sniff(text)


def test_a_file_is_what_it_begins_as() -> None:
    gif_named_png = b"\x89PNG\r\n\x1a\n" + image_file("GIF")
    with pytest.raises(Exception, match=r"broken|identify|cannot"):
        pixels(gif_named_png)
