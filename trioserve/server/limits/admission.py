"""Admission control: decides whether a request is accepted, and limits each client.

It bounds the queue for each API key and in total, checks priorities, limits requests and tokens a
minute, and separates the caches of clients.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

import attrs
import trio

from trioserve.config import Config
from trioserve.config.keys import KeyLimits
from trioserve.errors import InvalidRequestError, QueueFullError, RateLimitError
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Dispatcher, QueueLoad
from trioserve.server.keys import Keys
from trioserve.types import Adapters, CacheRoot, EngineStatus, WaitingStatus

#: Weight of the newest service time in the moving average.
_WEIGHT = 0.2


@attrs.frozen
class _Bounds:
    """The limits of a queue. `owner` is a phrase that error messages append."""

    n_requests: float
    n_tokens: float
    owner: str = ""


class Admission:
    """Rejects requests when the queue is full, and estimates wait times.

    With API keys, requests with a key are also rejected when they fill that key's share.

    Args:
        config: the limits.
        keys: the API keys.
        dispatcher: counts the requests that run and wait.
        n_slots: number of requests that run at the same time.
    """

    def __init__(self, config: Config, keys: Keys, dispatcher: Dispatcher, n_slots: int) -> None:
        self._bounds = _Bounds(config.max_queue, config.max_queue_tokens or math.inf)
        self._config = config
        self._keys = keys
        self._dispatcher = dispatcher
        self._n_slots = n_slots
        self._service_s = 0.0  # moving average of the seconds a request holds its slot

    def check(self, n_prompt: int, context: RequestContext) -> None:
        """Check that the queue has room for a request.

        Raises:
            QueueFullError: too many requests or prompt tokens wait; has a time to retry after.
        """
        n_queued = self._dispatcher.queued.n_requests
        n_free = self._n_slots - (len(self._dispatcher) - n_queued)
        if n_queued < n_free:
            return  # it starts at once
        if self._keys.needed:
            own = self._dispatcher.queued_of(context.client)
            bounds = _share_of_key(self._config, self._keys.number)
            self._check_load(own, max(0, n_free), n_prompt, bounds)
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
        """Check that a client's API key may use a priority.

        Raises:
            InvalidRequestError: the priority is higher than allowed.
        """
        key = self._keys.find(client)
        allowed = priority if key is None else key.priority
        if priority > max(0, allowed):
            raise InvalidRequestError(
                f"'priority' is {priority}, and the highest one that this API key may ask for is "
                f"{allowed}.",
                param="priority",
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


def _share_of_key(config: Config, n_keys: int) -> _Bounds:
    """Compute the share of the queue that one of several API keys may fill."""
    n_requests, n_tokens = config.max_queue, config.max_queue_tokens
    share = min(n_requests, config.max_queue_per_key or max(1, n_requests // max(1, n_keys)))
    tokens = max(1, n_tokens * share // n_requests) if n_tokens and n_requests else math.inf
    return _Bounds(share, tokens, " with this API key")


#: Seconds that a snapshot of the queue is reused: many streams may ask for one.
FRESH = 1.0


class Queue:
    """A cached snapshot of the queue.

    Args:
        look: takes a snapshot from the engine.
    """

    def __init__(self, look: Callable[[], Awaitable[EngineStatus]]) -> None:
        self._look = look
        self._looking = trio.Lock()
        self._seen_at: float | None = None
        self._places: dict[int, WaitingStatus] = {}

    async def first_of(self, task_ids: Sequence[int]) -> WaitingStatus | None:
        """Find the first of some tasks in the queue; None if none of them waits."""
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
    """A token bucket: holds up to `capacity`, and refills by `capacity` every `PERIOD` seconds.

    `level` is negative when a request used more than it reserved.
    """

    capacity: float
    level: float
    at: float  # the time of `level`

    def refill(self, now: float) -> None:
        """Add what accumulated since the last refill."""
        gained = (now - self.at) * self.capacity / PERIOD
        self.level, self.at = min(self.capacity, self.level + gained), now

    def wait(self, n: float) -> float:
        """Seconds until `n` can be taken."""
        return max(0.0, (n - self.level) * PERIOD / self.capacity)

    @property
    def full_in(self) -> float:
        """Seconds until the bucket is full."""
        return (self.capacity - self.level) * PERIOD / self.capacity


@attrs.frozen
class Remaining:
    """One limit of a client: its size, the amount left, and the seconds until it is reset."""

    limit: int
    remaining: int
    reset: float


class RateLimits:
    """The token buckets of all clients. A client whose buckets are full is dropped.

    Args:
        requests: requests a minute for each client; 0: no limit.
        tokens: tokens a minute for each client, of prompts and outputs; 0: no limit.
        keys: API keys, whose limits replace these.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        requests: int,
        tokens: int,
        *,
        keys: Keys | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._n_requests, self._n_tokens = requests, tokens
        self._keys = keys
        self._clock = clock
        #: Ordered by last use, the most recent last.
        self._clients: OrderedDict[str, dict[str, Bucket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, client: str) -> None:
        """Count a request of a client. Raises RateLimitError beyond the limit.

        Raises:
            RateLimitError: the limit is reached; has a time to retry after.
        """
        if "requests" in self._limits_of(client):
            self._take(client, "requests", 1)

    def reserve(self, client: str, n_tokens: int) -> Callable[[int], None]:
        """Reserve `n_tokens`, all or none, at most the tokens of one minute.

        Returns:
            A function to call once, at the end, with the number of tokens that were used.

        Raises:
            RateLimitError: too few tokens are left; has a time to retry after.
        """
        if (limit := self._limits_of(client).get("tokens")) is None:
            return _settled
        taken = min(n_tokens, limit)
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
        """What a client has left of "requests" and "tokens". Unlimited ones are omitted."""
        if not self._limits_of(client):
            return {}
        return {
            what: Remaining(int(bucket.capacity), max(0, int(bucket.level)), bucket.full_in)
            for what, bucket in self._find(client).items()
        }

    def _limits_of(self, client: str) -> dict[str, int]:
        """The limits of a client by their names, without those that it does not have."""
        key = None if self._keys is None else self._keys.find(client)
        own = KeyLimits() if key is None else key.limits
        limits = {
            "requests": self._n_requests if own.requests is None else own.requests,
            "tokens": self._n_tokens if own.tokens is None else own.tokens,
        }
        return {what: n for what, n in limits.items() if n}

    def _find(self, client: str) -> dict[str, Bucket]:
        now, limits = self._clock(), self._limits_of(client)
        buckets = self._clients.setdefault(client, {})
        self._clients.move_to_end(client)
        for what in buckets.keys() - limits.keys():
            del buckets[what]  # its key has changed
        for what, n in limits.items():
            bucket = buckets.setdefault(what, Bucket(n, n, now))
            bucket.capacity = n
            bucket.refill(now)
        self._forget(now)
        return buckets

    def _forget(self, now: float) -> None:
        """Drop clients whose buckets have refilled."""
        for _ in range(2):  # two for each one added, so that the number shrinks
            client, buckets = next(iter(self._clients.items()))
            if any(now < bucket.at + bucket.full_in for bucket in buckets.values()):
                return
            if len(self._clients) > 1:
                del self._clients[client]


def _settled(_n_used: int) -> None:
    """Does nothing: no tokens were reserved."""


class CacheSharing:
    """Chooses the cache root of a request's text. Requests with equal roots share cached tokens.

    With API keys, each key has separate roots, unless the configuration shares the cache. A root
    contains digests of keys and salts, not the values. Digests are equal in every process, which
    files of saved slots require.

    Args:
        config: the API keys, and whether they share the cache.
    """

    def __init__(self, config: Config) -> None:
        self._by_key = config.has_api_keys and config.cache_sharing == "key"

    def owner(self, client: str) -> str:
        """The owner of a client's text; empty if all clients share it."""
        return _digest("owner", client) if self._by_key else ""

    def root(self, adapters: Adapters, client: str, salt: str) -> CacheRoot:
        """The cache root of a text."""
        return CacheRoot(adapters, self.owner(client), _digest("salt", salt))

    def scope(self, client: str, salt: str = "") -> str:
        """The scope of what is cached without a root, such as embeddings of media."""
        return self.owner(client) + _digest("salt", salt)


def _digest(kind: str, value: str) -> str:
    if not value:
        return ""
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).hexdigest()
