"""Requests that wait for their model to be loaded, and the pings of their streams."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import trio

from trioserve.api.base import errors, limits, sse
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import TIMEOUT_HEADER, Caller
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import seconds
from trioserve.api.base.reply import KeepAlive, Pieces, Reply, json, value_of
from trioserve.api.base.routes import FORM, Responder, Route
from trioserve.concurrency import Feed, alongside
from trioserve.errors import InvalidRequestError, TrioServeError
from trioserve.router.states import QueueStatus, Status

if TYPE_CHECKING:
    from trioserve.api.router.service import RouterService

#: Writes the status of a waiting request as a ping; None: not known yet.
Say: TypeAlias = Callable[[QueueStatus | None], bytes]

_YES, _NO = frozenset({"true", "1"}), frozenset({"false", "0"})


def comment_on(waiting: QueueStatus | None) -> bytes:
    """Write the status of a waiting request, as a comment in a stream."""
    if waiting is None:
        return b":\n\n"
    if waiting.status in (Status.LOADING, Status.DOWNLOADING):
        share = "" if waiting.progress is None else f", {waiting.progress:.0%}"
        return f": {waiting.status} the model{share}\n\n".encode()
    return f": waiting for the model, position {waiting.position + 1}\n\n".encode()


def patient(router: RouterService, route: Route, answer: Responder) -> Responder:
    """Make the function that answers a route about a model as `answer` does, once it is loaded."""

    async def waits(
        incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
    ) -> Reply:
        caller.may_load = may_load(router.config.models_autoload, incoming.query, caller)
        fields = await fields_of(route, incoming)
        caller.wait_until = _deadline(fields, caller)
        name = caller.model = route.model_in(fields, incoming.query)
        if (nothing := route.waiting.answer(fields)) is not None:  # it is about unloading
            caller.check_manages("unloading the model")
            entry = router.find(name, caller, exact=True)
            if router.fleet.state(entry.name).value is Status.UNLOADED:
                return json(nothing)
        else:
            entry = router.find(name, caller, answers=True)
        answers = answer if entry.upstream is None else router.passing_on(entry, route)
        work = partial(answers, incoming, values=values, **more)
        streams = route.asks_for_stream(fields)
        try:
            if router.fleet.is_ready(entry) or not streams:
                reply = await work(caller=caller)
            else:
                late = _Late(route, fields, router.config.sse_ping_interval)
                reply = await late.reply(caller, work)
        except TrioServeError as error:
            router.counted.answered(entry.name, error.status)
            raise
        router.counted.answered(entry.name, reply.status)
        return reply

    return waits


async def fields_of(route: Route, incoming: Incoming) -> Mapping[str, Any]:
    """The fields of a body, as far as it has any."""
    if route.content == FORM:
        form = await incoming.form()
        fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
        return {**fields, "stream": form.flag("stream")}
    if route.takes_bytes:
        return {}
    return await incoming.fields(may_be_empty=route.takes is None or bool(route.query))


def may_load(default: bool, query: Mapping[str, str], caller: Caller) -> bool:
    """Read the permission to load a model for a request.

    Raises:
        InvalidRequestError: its query has no such value.
    """
    value = query.get("autoload", "")
    if value and value not in _YES | _NO:
        raise InvalidRequestError.at("autoload", f"must be true or false, not {value!r:.40}.")
    may = value in _YES if value else default
    # A GET changes nothing: a page of another site can have a browser send one.
    return may and caller.method == "POST"


def _deadline(fields: Mapping[str, Any], caller: Caller) -> float:
    """The deadline of a request. Its handler refuses an invalid timeout."""
    given, header = fields.get("timeout"), caller.headers.get(TIMEOUT_HEADER)
    if given is None and header is None:
        return math.inf
    try:
        return caller.arrived + seconds(float(header or "" if given is None else given))
    except (MismatchError, TypeError, ValueError):
        return math.inf


def _ping_interval(fields: Mapping[str, Any], default: float) -> float:
    given = fields.get("sse_ping_interval")
    interval = given if isinstance(given, int | float) and not isinstance(given, bool) else default
    return max(interval, limits.MIN_PING_INTERVAL) if interval > 0 else math.inf


@attrs.define(eq=False, slots=False)
class _Late:
    """A stream whose model is waited for aside. It begins before there is a reply."""

    _route: Route
    _fields: Mapping[str, Any]
    _default_interval: float

    def __attrs_post_init__(self) -> None:
        waiting, name = self._route.waiting, self._route.model_in(self._fields, {}) or ""
        self._say: Say = comment_on
        if (ping := waiting.ping) is not None:
            self._say = lambda _status: ping(name)
        self._interval = _ping_interval(self._fields, self._default_interval)
        self._tells_place = self._fields.get("queue_comments") is True
        self._status: QueueStatus | None = None  # where the request stands
        self._found = Feed[Reply]()
        self._inner: Reply | None = None

    async def reply(self, caller: Caller, work: Callable[..., Any]) -> Reply:
        """Reply as `work` does, or begin a stream when it is time to say something.

        Raises:
            TrioServeError: as `work`, before that.
        """
        # The task that waits opens and closes the resources of the request.
        own = attrs.evolve(caller, resources=AsyncExitStack(), on_wait=self._note)
        caller.limits_left = lambda: own.limits_left()
        await caller.open(alongside(partial(self._wait, own, work)))
        with trio.move_on_after(sse.SOON if self._tells_place else self._interval):
            return await anext(self._found)
        return Pieces(
            pieces=self._pieces(caller),
            headers=dict(sse.HEADERS),
            content_type=self._route.streams,
            keep_alive=KeepAlive(self._interval, self._beat),
        )

    async def _wait(self, own: Caller, work: Callable[..., Any]) -> None:
        async with own.resources:
            try:
                self._found.put(await work(caller=own))
            except Exception as error:
                self._found.end(errors.known(error))
            await trio.sleep_forever()

    def _note(self, status: QueueStatus) -> None:
        self._status = status

    async def _beat(self) -> bytes:
        """Write a ping: where the request stands, and then what its reply writes."""
        if self._inner is None:
            return self._say(self._status)
        return await self._inner.keep_alive.comment() if self._inner.keep_alive else b""

    async def _pieces(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        # An async generator, so no nursery or cancel scope may be open at a `yield`.
        said, inner, path = b"", None, caller.path
        patience = sse.LOOK_INTERVAL if self._tells_place else math.inf
        try:
            while inner is None:
                if (comment := self._say(self._status)) != said:
                    yield comment
                said = comment
                with trio.move_on_after(patience):
                    inner = await anext(self._found)
        except TrioServeError as error:
            caller.tally.error = error
            yield errors.last_event(path, error)
            return
        self._inner = inner
        if inner.status != 200:
            make, _ = await value_of(inner)
            yield errors.shape_of(path).event(make(), 0)
            return
        pieces = await inner.write()
        if not isinstance(pieces, AsyncIterable):
            for piece in pieces:
                yield piece
            return
        async with aclosing(cast(AsyncGenerator[bytes, None], pieces)) as parts:
            async for piece in parts:
                yield piece
