"""What the process that decodes may do is enough for every format."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.media_files import image_file, wav_file
from trioserve.media import child
from trioserve.media.pipe import MediaLimits, PipeError, read, write_data, write_message
from trioserve.media.process import AnswerReader, Order
from trioserve.types import DecodedAudio, DecodedImage

LIMITS = MediaLimits(max_pixels=1000, max_bytes=2**20, max_seconds=2, max_frames=2)

#: Root may have any number of threads, so it becomes somebody else first. What it needs has been
#: read by then: nobody else may read it where root keeps its Python.
CONFINED = """
import io, os
from tests.support.media_bombs import GOOD
from trioserve.media import child, pipe
from trioserve.media.pipe import MediaLimits

texts = [make() for make in GOOD.values()]
if os.getuid() == 0:
    os.setuid(65534)
child.confine(MediaLimits())
for data in texts:
    format = pipe.sniff(data)
    order = {"format": format.name, "kind": format.kinds[0], "rate": 16000, "fps": 4.0}
    sizes = [len(one) for one in child.decode(order, data, MediaLimits()) if isinstance(one, bytes)]
    print(format.name, sum(sizes))
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_every_format_is_decoded_without_files_and_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONFINED],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
    )
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert list(sizes) == [
        *("png", "jpeg", "webp", "gif", "bmp", "wav", "mp3", "flac", "ogg", "aac", "mp4", "webm")
    ], done.stderr
    assert all(int(size) > 1000 for size in sizes.values()), sizes


def test_orders_are_served_until_there_are_no_more() -> None:
    orders, answers = io.BytesIO(), io.BytesIO()
    image = {"format": "png", "kind": "image", "rate": 0, "fps": 0.0}
    for order, data in (
        (image, image_file(size=(8, 4))),
        (image, image_file(size=(40, 30))),
        (image, image_file()[:45]),
        ({"format": "wav", "kind": "audio", "rate": 8000, "fps": 0.0}, wav_file(0.1)),
    ):
        write_message(orders, order)
        write_data(orders, data)
    orders.seek(0)
    child.serve(LIMITS, orders, answers)
    answers.seek(0)
    found = AnswerReader(Order(format="png", kind="image"), LIMITS).read(answers)
    assert isinstance(found, DecodedImage) and found.width == 8
    assert read(answers, 0) == {"refused": "has 40 x 30 pixels, and 1000 in all are the most"}
    assert "cannot be read (" in str(read(answers, 0))
    sound = AnswerReader(Order(format="wav", kind="audio", rate=8000), LIMITS).read(answers)
    assert isinstance(sound, DecodedAudio) and sound.rate == 8000
    with pytest.raises(PipeError):
        read(answers, 0)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("image", []),
        ("image", [{}]),
        ("image", [b"x"]),
        ("image", [{"size": [1, 1], "at": 0.0}, b"1234"]),
        ("image", [{"size": [1, 1], "at": 0.0}, b"12", {}]),
        ("image", [{"size": [1, 1], "at": 0.0}, b"123", {"size": [1, 1], "at": 0.0}]),
        ("image", [{"size": [100, 100], "at": 0.0}]),
        ("image", [{"size": [-1, -1], "at": 0.0}]),
        ("image", [{"size": [0, 1], "at": 0.0}]),
        ("image", [{"size": [1.5, 1], "at": 0.0}]),
        ("image", [{"size": "ab", "at": 0.0}]),
        ("image", [{"size": [1, 1]}]),
        ("image", [{"size": [1, 1], "at": float("nan")}]),
        ("audio", [{"size": [1, 1], "at": 0.0}]),
        ("audio", [b"123", {}]),
        ("audio", [bytes(4 * 8000 * 4)]),
        ("video", [*([{"size": [1, 1], "at": 0.0}, b"123"] * 3), {}]),
        ("video", [{"size": [1, 1], "at": 99.0}, b"123", {}]),
    ],
)
def test_an_answer_that_cannot_be_is_not_believed(
    kind: str, blocks: list[dict[str, object] | bytes]
) -> None:
    answers = io.BytesIO()
    for block in blocks:
        (write_data if isinstance(block, bytes) else write_message)(answers, block)  # type: ignore[operator]
    answers.seek(0)
    order = Order(format="x", kind=kind, rate=8000, fps=4.0)  # type: ignore[arg-type]
    with pytest.raises(PipeError):
        AnswerReader(order, LIMITS).read(answers)


@pytest.mark.parametrize(
    "data", [b"", b"m", b"m" + bytes(7), b"x" + bytes(8), b"m" + b"\xff" * 8, b"d" + b"\xff" * 8]
)
def test_neither_is_what_is_no_message(data: bytes) -> None:
    with pytest.raises(PipeError):
        read(io.BytesIO(data), 100)
    length = len(b"[1]").to_bytes(8, "big")
    for text in (b"[1]", b"{1}", b"\xff\xff\xff"):
        with pytest.raises(PipeError):
            read(io.BytesIO(b"m" + length + text), 100)
