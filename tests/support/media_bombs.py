"""Files made to harm the program that opens them, and a function that damages files."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache

from PIL import Image

from tests.support.media_files import av_file, encode, image_file, wav_file


def png(width: int, height: int, depth: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of grey pixels, all black, with some more chunks."""
    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    pixels = zeros(height * (1 + (width * depth + 7) // 8))
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", head), *chunks, (b"IDAT", pixels), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


def zeros(count: int) -> bytes:
    """Return `count` zeros, compressed. Their blocks are identical."""
    block = _zeros(2**20)
    rest = _zeros(count % 2**20)
    end = struct.pack(">BBH", 3, 0, count % 65521) + b"\0\1"  # an empty block, and the checksum
    return b"\x78\x9c" + block * (count // 2**20) + rest + end


@cache
def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(bytes(count)) + packer.flush(zlib.Z_FULL_FLUSH)


def huge_png() -> bytes:
    """50,000 x 50,000 pixels, in 1 MB."""
    text = (b"tEXt", b"Comment\0" + bytes(range(1, 127)) * 5000)
    return png(50_000, 50_000, 1, text)


def large_png() -> bytes:
    """25 megapixels in 30 KB."""
    return png(5_000, 5_000, 8)


def long_gif(count: int = 10_000) -> bytes:
    """Many images, one after the other."""
    data = image_file("GIF", size=(500, 500))
    begin = data.index(b",")
    return data[:begin] + data[begin:-1] * count + b";"


def many_scans(count: int = 2000) -> bytes:
    """A JPEG that refines the same pixels again and again."""
    data = encode(Image.new("RGB", (2000, 2000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * count + b"\xff\xd9"


def boxes(depth: int = 5000) -> bytes:
    """An MP4 of nested boxes."""
    data = b""
    for _ in range(depth):
        data = struct.pack(">I", 8 + len(data)) + b"moov" + data
    return struct.pack(">I", 16) + b"ftypisom\0\0\2\0" + data


def elements(depth: int = 5000) -> bytes:
    """A WebM of nested elements of unknown size."""
    head = av_file("webm", "libopus", seconds=0.1)
    return (
        head[: head.index(b"\x18\x53\x80\x67")]
        + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" * depth
    )


def in_another() -> bytes:
    """A WAV that has an MP4 for its samples, which it says are MP3."""
    data = wav_file(0.1)
    inner = av_file("mp4", "aac", "libx264")
    return data[:20] + b"\x55\0" + data[22:40] + struct.pack("<I", len(inner)) + inner


def lying_wav(**fields: int) -> bytes:
    """A WAV whose head says something else than its samples."""
    data = bytearray(wav_file(0.1, 16_000, 1))
    places = {"riff": (4, "<I"), "format": (20, "<H"), "channels": (22, "<H"), "rate": (24, "<I"),
              "align": (32, "<H"), "bits": (34, "<H"), "data": (40, "<I")}  # fmt: skip
    for name, value in fields.items():
        place, form = places[name]
        struct.pack_into(form, data, place, value)
    return bytes(data)


#: Each with nothing in it that can be used.
BOMBS: Mapping[str, Callable[[], bytes]] = {
    "a PNG of 50,000 x 50,000": huge_png,
    "a PNG with text of a gigabyte": lambda: png(8, 8, 8, (b"zTXt", b"a\0\0" + zeros(2**30))),
    "a WebP of 16,383 x 16,383": lambda: (
        b"RIFF\x2e\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\xfe\x3f\0\xfe\x3f\0ANIM\x06\0\0\0\0\0\0\0\0\0"
        b"ANMF\0\0\0\0"
    ),
    "a BMP with a negative height": lambda: image_file("BMP")[:22] + b"\0\0\0\x80" + bytes(99),
    "boxes in boxes": boxes,
    "elements in elements": elements,
    "an MP4 in a WAV": in_another,
    "a WAV without channels": lambda: lying_wav(channels=0),
    "a WAV of 65,535 channels": lambda: lying_wav(channels=0xFFFF, align=0xFFFF),
    "a WAV without a rate": lambda: lying_wav(rate=0),
    "a WAV without bits": lambda: lying_wav(bits=0, align=0),
    "a WAV of one sample": lambda: wav_file(1 / 16_000, 16_000, 1),
    "a WAV of none": lambda: wav_file(0),
    "a WAV in an unknown format": lambda: lying_wav(format=0x7777),
    "an MP3 of nothing but a tag": lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(10_000),
    "a list of files to play": lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a list for concat": lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a drawing that fetches": lambda: (
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg">'
        b'<image href="http://127.0.0.1/"/></svg>'
    ),
}

#: Files that are fine, for each format; they are damaged by `damage`.
GOOD: Mapping[str, Callable[[], bytes]] = {
    **{
        name: lambda name=name: image_file(name, size=(40, 30))  # type: ignore[misc]
        for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    },
    "WAV": lambda: wav_file(0.1, 16_000),
    "MP3": lambda: av_file("mp3", "mp3", seconds=0.2),
    "FLAC": lambda: av_file("flac", "flac", seconds=0.2),
    "OGG": lambda: av_file("ogg", "libopus", seconds=0.2),
    "AAC": lambda: av_file("adts", "aac", seconds=0.2),
    "MP4": lambda: av_file("mp4", "aac", "libx264", seconds=0.5),
    "WEBM": lambda: av_file("webm", "libopus", "libvpx-vp9", seconds=0.5),
}


def damage(data: bytes, seed: int) -> bytes:
    """Change some bytes, take some away, double some; or cut the end off."""
    chance = random.Random(seed)
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 10, 50))):
        place = chance.randrange(len(damaged) or 1)
        length = chance.choice((1, 1, 2, 4, 30))
        match chance.randrange(6):
            case 0 | 1:
                damaged[place : place + length] = chance.randbytes(length)
            case 2:
                damaged[place : place + length] = chance.choice((b"\0", b"\xff", b"\x7f")) * length
            case 3:
                del damaged[place : place + length]
            case 4:
                damaged[place:place] = damaged[place : place + 10 * length]
            case 5 if chance.random() < 0.2:
                del damaged[place:]
    return bytes(damaged)
