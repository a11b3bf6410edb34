"""Images to pixels, with Pillow. Runs in the process of its own only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO

from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,  # noqa: F401 - Pillow imports it for its first EXIF data: too late
    WebPImagePlugin,
)

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MediaLimits

#: Each opens one format. A file that says it is another is refused.
_OPENERS: Mapping[str, Callable[[BytesIO], Image.Image]] = {
    "png": PngImagePlugin.PngImageFile,
    "jpeg": JpegImagePlugin.JpegImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
}

#: Rows are handed over in bands of about so many pixels.
_BAND = 2**18

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, name: str, limits: MediaLimits) -> Image.Image:
    """Decode an image, or the first one of an animation, and turn it as its EXIF data say.

    Raises:
        InvalidMediaError: it is larger than the limits allow.
        Exception: of many kinds; the file cannot be read.
    """
    image = _OPENERS[name](BytesIO(data))
    width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidMediaError(
            f"has {width} x {height} pixels, and {limits.max_pixels} in all are the most"
        )
    image.load()
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def rows(image: Image.Image) -> Iterator[bytes]:
    """Give the pixels of an image in pieces: RGB, from the top.

    Transparency is dropped, as llama-server drops it: the colors that it hides show.
    """
    width, height = image.size
    step = max(1, _BAND // width)
    for top in range(0, height, step):
        band = image.crop((0, top, width, min(top + step, height)))
        if band.mode.startswith("I;16"):  # converting would cut off what is brighter than 255
            high = slice(0, None, 2) if band.mode == "I;16B" else slice(1, None, 2)
            band = Image.frombytes("L", band.size, band.tobytes()[high])
        yield band.convert("RGB").tobytes()


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):  # EXIF data that make no sense turn nothing
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # `decode` has a limit of its own
