"""Errors as Ollama's clients see them, on its routes alone: ``{"error": "a sentence"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base import sse
from trioserve.api.base.errors import ErrorShape, message_of
from trioserve.errors import TrioServeError, UnknownModelError

_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}


def _applies_to(path: str) -> bool:
    return path.startswith("/api/")


def body(error: TrioServeError, request_id: str) -> dict[str, Any]:
    """Make the JSON body of an error."""
    return {"error": message_of(error, request_id)}


def line(value: Any, n_before: int = 0) -> bytes:
    """Write a line of a stream: an error ends one, and is no different from the others."""
    return f"{sse.encode(value)}\n".encode()


def status(error: TrioServeError) -> int:
    """The status of an error. Clients pull a model for which they get a 404."""
    return 404 if isinstance(error, UnknownModelError) else error.status


SHAPE = ErrorShape(_applies_to, body, _SCHEMA, line, status)
"""How Ollama's clients get errors; but for one, the statuses are those of all routes."""
