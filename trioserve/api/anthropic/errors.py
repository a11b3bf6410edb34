"""Errors as Anthropic's clients see them, on its routes alone.

``{"type": "error", "error": {"type", "message"}, "request_id"}``; the statuses are those of all
routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base import sse
from trioserve.api.base.errors import ErrorShape, message_of
from trioserve.errors import TrioServeError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}


def _applies_to(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def body(error: TrioServeError, request_id: str) -> dict[str, Any]:
    """Make the JSON body of an error."""
    other = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": message_of(error, request_id)},
        "request_id": request_id,
    }


def event(written: Mapping[str, Any], n_before: int = 0) -> bytes:
    """Write the body of an error as the last event of a stream."""
    return b"event: error\n" + sse.event(written)


SHAPE = ErrorShape(_applies_to, body, _SCHEMA, event)
