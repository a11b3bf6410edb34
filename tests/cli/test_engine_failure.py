"""A served engine that fails or hangs: what clients and supervisors see of the process."""

from __future__ import annotations

import json

import httpx
import pytest
import trio

from tests.support.broken_strategies import SECRET
from tests.support.command import serving
from tests.support.waiting import patiently
from trioserve.models import BUNDLED

pytestmark = pytest.mark.system

RAISES = ("-m", str(BUNDLED), "--strategy", "tests.support.broken_strategies:Raises")
STORY = {"prompt": "Once upon a time", "n_predict": 50, "ignore_eos": True}


async def test_a_broken_engine_ends_the_process() -> None:
    async with serving(*RAISES) as running, running.client() as client:
        answers: list[httpx.Response] = []

        async def ask(stream: bool) -> None:
            answers.append(await client.post("/completion", json={**STORY, "stream": stream}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, True)
            nursery.start_soon(ask, False)
        with patiently():
            assert await running.process.wait() == 1
        logs = [line async for line in running.lines]
    for answer in answers:
        last = answer.text.rpartition("data: ")[2]
        message = json.loads(last)["error"]["message"]
        assert message.startswith("The inference engine failed. The log has more, under ")
        assert SECRET not in answer.text
    tracebacks = [line["exception"] for line in logs if "exception" in line]
    assert len(tracebacks) == 1
    assert f"RuntimeError: {SECRET}" in tracebacks[0]
    assert "broken_strategies.py" in tracebacks[0]


async def test_a_client_that_does_not_read_does_not_keep_a_broken_server() -> None:
    async with serving(*RAISES, "--drain-timeout", "600") as running:
        url = httpx.URL(running.url)
        async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
            body = json.dumps({**STORY, "stream": True}).encode()
            head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            await stream.send_all(f"{head}\r\n\r\n".encode() + body)
            with patiently():
                assert await running.process.wait() == 1


async def test_a_broken_engine_may_stay() -> None:
    async with (
        serving(*RAISES, "--on-engine-failure", "stay", "--metrics") as running,
        running.client() as client,
    ):
        for _ in range(2):
            assert (await client.post("/completion", json=STORY)).status_code == 500
        for path in ("/health", "/health/ready", "/health/live"):
            assert (await client.get(path)).status_code == 503
        for path in ("/slots", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200
        running.process.terminate()
        assert await running.process.wait() == 0
