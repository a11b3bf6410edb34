"""A video, as the model sees it: frames, and between them now and then the time."""

from __future__ import annotations

from collections.abc import Iterator

from trioserve.types import DecodedImage, DecodedVideo


def as_parts(video: DecodedVideo, interval: int) -> Iterator[str | tuple[DecodedImage, ...]]:
    """Make text and images of a video, as llama-server does.

    Frames without text between them come in pairs, which some models merge.

    Args:
        video: what is shown.
        interval: milliseconds after which the time is told again; 0: never.
    """
    yield "Video:"
    pair: list[DecodedImage] = []
    next_time = 0.0
    for seconds, frame in video.frames:
        pair.append(frame)
        tells_time = interval > 0 and seconds * 1000 >= next_time
        if tells_time or len(pair) == 2:
            yield tuple(pair)
            pair.clear()
        if tells_time:
            minutes = int(seconds / 60)
            yield f"[{minutes}m{seconds - minutes * 60:.2f}s]"
            next_time += interval
    if pair:
        yield tuple(pair)
