"""``/cors-proxy``: requests of a page to an MCP server of another origin.

A browser lets a page reach another origin only with that origin's consent, which most MCP servers
do not give. The proxy sends the body and the headers that the page marks, and nothing else of the
page's request: no cookie, and no API key of this server. The page can read the response, but the
browser does not treat it as a page of this origin.

`FetchRules` decides which hosts requests may reach, as for fetched files: public addresses, unless
``--ui-mcp-proxy-hosts`` names others.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import attrs
import httpcore2
import trio

from trioserve.api.base import answers
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Pieces, Reply
from trioserve.api.base.routes import Query, Routes, reads
from trioserve.api.edge import access
from trioserve.api.openapi import gives, takes
from trioserve.config import Config
from trioserve.errors import (
    InvalidMediaError,
    InvalidRequestError,
    PermissionDeniedError,
    ProxyError,
    ProxyTimeoutError,
)
from trioserve.fair_limiter import FairLimiter
from trioserve.log import get_logger
from trioserve.media.fetch import FAILURES, Dialer, FetchRules, Target, parse_url, url_of

if TYPE_CHECKING:
    from trioserve.api.service import AppState

routes = Routes()

_log = get_logger("trioserve.api")

#: Headers of this name with one of these in front are sent on, and no others.
_PREFIXES = ("x-llama-server-proxy-header-", "x-trioserve-proxy-header-")

#: Headers that belong to a connection and not to a request.
_OF_CONNECTION = frozenset(
    {
        "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate",
        "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip

#: Headers of an answer that a page gets to see, and those that begin so. Others would say
#: something of this origin, or belong to the connection.
_SHOWN = frozenset(
    {
        "cache-control", "content-encoding", "content-language", "content-length", "content-type",
        "etag", "last-modified", "location", "retry-after", "www-authenticate",
    }
)  # fmt: skip
_SHOWN_PREFIX = "mcp-"

#: One challenge of the scheme Bearer, with parameters. Another scheme may follow a comma.
_PARAMETER = r"""[\w.~+/-]+\s*=\s*([\w.~+/-]+|"[^"\\]*")"""
_BEARER_ONLY = re.compile(rf"bearer(\s+{_PARAMETER}(\s*,\s*{_PARAMETER})*)?\s*", re.IGNORECASE)

#: An answer that is opened in place of a page can do nothing in the name of this server.
_FENCE = {
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: The maximum number of concurrent requests to other servers, and of those of one client.
_MAX_REQUESTS, _MAX_REQUESTS_EACH = 160, 128

#: Seconds until there is a connection, and until an answer begins. An MCP server may answer when
#: its tool is done.
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 600.0


@attrs.define(eq=False)
class Proxy:
    """The requests of an app, as `AppState.proxy`."""

    dialer: Dialer
    #: Requests do not wait: those before them may last as long as an MCP server likes.
    places: FairLimiter = attrs.field(
        factory=lambda: FairLimiter(_MAX_REQUESTS, _MAX_REQUESTS_EACH, max_waiting=0)
    )

    @classmethod
    def of(cls, config: Config) -> Proxy:
        """Make the one of a configuration."""
        rules = FetchRules(config.ui_mcp_proxy_hosts or ("all",), "--ui-mcp-proxy-hosts")
        return cls(Dialer(rules))


@routes.get("/cors-proxy")
@routes.post("/cors-proxy")
@routes.delete("/cors-proxy")
@reads(bytes)
@takes(None, query={"url": "where the request goes"})
@gives(answers.Bytes, "*/*")
async def forward(body: bytes, caller: Caller, app: AppState, query: Query) -> Reply:
    """Send a request of a page to an MCP server of another origin, with ``--ui-mcp-proxy``."""
    config = app.config
    if not config.has_mcp_proxy:
        raise PermissionDeniedError("This feature is disabled. Start the server with "
                                    "--ui-mcp-proxy.")  # fmt: skip
    access.check_embedding(caller.headers, config)
    if caller.headers.get("Sec-Fetch-Dest", "empty") != "empty":
        raise PermissionDeniedError("Only scripts of the page may send requests here.")
    target = _target(query.get("url", ""))
    headers = [(b"host", target.netloc.encode()), *_headers(caller)]
    if body or caller.method == "POST":
        headers.append((b"content-length", b"%d" % len(body)))
    await caller.open(app.proxy.places.place())
    try:
        connection = await app.proxy.dialer.connection(target)
    except InvalidMediaError as error:
        raise PermissionDeniedError(f"The MCP server {error.message}.") from None
    await caller.open(connection)
    answer = await _exchange(
        connection,
        httpcore2.Request(
            caller.method,
            url_of(target),
            headers=headers,
            content=body,
            extensions={"timeout": {"connect": _CONNECT_SECONDS}},
        ),
        target,
    )
    _log.info("forwarded", method=caller.method, to=target.netloc, status=answer.status)
    shown = _shown(answer)
    kind = shown.get("content-type", "")
    return Pieces(pieces=_body(answer), status=answer.status, headers=shown, content_type=kind)


def _target(url: str) -> Target:
    """Read where a request goes. Raises InvalidRequestError."""
    if not url:
        raise InvalidRequestError.at("url", "must say where the request goes.")
    try:
        return parse_url(url)
    except InvalidMediaError as error:
        raise InvalidRequestError(f"The MCP server {error.message}.", param="url") from None


def _headers(caller: Caller) -> Iterator[tuple[bytes, bytes]]:
    """The headers that the page wants to be sent. Raises InvalidRequestError."""
    for name, value in caller.headers.items():
        prefix = next((one for one in _PREFIXES if name.lower().startswith(one)), None)
        if prefix is None:
            continue
        wanted = name.lower().removeprefix(prefix)
        if wanted in _OF_CONNECTION or not wanted:
            raise InvalidRequestError(f"'{wanted}' is not a header that is sent on.", param=name)
        yield wanted.encode("latin-1"), value.encode("latin-1")  # as they came


async def _exchange(
    connection: httpcore2.AsyncHTTPConnection, sent: httpcore2.Request, target: Target
) -> httpcore2.Response:
    """Send a request; returns when the answer begins.

    Raises:
        ProxyError: it does not answer.
        ProxyTimeoutError: it took too long.
    """
    try:
        with trio.move_on_after(_ANSWER_SECONDS):
            return await connection.handle_async_request(sent)
    except FAILURES as error:
        reason = str(error) or type(error).__name__
        raise ProxyError(f"{target.netloc} cannot be reached: {reason}.") from error
    raise ProxyTimeoutError(f"{target.netloc} did not answer within {_ANSWER_SECONDS:g} seconds.")


def _shown(answer: httpcore2.Response) -> dict[str, str]:
    """The headers of an answer that the page gets."""
    headers = {}
    is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in answer.headers)
    for raw_name, raw_value in answer.headers:
        name, value = raw_name.decode("ascii").lower(), raw_value.decode("latin-1")
        if name == "www-authenticate" and not _BEARER_ONLY.fullmatch(value):
            continue  # the browser would ask for a password, in the name of this server
        if name == "content-length" and is_chunked:
            continue
        if name in _SHOWN or name.startswith(_SHOWN_PREFIX):
            headers[name] = value
    return headers | _FENCE


async def _body(answer: httpcore2.Response) -> AsyncGenerator[bytes, None]:
    """Forward the body of an answer as it arrives. Raises ProxyError if it breaks off."""
    async with aclosing(answer.aiter_stream()) as parts:
        try:
            async for part in parts:
                yield part
        except FAILURES as error:
            raise ProxyError(f"The answer of another server broke off: {error!r}.") from error
