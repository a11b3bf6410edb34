"""Forwards the current request to the child of its model, and the answer to the client.

When the client disconnects, the request's nursery is cancelled at any stage, which closes the
connection to the child.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio
from outcome import Error, Outcome, Value
from quart import request
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.datastructures import Headers

from trioserve.api.base import errors, limits, sse, vendors
from trioserve.api.base.app_state import is_unknown
from trioserve.api.base.body import read_whole
from trioserve.api.base.connection import KeepAlive, Request, counted, current_request
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.http import TIMEOUT_HEADER, current_request_id, json_response
from trioserve.api.base.readers import seconds
from trioserve.api.base.rights import check_manages
from trioserve.api.base.stored_as import headers_for_model
from trioserve.api.router import proxy
from trioserve.api.router.proxy import PassedStream
from trioserve.api.router.service import current_router, find_model
from trioserve.concurrency import alongside, deadline_scope
from trioserve.errors import (
    InvalidRequestError,
    ModelNotLoadedError,
    ModelProcessError,
    NotFoundError,
    TrioServeError,
)
from trioserve.models.catalog import ModelEntry
from trioserve.router.fleet import Fleet, connected
from trioserve.router.forward import (
    ChildAnswer,
    ChildConnection,
    NotTakenError,
    Outgoing,
    connect,
    exchange,
)
from trioserve.router.states import QueueStatus, Status
from trioserve.whole_numbers import whole_number

#: Writes the status of a waiting request as a ping; None: not known yet.
Say: TypeAlias = Callable[[QueueStatus | None], bytes]


class Place:
    """The place of one request at the child of its model. Made by `place_at`."""

    def __init__(self, wanted: ForwardedRequest) -> None:
        self._wanted = wanted
        self._waiting: QueueStatus | None = None  # where the request stands
        self._decided = trio.Event()
        self._outcome: Outcome[ChildConnection] | None = None

    @property
    def decided(self) -> bool:
        """Whether a connection is available, or has failed."""
        return self._decided.is_set()

    @property
    def connection(self) -> ChildConnection:
        """The connection to the child, once it is decided. Raises as `connected`."""
        assert self._outcome is not None
        return self._outcome.unwrap()

    def decide(self, outcome: Outcome[ChildConnection]) -> None:
        """Take a connection, or the error in place of one."""
        self._outcome = outcome
        self._decided.set()

    async def wait(self, patience: float) -> None:
        """Wait until it is decided, for at most `patience` seconds.

        Raises:
            DeadlineExceededError: the request has no time left.
        """
        if not self.decided:
            with deadline_scope(self._wanted.deadline), trio.move_on_after(patience):
                await self._decided.wait()

    async def keep(self, fleet: Fleet, entry: ModelEntry) -> None:
        """Take a connection, and keep it until cancelled."""
        autoload = self._wanted.autoload
        try:
            async with connected(fleet, entry, autoload=autoload, on_wait=self._note) as connection:
                self.decide(Value(connection))
                await trio.sleep_forever()
        except TrioServeError as error:
            self.decide(Error(error))
        except Exception as error:
            self.decide(Error(errors.unexpected(error)))

    def _note(self, waiting: QueueStatus) -> None:
        self._waiting = waiting

    def comment(self) -> bytes:
        """Write the status of the wait, for a stream that is silent meanwhile."""
        return self._wanted.say(self._waiting)

    async def beat(self) -> bytes:
        """Write the same as a ping; nothing once it is decided, because the child sends its own."""
        return b"" if self.decided else self.comment()


@asynccontextmanager
async def place_at(
    fleet: Fleet, entry: ModelEntry, wanted: ForwardedRequest
) -> AsyncIterator[Place]:
    """Take a place at the child of a model for the length of the block, waiting aside for it."""
    place = Place(wanted)
    async with AsyncExitStack() as stack:
        if fleet.is_ready(entry):  # there is nothing to wait for, and so no need for a task
            child = await stack.enter_async_context(fleet.use(entry, autoload=wanted.autoload))
            with suppress(ModelProcessError):
                made = stack.enter_context(connect(child.socket_path, child.kept, child.ended))
                place.decide(Value(made))
        if not place.decided:
            await stack.aclose()
            await stack.enter_async_context(alongside(partial(place.keep, fleet, entry)))
        yield place


def comment_on(waiting: QueueStatus | None) -> bytes:
    """Write the status of a waiting request, as a comment in a stream."""
    if waiting is None:
        return b":\n\n"
    if waiting.status in (Status.LOADING, Status.DOWNLOADING):
        share = "" if waiting.progress is None else f", {waiting.progress:.0%}"
        return f": {waiting.status} the model{share}\n\n".encode()
    return f": waiting for the model, position {waiting.position + 1}\n\n".encode()


_YES, _NO = frozenset({"true", "1"}), frozenset({"false", "0"})


@attrs.frozen
class ForwardedRequest:
    """A request that is to be forwarded."""

    body: bytes
    model: str | None  # the name that it gives
    autoload: bool  # whether its model may be loaded for it
    deadline: float  # until when it may wait (`trio.current_time`)
    #: Seconds of silence before a ping; infinite when the answer is no stream.
    ping_interval: float
    tells_place: bool  # as soon as it waits
    content_type: str  # of its answer, if that is a stream
    say: Say  # writes a ping
    #: The answer where the model is not loaded; none: it has to be loaded for an answer.
    if_unloaded: Mapping[str, Any] | None


async def read_request() -> ForwardedRequest:
    """Read the current request. What is wrong with other fields is for the child to say.

    Raises:
        InvalidRequestError: the body is not JSON, or a value cannot be used.
        TrioServeError: the body is too large.
    """
    path, content_type = request.path, request.headers.get("Content-Type", "")
    body, fields = await read_whole(lambda data: proxy.fields_of(data, content_type))
    config, vendor = current_router().config, vendors.vendor_of(path)
    model = vendors.model_in(path, fields, request.args)
    form, streams = vendor.streams, vendor.streams.is_asked(path, fields)
    interval = _ping_interval(fields, config.sse_ping_interval) if streams else math.inf
    return ForwardedRequest(
        body=body,
        model=model,
        # A GET changes nothing: a page of another site can have a browser send one.
        autoload=_flag("autoload", default=config.models_autoload)
        and request.method not in ("GET", "HEAD"),
        deadline=_deadline(fields),
        ping_interval=interval,
        tells_place=streams and fields.get("queue_comments") is True,
        content_type=form.content_type,
        say=comment_on if form.ping is None else partial(_ping, form.ping, path, model or ""),
        if_unloaded=vendor.unloaded(path, fields),
    )


def _ping(write: Callable[[str, str], bytes], path: str, model: str, _: object) -> bytes:
    return write(path, model)


def _flag(name: str, *, default: bool) -> bool:
    value = request.args.get(name, "")
    if value and value not in _YES | _NO:
        raise InvalidRequestError(f"'{name}' must be true or false, not {value!r:.40}.", param=name)
    return value in _YES if value else default


def _deadline(fields: Mapping[str, Any]) -> float:
    """The deadline of the request. The child refuses an invalid timeout."""
    given = fields.get("timeout")
    try:
        if given is None:
            given = float(request.headers.get(TIMEOUT_HEADER, "inf"))
        return current_request().arrived + seconds(given)
    except (MismatchError, ValueError):
        return math.inf


def _ping_interval(fields: Mapping[str, Any], default: float) -> float:
    given = fields.get("sse_ping_interval")
    interval = given if isinstance(given, int | float) and not isinstance(given, bool) else default
    return max(interval, limits.MIN_PING_INTERVAL) if interval > 0 else math.inf


#: Bodies up to this length (bytes) are received before the answer begins: it can still become an
#: error until then.
_SHORT = 2**20


async def forward() -> Response:
    """Answer the current request as the child of its model does.

    Raises:
        InsufficientQuotaError: the API key has used up its tokens of this day.
        TrioServeError: the model is unknown or cannot be loaded, or the request is wrong.
    """
    return await forward_to_model(await read_request())


async def forward_to_model(wanted: ForwardedRequest) -> Response:
    """Answer a request that was read as the child of its model does. Raises as `forward`."""
    router, resources = current_router(), current_request().resources
    fleet = router.fleet
    if request.method == "POST":
        router.usage.check(current_request().key)
    if wanted.if_unloaded is None:
        entry = find_model(wanted.model)
    else:  # it asks for the model's memory
        check_manages("unloading the model")
        entry = find_model(wanted.model, exact=True)
        if fleet.state(entry.name).value is Status.UNLOADED:
            return json_response(wanted.if_unloaded)
    resources.enter_context(counted(router.n_forwarded))
    try:
        response = await _respond(fleet, entry, wanted)
    except TrioServeError as error:
        router.metrics.answered(entry.name, error.status)
        raise
    router.metrics.answered(entry.name, response.status_code)
    return response


async def _respond(fleet: Fleet, entry: ModelEntry, wanted: ForwardedRequest) -> Response:
    """Wait for the child, but only until it is time to say something to the client."""
    current = current_request()
    while True:
        place = await current.resources.enter_async_context(place_at(fleet, entry, wanted))
        await place.wait(sse.SOON if wanted.tells_place else wanted.ping_interval)
        if not place.decided:
            current.keep_alive = KeepAlive(wanted.ping_interval, place.beat)
            late = _answer_late(place, wanted, current, _passed())
            return Response(late, headers=sse.HEADERS, content_type=wanted.content_type)
        connection = place.connection
        with suppress(NotTakenError):
            return await respond(await connection.ask(outgoing(current, wanted.body)))


def outgoing(current: Request, body: bytes) -> Outgoing:
    """Write a request for a child."""
    client = current.scope.get("client")
    headers = proxy.request_headers(
        current.scope["headers"],
        request_id=current_request_id(),
        waited=trio.current_time() - current.arrived,
        client=None if client is None else client[0],
    )
    query = current.query_string.decode("ascii", "replace")
    target = proxy.target_of(current.path, query)
    return Outgoing(current.method, target, [*headers, *headers_for_model(current)], body)


async def respond(answer: ChildAnswer) -> Response:
    """Make the response to the current request that passes on what a child answers.

    Raises:
        ModelProcessError: the child ended first.
    """
    headers = Headers(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in proxy.answer_headers(answer.headers)
    )
    length = whole_number(answer.header(b"content-length")) or 0
    if not answer.ended and not 0 < length <= _SHORT:
        response = Response(_parts(answer, _passed()), answer.status, headers)
    else:
        response = Response(await answer.receive_all(), answer.status, headers)
    if length:
        response.headers["Content-Length"] = str(length)  # of a HEAD, too
    return response


def _passed() -> PassedStream:
    return PassedStream(request.path, current_request_id())


async def _parts(
    answer: ChildAnswer, passed: PassedStream, *, begun: bool = False
) -> AsyncGenerator[bytes, None]:
    """Forward a body as it arrives. If the child ends early, a stream ends with an error, and
    another body breaks off with a ModelProcessError.

    With `begun`, the status of the response was sent before that of the answer was known. The
    request is not the current one any more.
    """
    try:
        if begun and answer.status != 200:
            yield passed.write(json.loads(await answer.receive_all()))
            return
        while part := await answer.receive():
            passed.n_events += part.count(b"\n\n")
            yield part
    except ModelProcessError as error:
        if not passed.can_end(answer.header(b"content-type")):
            raise
        yield passed.last_event(error)


async def _answer_late(
    place: Place, wanted: ForwardedRequest, current: Request, passed: PassedStream
) -> AsyncGenerator[bytes, None]:
    """Send the status of the wait until the child is available, then forward its answer."""
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    said = b""
    try:
        while not place.decided:
            if (comment := place.comment()) != said:
                yield comment
            said = comment
            await place.wait(sse.LOOK_INTERVAL if wanted.tells_place else math.inf)
        answer = await place.connection.ask(outgoing(current, wanted.body))
    except TrioServeError as error:
        yield passed.last_event(error)
        return
    async with aclosing(_parts(answer, passed, begun=True)) as parts:
        async for part in parts:
            yield part


async def forward_to_owner() -> Response:
    """Answer as the child does that knows the id, or else as the last one.

    Raises:
        NotFoundError: no model is loaded.
        TrioServeError: as `forward`.
    """
    wanted = await read_request()
    if wanted.model is not None:
        return await forward_to_model(wanted)
    router, resources = current_router(), current_request().resources
    fleet = router.fleet
    resources.enter_context(counted(router.n_forwarded))
    response: Response | None = None
    for name, entry in list(fleet.catalog.entries.items()):
        if fleet.state(name).value is Status.LOADED:
            response = await _ask(entry, wanted.body) or response
            if response is not None and not await _is_unknown(response):
                break
    if response is None:
        raise NotFoundError("There is no such answer: no model is loaded.")
    return response


async def _ask(entry: ModelEntry, body: bytes) -> Response | None:
    """Ask one child; None when it has ended meanwhile."""
    async with AsyncExitStack() as stack:
        try:
            child = await stack.enter_async_context(
                current_router().fleet.use(entry, autoload=False)
            )
            answer = await stack.enter_async_context(
                exchange(child.socket_path, outgoing(current_request(), body))
            )
            response = await respond(answer)
        except (ModelNotLoadedError, ModelProcessError):
            return None
        if not answer.ended:  # it is the one: its stream lasts as long as the request
            await current_request().resources.enter_async_context(stack.pop_all())
        return response


async def _is_unknown(response: Response) -> bool:
    """Whether a child does not know the id."""
    if response.content_type != "application/json":
        return False
    return is_unknown(response.status_code, await response.get_data(as_text=False))
