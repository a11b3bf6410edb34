"""The protocol of a server and the process that decodes for it: files, sizes, messages.

An order is a frame, and its file another. Answers are frames, too: the last one is `End` or
`Refused`. The process reads the files of strangers, and may be theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import attrs
from msgspec import Meta, Struct

from trioserve.errors import InvalidMediaError
from trioserve.types import MediaKind

#: Characters that a document may have.
MAX_TEXT = 2**22


@attrs.frozen(kw_only=True)
class MediaLimits:
    """Limits of a file and of its decoding. What exceeds them is refused."""

    max_bytes: int = 64 * 2**20  # of the file
    max_pixels: int = 64 * 2**20  # of an image, width times height
    max_seconds: float = 3600.0  # of sound, or of a video
    max_frames: int = 256  # of those of a video that the model sees; pages of a document
    timeout: float = 30.0  # seconds, to fetch a file, and once more to decode it
    max_files: int = 100  # of a request
    memory: int = 0  # bytes that decoding may take; 0: as media of these sizes need

    @property
    def max_memory(self) -> int:
        """Bytes that decoding may take, beside those of the program itself."""
        if self.memory:
            return self.memory
        # A progressive JPEG has 6 bytes for each pixel, and its image 4; turning it takes 4 more.
        return 14 * self.max_pixels + 2 * self.max_bytes + 64 * 2**20


@attrs.frozen
class Format:
    """A format of files, and what may be in it: the first kind is the likeliest."""

    name: str
    kinds: tuple[MediaKind, ...]


def _compile(magic: bytes) -> re.Pattern[bytes]:
    return re.compile(magic, re.DOTALL)


#: The beginnings of files. An MP3 has no other sign than a frame's first bits.
_MAGIC: Mapping[re.Pattern[bytes], Format] = {
    _compile(rb"\x89PNG\r\n\x1a\n"): Format("png", ("image",)),
    _compile(rb"\xff\xd8\xff"): Format("jpeg", ("image",)),
    _compile(rb"GIF8[79]a"): Format("gif", ("image",)),
    _compile(rb"RIFF....WEBP"): Format("webp", ("image",)),
    _compile(rb"BM.{4}\0{4}"): Format("bmp", ("image",)),
    _compile(rb"(RIFF|RF64)....WAVE"): Format("wav", ("audio",)),
    _compile(rb"fLaC"): Format("flac", ("audio",)),
    _compile(rb"OggS"): Format("ogg", ("audio",)),
    _compile(rb"....ftypM4[AB]"): Format("mp4", ("audio",)),
    _compile(rb"....ftyp"): Format("mp4", ("video", "audio")),
    _compile(rb"\x1aE\xdf\xa3"): Format("webm", ("video", "audio")),
    _compile(rb"\xff[\xf0\xf1\xf8\xf9]"): Format("aac", ("audio",)),
    _compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]"): Format("mp3", ("audio",)),
}

NAMES = "PNG, JPEG, WebP, GIF, BMP, WAV, MP3, FLAC, Ogg, AAC, MP4, M4A and WebM"


def sniff(data: bytes) -> Format:
    """Return the format of a file, found by its first bytes.

    Raises:
        InvalidMediaError: the format is not allowed. The message is a part of a sentence.
    """
    for magic, format in _MAGIC.items():
        if magic.match(data):
            return format
    if not data:
        raise InvalidMediaError("is empty")
    raise InvalidMediaError(f"is none of the files that are taken: {NAMES}")


class Order(Struct, frozen=True, kw_only=True):
    """What to decode the file to that comes in the next frame."""

    format: str
    charset: str = ""  # of text, if the server that sent it names one
    url: str = ""  # of a page, which its links are relative to
    kind: MediaKind | Literal["document"]
    rate: int = 0  # samples a second, of sound
    fps: float = 0.0  # frames a second, of video; 0: all
    on_white: bool = True  # whether transparent images are laid on white
    with_images: bool = False  # whether the pages of a document become images, too


class Picture(Struct, frozen=True, tag="picture"):
    """The size of an image, whose pixels follow, and when it is shown; of a document, its page."""

    at: Annotated[float, Meta(ge=0)]
    width: Annotated[int, Meta(gt=0)]
    height: Annotated[int, Meta(gt=0)]


class Text(Struct, frozen=True, tag="text"):
    """A piece of the text of a page."""

    page: Annotated[int, Meta(ge=0)]
    text: str


#: Characters of text that are handed over at once: at most 12 bytes each.
TEXT_PIECE = 4096


def text_pieces(page: int, text: str) -> Iterator[Text]:
    """Cut the text of a page into answers: one at least."""
    for start in range(0, len(text) or 1, TEXT_PIECE):
        yield Text(page, text[start : start + TEXT_PIECE])


class Data(Struct, frozen=True, tag="data"):
    """A piece of pixels or of samples."""

    data: bytes


class End(Struct, frozen=True, tag="end"):
    """The end of an answer."""


class Refused(Struct, frozen=True, tag="refused"):
    """The end of an answer: why the file cannot be used, as a part of a sentence."""

    reason: str


Answer: TypeAlias = Picture | Text | Data | End | Refused

#: Bytes of a `Data`, and of the frame of any answer.
PIECE = 2**20
MAX_ANSWER = PIECE + 2**10
