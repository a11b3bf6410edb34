"""Ollama's routes for the web: ``/api/web_search`` and ``/api/web_fetch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field, integer_in
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Routes
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, PermissionDeniedError, WebToolError
from trioserve.server.observers.observer import ToolRecord, observed_tool
from trioserve.tools.tool import ToolCallContext
from trioserve.tools.web.scope import MAX_RESULTS, N_RESULTS, WebScope
from trioserve.tools.web.tools import FETCH, SEARCH, WebTool, head_of

if TYPE_CHECKING:
    from trioserve.api.service import AppState

routes = Routes()

#: Errors that are the client's.
_INVALID = frozenset({"invalid_tool_input", "query_too_long", "url_too_long", "url_not_allowed"})


@attrs.frozen(kw_only=True)
class WebSearchRequest(RequestBody):
    """``POST /api/web_search``."""

    query: str = field(read=readers.text_of(limits.MAX_NAME))
    max_results: int | None = field(read=integer_in(1, MAX_RESULTS), default=None)


@attrs.frozen(kw_only=True)
class WebFetchRequest(RequestBody):
    """``POST /api/web_fetch``."""

    url: str = field(read=readers.text_of(limits.MAX_PATH))


class WebSearchResult(Answer):
    """A page that was found."""

    title: str
    url: str
    content: str


class WebSearchResults(Answer):
    """The results of a search."""

    results: Sequence[WebSearchResult]


class WebPage(Answer):
    """The text of a page."""

    title: str
    content: str
    links: Sequence[str]


@routes.post("/api/web_search", "/api/experimental/web_search")
@takes(WebSearchRequest)
@gives(WebSearchResults)
async def search(request: WebSearchRequest, caller: Caller, app: AppState) -> Reply:
    """Search the web, with ``--web-search``."""
    scope = WebScope(n_results=request.max_results or N_RESULTS)
    found = (await _call(app, caller, SEARCH, scope, query=request.query))["results"]
    told = [WebSearchResult(each["title"], each["url"], each["content"]) for each in found]
    return json(WebSearchResults(told))


@routes.post("/api/web_fetch", "/api/experimental/web_fetch")
@takes(WebFetchRequest)
@gives(WebPage)
async def fetch(request: WebFetchRequest, caller: Caller, app: AppState) -> Reply:
    """Read a page of the web, with ``--web-fetch``."""
    page = await _call(app, caller, FETCH, WebScope(), url=request.url)
    text = page["plain_text_response"].removeprefix(head_of(page["url"], page["title"]))
    return json(WebPage(page["title"], text, page["links"]))


async def _call(
    app: AppState, caller: Caller, name: str, scope: WebScope, **arguments: str
) -> Mapping[str, Any]:
    """Call one of the tools for a client.

    Raises:
        PermissionDeniedError: the server does not have it.
        InvalidRequestError: it refuses what the client has given.
        WebToolError: it has failed.
    """
    tool = app.tools.tools.get(name) if app.config.has_web_tools else None
    if not isinstance(tool, WebTool):
        flag = name.replace("_", "-")
        raise PermissionDeniedError(f"This feature is disabled. Start the server with --{flag}.")
    record = ToolRecord(name, tool.info.kind, context=caller.context())
    context = ToolCallContext(count=caller.held.change)
    with observed_tool(app.observers, record):
        result = await app.tool_calls.run(tool.within(scope), arguments, context, record)
    if result.is_error:
        message, reason = str(result.answer["error"]), result.answer["error_code"]
        if reason in _INVALID:
            raise InvalidRequestError(message, param=next(iter(arguments)))
        raise WebToolError(message, reason=reason)
    return result.answer
