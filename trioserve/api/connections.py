"""`Connections`: the connections of an app, which share their places by address."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.config import Config
from trioserve.errors import UnavailableError

#: Where an app has its state: `app.extensions[NAME]`.
NAME = "trioserve"

#: Seconds that a new connection has for its first request before its address may take its place.
#: In a burst, connections arrive before their requests.
GRACE = 1.0


class Connections:
    """The connections of an app, which `tcp` opens. The addresses of clients share the places.

    Args:
        config: the limits. May be set until the app is served.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.n_connections = 0  # that are served
        self.n_refused = 0  # connections that are being told that there are too many
        self._n_of: Counter[str] = Counter()  # by address
        #: Connections that wait for their clients, by address: the longest wait first. Each with
        #: the time from which its address may close it.
        self._waiting: defaultdict[str, dict[trio.CancelScope, float]] = defaultdict(dict)

    @contextmanager
    def connection(self, address: str, limit: float) -> Iterator[trio.CancelScope]:
        """Count a connection during a block, which is cancelled when its place is needed.

        It waits for its client until `is_served` is called.

        Raises:
            UnavailableError: the limit is reached, and none can be closed.
        """
        if self.n_connections >= limit and not self._make_room_for(address):
            raise UnavailableError("The server has as many connections as it takes.")
        self.n_connections += 1
        self._n_of[address] += 1
        scope = trio.CancelScope()
        self.waits(address, scope, GRACE)
        try:
            with scope:
                yield scope
        finally:
            self.is_served(address, scope)
            self.n_connections -= 1
            self._n_of[address] -= 1
            if not self._n_of[address]:
                del self._n_of[address]

    def waits(self, address: str, scope: trio.CancelScope, grace: float = 0.0) -> None:
        """Note that a connection waits for its client from now on: for a request, or its body.

        For `grace` seconds, its own address does not close it.
        """
        self._waiting[address].pop(scope, None)
        self._waiting[address][scope] = trio.current_time() + grace

    def is_served(self, address: str, scope: trio.CancelScope) -> None:
        """Note that a connection does not wait for its client: it is being answered."""
        self._waiting[address].pop(scope, None)
        if not self._waiting[address]:
            del self._waiting[address]

    def _make_room_for(self, address: str) -> bool:
        """Close the connection that waits longest, of the address that has most.

        Returns:
            Whether there was one. Addresses with no more connections than `address` lose none.
        """
        n_own, now = self._n_of[address], trio.current_time()
        most, scope = address, None
        others = [each for each in self._waiting if self._n_of[each] > n_own]
        if others:
            most = max(others, key=self._n_of.__getitem__)
            scope = next(iter(self._waiting[most]))
        elif address in self._waiting:
            waiting = self._waiting[address].items()
            scope = next((each for each, since in waiting if since <= now), None)
        if scope is None:
            return False
        self.is_served(most, scope)
        scope.cancel(reason="another connection needs the place")
        return True
