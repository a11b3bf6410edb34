"""Limits of the requests and tokens a minute, of each client or API key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import monotonic

import attrs

from trioserve.errors import RateLimitError
from trioserve.server.keys import Keys

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


@attrs.frozen
class Remaining:
    """One limit of a client: its size, the amount left, and the seconds until it is reset."""

    limit: int
    remaining: int
    reset: float


@attrs.frozen
class Counted:
    """A request that was counted for the rate limits."""

    #: Gives what its client has left of "requests" and "tokens".
    left: Callable[[], Mapping[str, Remaining]] = dict
    error: RateLimitError | None = None  # that the limit is reached, with a time to retry after


@attrs.define(eq=False, slots=False)
class RateLimits:
    """The token buckets of all clients. A client whose buckets are full is dropped."""

    _n_requests: int  # a minute for each client; 0: no limit
    _n_tokens: int  # a minute for each client, of prompts and outputs; 0: no limit
    _keys: Keys | None = None  # API keys, whose limits replace these
    _clock: Callable[[], float] = monotonic  # in seconds
    #: Ordered by last use, the most recent last.
    _clients: OrderedDict[str, dict[str, Bucket]] = attrs.field(init=False, factory=OrderedDict)

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
            return lambda _n_used: None
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
        """The remaining "requests" and "tokens" of a client. Unlimited ones are omitted."""
        if not self._limits_of(client):
            return {}
        return {
            what: Remaining(
                int(bucket.capacity), max(0, int(bucket.level)), bucket.wait(bucket.capacity)
            )
            for what, bucket in self._find(client).items()
        }

    def _limits_of(self, client: str) -> dict[str, int]:
        """The limits of a client by their names, without those that it does not have."""
        key = None if self._keys is None else self._keys.find(client)
        own = (None, None) if key is None else (key.requests, key.tokens)
        limits = {
            "requests": self._n_requests if own[0] is None else own[0],
            "tokens": self._n_tokens if own[1] is None else own[1],
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
            if any(now < bucket.at + bucket.wait(bucket.capacity) for bucket in buckets.values()):
                return
            if len(self._clients) > 1:
                del self._clients[client]
