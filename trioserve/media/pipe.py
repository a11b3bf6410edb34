"""What a server and the process that decodes for it agree on: files, their sizes, and pipes.

Messages and data go through the pipes, each with its length before it. Nothing that is read is
executed, as a pickle would be: the process reads the files of strangers, and may be theirs.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import IO, Any

import attrs

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

    @property
    def max_memory(self) -> int:
        """Bytes that decoding may take, beside those of the program itself."""
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
        InvalidMediaError: it is none that is taken. The message is a part of a sentence.
    """
    for magic, format in _MAGIC.items():
        if magic.match(data):
            return format
    if not data:
        raise InvalidMediaError("is empty")
    raise InvalidMediaError(f"is none of the files that are taken: {NAMES}")


_HEAD = struct.Struct(">cQ")
_MESSAGE, _DATA = b"m", b"d"
_MAX_MESSAGE = 2**16


class PipeError(Exception):
    """The other side has ended, or sent an invalid message."""


def write_message(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Write a message. Raises OSError."""
    data = json.dumps(message).encode()
    stream.write(_HEAD.pack(_MESSAGE, len(data)) + data)


def write_data(stream: IO[bytes], data: bytes) -> None:
    """Write data. Raises OSError."""
    stream.write(_HEAD.pack(_DATA, len(data)))
    stream.write(data)


def read(stream: IO[bytes], most: int) -> dict[str, Any] | bytes:
    """Read a message, or data of at most `most` bytes.

    Raises:
        PipeError: the stream has ended, or the message is too long or malformed.
    """
    kind, length = _HEAD.unpack(_read_exactly(stream, _HEAD.size))
    if length > (_MAX_MESSAGE if kind == _MESSAGE else most):
        raise PipeError(f"{length} bytes are too many")
    data = _read_exactly(stream, length)
    if kind == _DATA:
        return data
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if kind != _MESSAGE or not isinstance(message, dict):
        raise PipeError("no message")
    return message


def _read_exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise PipeError("the other side has ended")
    return data
