"""`Responses`: the responses of an app that other requests can reach by the id in their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from trioserve.server.stream import ChatStream

#: What is said of the id of a completion that is not running here.
NOT_RUNNING = "no active completion for this id"


@attrs.frozen(eq=False)
class Running:
    """A response that is being sent."""

    streams: Sequence[ChatStream]
    client: str  # who may find it
    reasoning_control: bool  # whether the request allows that its reasoning is ended

    @property
    def live(self) -> list[ChatStream]:
        """The streams that have not ended."""
        return [stream for stream in self.streams if not stream.mailbox.ended]

    def cancel(self) -> None:
        """End the streams; their reader gets a `RequestEndedError`."""
        for stream in self.live:
            stream.cancel()


class Responses:
    """The responses of an app, by id."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}

    @contextmanager
    def running(
        self, id_: str, streams: Sequence[ChatStream], client: str, *, reasoning_control: bool
    ) -> Iterator[None]:
        """Have a client find its response by the id in the chunks, as long as a block lasts."""
        self._running[id_] = Running(tuple(streams), client, reasoning_control)
        try:
            yield
        finally:
            del self._running[id_]

    def find(self, id_: str, client: str) -> Running | None:
        """Find a response that is being sent, unless it is another client's."""
        found = self._running.get(id_)
        return found if found is not None and found.client == client else None
