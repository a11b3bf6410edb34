"""The routes of Cohere's API, version 2: ``/v2/rerank`` and ``/v2/embed``."""

from __future__ import annotations

from typing import Any

from trioserve.api.base.answers import Answer
from trioserve.api.base.errors import message_of
from trioserve.api.base.vendors import ErrorShape, Vendor
from trioserve.api.cohere import routes
from trioserve.errors import TrioServeError


class CohereError(Answer):
    """The body of an error."""

    id: str
    message: str


def _error(error: TrioServeError, request_id: str) -> dict[str, Any]:
    message, name = message_of(error, request_id), error.param
    if name and f"'{name}'" not in message:
        message = f"'{name}': {message}"
    return {"id": request_id, "message": message}


VENDOR = Vendor(
    name="cohere",
    paths=("/v2/rerank", "/v2/embed"),
    routes=(routes.routes,),
    errors=ErrorShape(_error, CohereError),
    orders_priorities=True,
)
