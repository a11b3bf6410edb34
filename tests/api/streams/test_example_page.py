"""`examples/eventsource.html` in a real browser: a stream goes on after cuts, and Stop ends it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.event_source import connections_of_readers, gated
from tests.support.http_server import serving_script, slots_in_use
from tests.support.waiting import patiently
from trioserve.api.service import Service
from trioserve.testing import ScriptedBackend

EXAMPLES = Path(__file__).parents[3] / "examples"

DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(DRIVER is None, reason="needs Chromium and its driver"),
]

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """A page in headless Chromium, spoken to in the WebDriver protocol."""

    def __init__(self, client: httpx.AsyncClient, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    async def command(self, path: str, **body: Any) -> Any:
        answer = await self._client.post(self._session + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    async def open(self, url: str) -> None:
        await self.command("/url", url=url)

    async def script(self, text: str) -> Any:
        return await self.command("/execute/sync", script=text, args=[])

    async def text_of(self, element: str) -> str:
        text = await self.script(f"return document.getElementById('{element}').textContent")
        assert isinstance(text, str)
        return text


@asynccontextmanager
async def browsing(tmp_path: Path) -> AsyncIterator[Browser]:
    """Run a browser that remembers nothing."""
    assert DRIVER is not None
    log = tmp_path / "driver.log"
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process([DRIVER, "--port=0"], stdout=output)
    try:
        with patiently():
            port = await _port_in(log)
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                options = {"args": [*ARGUMENTS, f"--user-data-dir={tmp_path / 'profile'}"]}
                wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
                answer = (await client.post("/session", json=wanted)).json()["value"]
                session = answer["sessionId"]
                yield Browser(client, session)
                await client.delete(f"/session/{session}")
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def _port_in(log: Path) -> int:
    while (found := re.search(r"on port (\d+)\.", log.read_text())) is None:
        await trio.sleep(0.05)
    return int(found[1])


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    with patiently():
        while not await condition():
            await trio.sleep(0.05)


@asynccontextmanager
async def open_page(
    backend: ScriptedBackend, tmp_path: Path
) -> AsyncIterator[tuple[Browser, Service]]:
    """Serve the examples, open the page, and send what is in it."""
    async with (
        serving_script(backend, static_path=str(EXAMPLES)) as (url, service),
        browsing(tmp_path) as browser,
    ):
        await browser.open(url + "/eventsource.html")
        await browser.script("document.getElementById('send').click()")
        yield browser, service


async def test_an_answer_goes_on_after_each_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "It works: ünïcödé, 😀. " + "".join(f"{n} " for n in range(100))
    backend, gate = gated(text)
    connections = connections_of_readers(monkeypatch)
    async with open_page(backend, tmp_path) as (browser, _):
        for n in range(3):
            said = len(await browser.text_of("answer"))
            gate.allow(30)

            async def goes_on(n: int = n, said: int = said) -> bool:
                return len(connections) > n and len(await browser.text_of("answer")) > said

            await _until(goes_on)
            connections[n]()
        gate.open()

        async def done() -> bool:
            return "tokens" in await browser.text_of("status")

        await _until(done)
        assert await browser.text_of("answer") == text
        # The end is the end: the browser does not connect again.
        assert await browser.script("return document.getElementById('send').disabled") is False
        assert len(connections) == 4


async def test_stop_frees_the_slot(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "word " * 100_000, n_ctx=1_000_000)
    backend.on_decode = lambda _: time.sleep(0.002)
    async with open_page(backend, tmp_path) as (browser, service):

        async def speaks() -> bool:
            return "word" in await browser.text_of("answer")

        async def is_free() -> bool:
            return await slots_in_use(service) == 0

        await _until(speaks)
        assert not await is_free()
        await browser.script("document.getElementById('stop').click()")
        await _until(is_free)


async def test_a_page_that_is_opened_from_disk_says_how_to_serve_it(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        await browser.open((EXAMPLES / "eventsource.html").as_uri())
        shown = await browser.script("return document.body.innerText")
    assert "trioserve --path examples" in shown
    assert "http://127.0.0.1:8080/eventsource.html" in shown
