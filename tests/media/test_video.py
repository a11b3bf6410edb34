"""Videos to frames."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from tests.support.media_files import av_file, video_file
from trioserve.errors import InvalidMediaError
from trioserve.media import video
from trioserve.media.limits import MediaLimits
from trioserve.media.sniff import sniff

LIMITS = MediaLimits()


def frames(
    data: bytes, fps: float = 4.0, limits: MediaLimits = LIMITS
) -> list[tuple[float, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
    found = video.decode(data, sniff(data).name, fps, limits)
    return [(at, np.asarray(image)) for at, image in found]


@pytest.fixture(scope="module")
def mp4() -> bytes:
    """Two seconds of 24 frames, of 64 x 48, in which red rises from 0 to 255."""
    return av_file("mp4", "aac", "libx264", seconds=2)


def test_frames_are_taken_at_a_rate(mp4: bytes) -> None:
    found = frames(mp4)
    assert [at for at, _ in found] == [i / 4 for i in range(len(found))]
    assert len(found) in (8, 9)
    for at, frame in found:
        assert frame.shape == (48, 64, 3)
        assert frame[:, :, 0].mean() == pytest.approx(127.5 * min(at, 23 / 12), abs=12)


@pytest.mark.parametrize(("fps", "count"), [(1, (2, 3)), (12, (24, 25)), (48, (95, 96))])
def test_the_rate_may_be_any(mp4: bytes, fps: float, count: tuple[int, ...]) -> None:
    found = frames(mp4, fps)
    assert len(found) in count
    assert [at for at, _ in found] == [i / fps for i in range(len(found))]


def test_all_frames_are_taken_at_rate_0(mp4: bytes) -> None:
    found = frames(mp4, 0)
    assert len(found) == 48
    assert [at for at, _ in found] == pytest.approx([i / 24 for i in range(48)], abs=0.001)


@pytest.mark.parametrize(("format", "codec"), [("webm", "libvpx-vp9"), ("webm", "libvpx")])
def test_webm_is_read(format: str, codec: str) -> None:
    assert len(frames(av_file(format, None, codec))) in (4, 5)


def test_large_frames_are_made_smaller(mp4: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_MAX_FRAME_PIXELS", 32 * 24)
    assert frames(mp4)[0][1].shape == (24, 32, 3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_frames=7), "has more than 7 frames, at 4 a second"),
        (MediaLimits(max_seconds=1), "is longer than 1 seconds"),
        (MediaLimits(max_pixels=64 * 48 - 1), "has frames of 64 x 48 pixels"),
    ],
)
def test_limits_hold(mp4: bytes, limits: MediaLimits, message: str) -> None:
    with pytest.raises(InvalidMediaError, match=message):
        frames(mp4, limits=limits)


def test_a_video_is_turned_as_it_says() -> None:
    """Phones turn a video by the matrix in the head of its track, here clockwise."""
    straight = struct.pack(">9i", 2**16, 0, 0, 0, 2**16, 0, 0, 0, 2**30)
    turned = struct.pack(">9i", 0, 2**16, 0, -(2**16), 0, 0, 0, 0, 2**30)
    image = Image.new("RGB", (64, 48))
    image.paste((255, 0, 0), (0, 0, 32, 48))  # its left half is red
    data = video_file([image] * 24)
    movie, track, rest = data.split(straight)
    (_, frame), *_ = frames(movie + straight + track + turned + rest)
    assert frame.shape == (64, 48, 3)
    assert frame[:28, :, 0].min() > 200 and frame[36:, :, 0].max() < 50


def test_sound_has_no_video() -> None:
    with pytest.raises(InvalidMediaError, match="has no video"):
        frames(av_file("mp4", "aac"))
