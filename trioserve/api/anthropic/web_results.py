"""Blocks of messages with the results of web tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from trioserve.api.anthropic.messages import SERVER_CALL, sign
from trioserve.api.base.web import Source
from trioserve.server.runs.events import ToolReturned
from trioserve.tools.web.tools import FETCH, head_of


def result(event: ToolReturned, found: Sequence[Source]) -> dict[str, Any]:
    """Write the block with the result of a call; `found` are the pages of a search."""
    name = event.call.tool.name
    return {
        "type": f"{name}_tool_result",
        "tool_use_id": f"{SERVER_CALL}{event.call.id}",
        "content": _page(event) if name == FETCH else _search(event, found),
        "caller": {"type": "direct"},
    }


def _search(event: ToolReturned, found: Sequence[Source]) -> Any:
    """Write what a search has found. The first result has what the model has read of all."""
    if event.is_error:
        return {"type": "web_search_tool_result_error", "error_code": _code(event, _SEARCH_CODES)}
    return [
        {
            "type": "web_search_result",
            "url": source.url,
            "title": source.title,
            "page_age": event.answer["results"][i]["date"] or None,
            "encrypted_content": sign(event.content, shown=i > 0),
        }
        for i, source in enumerate(found)
    ]


def _page(event: ToolReturned) -> Any:
    if event.is_error:
        return {"type": "web_fetch_tool_result_error", "error_code": _code(event, _FETCH_CODES)}
    url, title = event.answer["url"], event.answer["title"]
    text = event.content.removeprefix(head_of(url, title))
    source = {"type": "text", "media_type": "text/plain", "data": text}
    document = {"type": "document", "source": source, "title": title or None, "citations": None}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"type": "web_fetch_result", "url": url, "content": document, "retrieved_at": now}


#: The codes of errors that clients know.
_SEARCH_CODES = frozenset(
    {"invalid_tool_input", "max_uses_exceeded", "too_many_requests", "query_too_long"}
)
_FETCH_CODES = frozenset(
    {
        "invalid_tool_input", "url_too_long", "url_not_allowed", "url_not_in_prior_context",
        "url_not_accessible", "unsupported_content_type", "too_many_requests", "max_uses_exceeded",
        "content_too_large",
    }
)  # fmt: skip


def _code(event: ToolReturned, known: Collection[str]) -> str:
    code = str(event.answer.get("error_code", "invalid_tool_input"))
    return code if code in known else "unavailable"


def citation(source: Source) -> dict[str, Any]:
    """Write where a text cites a page that a search has found."""
    return {
        "type": "web_search_result_location",
        "url": source.url,
        "title": source.title,
        "cited_text": source.excerpt,
        "encrypted_index": "",
    }
