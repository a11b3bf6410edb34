"""Pages, addresses and results of searches that attack: nothing of the server is lost."""

from __future__ import annotations

import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.support.loop_probe import probing
from tests.support.process_memory import resident
from tests.support.searxng import FOUND, serving_searxng
from tests.support.web_site import Site, answer, serving_site
from trioserve.config import Config
from trioserve.tools.registry import open_registry
from trioserve.tools.tool import ToolCallContext, ToolResult

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

#: Bytes that a page may cost this process, and processor seconds without a turn of the event loop.
_MAX_MEMORY, _MAX_STALL = 100 * 2**20, 0.5

WORDS = "Words of a page. " * 20
BIG = 4 * 2**20 - 200
GOOD = b"<html><body><p>" + WORDS.encode() + b"</p></body></html>"

PAGES = {
    "nested": "<div>" * (BIG // 5),
    "deep": "<b>" * 200 + WORDS,
    "tables": "<table><tr><td>" * (BIG // 15),
    "attributes": "<p " + " ".join(f"a{i}=1" for i in range(300_000)) + ">x",
    "entities": "&#x41;" * (BIG // 6),
    "opened": "<" * BIG,
    "comments": "<!--" * (BIG // 4),
    "scripts": "<script>" + "x" * BIG,
    "links": "".join(f"<a href='{i}'>x</a>" for i in range(150_000)),
    "zeros": "\0" * BIG,
    "doctype": '<!DOCTYPE x [<!ENTITY a "'
    + "b" * 1000
    + '">'
    + "<!ENTITY c '&a;&a;&a;'>" * 1000
    + "]><p>&c;",
    "forms": "<form><input>" * (BIG // 13),
    "lists": "<ul><li>" * (BIG // 8),
    "title": "<title>" + "x" * BIG,
}


@asynccontextmanager
async def fetching(site: Site) -> AsyncIterator[Any]:
    """Give a function that reads pages of a site as a model would."""
    hosts = (f".test:{site.port}=127.0.0.0/8", "public.example:*")
    async with open_registry(Config(web_fetch=hosts)) as tools:

        async def fetch(url: str, **arguments: Any) -> ToolResult:
            return await tools.find("web_fetch").call({"url": url, **arguments}, ToolCallContext())

        yield fetch


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_that_attacks(name: str) -> None:
    page = f"<html><body>{PAGES[name]}"[:BIG].encode()
    async with serving_site() as site, fetching(site) as fetch:
        site.answers = {"/good": answer(GOOD), "/bad": answer(page)}
        await fetch(site.url(path="/good"))
        before, began = resident(), time.monotonic()
        async with probing() as probe, trio.open_nursery() as nursery:
            nursery.start_soon(fetch, site.url(path="/bad"))
            good = await fetch(site.url(path="/good"))
        assert "Words of a page." in good.text
        print(f"{(resident() - before) / 2**20:.0f} MiB, {time.monotonic() - began:.1f} s, "
              f"stalled for {probe.stalled:.3f} s")  # fmt: skip
        assert resident() - before < _MAX_MEMORY
        assert probe.stalled < _MAX_STALL
        again = await fetch(site.url(path="/good"))
        assert "Words of a page." in again.text


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1:{port}/secret", "http://localhost:{port}/secret",
        "http://[::1]:{port}/secret", "http://0x7f.1:{port}/secret", "http://2130706433/secret",
        "http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.1]:{port}/secret",
        "http://private.test:{port}/secret", "file:///etc/passwd", "gopher://127.0.0.1/",
        "http://user@files.test:{port}/secret",
    ],
)  # fmt: skip
async def test_a_redirect_to_a_private_address(to: str) -> None:
    async with serving_site() as site, fetching(site) as fetch:
        site.names["private.test"] = [["10.0.0.1"]]
        location = to.format(port=site.port)
        site.answers = {
            "/a": answer(status="302 Found", Location=location),
            "/secret": answer(b"the secret"),
        }
        result = await fetch(site.url(path="/a"))
        assert result.answer["error_code"] in ("url_not_allowed", "invalid_tool_input")
        assert not any("/secret" in request for request in site.requests)


async def test_a_name_that_gets_another_address() -> None:
    async with serving_site() as site, fetching(site) as fetch:
        site.names["public.example"] = [["127.0.0.1"], ["192.0.2.1"]]
        assert (await fetch(site.url("public.example"))).answer["error_code"] == "url_not_allowed"
        # Looked up once: the address that was checked is the one that is used.
        site.names["public.example"] = [["1.1.1.1", "127.0.0.1"]]
        assert (await fetch(site.url("public.example"))).answer["error_code"] == "url_not_allowed"
        assert site.requests == []


async def test_an_endless_page_and_a_bomb() -> None:
    async with serving_site() as site, fetching(site) as fetch:
        before = resident()
        bomb = gzip.compress(bytes(200 * 2**20))
        site.answers = {
            "/endless": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n",
            "/header": b"HTTP/1.1 200 OK\r\nX: ",
            "/bomb": answer(bomb, Content_Encoding="gzip"),
            "/large": answer(b"", Content_Length=str(2**40)),
        }
        compressed = await fetch(site.url(path="/bomb"))
        assert "sends it compressed" in compressed.text
        assert (await fetch(site.url(path="/large"))).answer["error_code"] == "content_too_large"
        site.endless = b"x" * 2**16
        endless = await fetch(site.url(path="/endless"))
        assert endless.answer["error_code"] == "content_too_large"
        header = await fetch(site.url(path="/header"))
        assert header.answer["error_code"] == "url_not_accessible"
        assert resident() - before < _MAX_MEMORY


async def test_results_that_attack() -> None:
    hostile = (
        "\x1b]0;x\x07\u202eevil\u200b"
        + "<b>" * 10_000
        + "\ud800".encode("utf-16", "surrogatepass").decode("latin-1")
    )
    results = [
        FOUND | {"title": hostile, "content": hostile, "url": f"https://example.org/{i}"}
        for i in range(50)
    ]
    results += [
        FOUND | {"url": url} for url in ("javascript:alert(1)", "https://a@b/", "\0", "x" * 9999)
    ]
    with serving_searxng(results=results) as engine:
        async with open_registry(Config(web_search=engine.address)) as tools, probing() as probe:
            result = await tools.find("web_search").call({"query": "q"}, ToolCallContext())
    assert len(result.text) < 20_000
    assert not any(mark in result.text for mark in ("\x1b", "\u202e", "\u200b", "\x07"))
    assert all(each["url"].startswith("https://example.org/") for each in result.answer["results"])
    assert probe.stalled < _MAX_STALL
