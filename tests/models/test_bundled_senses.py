"""The bundled model answers questions about new drawings, through the server."""

from __future__ import annotations

import base64
from io import BytesIO
from random import Random

import pytest
from PIL import Image

from examples.bundled_model.vision.paint import new_picture
from examples.bundled_model.vision.questions import ASK, answer, kinds
from trioserve import Config, Server
from trioserve.models import BUNDLED_PROJECTOR

pytestmark = pytest.mark.skipif(
    not BUNDLED_PROJECTOR.exists(), reason="this build has no eyes for the bundled model"
)
GREEDY = {"temperature": 0, "max_tokens": 24}


def content(question: str, pixels: object) -> list[dict[str, object]]:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


async def test_it_sees_colors_shapes_numbers_and_digits() -> None:
    rng, right, asked = Random(7), 0, 0
    async with Server(Config(threads=1, ctx_size=2048, parallel=2)) as server:
        for _ in range(16):
            shown, pixels = new_picture(rng)
            for kind in kinds(shown):
                if kind == "describe":
                    continue
                messages = [{"role": "user", "content": content(ASK[kind][0], pixels)}]
                done = await server.chat(messages, **GREEDY)
                right += done.message.content == answer(kind, shown)
                asked += 1
    assert right >= 0.85 * asked
