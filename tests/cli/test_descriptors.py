"""A served process with few descriptors: it answers, or says that it has too many connections."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import trio

from tests.support.command import serving
from tests.support.waiting import patiently
from trioserve.models import BUNDLED

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
]


def limited(ulimit: str) -> list[str]:
    return ["sh", "-c", f'ulimit {ulimit}; exec "$@"', "sh"]


async def ask(url: httpx.URL, held: AsyncExitStack) -> int:
    """Open a connection, which is left open; gives the status of an answer on it."""
    stream = await held.enter_async_context(await trio.open_tcp_stream(url.host, url.port or 0))
    try:
        await stream.send_all(GET)
        answer = await stream.receive_some(65536)
    except trio.BrokenResourceError:
        answer = b""
    assert answer.startswith(b"HTTP/1.1 "), "silence"
    return int(answer[9:12])


async def test_a_server_with_few_descriptors_is_never_deaf() -> None:
    async with serving(
        "-m", str(BUNDLED), "--keep-alive-timeout", "75", prefix=limited("-n 256")
    ) as running:
        url = httpx.URL(running.url)
        descriptors = Path(f"/proc/{running.process.pid}/fd")
        n_before = len(list(descriptors.iterdir()))
        assert n_before < 32, "what is kept for files is enough for them"
        with patiently():
            for _ in range(400):
                async with AsyncExitStack() as one:
                    assert await ask(url, one) == 200

            statuses: Counter[int] = Counter()
            async with AsyncExitStack() as held:

                async def hold() -> None:
                    statuses[await ask(url, held)] += 1

                async with trio.open_nursery() as nursery:
                    for _ in range(300):
                        nursery.start_soon(hold)
                # Idle connections make room for new ones.
                assert set(statuses) <= {200, 503}
                assert statuses[200] >= 256 - 64 - 10
                assert len(list(descriptors.iterdir())) <= 256 - 64 + n_before
                assert await ask(url, held) == 200
            while len(list(descriptors.iterdir())) > n_before + 2:
                await trio.sleep(0.02)
            async with AsyncExitStack() as one:
                assert await ask(url, one) == 200


async def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    async with serving("-m", str(BUNDLED), prefix=limited("-Sn 200")) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        soft, hard = line.split()[3:5]
        assert soft == hard != "200"
