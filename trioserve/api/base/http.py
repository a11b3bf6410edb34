"""The HTTP request that a task handles: its id, its context, its rate limits, and answers to it."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import structlog
from quart import g, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse
from trioserve.api.base.connection import Request, address_of, current_request
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import seconds
from trioserve.api.base.service import current_server
from trioserve.api.base.vendors import vendor_of
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import text_threads
from trioserve.server import RequestContext
from trioserve.server.stream import ChatCompletion, Completion
from trioserve.types import CancelReason

#: The header with the timeout of a request, in seconds. The field `timeout` takes precedence.
TIMEOUT_HEADER = "X-Request-Timeout"

#: The header of requests and responses with the id of the request.
ID_HEADER = "X-Request-Id"

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)


def current_request_id() -> str:
    """The id of the request that this task handles."""
    return str(structlog.contextvars.get_contextvars().get("request_id", "-"))


def choose_id(offered: str | None) -> str:
    """Use the id that a client offers, if it is safe in a log line; else make one."""
    if offered is not None and _ID.fullmatch(offered):
        return offered
    return secrets.token_hex(12)


def current_context(timeout: float | None, keep_alive: float | None = None) -> RequestContext:
    """Make the context of the current request. Its time began before its body was read.

    Args:
        timeout: in how many seconds the body says that it has to be done.
        keep_alive: for how many seconds it says that the model stays in memory afterwards.

    Raises:
        InvalidRequestError: the header is not a number of seconds.
        RateLimitError: the client has used up its requests for this minute.
    """
    return uncounted_context(
        timeout, limited_as=count_request(current_request()), keep_alive=keep_alive
    )


def uncounted_context(timeout: float | None = None, **more: Any) -> RequestContext:
    """Make the context of a request that needs no model, and is not counted for rate limits.

    Arguments and errors as in `current_context`; `more` are other fields.
    """
    current = current_request()
    if timeout is None and (value := current.headers.get(TIMEOUT_HEADER)) is not None:
        timeout = _read_timeout(value.strip())
    return RequestContext(
        current.api_key,
        deadline=math.inf if timeout is None else current.arrived + timeout,
        arrived=current.arrived,
        request_id=current_request_id(),
        traceparent=current.headers.get("traceparent", ""),
        tracestate=current.headers.get("tracestate", ""),
        on_cancel=CancelReason.DISCONNECT,
        **more,
    )


def _read_timeout(value: str) -> float:
    try:
        return seconds(float(value) if _NUMBER.fullmatch(value) else None)
    except MismatchError as error:
        raise InvalidRequestError.at(TIMEOUT_HEADER, f"must be {error.expected}.") from None


def json_response(value: Any, status: int = 200) -> Response:
    """Make a response of JSON. What is no Unicode in it, such as in paths, is replaced."""
    body = sse.encode(value).encode(errors="replace")
    return Response(body, status=status, content_type="application/json")


#: The most bytes of JSON that are read or written on the event loop, which takes about 1 ms; and
#: the same in numbers of a list.
LONG, _SMALL = 2**18, 8192

#: Characters of a long answer in each chunk.
_PIECE = 2**18


async def long_response(make: Callable[[], Any], size: int) -> Response:
    """Make a response of what a function returns, in a thread when it is long.

    Args:
        make: returns the value; it may take long, too.
        size: how long, in numbers of a list. An object of a few fields counts as 32, and 32
            characters as one.
    """
    if size <= _SMALL:
        return json_response(make())
    pieces = await text_threads().run_sync(lambda: list(_pieces(sse.encode_in_steps(make()))))
    length = str(sum(map(len, pieces)))
    headers = {"Content-Length": length}
    return Response(_each(pieces), headers=headers, content_type="application/json")


def _pieces(texts: Iterable[str]) -> Iterator[bytes]:
    """Gather texts: what is handled at once, by Hypercorn too, holds up other threads."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(some).encode()
            some, size = [], 0
    yield "".join(some).encode()


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def size_of_outputs(outputs: Iterable[Completion | ChatCompletion]) -> int:
    """The size of outputs, for `long_response`."""
    size = 0
    for each in outputs:
        size += len(each.prompt) + 32 * sse.n_candidates(each.probs)
        if (scores := each.scores) is not None:
            size += 32 * len(scores) * (1 + scores.n_top)
    return size


async def give_id() -> None:
    """Give the current request an id, which its response and its log lines carry."""
    g.request_id = choose_id(request.headers.get(ID_HEADER))
    # Each request runs in a separate task, so the binding ends with it.
    structlog.contextvars.bind_contextvars(request_id=g.request_id)


async def show_id(response: Response) -> Response:
    """Add the id of the request to the response."""
    response.headers[ID_HEADER] = g.request_id
    return response


# -- rate limits as clients see them


def count_request(current: Request) -> str:
    """Count a request once. Returns the client it counts for: its key, or else its address.

    Raises:
        RateLimitError: the client has used up its requests for this minute.
    """
    if not current.limited_as:
        current.limited_as = current.api_key or address_of(current)
        if (limits := current_server().resources.rate_limits) is not None:
            limits.admit(current.limited_as)
    return current.limited_as


async def show_rate_limits(response: Response) -> Response:
    """Add the remaining limits to the response, if its request was counted."""
    client = getattr(request, "limited_as", "")
    if not client or (limits := current_server().resources.rate_limits) is None:
        return response
    if left := limits.remaining(client):
        response.headers.extend(vendor_of(request.path).rate_limits.write(left))
    return response
