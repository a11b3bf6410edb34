"""`Common`: what the engines of a server have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import attrs
from trio_util import AsyncValue

from trioserve.config import Config
from trioserve.engine.loop import EngineLoop
from trioserve.errors import ServerClosingError
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Dispatcher
from trioserve.server.limits.admission import Admission
from trioserve.server.limits.cache_sharing import CacheSharing
from trioserve.server.limits.memory import BYTES_PER_TOKEN, Hold, MemoryBudget
from trioserve.server.limits.rate_limits import RateLimits
from trioserve.server.observers.observer import Observer, RequestInfo, observed
from trioserve.server.prompts.tokens import text_of
from trioserve.server.stream import Stream
from trioserve.types import CancelReason, EmbeddingTask, Task


@attrs.frozen(kw_only=True)
class Common:
    """What belongs to a server and not to one of its engines: it is there while it sleeps, too.

    Args:
        config: of the server.
        memory: bounds what requests hold.
        observers: who is told when a request starts and ends.
        in_use: keeps the engine from being ended for as long as a block lasts.
    """

    config: Config
    memory: MemoryBudget
    observers: Sequence[Observer]
    in_use: Callable[[], AbstractContextManager[None]]
    rate_limits: RateLimits = attrs.field(init=False)
    cache_sharing: CacheSharing = attrs.field(init=False)
    task_ids: Iterator[int] = attrs.field(init=False, factory=lambda: itertools.count(1))

    @rate_limits.default
    def _make_rate_limits(self) -> RateLimits:
        return RateLimits(self.config.rate_limit_requests, self.config.rate_limit_tokens)

    @cache_sharing.default
    def _make_cache_sharing(self) -> CacheSharing:
        return CacheSharing(self.config)


class Requests:
    """Opens requests and closes them, on the event loop.

    Args:
        common: of the server.
        loop: the engine, whatever it makes.
        dispatcher: has a mailbox for each request.
        admission: says whether a request is let in.
        model: the model's name.
    """

    def __init__(
        self,
        common: Common,
        loop: EngineLoop,
        dispatcher: Dispatcher,
        admission: Admission,
        model: str,
    ) -> None:
        config = common.config
        self.admission = admission
        self.rate_limits = common.rate_limits
        self._common = common
        self._loop = loop
        self._dispatcher = dispatcher
        self._model = model
        self._n_open = AsyncValue(0)
        self._weights = dict(zip(config.api_keys, config.api_key_weights, strict=False))

    def new_id(self) -> int:
        """Make the id of a task."""
        return next(self._common.task_ids)

    def weight_of(self, client: str) -> float:
        """How many turns a client has in the queue for one of the others."""
        return self._weights.get(client, 1.0)

    @contextmanager
    def open(
        self, task: Task | EmbeddingTask, context: RequestContext, operation: str
    ) -> Iterator[Stream]:
        """Open a request and close it. All of it is synchronous: no await, no gap.

        Args:
            task: what the engine is to do.
            context: who asks, and until when.
            operation: what observers are told that it is; see `RequestInfo`.

        Raises:
            InvalidRequestError: the task can never run, or the client may not ask for its priority.
            QueueFullError: too many requests wait already.
            MemoryFullError: there is no room for its prompt.
            RateLimitError: the client has too few tokens left in this minute.
            ServerClosingError: the server drains, or is closed.
        """
        self.admission.check_open()
        self._loop.check(task)
        self.admission.check_priority(task.priority, task.client)
        self.admission.check(len(task.prompt), task.client)
        with self._common.in_use(), self._common.memory.hold(task.client) as held:
            held.grow(len(task.prompt) * BYTES_PER_TOKEN)
            info = RequestInfo(
                task.id, self._model, len(task.prompt), operation, task, context, self._text(task)
            )
            with self._running(task, info, held) as stream:
                yield stream

    def _text(self, task: Task | EmbeddingTask) -> Callable[[], str] | None:
        """What writes the prompt of a task, if the text is to be traced."""
        if not self._common.config.otel_content:
            return None
        return lambda: text_of(self._loop.vocab, task.prompt).decode("utf-8", "replace")

    @contextmanager
    def _running(
        self, task: Task | EmbeddingTask, info: RequestInfo, held: Hold
    ) -> Iterator[Stream]:
        """Submit a task that was let in."""
        context = info.context
        settle = self._reserve(task, context)
        mailbox = self._dispatcher.open(
            task.id, len(task.prompt), client=task.client, deadline=context.deadline
        )
        stream = Stream(task.prompt, mailbox, self._dispatcher, held)
        if info.prompt_text is not None:
            stream.texts = []
        self._n_open.value += 1
        try:
            with observed(self._common.observers, info, stream, context.on_cancel):
                self._loop.submit(task)
                yield stream
        finally:
            self._dispatcher.close(mailbox)
            self._n_open.value -= 1
            settle(len(task.prompt) + stream.n_tokens)
            if stream.finished is not None:
                timings = stream.finished.timings
                self.admission.observe(timings.prompt_ms + timings.predicted_ms)

    def _reserve(
        self, task: Task | EmbeddingTask, context: RequestContext
    ) -> Callable[[int], None]:
        """Reserve the tokens of a task: its prompt, and all that may be generated."""
        n_prompt = len(task.prompt)
        if not context.limited_as:
            return lambda _n_used: None
        n_output = 0
        if isinstance(task, Task):
            room, limit = self._loop.n_ctx_seq - n_prompt, task.params.max_tokens
            n_output = room if limit < 0 else min(room, limit)
        return self.rate_limits.reserve(context.limited_as, n_prompt + n_output)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a block as an open request, which is waited for when the server drains."""
        self._n_open.value += 1
        try:
            yield
        finally:
            self._n_open.value -= 1

    async def wait_none(self) -> None:
        """Wait until no request is open."""
        await self._n_open.wait_value(0)

    def end_all(self, message: str) -> None:
        """End all that run or wait; their readers get a ServerClosingError."""
        for mailbox in self._dispatcher.mailboxes:
            self._dispatcher.end(mailbox, ServerClosingError(message), CancelReason.SHUTDOWN)
