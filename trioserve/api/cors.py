"""Pages from other origins: those on this machine may read answers, and no others.

A page that `trioserve` serves itself needs nothing of this. llama-server lets every origin in
unless told otherwise; here a web page somewhere must not be able to use a server without keys.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Prefer, X-Api-Key, X-Request-Id, "
    "X-Request-Timeout",
    "Access-Control-Max-Age": "600",
}

_EXPOSED = "Location, Retry-After, X-Request-Id"


def is_local(origin: str) -> bool:
    """Whether an origin is a page that this machine serves."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def install(app: Quart) -> None:
    """Answer preflight requests, and mark answers for local pages."""

    async def preflight() -> Response | None:
        # Without a key: browsers send none with these.
        if request.method == "OPTIONS":
            return Response(status=204)
        return None

    async def mark(response: Response) -> Response:
        origin = request.headers.get("Origin", "")
        response.headers.add("Vary", "Origin")
        if is_local(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
            if request.method == "OPTIONS":
                response.headers.update(_PREFLIGHT)
        return response

    app.before_request(preflight)
    app.after_request(mark)
