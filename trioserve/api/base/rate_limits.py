"""Rate limits as clients see them: whom they are counted for, and the headers that tell of them."""

from __future__ import annotations

from quart import request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.connection import Request
from trioserve.api.base.service import current_server
from trioserve.api.base.vendors import vendor_of
from trioserve.server.limits.clients import RateLimits


def admit(current: Request) -> str:
    """Count a request, once. Returns whom it is counted for: a key, or else an address.

    Raises:
        RateLimitError: the client has no request left in this minute.
    """
    if not current.limited_as:
        current.limited_as = current.api_key or _address_of(current)
        _limits().admit(current.limited_as)
    return current.limited_as


async def show(response: Response) -> Response:
    """Tell what is left with an answer to a request that was counted."""
    if client := getattr(request, "limited_as", ""):
        headers = vendor_of(request.path).rate_limits
        response.headers.extend(headers.write(_limits().remaining(client)))
    return response


def _address_of(current: Request) -> str:
    """The address of a client. Who connects to a Unix socket is a proxy, which names it."""
    if current.scope.get("client") is None:
        return current.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip() or "-"
    return current.remote_addr or "-"


def _limits() -> RateLimits:
    return current_server().resources.rate_limits
