"""Stores responses: at their end, and those in the background from their beginning on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import trio

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
from trioserve.concurrency import Gate, Phase
from trioserve.errors import UnavailableError
from trioserve.fair_limiter import offload
from trioserve.store import Part, Records, Store

#: The end of a response that ran when the server was killed.
_CUT = {"status": "incomplete", "incomplete_details": {"reason": "server_restarted"}}


@attrs.define(eq=False)
class StoredRun:
    """A request whose response is to be stored. With `background`, its record is open as it runs.

    Attributes:
        id: of the response.
        owner: who may see it.
        store: where it is stored.
        gate: of the app.
        options: how.
        input: the items of the request, without those before them.
        body: the response as far as it is known; only of one in the background, as what follows.
        size: the bytes of its request.
        session: in which it runs.
        is_there: whether it has a record.
        is_kept: whether its end is stored.
        begun: set once it has a record, or cannot have one.
        ended: set when it has ended, and its end is stored.
    """

    id: str
    owner: bytes
    store: Store
    gate: Gate
    options: StoringRequest
    is_asked: bool  # rather than stored by default: if it cannot be, that is an error
    input: list[Part]
    body: dict[str, Any] = attrs.field(factory=dict)
    size: int = 0
    session: StreamSession | None = None
    is_there: bool = False
    is_kept: bool = False
    begun: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)

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

    def has_to_end(self) -> bool:
        """True once the server drains, so that the response has to end."""
        return self.gate.phase.value is not Phase.OPEN

    async def add(self) -> None:
        """Store the response before it is begun. Raises UnavailableError."""

        n_bytes = sum(len(each.body) for each in self.input)

        def check(records: Records) -> None:
            records.check_share(self.owner, n_bytes)

        await self.store.do(check)
        await self._add(self.body, check, is_open=True)
        self.is_there = True

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
            UnavailableError: it cannot be stored.
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


def settle(records: Records) -> None:
    """End the responses that ran when the last server ended, and could not store how they did."""
    for record in records.open_ones(RESPONSE):
        try:
            records.change(record.id, {**record.body, **_CUT})
        except UnavailableError:  # it is damaged, and has nothing but its input
            records.delete(record.id)
