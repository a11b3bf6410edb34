"""`result_of`: what an MCP server answers, as the result of a tool."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from trioserve.tools.tool import ToolResult


def result_of(answer: CallToolResult) -> ToolResult:
    """The text of an answer. What is no text is named, so that the model knows that it was there.

    Structured content is left out where there is text, for servers send it as text as well.
    """
    text = "\n".join(_text_of(block) for block in answer.content)
    if not answer.content and answer.structured_content is not None:
        text = json.dumps(answer.structured_content, ensure_ascii=False)
    if answer.is_error:
        return ToolResult.of_error(text or "The tool has failed, and does not say why.")
    return ToolResult.of_text(text)


def _text_of(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return _not_shown(block.type, block.mime_type, block.data)
        case ResourceLink():
            return f"[resource {block.name}: {block.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case EmbeddedResource():
            assert isinstance(block.resource, BlobResourceContents)
            what = f"resource {block.resource.uri}"
            return _not_shown(what, block.resource.mime_type, block.resource.blob)


def _not_shown(what: str, mime_type: str | None, base64: str) -> str:
    kind = "" if mime_type is None else f", {mime_type}"
    return f"[{what}{kind}, {len(base64) * 3 // 4:,} bytes, not shown]"


def without_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for halves of surrogate pairs, which no Unicode text has."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value
