"""The life of a request: admit it, submit its task to the engine, and close it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

import attrs
import trio

from trioserve.concurrency import Gate
from trioserve.config import Config
from trioserve.config.keys import Key
from trioserve.engine.loop import EngineLoop
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Dispatcher
from trioserve.server.keys import Keys
from trioserve.server.limits.admission import Admission, CacheSharing, RateLimits
from trioserve.server.limits.memory import BYTES_PER_TOKEN, MemoryBudget
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import Observer, RequestInfo, RequestLog, observed
from trioserve.server.observers.telemetry import Telemetry
from trioserve.server.prompts.text import text_of
from trioserve.server.stream import Stream
from trioserve.server.usage import Usage
from trioserve.types import CancelReason, EmbeddingTask, Task

_T = TypeVar("_T")


class ServerResources:
    """The parts of a server that outlive its engines. They exist while the server sleeps, too.

    Args:
        config: the server's configuration.
        keys: its API keys.
        usage: counts what they use.
    """

    def __init__(self, config: Config, keys: Keys, usage: Usage) -> None:
        self.config = config
        self.keys = keys
        self.usage = usage
        #: Admits requests and runs with tools, ends them, and has its phase when the server drains.
        self.gate = Gate()
        #: The memory budget of requests, including unread requests of other connections.
        self.memory = MemoryBudget.of(config)
        #: Request metrics; None unless the configuration enables them.
        self.metrics = Metrics() if config.metrics_endpoint else None
        self.observers: list[Observer] = [RequestLog(), usage]
        if self.metrics is not None:
            self.observers.append(self.metrics)
        #: Passes events to callbacks of a program; see `Telemetry.subscribe`.
        self.telemetry = Telemetry(self.observers)
        self.rate_limits = RateLimits(
            config.rate_limit_requests, config.rate_limit_tokens, keys=keys
        )
        self.cache_sharing = CacheSharing(config)
        self.task_ids = itertools.count(1)

    def weight_of(self, client: str) -> float:
        """The weight of a client in fair queueing; 1 is one turn per round."""
        key = self.keys.find(client)
        return 1.0 if key is None else key.weight

    @asynccontextmanager
    async def traced(self) -> AsyncIterator[None]:
        """Trace the requests of a block with OpenTelemetry, if the configuration enables it."""
        if not self.config.otel:
            yield
            return
        exporting = await trio.to_thread.run_sync(_import_exporting)
        async with exporting(content=self.config.otel_content) as observer:
            self.observers.append(observer)
            try:
                yield
            finally:
                self.observers.remove(observer)


def _import_exporting() -> Callable[..., AbstractAsyncContextManager[Observer]]:
    """Import the exporter on demand: the import is slow, and the package is optional."""
    from trioserve.server.observers.otel import exporting

    return exporting


@attrs.define(eq=False, slots=False)
class Requests:
    """Opens and closes requests, on the event loop."""

    resources: ServerResources  # the server's resources
    _loop: EngineLoop  # the engine, for text or embeddings
    _dispatcher: Dispatcher  # has a mailbox for each request
    admission: Admission  # accepts or rejects requests

    def check_room(self, context: RequestContext, n_prompt: int = 0) -> None:
        """Check that a request can be accepted, before work on its prompt starts.

        Raises:
            InsufficientQuotaError: the API key has used up its tokens of this day.
            QueueFullError: too many requests wait already.
        """
        self._check_budget(context)
        self._check_queue(n_prompt, context)

    def _check_queue(self, n_prompt: int, context: RequestContext) -> None:
        """Check the limits of the queue, except for what has had a place already."""
        if not self.resources.gate.has_begun:
            self.admission.check(n_prompt, context)

    def _check_budget(self, context: RequestContext) -> Key | None:
        """Check the budget of a request's API key, which this returns."""
        key = self.resources.keys.find(context.client)
        if key is not None and key.daily_tokens:
            self.resources.usage.check(key, self._dispatcher.used_by(context.client))
        return key

    @contextmanager
    def open(
        self, task: Task | EmbeddingTask, context: RequestContext, operation: str
    ) -> Iterator[Stream]:
        """Submit a task, and close its request after the block. Synchronous: it has no checkpoint.

        Args:
            task: the engine's task.
            context: the client and the deadline.
            operation: the operation's name for observers; see `RequestInfo`.

        Raises:
            InvalidRequestError: the task can never run, or the client may not use its priority.
            QueueFullError: too many requests wait already.
            MemoryFullError: the prompt does not fit into the memory budget.
            RateLimitError: the client has too few tokens left in this minute.
            InsufficientQuotaError: the API key has used up its tokens of this day. It is looked
                at again when the task gets its slot: then this comes from the stream.
            ServerClosingError: the server drains, or is closed.
        """
        key = self._check_budget(context)
        self._loop.check(task)
        self.admission.check_priority(task.priority, task.client)
        self._check_queue(len(task.prompt), context)
        with self.resources.memory.hold(task.client) as held:
            held.grow(len(task.prompt) * BYTES_PER_TOKEN)
            settle = self._reserve(task, context)
            mailbox = self._dispatcher.open(
                task.id, len(task.prompt), client=task.client, deadline=context.deadline
            )
            mailbox.check_slot = partial(self._check_budget, context)
            stream = Stream(task.prompt, mailbox, self._dispatcher, held)
            model, text = self._loop.info.name, self._text(task)
            if text is not None:
                stream.texts = []
            info = RequestInfo(
                task.id,
                model,
                len(task.prompt),
                operation,
                task,
                context,
                text,
                key="" if key is None else key.name,
            )
            end = partial(self._dispatcher.end, mailbox, reason=CancelReason.SHUTDOWN)
            try:
                with (
                    self.resources.gate.open(end),
                    observed(self.resources.observers, info, stream, context.on_cancel),
                ):
                    self._loop.submit(task)
                    yield stream
            finally:
                self._dispatcher.close(mailbox)
                settle(len(task.prompt) + stream.mailbox.n_output)
                if stream.finished is not None:
                    timings = stream.finished.timings
                    self.admission.observe(timings.prompt_ms + timings.predicted_ms)

    def _text(self, task: Task | EmbeddingTask) -> Callable[[], str] | None:
        """A function that decodes the task's prompt, if prompts are traced."""
        if not self.resources.config.otel_content:
            return None
        return lambda: text_of(self._loop.vocab, task.prompt).decode("utf-8", "replace")

    def _reserve(
        self, task: Task | EmbeddingTask, context: RequestContext
    ) -> Callable[[int], None]:
        """Reserve the tokens of a task: its prompt, and the most that it may generate."""
        n_prompt = len(task.prompt)
        if not context.limited_as:
            return lambda _n_used: None
        n_output = 0
        if isinstance(task, Task):
            room, limit = self._loop.n_ctx_seq - n_prompt, task.params.max_tokens
            n_output = room if limit < 0 else min(room, limit)
        return self.resources.rate_limits.reserve(context.limited_as, n_prompt + n_output)
