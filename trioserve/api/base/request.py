"""Small things that every route uses."""

from __future__ import annotations

from typing import Any, cast

from quart import request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse
from trioserve.api.base.connection import Request


def current_request() -> Request:
    """The request that this task handles."""
    return cast(Request, request._get_current_object())  # type: ignore[attr-defined]


def json_response(value: Any, status: int = 200) -> Response:
    """Make a response of JSON."""
    return Response(sse.encode(value), status=status, content_type="application/json")
