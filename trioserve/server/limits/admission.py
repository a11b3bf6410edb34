"""Whether a request is let in, and what each client may have.

How many requests may wait, of each API key and in all, how urgent they are, and how many requests
and tokens a client may have a minute; whose texts it shares in the caches.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from time import monotonic

import attrs
import trio

from trioserve.config import Config
from trioserve.errors import InvalidRequestError, QueueFullError, RateLimitError, ServerClosingError
from trioserve.server.dispatch import Dispatcher, QueueLoad
from trioserve.types import Adapters, CacheRoot, EngineStatus, WaitingStatus

#: Share of a new observation in the average of how long requests take.
_WEIGHT = 0.2


@attrs.frozen
class _Bounds:
    """How much may wait. `owner` ends a sentence about what waits."""

    n_requests: float
    n_tokens: float
    owner: str = ""


#: Whether the current task is to finish what it does, even if the server drains or is full.
_BEGUN: ContextVar[bool] = ContextVar("begun", default=False)


def let_finish() -> None:
    """Let whatever the current task asks for from now on in, though the server drains or is full.

    For a task that has begun something of several steps. What it starts is let in as well.
    """
    _BEGUN.set(True)


class Admission:
    """Refuses requests that would wait in a queue that is full, and estimates waits.

    With API keys, the queue is also full for a key whose share of it is.

    Args:
        config: the limits.
        dispatcher: knows how many requests run and wait.
        n_slots: requests that run at the same time.
    """

    def __init__(self, config: Config, dispatcher: Dispatcher, n_slots: int) -> None:
        self._bounds = _Bounds(config.max_queue, config.max_queue_tokens or math.inf)
        self._bounds_of_key = _share_of_key(config)
        priorities = config.api_key_priority
        self._max_priority = dict.fromkeys(config.api_keys, 0)
        self._max_priority |= zip(config.api_keys, priorities, strict=False)
        self._dispatcher = dispatcher
        self._n_slots = n_slots
        self._service_s = 0.0  # how long a request holds its slot, a moving average
        self.draining = False  # nothing new is let in
        self.closed = False  # and what has begun is over

    def check_open(self) -> None:
        """Refuse whatever comes when the server drains or is closed.

        Raises:
            ServerClosingError: it does, or is.
        """
        if self.closed or (self.draining and not _BEGUN.get()):
            raise ServerClosingError

    def check(self, n_prompt: int, client: str) -> None:
        """Let a request of a client in, or raise. What has begun is let in.

        Raises:
            QueueFullError: too many requests wait, or too many tokens; says when to come back.
        """
        if _BEGUN.get():
            return
        n_queued = self._dispatcher.queued.n_requests
        n_free = self._n_slots - (len(self._dispatcher) - n_queued)
        if n_queued < n_free:
            return  # it does not wait
        if self._bounds_of_key is not None:
            own = self._dispatcher.queued_of(client)
            self._check_load(own, max(0, n_free), n_prompt, self._bounds_of_key)
        self._check_load(self._dispatcher.queued, n_free, n_prompt, self._bounds)

    def _check_load(self, load: QueueLoad, n_free: int, n_prompt: int, bounds: _Bounds) -> None:
        n_waiting = load.n_requests - n_free
        if n_waiting >= bounds.n_requests:
            what, are = ("request", "is") if n_waiting == 1 else ("requests", "are")
            raise QueueFullError(
                f"{n_waiting} {what}{bounds.owner} {are} waiting, "
                f"and the limit is {bounds.n_requests}.",
                retry_after=self._retry_after(),
            )
        n_tokens = load.n_tokens + n_prompt
        if n_tokens > bounds.n_tokens:
            raise QueueFullError(
                f"With this request, {n_tokens} prompt tokens{bounds.owner} would be waiting, "
                f"and the limit is {bounds.n_tokens}.",
                retry_after=self._retry_after(),
            )

    def check_priority(self, priority: int, client: str) -> None:
        """Refuse a priority that a client's API key has no right to.

        Raises:
            InvalidRequestError: it is higher than allowed.
        """
        allowed = self._max_priority.get(client, priority)
        if priority > max(0, allowed):
            raise InvalidRequestError(
                f"'priority' is {priority}, and the highest one that this API key may ask for is "
                f"{allowed}.",
                param="priority",
            )

    def observe(self, service_ms: float) -> None:
        """Learn how long a request has held its slot."""
        seconds = service_ms / 1e3
        weight = _WEIGHT if self._service_s else 1.0
        self._service_s += weight * (seconds - self._service_s)

    def wait_s(self, position: int) -> float | None:
        """Estimate how long the request at a position waits; 1 is the next one.

        So many requests have to end first, as many at a time as there are slots. Returns None
        while none has ended, so that nothing is known.
        """
        return position / self._n_slots * self._service_s if self._service_s else None

    def _retry_after(self) -> float:
        """Say when a place in the queue will be free: when one request is done."""
        return max(1.0, math.ceil(self._service_s / self._n_slots))


def _share_of_key(config: Config) -> _Bounds | None:
    """How much of the queue one API key may fill; None without keys."""
    if not config.api_keys:
        return None
    n_requests, n_tokens = config.max_queue, config.max_queue_tokens
    n_keys = len(set(config.api_keys))
    share = min(n_requests, config.max_queue_per_key or max(1, n_requests // n_keys))
    tokens = max(1, n_tokens * share // n_requests) if n_tokens and n_requests else math.inf
    return _Bounds(share, tokens, " with this API key")


#: Seconds for which one look at the queue serves all who ask: streams may be many.
FRESH = 1.0


class Queue:
    """The queue as it was a moment ago.

    Args:
        look: looks at the engine.
    """

    def __init__(self, look: Callable[[], Awaitable[EngineStatus]]) -> None:
        self._look = look
        self._looking = trio.Lock()
        self._seen_at: float | None = None
        self._places: dict[int, WaitingStatus] = {}

    async def first_of(self, task_ids: Sequence[int]) -> WaitingStatus | None:
        """Find the place of that task which is next; None when none of them waits."""
        async with self._looking:
            if self._seen_at is None or trio.current_time() >= self._seen_at + FRESH:
                status = await self._look()
                self._places = {one.task_id: one for one in status.waiting}
                self._seen_at = trio.current_time()
        places = [self._places[id_] for id_ in task_ids if id_ in self._places]
        return min(places, key=lambda place: place.position, default=None)


#: Seconds in which an empty bucket fills up.
PERIOD = 60.0


@attrs.define
class Bucket:
    """Holds up to `capacity`, and gains as much in `PERIOD` seconds. Empty: `level` is 0.

    What is taken beyond an estimate is owed: `level` may be negative.
    """

    capacity: float
    level: float
    at: float  # when `level` was right

    def refill(self, now: float) -> None:
        """Add what has come since the last look."""
        gained = (now - self.at) * self.capacity / PERIOD
        self.level, self.at = min(self.capacity, self.level + gained), now

    def wait(self, n: float) -> float:
        """Seconds until `n` can be taken."""
        return max(0.0, (n - self.level) * PERIOD / self.capacity)

    @property
    def full_in(self) -> float:
        """Seconds until it is full."""
        return (self.capacity - self.level) * PERIOD / self.capacity


@attrs.frozen
class Remaining:
    """What a client may still do: a limit, what is left of it, and seconds until all is back."""

    limit: int
    remaining: int
    reset: float


class RateLimits:
    """The buckets of all clients. Those that are full again are forgotten.

    Args:
        requests: requests a minute for each client; 0: no limit.
        tokens: tokens a minute for each client, of prompts and outputs; 0: no limit.
        clock: seconds that never go back.
    """

    def __init__(
        self, requests: int, tokens: int, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._n_requests, self._n_tokens = requests, tokens
        self._clock = clock
        #: The one that was looked at last stands last.
        self._clients: OrderedDict[str, dict[str, Bucket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, client: str) -> None:
        """Take one request.

        Raises:
            RateLimitError: there is none left; it says when to come back.
        """
        if self._n_requests:
            self._take(client, "requests", 1)

    def reserve(self, client: str, n_tokens: int) -> Callable[[int], None]:
        """Take `n_tokens`, or nothing. More than a minute brings is as much as a minute brings.

        Returns:
            A function to be called once, at the end, with the number of tokens that were used.

        Raises:
            RateLimitError: too few are left; it says when to come back.
        """
        if not self._n_tokens:
            return _settled
        taken = min(n_tokens, self._n_tokens)
        bucket = self._take(client, "tokens", taken)

        def settle(n_used: int) -> None:
            bucket.refill(self._clock())
            bucket.level += taken - n_used

        return settle

    def _take(self, client: str, what: str, n: int) -> Bucket:
        bucket = self._find(client)[what]
        if (wait := bucket.wait(n)) > 0:
            raise RateLimitError(
                f"Rate limit reached: {bucket.capacity:.0f} {what} a minute. "
                f"Try again in {wait:.1f} seconds.",
                retry_after=wait,
            )
        bucket.level -= n
        return bucket

    def remaining(self, client: str) -> dict[str, Remaining]:
        """What a client has left of "requests" and "tokens"; what has no limit is not there."""
        if not self._n_requests and not self._n_tokens:
            return {}
        return {
            what: Remaining(int(bucket.capacity), max(0, int(bucket.level)), bucket.full_in)
            for what, bucket in self._find(client).items()
        }

    def _find(self, client: str) -> dict[str, Bucket]:
        now = self._clock()
        limits = (("requests", self._n_requests), ("tokens", self._n_tokens))
        buckets = self._clients.setdefault(client, {w: Bucket(n, n, now) for w, n in limits if n})
        self._clients.move_to_end(client)
        for bucket in buckets.values():
            bucket.refill(now)
        self._forget(now)
        return buckets

    def _forget(self, now: float) -> None:
        """Drop clients that have been idle for so long that nothing is left to know of them."""
        for _ in range(2):  # so that they become fewer
            client, buckets = next(iter(self._clients.items()))
            if any(now < bucket.at + bucket.full_in for bucket in buckets.values()):
                return
            if len(self._clients) > 1:
                del self._clients[client]


def _settled(_n_used: int) -> None:
    """Nothing was taken."""


class CacheSharing:
    """Says under which root the text of a request stands.

    Where the configuration has API keys, each of them has roots of its own, unless all are to
    share. Keys and salts go no further: a root has digests of them, which are the same in every
    process, as files with saved slots need.

    Args:
        config: whether there are keys, and what they share.
    """

    def __init__(self, config: Config) -> None:
        self._by_key = bool(config.api_keys) and config.cache_sharing == "key"

    def owner(self, client: str) -> str:
        """Whose text it is that a client sends; empty: everybody's."""
        return _digest("owner", client) if self._by_key else ""

    def root(self, adapters: Adapters, client: str, salt: str) -> CacheRoot:
        """The root of a text."""
        return CacheRoot(adapters, self.owner(client), _digest("salt", salt))


def _digest(kind: str, value: str) -> str:
    if not value:
        return ""
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).hexdigest()
