"""What a file is, by its first bytes: one of the formats that are taken, or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from trioserve.errors import InvalidMediaError
from trioserve.types import MediaKind


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
    """Recognize a file.

    Raises:
        InvalidMediaError: it is none that is taken. The message is a part of a sentence.
    """
    for magic, format in _MAGIC.items():
        if magic.match(data):
            return format
    if not data:
        raise InvalidMediaError("is empty")
    raise InvalidMediaError(f"is none of the files that are taken: {NAMES}")
