"""The bundled model answers questions about new drawings and strange voices."""

from __future__ import annotations

import base64
import itertools
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from examples.bundled_model.vision.paint import Picture, new_picture
from examples.bundled_model.vision.questions import ASK, kinds
from tests.support.media_files import float_wav
from trioserve import Config, Server

pytestmark = pytest.mark.system

#: Voices that the ears were not trained with; each file is named by the digits in it.
SPOKEN = sorted(Path(__file__).with_name("spoken").glob("*.flac"))
#: A sentence has fewer tokens, and with thinking it is said twice.
GREEDY = {"temperature": 0, "max_tokens": 64}


@pytest.fixture(scope="module")
def drawings() -> list[tuple[Picture, Any]]:
    rng = Random(7)
    return [new_picture(rng) for _ in range(16)]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server(Config(threads=1, ctx_size=2048, parallel=2)) as server:
        yield server


def asked(question: str, pixels: Any) -> dict[str, Any]:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [picture, {"type": "text", "text": question}]}


def fact(kind: str, shown: Picture) -> str:
    """The word that a right answer has in it."""
    return {"color": shown.color, "shape": shown.shape}.get(kind) or str(shown.number)


@pytest.mark.parametrize("thinking", [False, True])
async def test_it_sees_colors_shapes_numbers_and_digits(
    server: Server, drawings: list[tuple[Picture, Any]], thinking: bool
) -> None:
    wrong, n_asked = [], 0
    for shown, pixels in drawings:
        for kind in set(kinds(shown)) - {"describe"}:
            done = await server.chat(
                [asked(ASK[kind][0], pixels)],
                template_kwargs={"enable_thinking": thinking},
                **GREEDY,
            )
            n_asked += 1
            if fact(kind, shown) not in done.message.content:
                wrong.append((kind, shown, done.message.content))
    assert len(wrong) <= 0.1 * n_asked, wrong


async def test_a_second_picture_is_another_one(
    server: Server, drawings: list[tuple[Picture, Any]]
) -> None:
    digits = [(shown, pixels) for shown, pixels in drawings if shown.shape is None]
    wrong = []
    for (first, before), (second, after) in itertools.pairwise(digits):
        messages = [
            asked("What digit is it?", before),
            {"role": "assistant", "content": f"The number is {first.number}."},
            asked("What digit is it?", after),
        ]
        done = await server.chat(messages, template_kwargs={"enable_thinking": False}, **GREEDY)
        if str(second.number) not in done.message.content:
            wrong.append((first, second, done.message.content))
    assert len(wrong) <= 0.2 * (len(digits) - 1), wrong


def printed(digit: int, height: int, ink: str, paper: str) -> Any:
    """A digit in Pillow's own font, which the eyes were not trained with."""
    picture = Image.new("RGB", (128, 128), paper)
    font = ImageFont.load_default(height)
    ImageDraw.Draw(picture).text((64, 64), str(digit), ink, font, anchor="mm")
    return np.asarray(picture)


@pytest.mark.parametrize(("ink", "paper"), [("black", "white"), ("white", "black")])
async def test_it_reads_printed_digits(server: Server, ink: str, paper: str) -> None:
    wrong = []
    for height in (60, 90, 120):
        for digit in range(10):
            done = await server.chat(
                [asked("What digit is it?", printed(digit, height, ink, paper))],
                template_kwargs={"enable_thinking": False},
                **GREEDY,
            )
            if done.message.content != f"The number is {digit}.":
                wrong.append((height, digit, done.message.content))
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("file", SPOKEN, ids=lambda file: file.stem)
async def test_it_hears_digits(server: Server, file: Path) -> None:
    transcript = await server.transcribe(file.read_bytes(), temperature=0)
    assert transcript.text == file.stem.replace("-", " ")


@pytest.mark.parametrize("file", SPOKEN, ids=lambda file: file.stem)
async def test_it_hears_digits_without_silence_around_them(server: Server, file: Path) -> None:
    with av.open(file) as container:
        frames = [each.to_ndarray()[0] for each in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    samples = np.concatenate(frames).astype(np.float32)
    loud = np.flatnonzero(np.abs(samples) > 0.05 * np.abs(samples).max())
    cut = samples[loud[0] : loud[-1] + 1] / np.abs(samples).max()
    transcript = await server.transcribe(float_wav(cut, rate), temperature=0)
    assert transcript.text == file.stem.replace("-", " ")
