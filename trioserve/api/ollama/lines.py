"""Streams as Ollama's clients read them: lines of JSON, without names or comments.

There is nothing that such a client skips, so a part without text keeps a silent stream alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, sse
from trioserve.api.base.generation import event_stream
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.keepalive import Waiting
from trioserve.api.base.request import current_request, current_request_id
from trioserve.api.ollama import errors as ollama_errors
from trioserve.errors import TrioServeError
from trioserve.server import Server
from trioserve.server.dispatch import Mailbox
from trioserve.server.queue import Queue
from trioserve.server.stream import ChatStream, Stream

CONTENT_TYPE = "application/x-ndjson"


def last_line(error: Exception) -> bytes:
    """Make the line that ends a stream which had begun."""
    known = error if isinstance(error, TrioServeError) else errors.unexpected(error)
    return ollama_errors.line(ollama_errors.body(known, current_request_id()))


class _EmptyParts(Waiting):
    """Fills silence with parts that have no text."""

    def __init__(
        self, queue: Queue, mailboxes: Sequence[Mailbox], write: Callable[[], bytes]
    ) -> None:
        super().__init__(queue, mailboxes)
        self._write = write

    async def comment(self) -> bytes:
        """Write a part without text."""
        return self._write()


async def respond_lines(
    server: Server,
    request: GenerationRequest,
    stream: Stream | ChatStream,
    encoder: sse.Encoder[sse.Event],
    empty: Callable[[], bytes],
) -> Response:
    """Make the response that sends a stream of the current request; see `sse.respond`.

    Args:
        server: what makes the stream.
        request: what asked for it.
        stream: what is sent.
        encoder: writes its events.
        empty: writes a part without text.
    """
    streams: Any = [stream]
    events = await event_stream(server, request, streams, encoder, last_line)
    waiting = _EmptyParts(server.parts.queue, [stream.mailbox], empty)
    events = attrs.evolve(
        events, pings=attrs.evolve(events.pings, waiting=waiting), content_type=CONTENT_TYPE
    )
    return await sse.respond(current_request(), events)
