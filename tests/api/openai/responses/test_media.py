"""Images, sound and files in the Responses API, sent by OpenAI's SDK."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import Any

import openai
import pytest

from tests.support.clients import use_openai
from tests.support.media_files import image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting

pytestmark = pytest.mark.system

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
    called: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image()]},
    ]

    def use(client: openai.OpenAI) -> None:
        whole = client.responses.create(model="m", input=items)
        with client.responses.stream(model="m", input=items) as stream:
            streamed = stream.get_final_response()
        assert whole.output_text == streamed.output_text == "A cat."
        counted = client.responses.input_tokens.count(model="m", input=items)
        assert whole.usage is not None
        assert counted.input_tokens == whole.usage.input_tokens
        assert client.responses.create(model="m", input=called).output_text == "A cat."

    await use_openai(backend, use)
    *prompts, last = prompts
    said = "So?(image 8x4)(sound 0.5s)File: notes.txt\n```\nCats have nine lives.\n```"
    assert len(prompts) == 2 and all(said in prompt for prompt in prompts)
    assert "(image 8x4)" in last


WRONG = [
    (image("data:text/html;base64,aGVsbG8="), "image_url"),
    (image(b64encode(b"no image").decode()), "image_url"),
    (image("https://example.org/cat.png"), "image_url"),
    (file(b64encode(b"\xff\xfe\xfd").decode()), "file_data"),
]


@pytest.mark.parametrize(("sees", "cases"), [(False, [(image(), "image_url")]), (True, WRONG)])
async def test_the_sdk_raises_errors_that_name_the_part(
    sees: bool, cases: list[tuple[Any, str]]
) -> None:
    def use(client: openai.OpenAI) -> None:
        for part, field in cases:
            items: Any = user(part)
            for send in (
                partial(client.responses.create, input=items),
                partial(client.responses.create, input=items, stream=True),
                partial(client.responses.input_tokens.count, input=items),
            ):
                with pytest.raises(openai.BadRequestError) as caught:
                    send(model="m")
                assert caught.value.param == f"{PATH}.{field}"

    await use_openai(answering("A cat.", projector=WordProjector(sees=sees)), use)
