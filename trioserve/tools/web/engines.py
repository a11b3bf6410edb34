"""The search engines: SearXNG at an address, Brave and Tavily with a key.

An engine says how it is asked and how its answer is read; `SearchClient` asks. Its operator chose
the address, so that may be in the same network.
"""

from __future__ import annotations

import html
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from urllib.parse import quote, urlencode, urlsplit

import attrs
import httpcore2
import msgspec
import trio

from trioserve._version import __version__
from trioserve.config import Config
from trioserve.config.checks import WEB_SEARCH_KEYS
from trioserve.config.readers import file
from trioserve.errors import ConfigError, WebToolError
from trioserve.fair_limiter import FairLimiter, offload
from trioserve.media.fetch import FAILURES, read_bounded
from trioserve.media.plain_text import plain
from trioserve.tools.web.scope import MAX_RESULTS, Domain, WebScope

#: Characters of a query: as many as Brave and Tavily take.
MAX_QUERY = 400

#: Characters of the parts of a result that are kept.
_MAX_TITLE, _MAX_CONTENT, _MAX_DATE, _MAX_URL = 200, 2000, 40, 2000

#: Bytes of an answer, and seconds for it.
_MAX_ANSWER = 4 * 2**20
_SECONDS = 15.0

#: Searches at the same time, those of one client, and those of it that wait.
_N_SEARCHES, _N_SEARCHES_EACH, _MAX_WAITING = 8, 4, 64

#: Bytes of JSON that are read on the event loop.
_SHORT = 2**16

#: Characters of addresses that stay as they are.
_AS_IT_IS = "%/:?#[]@!$&'()*+,;=~"

_TAGS = re.compile(r"</?(?:strong|b|em|i|mark|span|br)\b[^<>]{0,200}>", re.IGNORECASE)


@attrs.frozen
class SearchResult:
    """A page that was found."""

    title: str
    url: str
    content: str
    date: str = ""


class _Found(msgspec.Struct):
    url: str = ""
    title: str | None = None
    content: str | None = None
    description: str | None = None
    extra_snippets: list[str] = []
    date: str | None = msgspec.field(name="publishedDate", default=None)
    page_age: str | None = None
    published_date: str | None = None


class _Results(msgspec.Struct):
    results: list[_Found] = []


class _BraveResults(msgspec.Struct):
    web: _Results = msgspec.field(default_factory=_Results)


@attrs.frozen
class _Request:
    """A request to an engine."""

    path: str
    headers: Mapping[str, str] = {}
    body: bytes = b""


def _operators(words: str, domains: Sequence[Domain]) -> str:
    """Add the domains to a query, as most engines understand it."""
    sites = [f"site:{each.host}{each.path.rstrip('/*')}" for each in domains]
    asked = f"{words} ({' OR '.join(sites)})" if len(sites) > 1 else " ".join([words, *sites])
    return asked if len(asked) <= MAX_QUERY else words


def _of_searxng(words: str, scope: WebScope, key: str) -> _Request:
    query = urlencode({"q": _operators(words, scope.allowed), "format": "json"})
    return _Request(f"/search?{query}")


def _of_brave(words: str, scope: WebScope, key: str) -> _Request:
    fields = {"q": _operators(words, scope.allowed), "count": MAX_RESULTS, "extra_snippets": "true"}
    if scope.country:
        fields["country"] = scope.country.upper()
    return _Request(f"/res/v1/web/search?{urlencode(fields)}", {"X-Subscription-Token": key})


def _of_tavily(words: str, scope: WebScope, key: str) -> _Request:
    body = {
        "query": words,
        "max_results": MAX_RESULTS if scope.allowed or scope.blocked else scope.n_results,
        "include_domains": [each.host for each in scope.allowed],
        "exclude_domains": [each.host for each in scope.blocked if each.path == "/"],
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return _Request("/search", headers, json.dumps(body).encode())


@attrs.frozen
class Engine:
    """A search engine.

    Attributes:
        name: as messages have it.
        address: where it is.
        ask: makes the request of a query.
        form: of its answer.
        advice: what may help where it refuses.
    """

    name: str
    address: str
    ask: Callable[[str, WebScope, str], _Request]
    form: type[_Results | _BraveResults] = _Results
    advice: str = ""


ENGINES = {
    "brave": Engine("Brave", "https://api.search.brave.com", _of_brave, _BraveResults),
    "tavily": Engine("Tavily", "https://api.tavily.com", _of_tavily),
}

_SEARXNG = Engine("SearXNG", "", _of_searxng, advice="; its settings need 'json' in search.formats")


@attrs.define(eq=False)
class SearchClient:
    """Asks a search engine. Call `aclose` after use."""

    engine: Engine
    _certificates: ssl.SSLContext | None = None
    _key: str = attrs.field(default="", repr=False)
    _pool: httpcore2.AsyncConnectionPool = attrs.field(init=False)
    _places: FairLimiter = attrs.field(
        init=False,
        factory=lambda: FairLimiter(_N_SEARCHES, _N_SEARCHES_EACH, max_waiting=_MAX_WAITING),
    )

    def __attrs_post_init__(self) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._certificates, max_connections=_N_SEARCHES
        )

    @classmethod
    def of(cls, config: Config, certificates: ssl.SSLContext | None = None) -> SearchClient:
        """Make the client of a configuration. Reads the key.

        Raises:
            ConfigError: the key is missing or invalid, or its file cannot be read.
        """
        assert config.web_search is not None
        engine = ENGINES.get(config.web_search)
        if engine is None:
            engine = attrs.evolve(_SEARXNG, address=config.web_search.rstrip("/"))
            return cls(engine, certificates)
        variable = WEB_SEARCH_KEYS[config.web_search]
        if config.web_search_key_file is not None:
            key = file(config.web_search_key_file, "web_search_key_file").strip()
        else:
            key = os.environ.get(variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"web_search {config.web_search} needs a key: set {variable}, or "
                "--web-search-key-file"
            )
        return cls(engine, certificates, key)

    async def search(self, query: str, scope: WebScope) -> list[SearchResult]:
        """Search the web.

        Raises:
            WebToolError: the query is too long, or the engine refuses or does not answer.
            QueueFullError: too many searches of the client wait.
        """
        words = " ".join(plain(query).split())
        if not words:
            raise WebToolError("The query is empty.", reason="invalid_tool_input")
        if len(words) > MAX_QUERY:
            raise WebToolError(
                f"The query has more than {MAX_QUERY} characters.", reason="query_too_long"
            )
        asked = self.engine.ask(words, scope, self._key)
        async with self._places.place():
            data = await self._answer(asked)
        return await offload(lambda: self._read(data, scope), len(data), _SHORT)

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def _answer(self, asked: _Request) -> bytes:
        try:
            with trio.move_on_after(_SECONDS):
                return await self._exchange(asked)
        except FAILURES as error:
            raise WebToolError(f"{self.engine.name} cannot be reached.") from error
        raise WebToolError(f"{self.engine.name} did not answer within {_SECONDS:g} seconds.")

    async def _exchange(self, asked: _Request) -> bytes:
        headers = {
            "Host": urlsplit(self.engine.address).netloc,
            "User-Agent": f"trioserve/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            **asked.headers,
        }
        opened = self._pool.stream(
            "POST" if asked.body else "GET",
            self.engine.address + asked.path,
            headers=list(headers.items()),
            content=asked.body,
        )
        async with opened as response, aclosing(response.aiter_stream()) as parts:
            self._check(response.status)
            return await read_bounded(parts, _MAX_ANSWER, self._too_much)

    def _too_much(self) -> WebToolError:
        return WebToolError(f"{self.engine.name} sends too much.")

    def _check(self, status: int) -> None:
        if status == 200:
            return
        is_busy = status == 429
        raise WebToolError(
            f"{self.engine.name} answers with status {status}"
            f"{'' if is_busy else self.engine.advice}.",
            reason="too_many_requests" if is_busy else "unavailable",
        )

    def _read(self, data: bytes, scope: WebScope) -> list[SearchResult]:
        try:
            answer = msgspec.json.decode(data, type=self.engine.form)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise WebToolError(f"{self.engine.name} sends an invalid answer.") from None
        found = answer.web.results if isinstance(answer, _BraveResults) else answer.results
        results: dict[str, SearchResult] = {}
        for each in found:
            url = quote(each.url[: _MAX_URL + 1], _AS_IT_IS)
            if len(url) <= _MAX_URL and url not in results and scope.allows(url):
                results[url] = _result(each, url)
            if len(results) >= scope.n_results:
                break
        return list(results.values())


def _result(found: _Found, url: str) -> SearchResult:
    content = [found.content, found.description, *found.extra_snippets]
    return SearchResult(
        title=_line(found.title, _MAX_TITLE) or url,
        url=url,
        content=_line("\n".join(filter(None, content)), _MAX_CONTENT),
        date=_line(found.date or found.page_age or found.published_date, _MAX_DATE),
    )


def _line(text: str | None, most: int) -> str:
    """Put a text on one line, without the tags that some engines put around words."""
    shown = html.unescape(_TAGS.sub("", (text or "")[: 4 * most]))
    return " ".join(plain(shown).split())[:most]
