"""Pages from other origins: which may use the API, as ``--cors-origins`` and its like say.

A page that `trioserve` serves itself needs nothing of this. llama-server lets every origin in
unless told otherwise; here the default is those on this machine, because a web page somewhere
must not be able to use a server without keys.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import rate_limits
from trioserve.api.base.intake import intake_of
from trioserve.config import Config

#: Seconds that a browser may remember the answer to a preflight request.
_MAX_AGE = "600"

_EXPOSED = ", ".join(
    (
        "Location",
        "Mcp-Protocol-Version",
        "Mcp-Session-Id",
        "Preference-Applied",
        "Request-Id",
        "Retry-After",
        "WWW-Authenticate",
        "X-Request-Id",
        *rate_limits.HEADERS,
    )
)


def is_local(origin: str) -> bool:
    """Whether an origin is a page that this machine serves."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed(origin: str, config: Config) -> str | None:
    """What ``Access-Control-Allow-Origin`` says to a page of this origin; None: it says nothing."""
    names = [name.strip() for name in config.cors_origins.split(",")]
    if "*" in names:
        # With credentials, browsers do not take the star.
        return origin if origin and config.cors_credentials else "*"
    if origin in names or ("localhost" in names and is_local(origin)):
        return origin
    return None


def headers_for(origin: str, method: str, config: Config) -> dict[str, str]:
    """The headers by which a browser knows whether a page of this origin may read an answer."""
    allowing = allowed(origin, config)
    if not allowing:
        return {}
    headers = {
        "Access-Control-Allow-Origin": allowing,
        "Access-Control-Expose-Headers": _EXPOSED,
    }
    if config.cors_credentials:
        headers["Access-Control-Allow-Credentials"] = "true"
    if method == "OPTIONS":
        headers["Access-Control-Allow-Methods"] = config.cors_methods
        headers["Access-Control-Allow-Headers"] = config.cors_headers
        headers["Access-Control-Max-Age"] = _MAX_AGE
    return headers


def install(app: Quart) -> None:
    """Answer preflight requests, and mark answers for the pages that may read them."""

    async def preflight() -> Response | None:
        # Without a key: browsers send none with these.
        if request.method == "OPTIONS":
            return Response()  # 200, as in llama-server
        return None

    async def mark(response: Response) -> Response:
        origin = request.headers.get("Origin", "")
        response.headers.add("Vary", "Origin")
        response.headers.update(headers_for(origin, request.method, intake_of(app).config))
        return response

    app.before_request(preflight)
    app.after_request(mark)
