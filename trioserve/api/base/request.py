"""The HTTP request that a task handles: what routes read of it, and what they answer."""

from __future__ import annotations

import math
import re
from typing import Any, cast

from quart import request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import rate_limits, sse
from trioserve.api.base.connection import Request
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import seconds
from trioserve.errors import InvalidRequestError
from trioserve.server import RequestContext
from trioserve.types import CancelReason

#: The header that says in how many seconds a request has to be done. The field `timeout` wins.
TIMEOUT_HEADER = "X-Request-Timeout"

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)


def current_request() -> Request:
    """The request that this task handles."""
    return cast(Request, request._get_current_object())  # type: ignore[attr-defined]


def current_context(timeout: float | None) -> RequestContext:
    """Make the context of the current request. Its time began before its body was read.

    Args:
        timeout: in how many seconds the body says that it has to be done.

    Raises:
        InvalidRequestError: the header is not a number of seconds.
        RateLimitError: the client has no request left in this minute.
    """
    current = current_request()
    if timeout is None and (value := current.headers.get(TIMEOUT_HEADER)) is not None:
        timeout = _read_timeout(value.strip())
    deadline = math.inf if timeout is None else current.arrived + timeout
    return RequestContext(
        current.api_key,
        rate_limits.admit(current),
        deadline=deadline,
        on_cancel=CancelReason.DISCONNECT,
    )


def _read_timeout(value: str) -> float:
    try:
        return seconds(float(value) if _NUMBER.fullmatch(value) else None)
    except MismatchError as error:
        raise InvalidRequestError(
            f"'{TIMEOUT_HEADER}' must be {error.expected}.", param=TIMEOUT_HEADER
        ) from None


def json_response(value: Any, status: int = 200) -> Response:
    """Make a response of JSON."""
    return Response(sse.encode(value), status=status, content_type="application/json")
