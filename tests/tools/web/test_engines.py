"""Requests to search engines, and the parsing of their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from tests.support.searxng import FOUND, SearXNG, serving_searxng
from trioserve.config import Config
from trioserve.errors import ConfigError, WebToolError
from trioserve.tools.web.engines import ENGINES, SearchClient, SearchResult
from trioserve.tools.web.scope import Domain, WebScope

SCOPE = WebScope(
    allowed=(Domain("example.org"),), blocked=(Domain("bad.test"),), country="ch", n_results=2
)
KEY = "secret-4711"

BRAVE = {
    "web": {
        "results": [
            {
                "url": "https://example.org/a",
                "title": "A <strong>page</strong> of List<T>",
                "description": "It &quot;says&quot; so.",
                "extra_snippets": ["And more."],
                "page_age": "2026-01-02T03:04:05",
            }
        ]
    }
}
TAVILY = {
    "results": [{"url": "https://example.org/a", "title": "A", "content": "It.", "score": 0.9}]
}


@pytest.fixture
def engine() -> Iterator[SearXNG]:
    with serving_searxng() as engine:
        yield engine


@pytest.mark.parametrize("name", ["brave", "tavily"])
async def test_engines_with_keys(
    engine: SearXNG, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = lambda _path: {"brave": BRAVE, "tavily": TAVILY}[name]
    monkeypatch.setenv(f"{name.upper()}_API_KEY", KEY)
    here = attrs.evolve(ENGINES[name], address=engine.address)
    with mock.patch.dict(ENGINES, {name: here}):
        client = SearchClient.of(Config(web_search=name))
        (found,) = await client.search("a  page\n", SCOPE)
        engine.status = 401
        with pytest.raises(WebToolError, match="status 401") as refused:
            await client.search("q", WebScope())
        await client.aclose()
    (asked, _), (headers, _) = engine.queries, engine.headers
    if name == "brave":
        assert found == SearchResult(
            "A page of List<T>",
            "https://example.org/a",
            'It "says" so. And more.',
            "2026-01-02T03:04:05",
        )
        assert asked == "a page site:example.org"
        assert headers["X-Subscription-Token"] == KEY
    else:
        assert found == SearchResult("A", "https://example.org/a", "It.")
        body = json.loads(asked)
        assert (body["query"], body["include_domains"]) == ("a page", ["example.org"])
        assert body["exclude_domains"] == ["bad.test"]
        assert headers["Authorization"] == f"Bearer {KEY}"
    output = capsys.readouterr()
    assert KEY not in f"{client!r} {refused.value!r} {output.out} {output.err}"


def test_a_key_is_in_the_environment_or_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BRAVE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set BRAVE_API_KEY, or --web-search-key-file"):
        SearchClient.of(Config(web_search="brave"))
    (tmp_path / "key").write_text(f"{KEY}\n")
    client = SearchClient.of(Config(web_search="brave", web_search_key_file=str(tmp_path / "key")))
    assert client._key == KEY
    with pytest.raises(ConfigError, match="must be the address of a SearXNG"):
        Config(web_search="duckduckgo")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"no JSON", "sends an invalid answer"),
        (b"[" * 100_000, "sends an invalid answer"),
        ({"results": [{"url": 1}]}, "sends an invalid answer"),
        (b" " * (4 * 2**20 + 1), "sends too much"),
    ],
)
async def test_an_answer_that_cannot_be(engine: SearXNG, answer: Any, words: str) -> None:
    engine.answer = lambda _path: answer
    client = SearchClient.of(Config(web_search=engine.address))
    with pytest.raises(WebToolError, match=words):
        await client.search("q", WebScope())
    await client.aclose()


async def test_an_engine_that_is_busy_or_away(engine: SearXNG) -> None:
    engine.status = 429
    client = SearchClient.of(Config(web_search=engine.address))
    with pytest.raises(WebToolError) as busy:
        await client.search("q", WebScope())
    assert busy.value.reason == "too_many_requests"
    away = SearchClient.of(Config(web_search="http://127.0.0.1:1"))
    with pytest.raises(WebToolError, match="SearXNG cannot be reached"):
        await away.search("q", WebScope())


async def test_addresses_in_other_scripts_are_escaped(engine: SearXNG) -> None:
    engine.results = [FOUND | {"url": "https://example.org/ä b?c=%20"}]
    client = SearchClient.of(Config(web_search=engine.address))
    (found,) = await client.search("q", WebScope())
    assert found.url == "https://example.org/%C3%A4%20b?c=%20"
    await client.aclose()
