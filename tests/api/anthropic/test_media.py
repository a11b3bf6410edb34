"""Images and documents in Anthropic's API, sent by its SDK."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.clients import use_anthropic
from tests.support.media_files import image_file
from tests.support.pdf_files import pdf_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting

pytestmark = pytest.mark.system

PNG = b64encode(image_file(size=(8, 4))).decode()
NOTES = {"type": "text", "media_type": "text/plain", "data": "Cats have nine lives."}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}


def image(data: Any = PNG, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


UNTYPED = image(f"data:image/png;base64,{PNG}", "application/octet-stream")


def asked(*content: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": list(content)}],
    }


async def test_a_message_with_images_documents_and_results(tmp_path: Path) -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    file = tmp_path / "cat.png"
    file.write_bytes(image_file(size=(8, 4)))
    notes = {"type": "document", "source": NOTES, "title": "notes.txt"}
    question: Any = asked(image(), image(file), UNTYPED, notes, {"type": "text", "text": "So?"})
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [image()]}
    called: Any = asked("Look.") | {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [result]},
        ]
    }

    def use(client: anthropic.Anthropic) -> None:
        whole = client.messages.create(**question)
        with client.messages.stream(**question) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert block.type == "text" and block.text == "A cat."
        counted = client.messages.count_tokens(model="m", messages=question["messages"])
        assert counted.input_tokens == whole.usage.input_tokens
        client.messages.create(**called)

    await use_anthropic(backend, use)
    *prompts, last = prompts
    said = "(image 8x4)(image 8x4)(image 8x4)File: notes.txt\n```\nCats have nine lives.\n```\nSo?"
    assert len(prompts) == 2 and all(said in prompt for prompt in prompts)
    assert "(image 8x4)" in last


async def test_a_pdf() -> None:
    pytest.importorskip("pypdfium2", reason="the extra trioserve[pdf] is not installed")
    backend, prompts = noting("Yes.", projector=WordProjector())
    data = b64encode(pdf_file("One")).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    question: Any = asked({"type": "document", "source": source, "title": "a.pdf"})
    await use_anthropic(backend, lambda client: client.messages.create(**question))
    assert "File: a.pdf, page 1\n```\nOne\n```(image 1536x768)" in prompts[0]


WRONG = [
    (image(b64encode(b"no image").decode()), "'messages[0].content[0].source.data'"),
    (image("?"), "'messages[0].content[0].source.data' is not valid base64."),
    (image(media_type="text/html"), "'messages[0].content[0].source.media_type'"),
    (
        {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}},
        "'messages[0].content[0].source.url'",
    ),
]


@pytest.mark.parametrize(
    ("sees", "cases"), [(False, [(image(), "image input is not supported")]), (True, WRONG)]
)
async def test_errors_are_those_of_the_sdk(sees: bool, cases: list[tuple[Any, str]]) -> None:
    def use(client: anthropic.Anthropic) -> None:
        for block, problem in cases:
            question: Any = asked(block)
            for send in (
                partial(client.messages.create, **question),
                partial(client.messages.create, **question, stream=True),
                partial(client.messages.count_tokens, model="m", messages=question["messages"]),
            ):
                with pytest.raises(anthropic.BadRequestError) as caught:
                    send()
                error: Any = caught.value.body
                assert error["error"]["type"] == "invalid_request_error"
                assert problem in error["error"]["message"]

    await use_anthropic(answering("A cat.", projector=WordProjector(sees=sees)), use)
