"""The clients of the soak test: those that behave, and those that leave, stall and send rubbish."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import attrs
import trio

from benchmarks.http1 import ProtocolError, ResponseReader
from tests.soak import catalogue
from tests.soak.catalogue import Ask
from tests.soak.tally import Tally
from tests.support.attacks import send_mutated

#: Something that a client does, and how often.
Act: TypeAlias = tuple[Callable[[Any], Awaitable[None]], int]

#: Seconds in which a client that reads has its answer.
PATIENCE = 60.0


@attrs.frozen
class Client:
    """One client. Each act has a new connection."""

    url: str
    tally: Tally
    source: random.Random

    @property
    def acts(self) -> Sequence[Act]:
        """Its work, and the number of times."""
        return ACTS

    async def run(self) -> None:
        """Do something, again and again, until cancelled."""
        while True:
            await self.act()
            await trio.sleep(self.source.uniform(0, 0.2))

    async def act(self) -> None:
        """Do one thing."""
        act, weight = zip(*self.acts, strict=True)
        chosen = self.source.choices(act, weight)[0]
        with trio.move_on_after(PATIENCE) as scope:
            try:
                await chosen(self)
            except OSError as error:  # which an end of a connection is not, in Trio
                self.tally.fault(f"{chosen.__name__}: the server takes no connection: {error!r}")
                await trio.sleep(1)
        if scope.cancelled_caught:
            self.tally.fault(f"{chosen.__name__}: not over after {PATIENCE:g} seconds")

    # -- clients that behave

    async def behave(self) -> None:
        """Send one to four requests over one connection, and read all answers."""
        async with self.connected() as stream:
            for _ in range(self.source.randint(1, 4)):
                ask = catalogue.draw(self.source)
                answer = await self._ask(stream, ask)
                if not (answer.done and answer.keep_alive):
                    return

    async def read_event_source(self) -> None:
        """Post a chat as a page does, and come for it, or cancel it, or forget it."""
        name, body = "EventSource", catalogue.chat_body(self.source) | {"stream": True}
        data, head = catalogue.request(
            "POST", "/v1/chat/completions", body, "Prefer: respond-async"
        )
        posting = Ask(name=f"{name}, POST", data=data, head=head, allowed=frozenset({202, 429}))
        answer = await self.ask_alone(posting)
        if answer.status != 202:
            return
        path = json.loads(answer.body)["location"]
        if self.source.random() < 0.2:
            return
        if self.source.random() < 0.2:
            data, head = catalogue.request("DELETE", path, key="")
            allowed = frozenset({204})
            await self.ask_alone(Ask(name=f"{name}, DELETE", data=data, head=head, allowed=allowed))
            return
        data, head = catalogue.request("GET", path, None, "Accept: text/event-stream", key="")
        allowed = frozenset({200, 404})  # others may have needed its place
        getting = Ask(
            name=f"{name}, GET", data=data, head=head, allowed=allowed, end=b"event: done"
        )
        if self.source.random() < 0.4:
            await self._drop(getting)
        else:
            await self.ask_alone(getting)

    async def resume(self) -> None:
        """Begin a stream with a name, lose its connection several times, and read on; or stop it.

        Some names are shared, so that a newer stream takes the place of one that is being read.
        """
        is_shared = self.source.random() < 0.2
        name = f"shared-{self.source.randrange(3)}" if is_shared else f"{self.source.random()}"
        ask = catalogue.named_stream(self.source, name)
        body = b""
        for _ in range(20):
            answer = await self._read_some(ask)
            self.tally.note(ask.name, answer.status or "no answer yet")
            self._check_status(ask, answer)
            if answer.status not in (0, 200):
                return
            body += answer.body if answer.status else b""
            if answer.done:
                break
            ask = catalogue.rest_of_stream(name, len(body))
        else:
            await self.ask_alone(catalogue.stop_of_stream(name))
            return
        if not is_shared and not catalogue.is_whole(body):
            self.tally.fault(f"{ask.name}: it came as {body[:300]!r} ... {body[-300:]!r}")

    async def _read_some(self, ask: Ask) -> ResponseReader:
        answer, n_parts = ResponseReader(), self.source.randint(0, 12)
        async with self.connected() as stream:
            await self.send(stream, ask.data)
            while n_parts and not answer.done and await self.receive(stream, answer, 2000):
                n_parts -= 1
        return answer

    async def control(self) -> None:
        """Cancel a streamed chat, or end its reasoning, over another connection."""
        body = catalogue.chat_body(self.source) | {"stream": True, "max_tokens": 200}
        data, _ = catalogue.request(
            "POST", "/v1/chat/completions", body | {"reasoning_control": True}
        )
        answer = ResponseReader()
        async with self.connected() as stream:
            await self.send(stream, data)
            while not answer.done and b'"id":"' not in answer.body:
                if not await self.receive(stream, answer):
                    break
            if answer.status == 200:
                _, _, rest = answer.body.partition(b'"id":"')
                wanted = {
                    "id": rest.partition(b'"')[0].decode(),
                    "action": self.source.choice(("cancel", "reasoning_end")),
                }
                data, head = catalogue.request("POST", "/v1/chat/completions/control", wanted)
                await self.ask_alone(Ask(name="POST .../control", data=data, head=head))
            while not answer.done and await self.receive(stream, answer):
                pass
        outcome = answer.status if answer.done else "cut"
        self.tally.note("POST /v1/chat/completions, controlled", outcome)
        if outcome not in (200, 429):
            self.tally.fault(f"a controlled chat: {outcome}")

    async def send_bad_request(self) -> None:
        """Send a request that is wrong, and read what is wrong with it."""
        await self.ask_alone(catalogue.draw_bad(self.source))

    # -- clients that do not

    async def leave(self) -> None:
        """Send a request, or part of one, and leave at a random point."""
        draw = self.source.choice(
            (catalogue.draw, lambda source: catalogue.draw_generating(source, streamed=True))
        )
        await self._drop(draw(self.source))

    async def read_slowly(self) -> None:
        """Read little of a long stream, slowly, for some seconds; then leave, or read the rest."""
        ask = catalogue.long_stream(self.source)
        answer = ResponseReader()
        async with self.connected(buffer=4096) as stream:
            await self.send(stream, ask.data)
            with trio.move_on_after(self.source.uniform(0.5, 6)):
                while await self.receive(stream, answer, self.source.randint(1, 2000)):
                    await trio.sleep(self.source.uniform(0.05, 0.5))
            if self.source.random() < 0.5:
                while not answer.done and await self.receive(stream, answer):
                    pass
        self.tally.note(ask.name, answer.status if answer.done else "ended early")
        self._check_status(ask, answer)

    async def read_nothing(self) -> None:
        """Ask for a long stream and read nothing, for longer than the server waits."""
        ask = catalogue.long_stream(self.source, n_predict=400)
        async with self.connected(buffer=4096) as stream:
            await self.send(stream, ask.data)
            await trio.sleep(self.source.uniform(1, 6))
        self.tally.note("a client that does not read", "left")

    async def stop_uploading(self) -> None:
        """Send part of a body, or send it byte by byte, and wait for what the server says."""
        ask = catalogue.draw_generating(self.source, streamed=True)
        answer = ResponseReader()
        end = self.source.randrange(ask.head, len(ask.data))
        async with self.connected() as stream:
            await self.send(stream, ask.data[:end])
            for at in range(end, min(end + self.source.choice((0, 10)), len(ask.data) - 1)):
                await self.send(stream, ask.data[at : at + 1])
                await trio.sleep(0.1)
            while not answer.done and await self.receive(stream, answer):
                pass
        self.tally.note("an upload that stops", answer.status if answer.done else "cut")
        self._check_status(attrs.evolve(ask, allowed=frozenset({408, 504})), answer)

    async def send_mutated(self) -> None:
        """Send mutated bytes."""
        key = self.source.choice((f"Authorization: Bearer {catalogue.KEYS[1]}\r\n", "")).encode()
        statuses = await send_mutated(self.url, self.source.randrange(2**32), key)
        for status in statuses or ["no answer yet"]:
            self.tally.note("mutated bytes", status)
        if bad := [status for status in statuses if status >= 500 and status != 501]:
            self.tally.fault(f"mutated bytes: status {bad[0]}")

    # -- how they do it

    @asynccontextmanager
    async def connected(self, buffer: int = 0) -> AsyncIterator[trio.SocketStream]:
        host, port = self.url.removeprefix("http://").split(":")
        sock = trio.socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        with sock:
            await sock.connect((host, int(port)))
            yield trio.SocketStream(sock)
            if self.source.random() < 0.2:  # then the server sees a reset
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def ask_alone(self, ask: Ask) -> ResponseReader:
        async with self.connected() as stream:
            return await self._ask(stream, ask)

    async def _ask(self, stream: trio.SocketStream, ask: Ask) -> ResponseReader:
        """Send a request, read the answer, and check it."""
        answer = ResponseReader()
        await self.send(stream, ask.data)
        while not answer.done and await self.receive(stream, answer):
            pass
        self.tally.note(ask.name, answer.status if answer.done else "cut")
        if not answer.done:
            self.tally.fault(f"{ask.name}: the answer was cut after {len(answer.body)} bytes")
            return answer
        self._check_status(ask, answer)
        if answer.status == 200 and ask.end not in answer.body[-20_000:]:
            self.tally.fault(f"{ask.name}: a stream ends with {answer.body[-200:]!r}")
        return answer

    def _check_status(self, ask: Ask, answer: ResponseReader) -> None:
        if answer.status and answer.status not in ask.allowed:
            allowed = " or ".join(map(str, sorted(ask.allowed)))
            self.tally.fault(
                f"{ask.name}: status {answer.status}, not {allowed}: {answer.body[:300]!r} "
                f"to {ask.data[:60]!r} ... {ask.data[ask.head :][:600]!r}"
            )

    async def _drop(self, ask: Ask) -> None:
        """Leave at a random point."""
        source, answer = self.source, ResponseReader()
        point = source.choice(("head", "before the body", "body", "sent", "begun", "stream"))
        end = {
            "head": source.randrange(ask.head),
            "before the body": ask.head,
            "body": source.randrange(ask.head, len(ask.data) + 1),
        }.get(point, len(ask.data))
        async with self.connected() as stream:
            await self.send(stream, ask.data[:end])
            await trio.sleep(source.choice((0, 0, 0.01, 0.1)))
            if point in ("begun", "stream"):
                n_parts = source.randint(2, 20) if point == "stream" else 1
                for _ in range(n_parts):
                    if answer.done or not await self.receive(stream, answer, 1000):
                        break
            if source.random() < 0.2:  # half closed for a while
                with suppress(trio.BrokenResourceError, OSError):
                    await stream.send_eof()
                await trio.sleep(source.uniform(0, 0.5))
        self.tally.note(f"gone: {point}", answer.status or "no answer yet")
        self._check_status(attrs.evolve(ask, allowed=ask.allowed | {400}), answer)

    async def send(self, stream: trio.SocketStream, data: bytes) -> None:
        """Send; when the server does not want the rest, it may have answered."""
        with suppress(trio.BrokenResourceError):
            await stream.send_all(data)

    async def receive(
        self, stream: trio.SocketStream, answer: ResponseReader, size: int = 65536
    ) -> bool:
        """Take what comes next. Returns False at the end of the connection."""
        try:
            data = await stream.receive_some(size)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            answer.close()
            return False
        try:
            answer.feed(data, 0.0)
        except ProtocolError as error:
            self.tally.fault(f"no HTTP came back: {error}")
            return False
        return True


#: Acts of clients with their weights. A third leave before they have their answer.
ACTS: tuple[Act, ...] = (
    (Client.behave, 30),
    (Client.leave, 40),
    (Client.send_bad_request, 8),
    (Client.read_event_source, 8),
    (Client.resume, 8),
    (Client.control, 4),
    (Client.stop_uploading, 4),
    (Client.send_mutated, 10),
    (Client.read_slowly, 3),
    (Client.read_nothing, 1),
)
