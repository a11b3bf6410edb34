"""Images and sound in OpenAI's chats, on the wire."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import httpx
import openai
import pytest

from tests.support.clients import client_of, use_openai
from tests.support.media_files import image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import noting
from trioserve.testing import ScriptedBackend

pytestmark = pytest.mark.system

PNG = b64encode(image_file(size=(8, 4))).decode()
WAV = b64encode(wav_file(0.5)).decode()
PATH = "messages[0].content[1]"


def user(*parts: Any) -> list[dict[str, Any]]:
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": said}]


def image(url: str = f"data:image/png;base64,{PNG}") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def sound(data: str = WAV) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def seeing(**projector: bool) -> tuple[ScriptedBackend, list[str]]:
    return noting("A cat.", projector=WordProjector(**projector))


async def test_chats_with_images_and_sound() -> None:
    backend, prompts = seeing()
    async with client_of(backend) as client:

        async def ask(*messages: Any, path: str = "", **fields: Any) -> Any:
            body = {"messages": messages, **fields}
            answer = await client.post(f"/v1/chat/completions{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        messages = user("What", "is this:", image(), "and", sound(), "?")
        untyped = (
            image(f" data:application/octet-stream;base64,{PNG} "),
            image(f"data:;base64,{PNG}"),
        )
        await ask(*user("Two:", *untyped))
        assert "Two:(image 8x4)(image 8x4)" in prompts[-1]
        data, count = await ask(*messages), await ask(*messages, path="/input_tokens")
        assert data["choices"][0]["message"]["content"] == "A cat."
        assert "What\nis this:(image 8x4)and(sound 0.5s)?" in prompts[-1]
        assert count["input_tokens"] == data["usage"]["prompt_tokens"]
        # The marker is text, if a user writes it.
        marker = (await client.get("/props")).json()["media_marker"]
        await ask(*user(marker, image()))
        assert f"{marker}(image 8x4)" in prompts[-1]
        # The same image may be there several times.
        said = {"role": "assistant", "content": "x"}
        again = await ask(*user(image()), said, *user("And", image(), "?"), n=2)
        assert len(again["choices"]) == 2
        assert prompts[-1].count("(image 8x4)") == 2
        # A message with an image is continued.
        said = {"role": "assistant", "content": [image(), {"type": "text", "text": "It is"}]}
        begun = await ask(*user("Draw it"), said)
        assert begun["choices"][0]["message"]["content"] == "It isA cat."
        assert prompts[-1].endswith("(image 8x4)It is")


async def test_the_sdk_sends_an_image_and_streams() -> None:
    backend, prompts = seeing()

    def use(client: openai.OpenAI) -> None:
        messages: Any = user("What is this?", image())
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "A cat."

    await use_openai(backend, use)
    assert "(image 8x4)" in prompts[0]


@pytest.mark.parametrize(
    ("projector", "parts"),
    [
        ({"sees": False}, [image(), {"type": "video_url", "video_url": {"url": PNG}}]),
        ({"hears": False}, [sound()]),
    ],
)
async def test_media_that_the_model_does_not_take_are_refused(
    projector: dict[str, bool], parts: list[dict[str, Any]]
) -> None:
    backend, _ = seeing(**projector)
    async with client_of(backend) as client:
        for part in parts:
            await assert_refused(client, part, 400, "you may need to provide the mmproj")


async def test_invalid_images_are_refused() -> None:
    backend, prompts = seeing()
    async with client_of(backend) as client:
        for part in (
            image("malformed!"),
            image(b64encode(b"no image").decode()),
            image("data:text/html;base64,aGVsbG8="),
            image("https://example.org/cat.png"),
            image("file:///etc/passwd"),
            image(f"data:audio/wav;base64,{WAV}"),
            sound(PNG),
            image(b64encode(image_file(size=(1, 4))).decode()),
        ):
            await assert_refused(client, part, "invalid_media", f"'{PATH}.")
    assert prompts == []


async def assert_refused(
    client: httpx.AsyncClient, part: dict[str, Any], code: int | str, reason: str
) -> None:
    body = {"messages": user("What is this?", part)}
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == f"{PATH}.{part['type']}"
        assert error["code"] == code
        assert reason in error["message"]
