"""Images and documents in Anthropic's API, sent by its SDK."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.clients import use_anthropic
from tests.support.media_files import image_file
from tests.support.pdf_files import pdf_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting

PNG = b64encode(image_file(size=(8, 4))).decode()
NOTES = {"type": "text", "media_type": "text/plain", "data": "Cats have nine lives."}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}


def image(data: Any = PNG, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def asked(*content: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": list(content)}],
    }


async def test_a_message_with_an_image_and_a_document(tmp_path: Path) -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    file = tmp_path / "cat.png"
    file.write_bytes(image_file(size=(8, 4)))
    question: Any = asked(
        image(),
        image(file),
        {"type": "document", "source": NOTES, "title": "notes.txt"},
        {"type": "text", "text": "So?"},
    )

    def use(client: anthropic.Anthropic) -> None:
        whole = client.messages.create(**question)
        with client.messages.stream(**question) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert block.type == "text" and block.text == "A cat."
        counted = client.messages.count_tokens(model="m", messages=question["messages"])
        assert counted.input_tokens == whole.usage.input_tokens

    await use_anthropic(backend, use)
    said = "(image 8x4)(image 8x4)File: notes.txt\n```\nCats have nine lives.\n```\nSo?"
    assert all(said in prompt for prompt in prompts)


async def test_a_pdf() -> None:
    pytest.importorskip("pypdfium2", reason="the extra trioserve[pdf] is not installed")
    backend, prompts = noting("Yes.", projector=WordProjector())
    data = b64encode(pdf_file("One")).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    question: Any = asked({"type": "document", "source": source, "title": "a.pdf"})

    def use(client: anthropic.Anthropic) -> None:
        client.messages.create(**question)

    await use_anthropic(backend, use)
    assert "File: a.pdf, page 1\n```\nOne\n```(image 1536x768)" in prompts[0]


async def test_a_tool_returns_an_image() -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [image()]}
    question: Any = asked("Look.") | {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [result]},
        ]
    }

    def use(client: anthropic.Anthropic) -> None:
        client.messages.create(**question)

    await use_anthropic(backend, use)
    assert "(image 8x4)" in prompts[0]


@pytest.mark.parametrize(
    ("block", "sees", "problem"),
    [
        (image(), False, "image input is not supported"),
        (image(b64encode(b"no image").decode()), True, "'messages[0].content[0].source.data'"),
        (image("?"), True, "'messages[0].content[0].source.data' is not valid base64."),
        (image(media_type="text/html"), True, "'messages[0].content[0].source.media_type'"),
        (
            {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}},
            True,
            "'messages[0].content[0].source.url'",
        ),
    ],
)
async def test_errors_are_those_of_the_sdk(block: dict[str, Any], sees: bool, problem: str) -> None:
    question: Any = asked(block)

    def use(client: anthropic.Anthropic) -> None:
        for send in (
            lambda: client.messages.create(**question),
            lambda: client.messages.create(**question, stream=True),
            lambda: client.messages.count_tokens(model="m", messages=question["messages"]),
        ):
            with pytest.raises(anthropic.BadRequestError) as caught:
                send()
            error: Any = caught.value.body
            assert error["error"]["type"] == "invalid_request_error"
            assert problem in error["error"]["message"]

    await use_anthropic(answering("A cat.", projector=WordProjector(sees=sees)), use)
