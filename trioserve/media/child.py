"""The process that decodes: ``python -m trioserve.media.child LIMITS``, for one file after another.

What reads files of strangers is mostly C, and has had its faults. So this process has nothing to
lose and nothing to gain: it can open no file and no socket, has a limit of memory and one of time
for each file, and none of the server's secrets. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import av.subtitles.codeccontext
import av.subtitles.stream  # noqa: F401 - PyAV imports these two for its first file: too late
from PIL import Image

from trioserve.errors import InvalidMediaError
from trioserve.media.decode import (
    PIECE,
    decode_image,
    decode_pages,
    decode_sound,
    decode_video,
    rows,
)
from trioserve.media.pipe import MediaLimits, PipeError, read, write_data, write_message

if sys.platform != "win32":  # which has no such limits
    import resource

#: Its niceness: the threads that compute tokens have priority.
_NICE = 5


def serve(limits: MediaLimits, orders: IO[bytes], answers: IO[bytes]) -> None:
    """Decode files until there are no more orders."""
    while True:
        try:
            end = _serve_one(limits, orders, answers)
        except PipeError:
            return
        write_message(answers, end)
        answers.flush()
        _limit_time(0)


def _serve_one(limits: MediaLimits, orders: IO[bytes], answers: IO[bytes]) -> dict[str, Any]:
    """Decode a file, and return the fields of the last message.

    Raises:
        PipeError: there are no more orders.
    """
    order, data = read(orders, 0), read(orders, limits.max_bytes)
    if not isinstance(order, dict) or not isinstance(data, bytes):
        raise PipeError("no order")
    _limit_time(limits.timeout)
    try:
        for one in decode(order, data, limits):
            write_data(answers, one) if isinstance(one, bytes) else write_message(answers, one)
    except InvalidMediaError as error:
        return {"refused": error.message}
    except MemoryError:
        return {"refused": "takes too much memory to decode"}
    except Exception as error:  # decoders raise many types for damaged files
        return {"refused": f"cannot be read ({_reason(error)})"}
    return {}


def decode(
    order: dict[str, Any], data: bytes, limits: MediaLimits
) -> Iterator[dict[str, Any] | bytes]:
    """Decode a file: for each image a message with its size, then the data.

    Raises any exception of the decoders.
    """
    kind, name = order["kind"], order["format"]
    if kind == "image":
        yield from _pixels(decode_image(data, name, limits), 0.0)
    elif kind == "audio":
        yield from decode_sound(data, name, order["rate"], limits)
    elif kind == "document":
        for page, (text, image) in enumerate(decode_pages(data, order["with_images"], limits)):
            for start in range(0, len(text) or 1, PIECE):
                yield {"text": text[start : start + PIECE], "page": page}
            if image is not None:
                yield from _pixels(image, float(page))
    else:
        for at, image in decode_video(data, name, order["fps"], limits):
            yield from _pixels(image, at)


def _pixels(image: Image.Image, at: float) -> Iterator[dict[str, Any] | bytes]:
    yield {"size": image.size, "at": at}
    yield from rows(image)


def _reason(error: Exception) -> str:
    """A decoder's answer about a file."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).partition("\n")[0][:200]


def confine(limits: MediaLimits) -> None:
    """Give up what decoding does not need. All modules have been imported."""
    if sys.platform == "win32":
        return
    os.nice(_NICE)
    with suppress(OSError):  # Linux: where memory is short, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    size = _size()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NPROC, 0)
    _lower(resource.RLIMIT_NOFILE, 3)  # those that are open: no file, no socket beside them
    _lower(resource.RLIMIT_AS, size + limits.max_memory)


if sys.platform != "win32":

    def _lower(which: int, value: int) -> None:
        _, hard = resource.getrlimit(which)
        if hard in (resource.RLIM_INFINITY, -1) or value <= hard:
            resource.setrlimit(which, (value, value))

    def _size() -> int:
        """Bytes of address space that the program itself takes."""
        try:
            pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        except OSError:
            return 2**30  # macOS does not say, nor does it keep the limit
        return pages * resource.getpagesize()


def _limit_time(seconds: float) -> None:
    """Have the system end this process when it has computed for so long. 0: do so no longer.

    The time of the clock does not count: other work may have the CPU. The server limits it.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serve on standard input and output."""
    limits = MediaLimits(**json.loads(sys.argv[1]))
    confine(limits)
    serve(limits, sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
