"""`examples/eventsource.html` in a browser: a stream continues after cuts, and Stop ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from playwright.sync_api import Page, expect

from tests.support.browsing import CHROMIUM, Visitor, chromium
from tests.support.event_source import connections_of_readers, gated
from tests.support.http_server import serving_script, slots_in_use
from tests.support.waiting import until
from trioserve.api.service import Service
from trioserve.testing import ScriptedBackend

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]


def visited(url: str, use: Callable[[Page], None]) -> None:
    with chromium() as browser:
        use(Visitor(browser).visit(url))


async def use_page(backend: ScriptedBackend, use: Callable[[Page, Service], None]) -> None:
    """Serve the examples, and let a thread use the page after it has sent its text."""
    async with serving_script(backend, static_path=str(EXAMPLES)) as (url, service):

        def send(page: Page) -> None:
            page.locator("#send").click()
            use(page, service)

        await trio.to_thread.run_sync(visited, f"{url}/eventsource.html", send)


async def test_an_answer_continues_after_each_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "It works: ünïcödé, 😀. " + "".join(f"{n} " for n in range(100))
    backend, gate = gated(text)
    connections = connections_of_readers(monkeypatch)

    def use(page: Page, _service: Service) -> None:
        answer = page.locator("#answer")
        for n in range(3):
            trio.from_thread.run(until, lambda n=n: len(connections) > n)
            said = answer.text_content() or ""
            gate.allow(30)
            expect(answer).not_to_have_text(said)
            trio.from_thread.run_sync(connections[n])
        gate.open()
        expect(page.locator("#status")).to_contain_text("tokens")
        assert answer.text_content() == text
        # The end is the end: the browser does not connect again.
        expect(page.locator("#send")).to_be_enabled()
        assert len(connections) == 4

    await use_page(backend, use)


async def test_stop_frees_the_slot() -> None:
    backend = ScriptedBackend(lambda prompt: "word " * 100_000, n_ctx=1_000_000)
    backend.on_decode = lambda _: time.sleep(0.002)

    def use(page: Page, service: Service) -> None:
        async def is_free() -> bool:
            return await slots_in_use(service) == 0

        expect(page.locator("#answer")).to_contain_text("word")
        assert not trio.from_thread.run(is_free)
        page.locator("#stop").click()
        trio.from_thread.run(until, is_free)

    await use_page(backend, use)


def test_a_page_that_is_opened_from_disk_says_how_to_serve_it() -> None:
    def use(page: Page) -> None:
        expect(page.locator("body")).to_contain_text("trioserve --path examples")
        expect(page.locator("body")).to_contain_text("http://127.0.0.1:8080/eventsource.html")

    visited((EXAMPLES / "eventsource.html").as_uri(), use)
