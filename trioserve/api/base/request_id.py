"""The id of a request: in its log lines, and in the header of its response."""

from __future__ import annotations

import re
import secrets

import structlog
from quart import Quart, g, request
from quart_trio.wrappers import TrioResponse as Response

#: The header, of requests and of responses.
HEADER = "X-Request-Id"

_VALID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def current_request_id() -> str:
    """The id of the request that this task handles."""
    return str(structlog.contextvars.get_contextvars().get("request_id", "-"))


def choose(offered: str | None) -> str:
    """Take the id that a client offers, if it can stand in a log line; else make one."""
    if offered is not None and _VALID.fullmatch(offered):
        return offered
    return secrets.token_hex(12)


def install(app: Quart) -> None:
    """Give each request an id, and each response the id of its request."""

    async def bind() -> None:
        g.request_id = choose(request.headers.get(HEADER))
        # Each request runs in a task of its own, so this ends with it.
        structlog.contextvars.bind_contextvars(request_id=g.request_id)

    async def show(response: Response) -> Response:
        response.headers[HEADER] = g.request_id
        return response

    app.before_request(bind)
    app.after_request(show)
