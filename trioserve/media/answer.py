"""What the process that decodes sends, checked: it may be in the hands of the file it has read."""

from __future__ import annotations

import math
from io import BytesIO
from typing import IO, Any, Literal

import attrs
import numpy as np

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MAX_TEXT, MediaLimits
from trioserve.media.pipe import PipeError, read
from trioserve.types import (
    DecodedAudio,
    DecodedDocument,
    DecodedImage,
    DecodedMedia,
    DecodedPage,
    DecodedVideo,
    MediaKind,
    content_id,
)

#: Samples are looked at in pieces of so many.
_SAMPLES = 2**20


@attrs.frozen(kw_only=True)
class Order:
    """What is to be made of a file."""

    format: str
    kind: MediaKind | Literal["document"]
    rate: int = 0  # samples a second, of sound
    fps: float = 0.0  # frames a second, of video; 0: all
    with_images: bool = False  # whether the pages of a document become images, too


class Answer:
    """Reads what comes for one order."""

    def __init__(self, order: Order, limits: MediaLimits) -> None:
        self._order = order
        self._pages: list[list[str]] = []  # of a document, the pieces of the text of each
        self._n_chars = 0
        self._limits = limits
        self._frames: list[tuple[float, DecodedImage]] = []
        self._next: tuple[float, int, int] | None = None  # the image whose pixels come
        self._data = BytesIO()
        self._room = 0  # bytes that may still come
        if order.kind == "audio":
            self._room = 4 * math.ceil((limits.max_seconds + 1) * order.rate)

    def read(self, stream: IO[bytes]) -> DecodedMedia | DecodedDocument:
        """Read all of it.

        Raises:
            InvalidMediaError: the file cannot be used. The message is a part of a sentence.
            PipeError: the answer makes no sense, or there is none.
            OSError: it cannot be read.
        """
        while True:
            block = read(stream, self._room)
            if isinstance(block, bytes):
                self._room -= self._data.write(block)
            elif "size" in block:
                self._end_image()
                self._begin_image(block)
            elif "text" in block:
                self._end_image()
                self._take_text(block)
            else:
                break
        if "refused" in block:
            raise InvalidMediaError(str(block["refused"]))
        return self._media()

    @property
    def _most_images(self) -> int:
        """How many images may come. Each page of a document has one at most."""
        most = {"audio": 0, "image": 1, "video": self._limits.max_frames}
        return most.get(self._order.kind, len(self._pages))

    def _take_text(self, block: dict[str, Any]) -> None:
        match block:
            case {"text": str(text), "page": int(page)} if (
                self._order.kind == "document"
                and page < self._limits.max_frames
                and page in (len(self._pages) - 1, len(self._pages))
                and self._n_chars + len(text) <= MAX_TEXT
            ):
                self._n_chars += len(text)
                if page == len(self._pages):
                    self._pages.append([])
                self._pages[page].append(text)
            case _:
                raise PipeError("a text that cannot be")

    def _begin_image(self, block: dict[str, Any]) -> None:
        match block:
            case {"at": float(at), "size": [int(width), int(height)]} if (
                len(self._frames) < self._most_images
                and 0 <= at <= self._limits.max_seconds
                and 0 < width * height <= self._limits.max_pixels
                and width > 0
            ):
                self._next = at, width, height
                self._room = 3 * width * height
            case _:
                raise PipeError("an image that cannot be")

    def _end_image(self) -> None:
        if self._next is None:
            return
        if self._room:
            raise PipeError("an image that is not complete")
        at, width, height = self._next
        pixels = self._data.getvalue()
        id = content_id(b"image %d %d" % (width, height), pixels)
        image = DecodedImage(width=width, height=height, pixels=pixels, id=id)
        self._frames.append((at, image))
        self._next, self._data = None, BytesIO()

    def _media(self) -> DecodedMedia | DecodedDocument:
        if self._order.kind == "audio":
            return _sound(self._data.getvalue(), self._order.rate)
        self._end_image()
        if self._order.kind == "document":
            pictures = dict(self._frames)
            return DecodedDocument(
                pages=tuple(
                    DecodedPage(text="".join(pieces), image=pictures.get(page))
                    for page, pieces in enumerate(self._pages)
                )
            )
        if not self._frames:
            raise PipeError("no image")
        if self._order.kind == "image":
            return self._frames[0][1]
        told = [f"{at!r} {image.id}".encode() for at, image in self._frames]
        return DecodedVideo(frames=tuple(self._frames), id=content_id(b"video", *told))


def _sound(data: bytes, rate: int) -> DecodedAudio:
    """Check the samples, and cut off what is louder than can be.

    Raises:
        InvalidMediaError: there are none, or some are no numbers.
    """
    if len(data) % 4:
        raise PipeError("a part of a sample")
    samples = np.frombuffer(data, np.float32)
    if len(samples) < 2:
        raise InvalidMediaError("has no sound in it")
    loudest = 0.0
    for begin in range(0, len(samples), _SAMPLES):
        piece = samples[begin : begin + _SAMPLES]
        if not np.isfinite(piece).all():
            raise InvalidMediaError("has samples that are no numbers")
        loudest = max(loudest, float(np.abs(piece).max()))
    if loudest > 1.0:
        data = samples.clip(-1.0, 1.0).tobytes()
    return DecodedAudio(rate=rate, samples=data, id=content_id(b"sound %d" % rate, data))
