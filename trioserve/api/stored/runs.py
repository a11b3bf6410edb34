"""Stores responses: at their end, and those in the background from their beginning on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import attrs
import trio

from trioserve.api.base import errors
from trioserve.api.base.reply import LONG, Ending, Json, Reply
from trioserve.api.openai.responses.events import code_of
from trioserve.api.openai.responses.request import StoringRequest
from trioserve.api.sessions import StreamSession
from trioserve.api.stored.items import (
    CONVERSATION,
    INPUT,
    OUTPUT,
    RESPONSE,
    add_to_conversation,
    parts_of,
)
from trioserve.api.stored.shelf import PER_NUMBER
from trioserve.concurrency import Gate, Phase
from trioserve.errors import StoreError, TrioServeError, UnavailableError, raised_alone
from trioserve.fair_limiter import offload
from trioserve.left_out import leave_out
from trioserve.log import request_id
from trioserve.store import Part, Records, Store

#: Fields of a response that have values at its end.
OF_END = ("completed_at", "error", "incomplete_details", "usage")

#: The end of a response that ran when the server was killed.
_CUT = {"status": "incomplete", "incomplete_details": {"reason": "server_restarted"}}


#: Seconds before the end of a response in the background is stored again, if the store failed.
_PAUSE, _MAX_PAUSE = 1.0, 30.0


class ResponseWriter(Protocol):
    """The writer of a response's events, as far as it is stored."""

    end_of_stream: bytes  # the event with the whole response, and what follows it, once written
    n_before_end: int  # the events before that one

    @property
    def response(self) -> Mapping[str, Any] | None:
        """The response as it is, once it has begun."""


@attrs.define(eq=False)
class StoredRun:
    """A request whose response is to be stored. In the background, its record is open meanwhile."""

    id: str
    owner: bytes
    store: Store
    gate: Gate  # of the app
    options: StoringRequest
    path: str  # of the request
    is_asked: bool  # rather than stored by default: if it cannot be, that is an error
    input: list[Part]  # the items of the request, without those before them
    #: The response before it begins; only of one in the background, as all that follows.
    queued: dict[str, Any] = attrs.field(factory=dict)
    size: int = 0  # the bytes of the request
    writer: ResponseWriter | None = None  # once the request has a place
    session: StreamSession | None = None
    is_there: bool = False  # it has a record
    is_kept: bool = False  # its end is stored
    begun: trio.Event = attrs.field(factory=trio.Event)  # it has a record, or cannot have one
    ended: trio.Event = attrs.field(factory=trio.Event)  # its end is stored, or could not be

    @property
    def body(self) -> Mapping[str, Any]:
        """The response as far as it is known."""
        return (self.writer and self.writer.response) or self.queued

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields of the response that say how it is stored."""
        conversation = self.options.conversation
        return {
            "background": self.options.background,
            "conversation": None if conversation is None else {"id": conversation},
            "previous_response_id": self.options.previous_response_id or None,
            "store": self.options.store,
        }

    @property
    def has_to_end(self) -> bool:
        """True once the server drains, so that the response has to end."""
        return self.gate.phase.value is not Phase.OPEN

    async def stored(self, reply: Reply) -> Reply:
        """Have a reply stored: a whole one now, and a stream before its last event is sent."""
        if reply.status != 200:
            return reply
        if isinstance(reply, Ending):
            self.writer = reply.writer
            reply.at_end = partial(self._keep_last, reply.writer)
            return reply
        assert isinstance(reply, Json)
        size = PER_NUMBER * reply.size
        whole = await offload(reply.make, size, LONG)
        try:
            await self.keep(whole, size)
        except TrioServeError as error:
            if self.is_asked:
                raise
            _tell_not_stored(error)
            whole = {**whole, "store": False}
        return attrs.evolve(reply, make=lambda: whole)

    async def _keep_last(self, writer: ResponseWriter, data: bytes) -> bytes:
        """Store the response that has ended. Gives what is sent last: that, or an error."""
        if not writer.end_of_stream:
            return data  # it has failed before it began
        assert writer.response is not None
        response = dict(writer.response)
        # Until it is stored, it is not over: a client that asks would miss its output.
        is_running = {"status": "in_progress", "output": []}
        self.writer, self.queued = None, {**response, **dict.fromkeys(OF_END), **is_running}
        if self.options.background and response["status"] == "failed" and self.has_to_end:
            response["status"] = "cancelled"
        pause = _PAUSE
        while True:
            try:
                await self.keep(response, len(data))
                return data
            except TrioServeError as error:
                failure = error
            is_lasting = not isinstance(failure, StoreError)
            if not self.options.background or is_lasting or self.has_to_end:
                break
            with trio.move_on_after(pause):
                await self.gate.phase.wait_value(lambda phase: phase is not Phase.OPEN)
            pause = min(2 * pause, _MAX_PAUSE)
        if not self.is_asked:
            _tell_not_stored(failure)
            return data
        body = errors.bodies_on(self.path)(failure)
        told = errors.shape_of(self.path).event(body, writer.n_before_end)
        return data.removesuffix(writer.end_of_stream) + told

    @asynccontextmanager
    async def live(self, runs: dict[str, Any]) -> AsyncIterator[None]:
        """Store that a response runs in the background, and, after the block, how it has ended.

        It is in `runs` until its end is stored.
        """
        n_bytes = sum(len(each.body) for each in self.input)
        check = partial(Records.check_share, owner=self.owner, n_bytes=n_bytes)
        runs[self.id] = self
        try:
            await self.store.do(check)
            await self._add(self.queued, check, is_open=True)
            self.is_there = True
            self.begun.set()
            async with self._stored_end():
                yield
        finally:
            if self.is_kept or not self.is_there:
                del runs[self.id]
            self.begun.set()
            self.ended.set()

    @asynccontextmanager
    async def _stored_end(self) -> AsyncIterator[None]:
        """Store how a run has ended that does not come to its last event in the block."""
        status, failure = "failed", None
        try:
            yield
        except trio.Cancelled:
            status = "cancelled"
            raise
        except Exception as group:
            failure = errors.known(alone := raised_alone(group))
            if failure is alone:
                raise
            raise failure from group
        finally:
            with trio.CancelScope(shield=True):
                if not self.is_kept:
                    await self._keep_end(status, failure)

    async def _keep_end(self, status: str, failure: TrioServeError | None) -> None:
        if self.has_to_end:
            status = "cancelled"
        error = self._error(failure) if status == "failed" else None
        body = {**self.body, "status": status, "error": error, "output": []}
        self.writer, self.queued = None, body
        try:
            await self.keep(body, 0)
        except TrioServeError as problem:
            leave_out("the end of a background response", problem.message)

    def _error(self, failure: TrioServeError | None) -> dict[str, str]:
        """The error of the response: the one raised, or that of the reply."""
        assert self.session is not None
        reply, problem = self.session.reply, self.session.problem
        if failure is not None:
            status, message = failure.status, errors.message_of(failure, request_id())
        elif reply is not None and problem is not None:
            status, message = reply.status, problem["error"]["message"]
        else:
            status, message = 500, "The response has no end."
        return {"code": code_of(status), "message": message}

    async def _add(
        self, body: dict[str, Any], then: Callable[[Records], None], *, is_open: bool = False
    ) -> None:
        parts = (INPUT, self.input)
        await self.store.add(
            self.id, RESPONSE, self.owner, body, parts=parts, is_open=is_open, then=then
        )

    async def keep(self, response: Mapping[str, Any], size: int) -> None:
        """Store the response as it has ended, with its items. Of several ends, the first counts.

        `size` is about how many characters of JSON it has.

        Raises:
            TrioServeError: it cannot be stored.
        """
        body = {name: value for name, value in response.items() if name != "output"}
        items = [each for each in response["output"] if isinstance(each, dict)]
        output = await offload(lambda: list(parts_of(items)), size)

        def end(records: Records) -> None:
            record = records.find(self.id, RESPONSE, self.owner)
            if record is None or not record.is_open:
                return  # deleted meanwhile, or stored by a call that was cancelled
            records.change(self.id, body)
            add_output(records)

        def add_output(records: Records) -> None:
            records.append(self.id, OUTPUT, output)
            id_ = self.options.conversation
            if id_ is None or body["status"] not in ("completed", "incomplete"):
                return
            if (conversation := records.find(id_, CONVERSATION, self.owner)) is not None:
                add_to_conversation(records, conversation, [*self.input, *output])

        if self.options.background:
            await self.store.do(end)
        else:
            await self._add(body, add_output)
        self.is_kept = True


def _tell_not_stored(error: TrioServeError) -> None:
    leave_out("store", f"it is the default, and not possible at the moment: {error.message}")


def settle(records: Records) -> None:
    """End the responses that ran when the last server ended, and could not store how they did."""
    for record in records.open_ones(RESPONSE):
        try:
            records.change(record.id, {**record.body, **_CUT})
        except UnavailableError:  # it is damaged, and has nothing but its input
            records.delete(record.id)
