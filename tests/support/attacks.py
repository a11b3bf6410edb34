"""Bytes that attack a connection: requests that once ended the process, and mutations of them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import trio

from tests.support.http_server import connected, post
from tests.support.waiting import patiently

#: HTTP/2: the preface, and an empty SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: An upgrade to a websocket.
WEBSOCKET = (
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 1) -> bytes:
    """Write a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def priorities(n: int) -> bytes:
    return b"".join(frame(2, bytes(5), stream=2 * i + 1) for i in range(n))


ATTACKS = {
    "h2c with invalid settings": b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n\r\n",
    "HTTP/2: CONNECT": PREFACE + frame(1, b"\x02\x07CONNECT\x41\x01a", flags=5),
    "HTTP/2: a path that is not ASCII": PREFACE
    + frame(1, b"\x82\x86\x04\x02/\xff\x41\x01a", flags=5),
    "HTTP/2: 3,000 PRIORITY frames": PREFACE + priorities(3000),
    "a websocket, then garbage": WEBSOCKET + bytes(range(256)) * 40,
    "a target without a slash, and a bad chunk": b"GET ?a HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nnot a chunk\r\n",
    "a bad chunk behind a good head": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50,
    "a head without an end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000,
}


_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")

SEEDS = (
    post(
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}',
    ),
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'5\r\n{"con\r\n0\r\n\r\n',
    *ATTACKS.values(),
)


def mutated(source: random.Random, header: bytes = b"") -> bytes:
    """One of the seeds with bytes changed, doubled, inserted or left out, cut anywhere.

    `header` is a line that is added to the head.
    """
    host = b"Host: localhost\r\n"
    data = bytearray(source.choice(SEEDS)[:4000].replace(host, host + header))
    for _ in range(source.randrange(8)):
        at, n = source.randrange(len(data)), source.randrange(1, 20)
        match source.randrange(4):
            case 0:
                data[at] = source.randrange(256)
            case 1:
                data[at:at] = data[at : at + n]
            case 2:
                data[at:at] = source.choice(
                    (b"\r\n", b"\0", b" ", b":", b"Upgrade: h2c\r\n", b"%ff")
                )
            case _:
                if len(data) > n:
                    del data[at : at + n]
    return bytes(data[: source.randrange(1, len(data) + 1)])


async def answer_to(url: str, data: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    received = b""
    async with connected(url) as stream:
        with patiently(), suppress(trio.BrokenResourceError):
            await stream.send_all(data)
            async for part in stream:
                received += part
    return received


async def attack(url: str, data: bytes) -> None:
    """Send bytes, and read for half a second. An attack need not have an answer."""
    with trio.move_on_after(0.5):
        await answer_to(url, data)


async def send_mutated(url: str, seed: int, header: bytes = b"") -> list[int]:
    """Send one mutated request, and leave at once, after the answer, or in between.

    Returns the statuses of what was answered until then.
    """
    source = random.Random(seed)
    received = b""
    async with connected(url) as stream:
        try:
            await stream.send_all(mutated(source, header))
            with trio.move_on_after(source.choice((0, 0.01, 0.05))):
                while part := await stream.receive_some(65536):
                    received += part
        except trio.BrokenResourceError:
            pass
    return [int(status) for status in _STATUS_LINE.findall(received)]


async def send_all_mutated(url: str, seeds: Sequence[int], at_once: int = 20) -> Counter[int]:
    """Send a mutated request for each seed. Returns how often which status came back."""
    statuses: Counter[int] = Counter()

    async def send(seed: int) -> None:
        statuses.update(await send_mutated(url, seed))

    for start in range(0, len(seeds), at_once):
        async with trio.open_nursery() as nursery:
            for seed in seeds[start : start + at_once]:
                nursery.start_soon(send, seed)
    return statuses
