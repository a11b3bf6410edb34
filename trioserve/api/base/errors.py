"""Errors as clients see them: ``{"error": {"code", "message", "type", "param"}}``.

A vendor may define another form: `Vendor.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trioserve.api.base.reply import Json
from trioserve.api.base.vendors import ErrorShape, vendor_of
from trioserve.concurrency import has_no_thread
from trioserve.errors import (
    ContextLengthExceededError,
    RequestEndedError,
    ToolError,
    ToolRuntimeError,
    TrioServeError,
    UnavailableError,
)
from trioserve.log import get_logger, request_id

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
        "message": message_of(error, request_id()),
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
    return f"{message} The log has more, under {request_id}." if is_ours(error) else message


def is_ours(error: BaseException) -> bool:
    """True for an error that the server caused, and not the client, a tool or a shutdown."""
    if not isinstance(error, TrioServeError):
        return True
    others = RequestEndedError | ToolError | ToolRuntimeError
    return error.status == 500 and not isinstance(error, others)


def bodies_on(path: str) -> Callable[[Exception], dict[str, Any]]:
    """The function that makes error bodies on a path, also after the response has begun."""
    shape, id_ = shape_of(path), request_id()
    return lambda error: shape.body(known(error), id_)


def last_event(path: str, error: Exception) -> bytes:
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


def reply(error: Exception, path: str) -> Json:
    """Answer a request to a path that failed before its answer began. Logs what was our fault."""
    error = known(error)
    if is_ours(error) and not isinstance(error, InternalError):
        cause = None if error.__cause__ is None else repr(error.__cause__)
        _log.warning("internal error", error=error.message, cause=cause)
    shape, id_ = shape_of(path), request_id()
    failed = error
    return Json(
        make=lambda: shape.body(failed, id_),
        status=error.status,
        headers=headers_of(error),
    )


def headers_of(error: TrioServeError) -> dict[str, str]:
    """The headers for an error: ``Retry-After``, if the time is known."""
    if error.retry_after is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
