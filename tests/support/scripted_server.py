"""A `Server` on a scripted backend, driven without a thread."""

from __future__ import annotations

from trioserve.config import Config
from trioserve.server import Server
from trioserve.server.stream import Stream
from trioserve.testing import ScriptedBackend, scripted, ticking
from trioserve.types import Chunk


def serve(backend: ScriptedBackend | None = None, **config: object) -> Server:
    backend = backend or ScriptedBackend()
    config.setdefault("stream_interval_ms", 0)
    return Server(Config(**config), load=scripted(backend), drive=ticking)


async def read(stream: Stream) -> str:
    return "".join([event.text async for event in stream if isinstance(event, Chunk)])


async def assert_at_rest(server: Server) -> None:
    """Nothing of a request is left: no slot, no task in the queue, no mailbox."""
    status = await server.status()
    assert [slot.state for slot in status.slots] == ["idle"] * server.model.n_slots
    assert status.waiting == ()
    assert len(server.parts.dispatcher) == 0
