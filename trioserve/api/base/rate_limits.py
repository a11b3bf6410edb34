"""Rate limits as clients see them: whom they are counted for, and the headers that tell of them.

The headers are OpenAI's (``x-ratelimit-remaining-tokens: 950``), and on Anthropic's routes
Anthropic's (``anthropic-ratelimit-tokens-remaining``), so that either SDK knows when to come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.connection import Request
from trioserve.api.base.service import current_server
from trioserve.server.limits.rate_limits import RateLimits, Remaining

_KINDS = ("requests", "tokens")

_PARTS = ("Limit", "Remaining", "Reset")

#: The headers, for pages that want to read them.
HEADERS = (
    *(f"X-RateLimit-{part}-{kind.title()}" for kind in _KINDS for part in _PARTS),
    *(f"Anthropic-RateLimit-{kind.title()}-{part}" for kind in _KINDS for part in _PARTS),
)


def admit(current: Request) -> str:
    """Count a request, once. Returns whom it is counted for: a key, or else an address.

    Raises:
        RateLimitError: the client has no request left in this minute.
    """
    if not current.limited_as:
        current.limited_as = current.api_key or _address_of(current)
        _limits().admit(current.limited_as)
    return current.limited_as


def install(app: Quart) -> None:
    """Tell what is left with each answer to a request that was counted."""

    async def show(response: Response) -> Response:
        if client := getattr(request, "limited_as", ""):
            write = _anthropic if request.path.startswith("/v1/messages") else _openai
            response.headers.extend(write(_limits().remaining(client)))
        return response

    app.after_request(show)


def _address_of(current: Request) -> str:
    """The address of a client. Who connects to a Unix socket is a proxy, which names it."""
    if current.scope.get("client") is None:
        return current.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip() or "-"
    return current.remote_addr or "-"


def _limits() -> RateLimits:
    return current_server().common.rate_limits


def _openai(left: Mapping[str, Remaining]) -> Iterator[tuple[str, str]]:
    for kind, one in left.items():
        yield f"x-ratelimit-limit-{kind}", str(one.limit)
        yield f"x-ratelimit-remaining-{kind}", str(one.remaining)
        yield f"x-ratelimit-reset-{kind}", f"{one.reset:.3f}s"


def _anthropic(left: Mapping[str, Remaining]) -> Iterator[tuple[str, str]]:
    for kind, one in left.items():
        at = datetime.now(UTC) + timedelta(seconds=one.reset)
        yield f"anthropic-ratelimit-{kind}-limit", str(one.limit)
        yield f"anthropic-ratelimit-{kind}-remaining", str(one.remaining)
        yield f"anthropic-ratelimit-{kind}-reset", at.isoformat(timespec="seconds")
