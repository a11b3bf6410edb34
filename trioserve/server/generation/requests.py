"""The life of a request: admit it, submit its task to the engine, and close it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module

import attrs
import trio

from trioserve.concurrency import Gate
from trioserve.config import Config
from trioserve.config.keys import Key
from trioserve.engine.loop import EngineLoop
from trioserve.errors import InvalidRequestError, QueueFullError
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Dispatcher, QueueLoad
from trioserve.server.keys import Keys
from trioserve.server.limits.memory import BYTES_PER_TOKEN, MemoryBudget
from trioserve.server.limits.rates import RateLimits
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import Observer, RequestInfo, RequestLog, observed
from trioserve.server.observers.telemetry import Telemetry
from trioserve.server.prompts.text import text_of
from trioserve.server.stream import Stream
from trioserve.server.usage import Usage
from trioserve.types import (
    AnyTask,
    CacheRoot,
    CancelReason,
    EngineStatus,
    SpeechTask,
    Task,
    WaitingStatus,
)


class ServerResources:
    """The parts of a server that outlive its engines. They exist while the server sleeps, too.

    Args:
        usage: counts what they use; None: only their budgets do.
    """

    def __init__(self, config: Config, keys: Keys, usage: Usage | None) -> None:
        self.config = config
        #: The API keys; None where clients need none.
        self.keys = keys if keys.needed else None
        self.usage = usage or Usage()
        #: Admits requests and runs with tools, ends them, and has its phase when the server drains.
        self.gate = Gate()
        #: The memory budget of requests, including unread requests of other connections.
        self.memory = MemoryBudget.of(config)
        #: Request metrics; None unless the configuration enables them.
        self.metrics = Metrics() if config.metrics_endpoint else None
        self.observers: list[Observer] = [RequestLog()]
        if usage is not None or self.keys is not None:
            self.observers.append(self.usage)
        if self.metrics is not None:
            self.observers.append(self.metrics)
        #: Passes events to callbacks of a program; see `Telemetry.subscribe`.
        self.telemetry = Telemetry(self.observers)
        #: The limits of requests and tokens a minute; None without limits.
        self.rate_limits: RateLimits | None = None
        if config.rate_limit_requests or config.rate_limit_tokens or config.keys_file:
            self.rate_limits = RateLimits(
                config.rate_limit_requests, config.rate_limit_tokens, keys=self.keys
            )
        self.task_ids = itertools.count(1)
        #: Calls what puts the events of a step into the mailboxes.
        self.step: Callable[[Callable[[], None]], None] = lambda deliver: deliver()

    def weight_of(self, client: str) -> float:
        """The weight of a client in fair queueing; 1 is one turn per round."""
        key = None if self.keys is None else self.keys.find(client)
        return 1.0 if key is None else key.weight

    def cache_root(self, client: str, salt: str) -> CacheRoot:
        """The root of a client's text, without adapters. Those with equal ones share cached tokens.

        With API keys, each key has separate roots, unless the configuration shares the cache. A
        root contains digests of keys and salts, not the values. Digests are equal in every process,
        which files of saved slots require.
        """
        owner = cache_owner(self.config, client)
        return CacheRoot((), owner, _digest("salt", salt)) if owner or salt else CacheRoot()

    @asynccontextmanager
    async def traced(self) -> AsyncIterator[None]:
        """Trace the requests of a block with OpenTelemetry, if the configuration enables it."""
        if not self.config.otel:
            yield
            return
        # The import is slow, and the package is optional.
        module = "trioserve.server.observers.otel"
        otel = await trio.to_thread.run_sync(import_module, module)
        async with otel.exporting(content=self.config.otel_content) as observer:
            self.observers.append(observer)
            try:
                yield
            finally:
                self.observers.remove(observer)


#: Weight of the newest service time in the moving average.
_WEIGHT = 0.2


@attrs.define(eq=False, slots=False)
class Admission:
    """Rejects requests when the queue is full, and estimates wait times.

    With API keys, requests with a key are also rejected when they fill that key's share.
    """

    _config: Config  # the limits
    _keys: Keys | None  # the API keys; None: clients need none
    _dispatcher: Dispatcher  # counts the requests that run and wait
    _n_slots: int  # requests that run at the same time
    _service_s: float = attrs.field(init=False, default=0.0)  # moving average of the time in a slot

    def check(self, n_prompt: int, context: RequestContext) -> None:
        """Check that the queue has room for a request.

        Raises:
            QueueFullError: too many requests or prompt tokens wait; has a time to retry after.
        """
        n_queued = self._dispatcher.queued.n_requests
        n_free = self._n_slots - (len(self._dispatcher) - n_queued)
        if n_queued < n_free:
            return  # it starts at once
        n_requests, n_tokens = self._config.max_queue, self._config.max_queue_tokens
        if self._keys is not None:
            own = self._dispatcher.queued_of(context.client)
            share = max(1, n_requests // max(1, self._keys.number))
            most = min(n_requests, self._config.max_queue_per_key or share)
            most_tokens: float = math.inf
            if n_tokens and n_requests:
                most_tokens = max(1, n_tokens * most // n_requests)
            whose = " with this API key"
            self._check_load(own, max(0, n_free), n_prompt, most, most_tokens, whose)
        limit = n_tokens or math.inf
        self._check_load(self._dispatcher.queued, n_free, n_prompt, n_requests, limit)

    def _check_load(
        self,
        load: QueueLoad,
        n_free: int,
        n_prompt: int,
        most: int,
        most_tokens: float,
        whose: str = "",
    ) -> None:
        n_waiting = load.n_requests - n_free
        if n_waiting >= most:
            what, are = ("request", "is") if n_waiting == 1 else ("requests", "are")
            raise QueueFullError(
                f"{n_waiting} {what}{whose} {are} waiting, and the limit is {most}.",
                retry_after=self._retry_after(),
            )
        n_tokens = load.n_tokens + n_prompt
        if n_tokens > most_tokens:
            raise QueueFullError(
                f"With this request, {n_tokens} prompt tokens{whose} would be waiting, "
                f"and the limit is {most_tokens}.",
                retry_after=self._retry_after(),
            )

    def observe(self, service_ms: float) -> None:
        """Update the average time that a request holds its slot."""
        seconds = service_ms / 1e3
        weight = _WEIGHT if self._service_s else 1.0
        self._service_s += weight * (seconds - self._service_s)

    def wait_s(self, position: int) -> float | None:
        """Estimate the seconds that the request at a queue position waits; 1 is the next one.

        That many requests must finish first, and one for each slot runs at a time. Returns None
        until a request has finished.
        """
        return position / self._n_slots * self._service_s if self._service_s else None

    def _retry_after(self) -> float:
        """Estimate the seconds until one request finishes and frees a place in the queue."""
        return max(1.0, math.ceil(self._service_s / self._n_slots))


#: Seconds that a snapshot of the queue is reused: many streams may ask for one.
FRESH = 1.0


@attrs.define(eq=False, slots=False)
class Queue:
    """A cached snapshot of the queue."""

    _look: Callable[[], Awaitable[EngineStatus]]  # takes a snapshot from the engine
    _looking: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _seen_at: float = attrs.field(init=False, default=-math.inf)
    _places: dict[int, WaitingStatus] = attrs.field(init=False, factory=dict)

    async def first_of(self, task_ids: Sequence[int]) -> WaitingStatus | None:
        """Find the first of some tasks in the queue; None if none of them waits."""
        async with self._looking:
            if trio.current_time() >= self._seen_at + FRESH:
                status = await self._look()
                self._places = {one.task_id: one for one in status.waiting}
                self._seen_at = trio.current_time()
        places = [self._places[id_] for id_ in task_ids if id_ in self._places]
        return min(places, key=lambda place: place.position, default=None)


@attrs.define(eq=False, slots=False)
class Requests:
    """Opens and closes requests, on the event loop."""

    resources: ServerResources  # the server's resources
    _loop: EngineLoop  # the engine, for text, embeddings or speech
    dispatcher: Dispatcher  # has a mailbox for each request
    admission: Admission  # accepts or rejects requests

    def check_room(self, context: RequestContext, n_prompt: int = 0) -> None:
        """Check that a request can be accepted, before work on its prompt starts.

        Raises:
            InsufficientQuotaError: the API key has used up its tokens of this day.
            QueueFullError: too many requests wait already.
        """
        if self.resources.keys is not None:
            self._check_budget(self.resources.keys, context)
        if not self.resources.gate.has_begun:
            self.admission.check(n_prompt, context)

    def _check_budget(self, keys: Keys, context: RequestContext) -> Key | None:
        """Check the budget of a request's API key, which this returns."""
        key = keys.find(context.client)
        if key is not None and key.daily_tokens:
            self.resources.usage.check(key, self.dispatcher.used_by(context.client))
        return key

    @contextmanager
    def open(self, task: AnyTask, context: RequestContext, operation: str) -> Iterator[Stream]:
        """Submit a task, and close its request after the block. Synchronous: it has no checkpoint.

        Args:
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
        resources, dispatcher, n_prompt = self.resources, self.dispatcher, len(task.prompt)
        keys, key = resources.keys, None
        if keys is not None and (key := self._check_budget(keys, context)) is not None:
            _check_priority(task.priority, key)
        self._loop.check(task)
        if not resources.gate.has_begun:
            self.admission.check(n_prompt, context)
        with resources.memory.hold(task.client) as held:
            held.grow(n_prompt * BYTES_PER_TOKEN)
            settle = None
            if resources.rate_limits is not None and context.limited_as:
                settle = resources.rate_limits.reserve(context.limited_as, self._most(task))
            mailbox = dispatcher.open(
                task.id, n_prompt, client=task.client, deadline=context.deadline
            )
            if keys is not None:
                mailbox.check_slot = partial(self._check_budget, keys, context)
            stream = Stream(task.prompt, mailbox, dispatcher, held)
            text = None
            if resources.config.otel_content:
                text, stream.texts = partial(self._text, task), []
            info = RequestInfo(
                task.id,
                self._loop.info.name,
                n_prompt,
                operation,
                task,
                context,
                text,
                key="" if key is None else key.name,
            )
            end = partial(dispatcher.end, mailbox, reason=CancelReason.SHUTDOWN)
            try:
                with (
                    resources.gate.open(end),
                    observed(resources.observers, info, stream, context.on_cancel),
                ):
                    dispatcher.submit(task)
                    yield stream
            finally:
                dispatcher.close(mailbox)
                if context.tally is not None:
                    context.tally.add(self._loop.info.name, stream)
                if settle is not None:
                    settle(n_prompt + mailbox.n_output)
                if stream.finished is not None:
                    timings = stream.finished.timings
                    self.admission.observe(timings.prompt_ms + timings.predicted_ms)

    def _text(self, task: AnyTask) -> str:
        """The text of a task's prompt."""
        return text_of(self._loop.vocab, task.prompt).decode("utf-8", "replace")

    def _most(self, task: AnyTask) -> int:
        """The tokens of a task: its prompt, and the most that it may generate."""
        n_prompt, n_output = len(task.prompt), 0
        if isinstance(task, Task):
            room, limit = self._loop.n_ctx_seq - n_prompt, task.params.max_tokens
            n_output = room if limit < 0 else min(room, limit)
        elif isinstance(task, SpeechTask):
            n_output = task.max_frames
        return n_prompt + n_output


def _check_priority(priority: int, key: Key) -> None:
    """Check that an API key may use a priority. Raises InvalidRequestError."""
    if priority > max(0, key.priority):
        raise InvalidRequestError.at(
            "priority",
            f"is {priority}, and the highest one that this API key may ask for is {key.priority}.",
        )


def cache_owner(config: Config, client: str) -> str:
    """The owner of a client's text in the cache; empty if all clients share it."""
    is_apart = config.has_api_keys and config.cache_sharing == "key"
    return _digest("owner", client) if is_apart else ""


def _digest(kind: str, value: str) -> str:
    if not value:
        return ""
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).hexdigest()
