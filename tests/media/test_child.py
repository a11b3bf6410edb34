"""The rights of the process that decodes are enough for every format."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from tests.support.media_files import image_file, wav_file
from trioserve.children.child import ChildError
from trioserve.errors import InvalidMediaError
from trioserve.media import child, serving
from trioserve.media.orders import Answer, Data, End, MediaLimits, Order, Picture, Refused, Text
from trioserve.media.process import AnswerReader
from trioserve.types import DecodedAudio, DecodedImage

LIMITS = MediaLimits(max_pixels=1000, max_bytes=2**20, max_seconds=2, max_frames=2)

#: Root may have any number of threads, so it changes its user first. The files have been read by
#: then: other users may not read them where root keeps its Python.
CONFINED = """
import os
from tests.support.media_bombs import GOOD
from trioserve.media import child, orders, serving
from trioserve.media.orders import Data, MediaLimits, Order

texts = [make() for make in GOOD.values()]
if os.getuid() == 0:
    os.setuid(65534)
serving.confine(MediaLimits())
for data in texts:
    format = orders.sniff(data)
    order = Order(format=format.name, kind=format.kinds[0], rate=16000, fps=4.0)
    answers = child.decode(order, data, MediaLimits())
    print(format.name, sum(len(one.data) for one in answers if isinstance(one, Data)))
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


def read(order: Order, payloads: Iterable[bytes]) -> object:
    return AnswerReader(order, LIMITS, iter(payloads).__next__).read()


def test_orders_are_served_until_there_are_no_more() -> None:
    image = Order(format="png", kind="image")
    sound = Order(format="wav", kind="audio", rate=8000)
    orders = list[bytes]()
    for order, data in (
        (image, image_file(size=(8, 4))),
        (image, image_file(size=(40, 30))),
        (image, image_file()[:45]),
        (sound, wav_file(0.1)),
    ):
        orders += (msgspec.msgpack.encode(order), data)
    answers = list[bytes]()
    serving.serve(LIMITS, iter([*orders, None]).__next__, answers.append, child.decode)
    payloads = iter(answers)
    found = read(image, payloads)
    assert isinstance(found, DecodedImage) and found.width == 8
    with pytest.raises(InvalidMediaError, match="has 40 x 30 pixels, and 1000 in all are the most"):
        read(image, payloads)
    with pytest.raises(InvalidMediaError, match=r"cannot be read \("):
        read(image, payloads)
    heard = read(sound, payloads)
    assert isinstance(heard, DecodedAudio) and heard.rate == 8000
    assert not list(payloads)


def test_a_long_row_comes_in_pieces() -> None:
    limits = MediaLimits()
    order = Order(format="png", kind="image")
    answers = list(child.decode(order, image_file(size=(500_000, 2)), limits))
    assert answers[0] == Picture(0.0, 500_000, 2)
    sizes = [len(one.data) for one in answers[1:] if isinstance(one, Data)]
    assert max(sizes) == 2**20 and sum(sizes) == 3_000_000


DOT = Picture(0.0, 1, 1)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("image", [End()]),
        ("image", [Data(b"x")]),
        ("image", [Data(b"")]),
        ("image", [DOT, Data(b"1234")]),
        ("image", [DOT, Data(b"12"), End()]),
        ("image", [DOT, Data(b"")]),
        ("image", [DOT, Data(b"12"), Text(0, "a")]),
        ("image", [DOT, Data(b"123"), DOT]),
        ("image", [Picture(0.0, 100, 100)]),
        ("image", [Picture(0.0, -1, -1)]),
        ("image", [Picture(0.0, 0, 1)]),
        ("image", [Picture(float("nan"), 1, 1)]),
        ("image", [Text(0, "a")]),
        ("audio", [DOT]),
        ("audio", [Data(b"123"), End()]),
        ("audio", [Data(bytes(4 * 8000 * 4))]),
        ("video", [*([DOT, Data(b"123")] * 3), End()]),
        ("video", [Picture(99.0, 1, 1), Data(b"123"), End()]),
        ("document", [Text(1, "a")]),
        ("document", [Text(-1, "a")]),
        ("document", [Text(0, "a"), Text(1, "b"), Text(2, "c")]),
        ("document", [*[Text(0, "a" * 2**20)] * 4, Text(0, "a")]),
        ("document", [DOT]),
    ],
)
def test_an_answer_that_cannot_be_is_not_believed(kind: str, answers: list[Answer]) -> None:
    order = Order(format="x", kind=kind, rate=8000, fps=4.0)  # type: ignore[arg-type]
    with pytest.raises(ChildError):
        read(order, map(msgspec.msgpack.encode, answers))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(End())[:-1],
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"type": "picture", "at": 0.0, "width": 1.5, "height": 1}),
        msgspec.msgpack.encode({"type": "picture", "at": 0.0, "width": 1}),
        msgspec.msgpack.encode({"type": "picture", "at": 0.0, "width": "1", "height": 1}),
        msgspec.msgpack.encode({"type": "other"}),
        b"\x82\xa4type\xa7refused\xa6reason\xa2\xff\xff",
    ],
)
def test_neither_is_what_is_no_answer(payload: bytes) -> None:
    with pytest.raises(ChildError):
        read(Order(format="png", kind="image"), [payload])


def test_a_reason_is_bounded() -> None:
    refused = msgspec.msgpack.encode(Refused("x" * 2**20))
    with pytest.raises(InvalidMediaError) as caught:
        read(Order(format="png", kind="image"), [refused])
    assert caught.value.message == "x" * 300
