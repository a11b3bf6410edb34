"""Answers that other requests can reach or end: those that are being sent, by id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from trioserve.errors import UnknownToolCallError
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream

#: What is said of the id of a completion that is not running here.
NOT_RUNNING = "no active completion for this id"


@attrs.frozen(eq=False)
class Running:
    """A response that is being sent."""

    streams: Sequence[ChatStream]  # of a run: that of its step
    client: str  # who may find it
    reasoning_control: bool  # whether the request allows that its reasoning is ended
    run: AgentRun | None = None  # what it is the answer of, if the server runs tools for it

    @property
    def live(self) -> list[ChatStream]:
        """The streams that have not ended."""
        return [stream for stream in self.streams if not stream.mailbox.is_over]

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to end. A run may be between two streams."""
        return not self.live if self.run is None else self.run.is_over

    def cancel(self) -> None:
        """End it; its reader gets a `RequestEndedError`."""
        if self.run is not None:
            self.run.cancel()
            return
        for stream in self.live:
            stream.cancel()


def is_unknown(status: int, body: bytes) -> bool:
    """Whether a server told, when it was asked about a response, that it does not send it.

    `body` is JSON. A response whose calls of tools do not include the one in question is known.
    """
    told = json.loads(body)
    if status == 404:
        return bool(told["error"].get("code") != UnknownToolCallError.code)
    return status == 200 and bool(told.get("message") == NOT_RUNNING)


class Responses:
    """The responses of an app, by id."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}

    @contextmanager
    def running(self, id_: str, response: Running) -> Iterator[None]:
        """Have a client find its response by the id in the chunks, as long as a block lasts."""
        self._running[id_] = response
        try:
            yield
        finally:
            del self._running[id_]

    def find(self, id_: str, client: str) -> Running | None:
        """Find a response that is being sent, unless it is another client's."""
        found = self._running.get(id_)
        return found if found is not None and found.client == client else None
