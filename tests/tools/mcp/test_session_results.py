"""What MCP servers answer, as a model and a client are told."""

from __future__ import annotations

from typing import Any

from mcp_types import CallToolResult

from trioserve.tools.mcp.messages import without_surrogates
from trioserve.tools.mcp.session import result_of


def result(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = CallToolResult.model_validate({"content": content, **fields})
    return dict(result_of(answer).answer)


def test_texts_are_joined() -> None:
    texts = [{"type": "text", "text": text} for text in ("one", "", "two")]
    assert result(*texts) == {"plain_text_response": "one\n\ntwo"}
    assert result() == {"plain_text_response": ""}


def test_structured_content_stands_in_for_text() -> None:
    assert result(structuredContent={"é": 1}) == {"plain_text_response": '{"é": 1}'}
    text = {"type": "text", "text": "{}"}
    assert result(text, structuredContent={"a": 1}) == {"plain_text_response": "{}"}


def test_errors() -> None:
    assert result({"type": "text", "text": "no"}, isError=True) == {"error": "no"}
    silent = {"error": "The tool has failed, and does not say why."}
    assert result(isError=True) == silent


def test_what_is_no_text_is_named() -> None:
    image = {"type": "image", "mimeType": "image/png", "data": "AAAA" * 1000}
    audio = {"type": "audio", "mimeType": "audio/wav", "data": "AAAA"}
    link = {"type": "resource_link", "name": "notes", "uri": "file:///notes.txt"}
    text = {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}}
    blob = {"type": "resource", "resource": {"uri": "file:///b.bin", "blob": "AAAA"}}
    assert result(image, audio, link, text, blob)["plain_text_response"].splitlines() == [
        "[image, image/png, 3,000 bytes, not shown]",
        "[audio, audio/wav, 3 bytes, not shown]",
        "[resource notes: file:///notes.txt]",
        "inside",
        "[resource file:///b.bin, 3 bytes, not shown]",
    ]


def test_halves_of_surrogate_pairs() -> None:
    value = {"a\ud800": ["\udc00", "\ud83d\ude00", 1, None, "ö"]}
    assert without_surrogates(value) == {"a\ufffd": ["\ufffd", "😀", 1, None, "ö"]}
