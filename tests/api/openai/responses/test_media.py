"""Images, sound and files in the Responses API, sent by OpenAI's SDK."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import openai
import pytest

from tests.support.clients import use_openai
from tests.support.media_files import image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting

PNG = b64encode(image_file(size=(8, 4))).decode()
WAV = b64encode(wav_file(0.5)).decode()
TEXT = b64encode(b"Cats have nine lives.").decode()
PATH = "input[0].content[0]"


def image(url: str = f"data:image/png;base64,{PNG}") -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def file(data: str) -> dict[str, Any]:
    return {"type": "input_file", "filename": "notes.txt", "file_data": data}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def test_a_response_to_an_image_sound_and_a_file() -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    items: Any = user(
        {"type": "input_text", "text": "So?"},
        image(),
        {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
        file(f"data:text/plain;base64,{TEXT}"),
    )

    def use(client: openai.OpenAI) -> None:
        whole = client.responses.create(model="m", input=items)
        with client.responses.stream(model="m", input=items) as stream:
            streamed = stream.get_final_response()
        assert whole.output_text == streamed.output_text == "A cat."
        counted = client.responses.input_tokens.count(model="m", input=items)
        assert whole.usage is not None
        assert counted.input_tokens == whole.usage.input_tokens

    await use_openai(backend, use)
    said = "So?(image 8x4)(sound 0.5s)File: notes.txt\n```\nCats have nine lives.\n```"
    assert all(said in prompt for prompt in prompts)


async def test_a_function_returns_an_image() -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image()]},
    ]

    def use(client: openai.OpenAI) -> None:
        assert client.responses.create(model="m", input=items).output_text == "A cat."

    await use_openai(backend, use)
    assert "(image 8x4)" in prompts[0]


@pytest.mark.parametrize(
    ("part", "sees", "field"),
    [
        (image(), False, "image_url"),
        (image("data:text/html;base64,aGVsbG8="), True, "image_url"),
        (image(b64encode(b"no image").decode()), True, "image_url"),
        (image("https://example.org/cat.png"), True, "image_url"),
        (file(b64encode(b"\xff\xfe\xfd").decode()), True, "file_data"),
    ],
)
async def test_errors_are_those_of_the_sdk(part: dict[str, Any], sees: bool, field: str) -> None:
    items: Any = user(part)

    def use(client: openai.OpenAI) -> None:
        for send in (
            lambda: client.responses.create(model="m", input=items),
            lambda: client.responses.create(model="m", input=items, stream=True),
            lambda: client.responses.input_tokens.count(model="m", input=items),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                send()
            assert caught.value.param == f"{PATH}.{field}"

    await use_openai(answering("A cat.", projector=WordProjector(sees=sees)), use)
