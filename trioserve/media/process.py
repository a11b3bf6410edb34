"""`Decoder`: a process that decodes media, as its server sees it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import attrs
import msgspec
import numpy as np

from trioserve.children.child import Child, ChildError, bare_environment
from trioserve.errors import InvalidMediaError
from trioserve.media.orders import (
    MAX_ANSWER,
    MAX_TEXT,
    Answer,
    Data,
    MediaLimits,
    Order,
    Picture,
    Refused,
    Text,
)
from trioserve.types import (
    DecodedAudio,
    DecodedDocument,
    DecodedImage,
    DecodedMedia,
    DecodedPage,
    DecodedVideo,
    content_id,
)

#: Samples are checked in pieces of this size.
_SAMPLES = 2**20

#: Characters of a reason that are passed on.
_MAX_REASON = 300

_answers = msgspec.msgpack.Decoder(Answer)


class AnswerReader:
    """Reads the answer to one order. `receive` gives the next payload."""

    def __init__(self, order: Order, limits: MediaLimits, receive: Callable[[], bytes]) -> None:
        self._order = order
        self._receive = receive
        self._pages: list[list[str]] = []  # of a document, the pieces of the text of each
        self._n_chars = 0
        self._limits = limits
        self._frames: list[tuple[float, DecodedImage]] = []
        self._sound = BytesIO()
        #: Bytes of sound that may still come.
        self._room = 0
        if order.kind == "audio":
            self._room = 4 * math.ceil((limits.max_seconds + 1) * order.rate)

    def read(self) -> DecodedMedia | DecodedDocument:
        """Read a whole answer of the decoder.

        Raises:
            InvalidMediaError: the file cannot be used. The message is a part of a sentence.
            ChildError: the answer is invalid or missing.
        """
        while True:
            match self._next():
                case Data(data) if 0 < len(data) <= self._room:
                    self._room -= self._sound.write(data)
                case Picture() as picture:
                    self._read_image(picture)
                case Text() as text:
                    self._take_text(text)
                case Data():
                    raise ChildError("data that cannot be")
                case _:
                    return self._media()

    def _next(self) -> Answer:
        try:
            answer: Answer = _answers.decode(self._receive())
        except (ValueError, RecursionError, msgspec.MsgspecError):
            raise ChildError("no answer") from None
        if isinstance(answer, Refused):
            raise InvalidMediaError(answer.reason[:_MAX_REASON])
        return answer

    @property
    def _most_images(self) -> int:
        """The most images of an answer. Each page of a document has one at most."""
        most = {"audio": 0, "image": 1, "video": self._limits.max_frames}
        return most.get(self._order.kind, len(self._pages))

    def _take_text(self, piece: Text) -> None:
        page = piece.page
        self._n_chars += len(piece.text)
        if not (
            self._order.kind == "document"
            and page < self._limits.max_frames
            and page in (len(self._pages) - 1, len(self._pages))
            and self._n_chars <= MAX_TEXT
        ):
            raise ChildError("a text that cannot be")
        if page == len(self._pages):
            self._pages.append([])
        if piece.text:
            self._pages[page].append(piece.text)

    def _read_image(self, picture: Picture) -> None:
        width, height = picture.width, picture.height
        if not (
            len(self._frames) < self._most_images
            and picture.at <= self._limits.max_seconds
            and width * height <= self._limits.max_pixels
        ):
            raise ChildError("an image that cannot be")
        room, data = 3 * width * height, BytesIO()
        while room > 0:
            piece = self._next()
            if not isinstance(piece, Data) or not 0 < len(piece.data) <= room:
                raise ChildError("an image that is not complete")
            room -= data.write(piece.data)
        pixels = data.getvalue()
        id = content_id(b"image %d %d" % (width, height), pixels)
        image = DecodedImage(width=width, height=height, pixels=pixels, id=id)
        self._frames.append((picture.at, image))

    def _media(self) -> DecodedMedia | DecodedDocument:
        if self._order.kind == "audio":
            return _checked_sound(self._sound.getvalue(), self._order.rate)
        if self._order.kind == "document":
            pictures = dict(self._frames)
            return DecodedDocument(
                pages=tuple(
                    DecodedPage(text="".join(pieces), image=pictures.get(page))
                    for page, pieces in enumerate(self._pages)
                )
            )
        if not self._frames:
            raise ChildError("no image")
        if self._order.kind == "image":
            return self._frames[0][1]
        told = [f"{at!r} {image.id}".encode() for at, image in self._frames]
        return DecodedVideo(frames=tuple(self._frames), id=content_id(b"video", *told))


def _checked_sound(data: bytes, rate: int) -> DecodedAudio:
    """Check the samples, and clip those that are too loud.

    Raises:
        InvalidMediaError: there are too few, or some are not finite.
    """
    if len(data) % 4:
        raise ChildError("a part of a sample")
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


#: The program that decodes media. It imports what this process must not have.
MEDIA_CHILD = "trioserve.media.child"

#: Bytes of RAM that a process may have between two files; it begins with some 40 MiB.
_MAX_KEPT = 192 * 2**20
_PAGE = 4096 if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE")


class Decoder(Child):
    """A process that decodes one file after another."""

    _limits: MediaLimits

    @classmethod
    def start(cls, limits: MediaLimits, module: str = MEDIA_CHILD) -> Decoder:
        """Start one that runs a module. Raises OSError: the system does not let us."""
        arguments = json.dumps(attrs.asdict(limits))
        command = [sys.executable, "-P", "-s", "-m", module, arguments]
        made = cls.spawn(command, env=bare_environment(), max_frame=MAX_ANSWER)
        made._limits = limits
        return made

    def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Decode a file in the process. Blocks until that is done.

        Raises:
            InvalidMediaError: it cannot be used. The message is a part of a sentence.
            ChildError: the process has ended, by itself or by `kill`. It has a `code`.
        """
        most = self._limits.max_bytes
        if len(data) > most:
            raise InvalidMediaError(f"has more than {most} bytes")
        try:
            self.send(msgspec.msgpack.encode(order))
            self.send(data)
            return AnswerReader(order, self._limits, self.receive).read()
        except ChildError as error:
            error.code = self.end()
            raise
        finally:
            if not self.is_alive or self._has_grown():
                self.end(0.0)

    def _has_grown(self) -> bool:
        """True if the process keeps more memory than it needs, as after a leak in a decoder."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):  # other systems than Linux do not say, nor do the dead
            return False
        return pages * _PAGE > _MAX_KEPT
