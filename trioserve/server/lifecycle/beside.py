"""`EmbeddingsBeside`: embeddings of a model that generates text, with a second context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from trio_util import AsyncValue

from trioserve.concurrency import alone, alongside, deadline_scope
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.errors import EngineError, TrioServeError, UnavailableError
from trioserve.fair_limiter import Workers
from trioserve.log import get_logger
from trioserve.server.context import RequestContext
from trioserve.server.generation.embeddings import Embedder
from trioserve.server.generation.requests import Admission, Requests, ServerResources
from trioserve.server.lifecycle.engine import Driver, engine_of
from trioserve.server.prompts.media import MediaPrompts

_log = get_logger("trioserve.server")

#: Seconds without requests after which the context is freed.
IDLE_SECONDS = 300.0


class _Line:
    """The requests that wait for a context or use it, and what they get."""

    def __init__(self) -> None:
        self.n: AsyncValue[int] = AsyncValue(0)
        self.found: AsyncValue[Embedder | TrioServeError | None] = AsyncValue(None)


@attrs.define(eq=False, slots=False)
class EmbeddingsBeside:
    """Makes a second context of a loaded model at the first request, and frees it when it is idle.

    It has an engine on another thread, and ends with `run`, before the model. If the context cannot
    be made, all waiting requests get the error, and the next one tries again.
    """

    _resources: ServerResources
    _text: Engine  # generates text, and owns the model
    _drive: Driver
    _workers: Workers
    _media: MediaPrompts

    def __attrs_post_init__(self) -> None:
        self._line = _Line()  # another one after each failure to make a context

    @asynccontextmanager
    async def use(self, context: RequestContext) -> AsyncIterator[Embedder]:
        """Keep the context for a block, once it has been made.

        Raises:
            UnavailableError: it cannot be made.
            DeadlineExceededError: not in time.
        """
        line = self._line
        line.n.value += 1
        try:
            with deadline_scope(context.deadline):
                found = await line.found.wait_value(lambda found: found is not None)
            if isinstance(found, TrioServeError):
                raise found.again()
            yield found
        finally:
            line.n.value -= 1

    async def run(self) -> None:
        """Make and free contexts, one at a time, until cancelled."""
        while True:
            await self._line.n.wait_value(lambda n: n > 0)
            await alone(self._run_one, self._fail)

    def _fail(self, error: TrioServeError) -> None:
        _log.warning("no context for embeddings", reason=error.message)
        failed, self._line = self._line, _Line()
        failed.found.value = UnavailableError(
            f"The context for embeddings cannot be made: {error.message}"
        )

    async def _run_one(self) -> None:
        config, failure = self._resources.config, AsyncValue[EngineError | None](None)
        running = engine_of(config, self._text.make_embedder, EmbeddingEngine, self._drive, failure)
        async with running as (loop, dispatcher), alongside(dispatcher.run, dispatcher.watch):
            assert isinstance(loop, EmbeddingEngine)
            admission = Admission(config, self._resources.keys, dispatcher, loop.n_slots)
            requests = Requests(self._resources, loop, dispatcher, admission)
            found = self._line.found
            found.value = Embedder(loop, requests, self._workers, self._media)
            try:
                await self._while_used(failure)
            finally:
                found.value = None
        _log.info("the context for embeddings is freed")

    async def _while_used(self, failure: AsyncValue[EngineError | None]) -> None:
        """Return when there was no request for a while, or the engine has failed."""
        with trio.CancelScope() as scope:

            async def end() -> None:
                await failure.wait_value(lambda error: error is not None)
                scope.cancel()

            async with alongside(end):
                while await self._is_used():
                    pass

    async def _is_used(self) -> bool:
        """Wait until no request is left, and then for one more."""
        await self._line.n.wait_value(0)
        with trio.move_on_after(IDLE_SECONDS) as patience:
            await self._line.n.wait_value(lambda n: n > 0)
        return not patience.cancelled_caught
