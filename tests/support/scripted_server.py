"""A `Server` on a scripted backend, driven without a thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.server import RequestContext, Server
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import Stream
from trioserve.testing import ScriptedBackend, scripted, stepping
from trioserve.types import Chunk


def serve(backend: ScriptedBackend | None = None, **config: object) -> Server:
    backend = backend or ScriptedBackend()
    config.setdefault("stream_interval_ms", 0)
    return Server(Config(**config), load=scripted(backend), drive=stepping)


def within(seconds: float) -> RequestContext:
    """Make the context of a request with a deadline, which the HTTP interface sets."""
    return RequestContext(deadline=trio.current_time() + seconds)


@asynccontextmanager
async def completing(server: Server, prompt: str, seconds: float) -> AsyncIterator[Stream]:
    """Continue a prompt with a deadline."""
    context = within(seconds)
    params = await server.params({}, context=context)
    opened = server.stream_all([prompt], params, context=context)
    async with opened as (stream,):
        yield stream


async def complete_within(server: Server, prompt: str, seconds: float) -> str:
    async with completing(server, prompt, seconds) as stream:
        return await read(stream)


@asynccontextmanager
async def running(server: Server, tools: Sequence[Any], seconds: float) -> AsyncIterator[AgentRun]:
    """Run tools with a deadline."""
    messages = [{"role": "user", "content": "Hi"}]
    async with server.stream_run(messages, tools, context=within(seconds)) as run:
        yield run


async def read(stream: Stream) -> str:
    return "".join([event.text async for event in stream if isinstance(event, Chunk)])


async def assert_at_rest(server: Server) -> None:
    """Nothing of a request is left: no slot, no task in the queue, no mailbox."""
    status = await server.status()
    assert [slot.state for slot in status.slots] == ["idle"] * server.model.n_slots
    assert status.waiting == ()
    assert len(server.lifecycle.services.dispatcher) == 0


@attrs.define(eq=False)
class ScriptedLoader:
    """Loads another scripted backend each time, for a server that sleeps and wakes.

    `may_go_on` holds loading up while it is not set. `failure` is raised in place of loading.
    """

    make: Callable[[], ScriptedBackend] = ScriptedBackend
    backends: list[ScriptedBackend] = attrs.field(factory=list)
    n_begun: int = 0
    may_go_on: threading.Event = attrs.field(factory=threading.Event)
    failure: str = ""

    def __attrs_post_init__(self) -> None:
        self.may_go_on.set()

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> ScriptedBackend:
        self.n_begun += 1
        while not self.may_go_on.wait(0.01):
            if progress is not None and not progress(0.5):
                raise ModelLoadError("given up")
        if self.failure:
            raise ModelLoadError(self.failure)
        self.backends.append(self.make())
        return self.backends[-1]

    def serve(self, **config: object) -> Server:
        """Make a server that loads with this."""
        config.setdefault("stream_interval_ms", 0)
        return Server(Config(**config), load=self, drive=stepping)
