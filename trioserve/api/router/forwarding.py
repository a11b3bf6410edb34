"""Forwards requests to the children of their models, and their answers to the clients.

When the client disconnects, the request's nursery is cancelled at any stage, which closes the
connection to the child.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlencode

import attrs
import trio

from trioserve.api.base import errors, limits, sse
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import TIMEOUT_HEADER, Caller, waited
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.generation import is_unknown
from trioserve.api.base.readers import seconds
from trioserve.api.base.reply import (
    JSON,
    Data,
    Ending,
    Json,
    KeepAlive,
    Pieces,
    Reply,
    json as json_reply,
    value_of,
)
from trioserve.api.base.routes import Responder, Route
from trioserve.api.base.stored_as import STORED_HEADER, StoredAs
from trioserve.api.router import proxy
from trioserve.api.router.proxy import PassedStream
from trioserve.concurrency import Feed, alongside, deadline_scope
from trioserve.errors import (
    InvalidRequestError,
    ModelNotLoadedError,
    ModelProcessError,
    NotFoundError,
    TrioServeError,
)
from trioserve.fair_limiter import offload
from trioserve.log import request_id
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

if TYPE_CHECKING:
    from trioserve.api.router.service import RouterService

#: Writes the status of a waiting request as a ping; None: not known yet.
Say: TypeAlias = Callable[[QueueStatus | None], bytes]


class Place:
    """The place of one request at the child of its model. Made by `place_at`.

    Attributes:
        connection: to the child; none: it is waited for.
    """

    def __init__(self, wanted: ForwardedRequest) -> None:
        self.connection: ChildConnection | None = None
        self._wanted = wanted
        self._status: QueueStatus | None = None  # where the request stands
        self._found = Feed[ChildConnection]()

    async def connect(self, patience: float) -> ChildConnection | None:
        """Wait for the connection, for at most `patience` seconds; None: it is not there yet.

        Raises:
            DeadlineExceededError: the request has no time left.
            TrioServeError: as `connected`.
        """
        if self.connection is None:
            with deadline_scope(self._wanted.deadline), trio.move_on_after(patience):
                self.connection = await anext(self._found)
        return self.connection

    async def keep(self, fleet: Fleet, entry: ModelEntry) -> None:
        """Take a connection, and keep it until cancelled."""
        autoload = self._wanted.autoload
        try:
            async with connected(fleet, entry, autoload=autoload, on_wait=self._note) as connection:
                self._found.put(connection)
                await trio.sleep_forever()
        except Exception as error:
            self._found.end(errors.known(error))

    def _note(self, status: QueueStatus) -> None:
        self._status = status

    def comment(self) -> bytes:
        """Write the status of the wait, for a stream that is silent meanwhile."""
        return self._wanted.say(self._status)

    async def beat(self) -> bytes:
        """Write the same as a ping; nothing once it is over, because the child sends its own."""
        return self.comment() if self.connection is None else b""


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
                place.connection = stack.enter_context(
                    connect(child.socket_path, child.kept, child.ended)
                )
        if place.connection is None:
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


@attrs.frozen(kw_only=True)
class ForwardedRequest:
    """A request that is to be forwarded."""

    sent: Callable[[], Outgoing]  # writes it for the child
    path: str
    model: str | None  # the name that it gives
    autoload: bool  # whether its model may be loaded for it
    deadline: float  # until when it may wait (`trio.current_time`)
    #: Seconds of silence before a ping; infinite when the answer is no stream.
    ping_interval: float = math.inf
    tells_place: bool = False  # as soon as it waits
    content_type: str = ""  # of its answer, if that is a stream
    say: Say = comment_on  # writes a ping
    #: The answer where the model is not loaded; none: it has to be loaded for an answer.
    if_unloaded: Mapping[str, Any] | None = None


class Forwarder:
    """Answers the routes about models as the processes of the models do.

    Args:
        router: has the models.
    """

    def __init__(self, router: RouterService) -> None:
        self._router = router

    def answer_of(self, route: Route) -> Responder:
        """Make the function that answers a route."""

        async def answer(
            incoming: Incoming,
            caller: Caller,
            values: Mapping[str, str],
            **more: Any,
        ) -> Reply:
            stored: StoredAs | None = more.get("stored")
            wanted = await self._read(route, incoming, caller, stored)
            if route.about_answer and wanted.model is None:
                return await self._forward_to_owner(wanted, caller)
            reply = await self._forward(wanted, caller)
            return reply if stored is None else await typed(reply)

        return answer

    async def of_model(self, path: str, query: Mapping[str, str], caller: Caller) -> Reply:
        """Answer a request about the model that its query names as the child does.

        Raises as `_forward`.
        """
        wanted = ForwardedRequest(
            sent=lambda: question(path, caller, urlencode(query)),
            path=path,
            model=query.get("model") or None,
            autoload=self._autoload(query, caller),
            deadline=_deadline({}, caller),
        )
        return await self._forward(wanted, caller)

    async def _read(
        self, route: Route, incoming: Incoming, caller: Caller, stored: StoredAs | None
    ) -> ForwardedRequest:
        """Read a request. What is wrong with other fields is for the child to say.

        Raises:
            InvalidRequestError: the body is not JSON, or a value cannot be used.
            TrioServeError: the body is too large.
        """
        fields = await proxy.fields_of(incoming)
        if (data := incoming.data) is None or stored is not None:
            data = await incoming.aside(partial(_written, fields, stored))
        incoming.forget()
        caller.held.shrink_to(min(len(data), caller.held.n_bytes))
        # One in the background has a session, which sends pings and stores how it fails.
        is_apart = stored is not None and bool(stored.repeated.get("background"))
        config, streams = self._router.config, not is_apart and route.asks_for_stream(fields)
        interval = _ping_interval(fields, config.sse_ping_interval) if streams else math.inf
        model, waiting = route.model_in(fields, incoming.query), route.waiting
        return ForwardedRequest(
            sent=lambda: outgoing(incoming, caller, data, stored),
            path=incoming.path,
            model=model,
            autoload=self._autoload(incoming.query, caller),
            deadline=_deadline(fields, caller),
            ping_interval=interval,
            tells_place=streams and fields.get("queue_comments") is True,
            content_type=route.streams,
            say=comment_on if waiting.ping is None else partial(_ping, waiting.ping, model or ""),
            if_unloaded=waiting.answer(fields),
        )

    def _autoload(self, query: Mapping[str, str], caller: Caller) -> bool:
        value = query.get("autoload", "")
        if value and value not in _YES | _NO:
            raise InvalidRequestError.at("autoload", f"must be true or false, not {value!r:.40}.")
        may = value in _YES if value else self._router.config.models_autoload
        # A GET changes nothing: a page of another site can have a browser send one.
        return may and caller.method == "POST"

    async def _forward(self, wanted: ForwardedRequest, caller: Caller) -> Reply:
        """Answer a request as the child of its model does.

        Raises:
            InsufficientQuotaError: the API key has used up its tokens of this day.
            TrioServeError: the model is unknown or cannot be loaded, or the request is wrong.
        """
        router = self._router
        fleet = router.fleet
        if caller.method == "POST":
            router.usage.check(caller.key)
        if wanted.if_unloaded is None:
            entry = router.find(wanted.model, caller)
        else:  # it asks for the model's memory
            caller.check_manages("unloading the model")
            entry = router.find(wanted.model, caller, exact=True)
            if fleet.state(entry.name).value is Status.UNLOADED:
                return json_reply(wanted.if_unloaded)
        caller.enter(router.forwarded())
        try:
            reply = await self._reply(fleet, entry, wanted, caller)
        except TrioServeError as error:
            router.counted.answered(entry.name, error.status)
            raise
        router.counted.answered(entry.name, reply.status)
        return reply

    async def _reply(
        self, fleet: Fleet, entry: ModelEntry, wanted: ForwardedRequest, caller: Caller
    ) -> Reply:
        """Wait for the child, but only until it is time to say something to the client."""
        while True:
            place = await caller.open(place_at(fleet, entry, wanted))
            patience = sse.SOON if wanted.tells_place else wanted.ping_interval
            if (connection := await place.connect(patience)) is None:
                return Pieces(
                    pieces=_answer_late(place, wanted, _passed(wanted)),
                    headers=dict(sse.HEADERS),
                    content_type=wanted.content_type,
                    keep_alive=KeepAlive(wanted.ping_interval, place.beat),
                )
            with suppress(NotTakenError):
                return await pass_on(await connection.ask(wanted.sent()), _passed(wanted))

    async def _forward_to_owner(self, wanted: ForwardedRequest, caller: Caller) -> Reply:
        """Answer as the child does that knows the id, or else as the last one.

        Raises:
            NotFoundError: no model is loaded.
            TrioServeError: as `_forward`.
        """
        fleet = self._router.fleet
        caller.enter(self._router.forwarded())
        found: Data | None = None
        for name, entry in list(fleet.catalog.entries.items()):
            if fleet.state(name).value is not Status.LOADED:
                continue
            with suppress(ModelNotLoadedError, ModelProcessError):  # it has ended meanwhile
                async with (
                    fleet.use(entry, autoload=False) as child,
                    exchange(child.socket_path, wanted.sent()) as answer,
                ):
                    found = await _whole(answer)
                if not (found.content_type == JSON and is_unknown(found.status, found.body)):
                    break
        if found is None:
            raise NotFoundError("There is no such answer: no model is loaded.")
        return found


def _written(fields: Mapping[str, Any], stored: StoredAs | None) -> bytes:
    """Write the body of a request that was changed, or continues what is stored."""
    if stored is not None:
        fields = {**fields, "store": False}
        if isinstance(fields.get("input"), list):
            fields["input"] = [*stored.before, *fields["input"]]
    return "".join(sse.encode_in_steps(fields)).encode()


def _ping(write: Callable[[str], bytes], model: str, _: object) -> bytes:
    return write(model)


def _deadline(fields: Mapping[str, Any], caller: Caller) -> float:
    """The deadline of a request. The child refuses an invalid timeout."""
    given, header = fields.get("timeout"), caller.headers.get(TIMEOUT_HEADER)
    if given is None and header is None:
        return math.inf
    try:
        return caller.arrived + seconds(float(header or "") if given is None else given)
    except (MismatchError, ValueError):
        return math.inf


def _ping_interval(fields: Mapping[str, Any], default: float) -> float:
    given = fields.get("sse_ping_interval")
    interval = given if isinstance(given, int | float) and not isinstance(given, bool) else default
    return max(interval, limits.MIN_PING_INTERVAL) if interval > 0 else math.inf


def outgoing(
    incoming: Incoming, caller: Caller, body: bytes, stored: StoredAs | None = None
) -> Outgoing:
    """Write a request for a child."""
    headers = _headers(caller)
    if stored is not None:
        headers.append((STORED_HEADER.lower().encode(), stored.told().encode()))
    target = proxy.target_of(incoming.path, incoming.query_string)
    return Outgoing(incoming.method, target, headers, body)


def question(path: str, caller: Caller, query: str = "") -> Outgoing:
    """Write a request of a caller without a body for a child."""
    return Outgoing(caller.method, proxy.target_of(path, query), _headers(caller))


def _headers(caller: Caller) -> list[tuple[bytes, bytes]]:
    came = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in caller.headers.items()
        if name != "Remote-Addr"  # which Quart has added
    ]
    return proxy.request_headers(
        came,
        request_id=caller.request_id,
        waited=waited(caller),
        client=None if caller.address == "-" else caller.address,
    )


#: Bodies up to this length (bytes) are received before the answer begins: it can still become an
#: error until then.
_SHORT = 2**20


async def pass_on(answer: ChildAnswer, passed: PassedStream) -> Reply:
    """Make the reply that passes on what a child answers.

    Raises:
        ModelProcessError: the child ended first.
    """
    length = whole_number(answer.header(b"content-length"), most=_SHORT)
    if answer.ended or length:
        return await _whole(answer)
    headers, kind = proxy.head_of(answer.headers)
    pieces = passed.pieces(answer.receive, kind)
    return Pieces(pieces=pieces, status=answer.status, headers=headers, content_type=kind)


async def _whole(answer: ChildAnswer) -> Data:
    headers, kind = proxy.head_of(answer.headers)
    body = await answer.receive_all()
    return Data(body=body, status=answer.status, headers=headers, content_type=kind)


def _passed(wanted: ForwardedRequest) -> PassedStream:
    return PassedStream(wanted.path, request_id())


async def _answer_late(
    place: Place, wanted: ForwardedRequest, passed: PassedStream
) -> AsyncGenerator[bytes, None]:
    """Send the status of the wait until the child is available, then forward its answer."""
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    said, last, connection = b"", b"", None
    patience = sse.LOOK_INTERVAL if wanted.tells_place else math.inf
    try:
        while connection is None:
            if (comment := place.comment()) != said:
                yield comment
            said = comment
            connection = await place.connect(patience)
        answer = await connection.ask(wanted.sent())
        if answer.status != 200:
            last = passed.write(json.loads(await answer.receive_all()))
    except TrioServeError as error:
        last = passed.last_event(error)
    if last:
        yield last
        return
    async with aclosing(passed.pieces(answer.receive, wanted.content_type)) as pieces:
        async for piece in pieces:
            yield piece


# -- answers that are stored here


async def typed(reply: Reply) -> Reply:
    """Read the answer of a child that is to be stored."""
    if reply.content_type == JSON and not isinstance(reply, Json):
        make, n_bytes = await value_of(reply)
        whole, headers = await offload(make, n_bytes), dict(reply.headers)
        headers.pop("content-length", None)
        return Json(make=lambda: whole, size=n_bytes // 32, status=reply.status, headers=headers)
    if isinstance(reply, Pieces) and reply.content_type.startswith(sse.CONTENT_TYPE):
        return PassedResponse(
            pieces=reply.pieces,
            headers=reply.headers,
            content_type=reply.content_type,
            keep_alive=reply.keep_alive,
        )
    return reply


_MARK = b"\n\n"
_ENDS = tuple(b"event: response.%b\n" % end for end in (b"completed", b"incomplete", b"failed"))


@attrs.define(kw_only=True, eq=False)
class PassedResponse(Ending):
    """The events of a response. The first one and the last are read."""

    pieces: AsyncIterable[bytes]
    response: Mapping[str, Any] | None = None
    end_of_stream: bytes = b""
    n_before_end: int = 0
    _end: Mapping[str, Any] | None = attrs.field(init=False, default=None)

    writer: Any = attrs.field(init=False)

    @writer.default
    def _itself(self) -> PassedResponse:
        return self

    async def write(self) -> AsyncIterable[bytes]:
        """Pass on the events; the last one when it has been looked at."""
        return self._written()

    async def _written(self) -> AsyncGenerator[bytes, None]:
        # An async generator, so no nursery or cancel scope may be open at a `yield`.
        rest, last = b"", b""
        async with aclosing(cast(AsyncGenerator[bytes, None], self.pieces)) as pieces:
            async for piece in pieces:
                *events, rest = (rest + piece).split(_MARK)
                last += b"".join([await self._look(event) for event in events])
                if not self.end_of_stream and last:
                    yield last
                    last = b""
        self.response = self._end or self.response  # it is not over while more may come
        yield last + rest if self.at_end is None else await self.at_end(last + rest)

    async def _look(self, event: bytes) -> bytes:
        """Look at an event, and give it as it is sent."""
        sent = event + _MARK
        is_end = event.startswith(_ENDS)
        if self.end_of_stream or is_end:
            self.end_of_stream += sent
        if is_end or self.response is None:
            data = event.partition(b"\ndata: ")[2]
            fields = await offload(lambda: json.loads(data or b"{}"), len(data))
            if is_end:
                self._end = fields.get("response")
            else:
                self.response = fields.get("response")
        self.n_before_end += not self.end_of_stream and not event.startswith(b":")
        return sent
