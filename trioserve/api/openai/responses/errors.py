"""Errors in the streams of the Responses API. Elsewhere they are like those of other routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base import errors, sse
from trioserve.api.base.errors import ErrorShape

_PATHS = frozenset({"/v1/responses", "/responses"})


def as_event(body: Mapping[str, Any]) -> dict[str, Any]:
    """Make an event of the body of an error: flat, as the API has it, and as it is elsewhere."""
    error = body["error"]
    code = error["code"] if isinstance(error["code"], str) else error["type"]
    flat = {"code": code, "message": error["message"], "param": error["param"]}
    return {"type": "error", **flat, **body}


def event(body: Mapping[str, Any], n_before: int) -> bytes:
    """Write a body as the last event of a stream, after so many others."""
    numbered = {"type": "error", "sequence_number": n_before, **as_event(body)}
    return b"event: error\n" + sse.event(numbered)


SHAPE = ErrorShape(_PATHS.__contains__, lambda error, request_id: errors.body(error), event=event)
