"""`Decoder`: a process that decodes media, as its server sees it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal

import attrs
import numpy as np

from trioserve.errors import InvalidMediaError
from trioserve.media.pipe import MAX_TEXT, MediaLimits, PipeError, read, write_data, write_message
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

#: Samples are checked in pieces of this size.
_SAMPLES = 2**20


@attrs.frozen(kw_only=True)
class Order:
    """What to decode a file to."""

    format: str
    kind: MediaKind | Literal["document"]
    rate: int = 0  # samples a second, of sound
    fps: float = 0.0  # frames a second, of video; 0: all
    with_images: bool = False  # whether the pages of a document become images, too


class AnswerReader:
    """Reads the answer to one order."""

    def __init__(self, order: Order, limits: MediaLimits) -> None:
        self._order = order
        self._pages: list[list[str]] = []  # of a document, the pieces of the text of each
        self._n_chars = 0
        self._limits = limits
        self._frames: list[tuple[float, DecodedImage]] = []
        self._sound = BytesIO()
        #: Bytes of sound that may still come.
        self._room = 0
        if order.kind == "audio":
            self._room = 4 * math.ceil((limits.max_seconds + 1) * order.rate)

    def read(self, stream: IO[bytes]) -> DecodedMedia | DecodedDocument:
        """Read a whole answer of the decoder.

        Raises:
            InvalidMediaError: the file cannot be used. The message is a part of a sentence.
            PipeError: the answer is invalid, or there is none.
            OSError: it cannot be read.
        """
        while True:
            block = read(stream, self._room)
            if isinstance(block, bytes):
                self._room -= self._sound.write(block)
            elif "size" in block:
                self._read_image(block, stream)
            elif "text" in block:
                self._take_text(block)
            else:
                break
        _check_refused(block)
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

    def _read_image(self, block: dict[str, Any], stream: IO[bytes]) -> None:
        match block:
            case {"at": float(at), "size": [int(width), int(height)]} if (
                len(self._frames) < self._most_images
                and 0 <= at <= self._limits.max_seconds
                and 0 < width * height <= self._limits.max_pixels
                and width > 0
            ):
                size = 3 * width * height
            case _:
                raise PipeError("an image that cannot be")
        data = BytesIO()
        while data.tell() < size:
            piece = read(stream, size - data.tell())
            if isinstance(piece, dict):
                _check_refused(piece)
                raise PipeError("an image that is not complete")
            data.write(piece)
        pixels = data.getvalue()
        id = content_id(b"image %d %d" % (width, height), pixels)
        image = DecodedImage(width=width, height=height, pixels=pixels, id=id)
        self._frames.append((at, image))

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
            raise PipeError("no image")
        if self._order.kind == "image":
            return self._frames[0][1]
        told = [f"{at!r} {image.id}".encode() for at, image in self._frames]
        return DecodedVideo(frames=tuple(self._frames), id=content_id(b"video", *told))


def _check_refused(block: dict[str, Any]) -> None:
    if "refused" in block:
        raise InvalidMediaError(str(block["refused"]))


def _checked_sound(data: bytes, rate: int) -> DecodedAudio:
    """Check the samples, and clip those that are too loud.

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


#: The program that decodes. It imports what this process must not have.
_MODULE = "trioserve.media.child"

#: Variables without which a Python may not find its libraries. No others are passed on.
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


#: Seconds for a process to end by itself when it has closed its pipe.
_LAST = 0.5

#: Bytes of RAM that a process may have between two files; it begins with some 40 MiB.
_MAX_KEPT = 192 * 2**20
_PAGE = 4096 if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE")


class DecoderError(Exception):
    """The process could not be started, or ended before it had answered.

    Args:
        message: a description for the log.
        code: the exit code; negative: the number of the signal that has ended it.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    @property
    def by_signal(self) -> bool:
        """Whether a signal has ended it: it did what it must not, or took too much."""
        return self.code < 0

    @property
    def is_out_of_time(self) -> bool:
        """Whether it has computed for longer than it may."""
        return self.code == -getattr(signal, "SIGPROF", math.inf)


class Decoder:
    """A process that decodes one file after another. It is started for the first one.

    One thread at a time may have it decode. `kill` may be called from any.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether it can decode another file."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    @property
    def pid(self) -> int | None:
        """The number of the process, if it was started."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Decode a file in the process. Blocks until that is done.

        Raises:
            InvalidMediaError: it cannot be used. The message is a part of a sentence.
            DecoderError: the process has ended, by itself or by `kill`.
        """
        most = self._limits.max_bytes
        if len(data) > most:
            raise InvalidMediaError(f"has more than {most} bytes")
        try:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                write_message(process.stdin, attrs.asdict(order))
                write_data(process.stdin, data)
                process.stdin.flush()
                return AnswerReader(order, self._limits).read(process.stdout)
            except (PipeError, OSError) as error:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST)
                self.close()
                code = process.returncode
                raise DecoderError(f"{error}; exit code {code}", code=code) from error
        finally:
            if self._ended or self._has_grown():
                self.close()

    def kill(self) -> None:
        """Kill the process at once; a running `decode` then raises in its thread."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Kill the process, and wait until it has ended. Not while `decode` runs."""
        self.kill()
        if (process := self._process) is not None:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):  # it has not read everything
                    stream.close()

    def _has_grown(self) -> bool:
        """Whether the process keeps more memory than it needs, as after a leak in a decoder."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):  # other systems than Linux do not say, nor do the dead
            return False
        return pages * _PAGE > _MAX_KEPT

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise DecoderError("it was ended before it began")
            if self._process is None:
                try:
                    self._process = _open(self._limits)
                except OSError as error:
                    raise DecoderError(f"no process can be started: {error.strerror}") from error
            return self._process


def _open(limits: MediaLimits) -> subprocess.Popen[bytes]:
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-m", _MODULE, json.dumps(attrs.asdict(limits))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
    )
