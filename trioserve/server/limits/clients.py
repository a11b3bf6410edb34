"""What each client has of its own: requests and tokens a minute, and its texts in the caches.

A client is an API key or an address. For its rate it has two token buckets, which fill up steadily
and hold what a minute brings. A request takes one request, and as many tokens as its prompt has and
its output may have; at its end it gets back what it did not use. No library does the second part on
Trio. A prompt that another client has sent is quicker, and that tells: so caches are divided, too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

import attrs

from trioserve.config import Config
from trioserve.errors import RateLimitError
from trioserve.types import Adapters, CacheRoot

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
