"""The process that decodes: ``python -m trioserve.media.child LIMITS``, for one file after another.

What reads files of strangers is mostly C, and has had its faults. So this process has nothing to
lose and nothing to gain: it can open no file and no socket, has a limit of memory and one of time
for each file, and none of the server's secrets. It ends when its socket does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

import av.subtitles.codeccontext
import av.subtitles.stream  # noqa: F401 - PyAV imports these two for its first file: too late
import msgspec
from PIL import Image

from trioserve.children import inside
from trioserve.errors import InvalidMediaError
from trioserve.media.decode import (
    PIECE as TEXT_PIECE,
    decode_image,
    decode_pages,
    decode_sound,
    decode_video,
    rows,
)
from trioserve.media.orders import (
    PIECE,
    Answer,
    Data,
    End,
    MediaLimits,
    Order,
    Picture,
    Refused,
    Text,
)

#: Its niceness: the threads that compute tokens have priority.
_NICE = 5

_encode = msgspec.msgpack.Encoder().encode


def serve(
    limits: MediaLimits, receive: Callable[[], bytes | None], send: Callable[[bytes], object]
) -> None:
    """Decode files until there are no more orders."""
    while (order := receive()) is not None and (data := receive()) is not None:
        inside.limit_time(limits.timeout)
        end: Answer = End()
        try:
            for answer in decode(msgspec.msgpack.decode(order, type=Order), data, limits):
                send(_encode(answer))
        except InvalidMediaError as error:
            end = Refused(error.message)
        except MemoryError:
            end = Refused("takes too much memory to decode")
        except Exception as error:  # decoders raise many types for damaged files
            end = Refused(f"cannot be read ({_reason(error)})")
        send(_encode(end))
        inside.limit_time(0)


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
            for start in range(0, len(text) or 1, TEXT_PIECE):
                yield Text(page, text[start : start + TEXT_PIECE])
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


def _reason(error: Exception) -> str:
    """A decoder's answer about a file."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).partition("\n")[0][:200]


def confine(limits: MediaLimits) -> None:
    """Give up what decoding does not need. All modules have been imported."""
    if sys.platform == "win32":
        return
    os.nice(_NICE)
    inside.go_first()
    for limit in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        inside.lower(limit, 0)
    inside.limit_memory(limits.max_memory)
    inside.lower("RLIMIT_NOFILE", 3)  # those that are open: no file, no socket beside them


def main() -> None:
    """Serve the process that has started this one."""
    limits = MediaLimits(**json.loads(sys.argv[1]))
    parent = inside.Parent()
    confine(limits)
    serve(limits, parent.receive, parent.send)


if __name__ == "__main__":
    main()
