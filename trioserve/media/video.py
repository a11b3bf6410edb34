"""Video to frames, with PyAV. Runs in the process of its own only."""

from __future__ import annotations

import math
from collections.abc import Iterator

import av
from PIL import Image

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MediaLimits
from trioserve.media.sound import frames_of, open_container

#: Larger frames are made smaller: models see little more of a frame.
_MAX_FRAME_PIXELS = 2**19

_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


def decode(
    data: bytes, name: str, fps: float, limits: MediaLimits
) -> Iterator[tuple[float, Image.Image]]:
    """Decode a video to so many frames a second, or to all that it has.

    Gives each with its second: the frame that is shown then.

    Raises:
        InvalidMediaError: it has no frames, or more or larger ones than the limits allow.
        Exception: of many kinds; the file cannot be read.
    """
    chosen = _at_rate(_frames(data, name, limits), fps) if fps else _frames(data, name, limits)
    count = 0
    for count, (at, frame) in enumerate(chosen, 1):
        if count > limits.max_frames:
            raise InvalidMediaError(
                f"has more than {limits.max_frames} frames, "
                + (f"at {fps:g} a second" if fps else "all of which are wanted")
            )
        yield at, _image(frame)
    if not count:
        raise InvalidMediaError("has no frames")


def _at_rate(
    frames: Iterator[tuple[float, av.VideoFrame]], fps: float
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Choose frames as FFmpeg's filter ``fps`` does: each counts from the tick next to its time."""
    tick = 0
    shown: av.VideoFrame | None = None
    for at, frame in frames:
        now = math.floor(at * fps + 0.5)
        while shown is not None and tick < now:
            yield tick / fps, shown
            tick += 1
        shown = frame
    if shown is not None:
        yield tick / fps, shown


def _frames(data: bytes, name: str, limits: MediaLimits) -> Iterator[tuple[float, av.VideoFrame]]:
    """All frames, with the second from the first one on at which each is shown."""
    with open_container(data, name) as container:
        if not container.streams.video:
            raise InvalidMediaError("has no video")
        stream = container.streams.video[0]
        _check_size(stream.codec_context.width, stream.codec_context.height, limits)
        begin: float | None = None
        for frame in frames_of(container, stream):
            assert isinstance(frame, av.VideoFrame)
            _check_size(frame.width, frame.height, limits)
            time = frame.time or 0.0
            begin = time if begin is None else begin
            if not time - begin <= limits.max_seconds:
                raise InvalidMediaError(f"is longer than {limits.max_seconds:g} seconds")
            yield time - begin, frame


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_pixels:
        raise InvalidMediaError(
            f"has frames of {width} x {height} pixels, and {limits.max_pixels} in all are the most"
        )


def _image(frame: av.VideoFrame) -> Image.Image:
    scale = min(1.0, math.sqrt(_MAX_FRAME_PIXELS / (frame.width * frame.height)))
    width, height = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
    rgb = frame.reformat(width=width, height=height, format="rgb24", threads=1)
    plane = rgb.planes[0]
    image = Image.frombuffer("RGB", (width, height), bytes(plane), "raw", "RGB", plane.line_size, 1)
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)
