"""The process that decodes: ``python -m trioserve.media.child LIMITS``, for one file after another.

It is confined by `trioserve.media.serving`.
"""

from __future__ import annotations

from collections.abc import Iterator

import av.subtitles.codeccontext
import av.subtitles.stream  # noqa: F401 - PyAV imports these two for its first file: too late
from PIL import Image

from trioserve.media import serving
from trioserve.media.decode import decode_image, decode_pages, decode_sound, decode_video, rows
from trioserve.media.orders import PIECE, Answer, Data, MediaLimits, Order, Picture, text_pieces


def decode(order: Order, data: bytes, limits: MediaLimits) -> Iterator[Answer]:
    """Decode a file: for each image its size, then the data.

    Raises any exception of the decoders.
    """
    if order.kind == "image":
        one = decode_image(data, order.format, limits)
        yield from _pixels(one, 0.0, on_white=order.on_white and one.has_transparency_data)
    elif order.kind == "audio":
        for samples in decode_sound(data, order.format, order.rate, limits):
            yield from _pieces(samples)
    elif order.kind == "document":
        for page, (text, image) in enumerate(decode_pages(data, order.with_images, limits)):
            yield from text_pieces(page, text)
            if image is not None:
                yield from _pixels(image, float(page))
    else:
        for at, image in decode_video(data, order.format, order.fps, limits):
            yield from _pixels(image, at)


def _pixels(image: Image.Image, at: float, *, on_white: bool = False) -> Iterator[Answer]:
    yield Picture(at, *image.size)
    for band in rows(image, on_white=on_white):
        yield from _pieces(band)


def _pieces(data: bytes) -> Iterator[Data]:
    for start in range(0, len(data), PIECE):
        yield Data(data[start : start + PIECE])


if __name__ == "__main__":
    serving.main(decode)
