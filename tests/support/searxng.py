"""A stand-in for a SearXNG: it speaks its JSON API, and finds what a test says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs

from tests.support.threaded_server import QuietHandler, serving_handler

#: A result as SearXNG writes it.
FOUND = {
    "url": "https://example.org/trio",
    "title": "Trio: <b>a friendly</b> library",
    "content": "Trio is a library for async concurrency &amp; I/O.",
    "publishedDate": "2026-01-02T00:00:00",
    "engine": "duckduckgo",
    "engines": ["duckduckgo"],
    "score": 1.0,
    "category": "general",
    "parsed_url": ["https", "example.org", "/trio", "", "", ""],
    "template": "default.html",
    "positions": [1],
}


@attrs.define
class SearXNG:
    """A search engine with fixed results that records queries. It also serves `pages`."""

    address: str = ""
    results: list[dict[str, Any]] = attrs.Factory(lambda: [FOUND])
    pages: dict[str, bytes] = attrs.Factory(dict)
    queries: list[str] = attrs.Factory(list)
    headers: list[dict[str, str]] = attrs.Factory(list)
    status: int = 200
    type: str = "text/html; charset=utf-8"
    answer: Callable[[str], Any] | None = None  # in place of SearXNG's own

    def page(self, path: str) -> str:
        return self.address + path


@contextlib.contextmanager
def serving_searxng(**fields: Any) -> Iterator[SearXNG]:
    """Serve one, at any port."""
    engine = SearXNG(**fields)

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            engine.headers.append(dict(self.headers))
            if url.path in engine.pages:
                self.send(200, engine.pages[url.path], {"Content-Type": engine.type})
                return
            asked = {name: values[0] for name, values in parse_qs(url.query).items()}
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length).decode()
            engine.queries.append(asked.get("q", body))
            found: Any = {
                "query": asked.get("q"),
                "number_of_results": 0,
                "results": engine.results,
                "answers": [],
                "corrections": [],
                "infoboxes": [],
                "suggestions": [],
                "unresponsive_engines": [],
            }
            if engine.answer is not None:
                found = engine.answer(self.path)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            is_json = engine.answer is not None or asked.get("format") == "json"
            self.send(engine.status if is_json else 403, data, {"Content-Type": "application/json"})

        def do_POST(self) -> None:
            self.do_GET()

    with serving_handler(Handler) as address:
        engine.address = address
        yield engine
