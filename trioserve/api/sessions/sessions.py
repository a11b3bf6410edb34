"""`Sessions`: all streams of an app that outlive connections, how they are found, and their bounds.

Over a bound, the session that ended first goes first. While too many run, there are no new ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Set

import attrs
import trio

from trioserve.api.sessions.session import Names, Send, StreamFormat, StreamSession
from trioserve.config import Config
from trioserve.errors import QueueFullError, ServerClosingError, StreamStoppedError

#: Seconds after which a client may try again that was refused because too many streams run.
_RETRY_AFTER = 10.0

#: Of the largest stream, when there are too many bytes in all: 1/8 makes room for a while.
_SHARE_TO_DROP = 8


@attrs.frozen
class StreamLimits:
    """The bounds of all sessions together, and how long one is kept after its end."""

    sessions: int
    sessions_of_key: int
    bytes_each: int
    bytes_in_all: int
    keep_seconds: float

    @classmethod
    def of(cls, config: Config) -> StreamLimits:
        """The bounds that a configuration sets. Of several API keys, one has half of the sessions
        at most.
        """
        n = config.stream_sessions
        return cls(
            sessions=n,
            sessions_of_key=n if len(config.api_keys) < 2 else max(n // 2, 1),
            bytes_each=config.stream_bytes,
            bytes_in_all=config.stream_total_bytes,
            keep_seconds=config.stream_keep_seconds,
        )


class Sessions:
    """The sessions of an app. There are some while `run` does."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.n_bytes = 0  # that are kept, in all
        self.n_evicted = 0  # sessions that were forgotten early, to make room
        self._clock = clock
        self._limits: StreamLimits
        self._nursery: trio.Nursery | None = None
        self._by_conversation: dict[tuple[str, str], StreamSession] = {}
        self._by_secret: dict[str, StreamSession] = {}
        self._running: dict[StreamSession, None] = {}  # in the order in which they began
        self._finished: dict[
            StreamSession, float
        ] = {}  # until when each is kept; the next to go first
        self._has_finished = trio.Event()

    async def run(self, config: Config) -> None:
        """Keep sessions, until cancelled. Then those that still run are ended."""
        self._limits = StreamLimits.of(config)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._keep_expiring()
            finally:
                self._nursery = None

    @property
    def is_open(self) -> bool:
        """Whether there may be sessions: the server has begun, and has not ended."""
        return self._nursery is not None

    def __iter__(self) -> Iterator[StreamSession]:
        yield from self._running
        yield from self._finished

    # -- the life of a session

    def start(
        self,
        key: str,
        conversation: str | None,
        form: StreamFormat,
        ask: Callable[[Send], Awaitable[None]],
        *,
        secret: bool,
    ) -> StreamSession:
        """Begin a stream, in place of one that has the same name.

        Args:
            key: the API key that wants it.
            conversation: what the client calls it.
            form: how its API writes.
            ask: runs the request that writes the stream.
            secret: whether it has a name that cannot be guessed, too.

        Raises:
            QueueFullError: too many run.
            ServerClosingError: the server has ended.
        """
        if self._nursery is None:
            raise ServerClosingError
        if conversation is not None and (old := self.find(key, conversation)) is not None:
            self.stop(old, "A newer request has the same conversation id.")
        self._make_room_for_one(key)
        names = Names(key, conversation, secrets.token_urlsafe(24) if secret else None)
        session = StreamSession(names, form, self._limits.bytes_each, self._count)
        self._running[session] = None
        if names.conversation is not None:
            self._by_conversation[key, names.conversation] = session
        if names.secret is not None:
            self._by_secret[names.secret] = session
        self._nursery.start_soon(self._live, session, ask)
        return session

    async def _live(self, session: StreamSession, ask: Callable[[Send], Awaitable[None]]) -> None:
        await session.run(ask)
        if session in self._running:  # nobody has stopped it
            del self._running[session]
            self._finished[session] = self._clock() + self._limits.keep_seconds
            self._has_finished.set()

    def stop(self, session: StreamSession, why: str) -> None:
        """End a stream, and forget it. Its readers are told why."""
        session.stop(StreamStoppedError(why))
        self.forget(session)

    def forget(self, session: StreamSession) -> None:
        """Find a stream no more. If it runs, it runs on."""
        names = session.names
        self._running.pop(session, None)
        self._finished.pop(session, None)
        if names.conversation is not None:
            named = (names.key, names.conversation)
            if self._by_conversation.get(named) is session:
                del self._by_conversation[named]
        if names.secret is not None:
            self._by_secret.pop(names.secret, None)
        session.release()

    # -- names

    def find(self, key: str, conversation: str) -> StreamSession | None:
        """Find a stream by what the client calls it."""
        return self._by_conversation.get((key, conversation))

    def find_secret(self, secret: str) -> StreamSession | None:
        """Find a stream by the name that cannot be guessed."""
        return self._by_secret.get(secret)

    def lookup(self, key: str, conversations: Iterable[str]) -> list[StreamSession]:
        """Find those that have these names, or one of them with ``::`` and a model behind it."""
        found: dict[str, list[StreamSession]] = {}
        for (owner, name), session in self._by_conversation.items():
            if owner == key:
                for short in _prefixes(name):
                    found.setdefault(short, []).append(session)
        return [session for name in conversations for session in found.get(name, ())]

    # -- bounds

    def _make_room_for_one(self, key: str) -> None:
        limits = self._limits
        everyone = set(self)
        own = {session for session in everyone if session.names.key == key}
        if len(own) >= limits.sessions_of_key:
            self._evict_one_of(own, f"{len(own)} streams of this API key run, which is the most.")
        elif len(everyone) >= limits.sessions:
            self._evict_one_of(everyone, f"{len(everyone)} streams run, which is the most.")

    def _evict_one_of(self, sessions: Set[StreamSession], otherwise: str) -> None:
        """Forget the one that ended first. Raises QueueFullError: none has ended."""
        first = next((each for each in self._finished if each in sessions), None)
        if first is None:
            raise QueueFullError(otherwise, retry_after=_RETRY_AFTER)
        self._evict(first)

    def _evict(self, session: StreamSession) -> None:
        self.forget(session)
        self.n_evicted += 1

    def _count(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if n_bytes <= 0:
            return
        while (excess := self.n_bytes - self._limits.bytes_in_all) > 0:
            if self._finished:
                self._evict(next(iter(self._finished)))
            else:
                largest = max(self._running, key=_size)
                largest.drop(max(excess, _size(largest) // _SHARE_TO_DROP))

    async def _keep_expiring(self) -> None:
        """Forget streams some time after their end, unless somebody reads them. Never returns."""
        while True:
            while not self._finished:
                self._has_finished = trio.Event()
                await self._has_finished.wait()
            session, until = next(iter(self._finished.items()))
            if until > self._clock():
                await trio.sleep(until - self._clock())
            elif session.n_readers:
                del self._finished[session]
                self._finished[session] = self._clock() + self._limits.keep_seconds
            else:
                self.forget(session)


def _size(session: StreamSession) -> int:
    return len(session.ring)


def _prefixes(name: str) -> Iterator[str]:
    """A name, and what is before each ``::`` in it."""
    yield name
    at = name.find("::")
    while at >= 0:
        yield name[:at]
        at = name.find("::", at + 1)
