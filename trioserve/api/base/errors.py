"""Errors as clients see them: ``{"error": {"code", "message", "type", "param"}}``.

A vendor may define another form: `Vendor.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.exceptions import HTTPException

from trioserve.api.base import sse
from trioserve.api.base.http import current_request_id
from trioserve.api.base.vendors import ErrorShape, vendor_of
from trioserve.concurrency import has_no_thread
from trioserve.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    MemoryFullError,
    MethodNotAllowedError,
    ModelFailedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestEndedError,
    ToolError,
    ToolRuntimeError,
    TooManyRequestsError,
    TrioServeError,
    UnavailableError,
)
from trioserve.log import get_logger

_log = get_logger("trioserve.api")


def shape_of(path: str) -> ErrorShape:
    """The shape of the errors on a path."""
    return vendor_of(path).errors or _COMMON


class InternalError(TrioServeError):
    """An unexpected exception. The log has the traceback, with the request's id."""


def body(error: TrioServeError) -> dict[str, Any]:
    """Make the JSON body of an error."""
    fields: dict[str, Any] = {
        "code": error.code or error.status,
        "message": message_of(error, current_request_id()),
        "type": error.type,
        "param": error.param,
    }
    if isinstance(error, ContextLengthExceededError):
        fields |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return {"error": fields}


_COMMON = ErrorShape(lambda error, request_id: body(error))


def message_of(error: TrioServeError, request_id: str) -> str:
    """The message of an error for the client. Only the log has details of server errors."""
    message = error.public or error.message
    return f"{message} The log has more, under {request_id}." if _is_ours(error) else message


def _is_ours(error: TrioServeError) -> bool:
    """Whether the server caused the error, and not the client, a tool or a shutdown."""
    others = RequestEndedError | ToolError | ToolRuntimeError
    return error.status == 500 and not isinstance(error, others)


def last_event(error: Exception) -> bytes:
    """Make the error event that ends a stream which has begun."""
    return sse.event(body(known(error)))


def bodies_on(path: str) -> Callable[[Exception], dict[str, Any]]:
    """The function that makes error bodies on a path, also after the response has begun."""
    shape, request_id = shape_of(path), current_request_id()
    return lambda error: shape.body(known(error), request_id)


def last_event_on(path: str, error: Exception) -> bytes:
    """Make the error event that ends a stream on a path, once the stream has begun."""
    return shape_of(path).event(bodies_on(path)(error), 0)


def known(error: BaseException) -> TrioServeError:
    """Return a `TrioServeError` as it is. Log any other, and return an `InternalError`."""
    return error if isinstance(error, TrioServeError) else unexpected(error)


def unexpected(error: BaseException) -> TrioServeError:
    """Log an unexpected exception. Returns the error for the client, without details."""
    if has_no_thread(error):
        _log.error("no thread can be started", problem="the system limits threads or memory")
        return UnavailableError("The system refuses the server a thread.")
    _log.error("unexpected error", exc_info=error)
    return InternalError("Internal error.")


def response(error: TrioServeError) -> Response:
    """Make the response of a request that failed before its response began."""
    shape = shape_of(request.path)
    return Response(
        sse.encode(shape.body(error, current_request_id())),
        status=shape.status(error),
        headers=headers_of(error),
        content_type="application/json",
    )


def headers_of(error: TrioServeError) -> dict[str, str]:
    """The headers for an error: ``Retry-After``, if the time is known."""
    if isinstance(error, TooManyRequestsError | MemoryFullError | ModelFailedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {}


def _translate(error: HTTPException, limit: int | None) -> TrioServeError:
    """Translate an error of Quart into a `TrioServeError`."""
    if error.code == 404:
        return NotFoundError("File Not Found")
    if error.code == 405:
        return MethodNotAllowedError("This route does not take this method.")
    if error.code == 413:
        return PayloadTooLargeError(
            f"The body is larger than max_body_size, which is {limit} bytes."
        )
    translated = InvalidRequestError(error.description or error.name)
    translated.status = error.code or 400  # type: ignore[misc]
    return translated


def install(app: Quart) -> None:
    """Make an app write each error in the form of its route."""

    async def on_own(error: TrioServeError) -> Response:
        if _is_ours(error):
            cause = None if error.__cause__ is None else repr(error.__cause__)
            _log.warning("internal error", error=error.message, cause=cause)
        return response(error)

    async def on_http(error: HTTPException) -> Response:
        answer = response(_translate(error, app.config["MAX_CONTENT_LENGTH"]))
        if allowed := getattr(error, "valid_methods", None):
            answer.headers["Allow"] = ", ".join(sorted(allowed))
        return answer

    async def on_any(error: Exception) -> Response:
        return response(unexpected(error))

    app.register_error_handler(TrioServeError, on_own)
    app.register_error_handler(HTTPException, on_http)
    app.register_error_handler(Exception, on_any)
