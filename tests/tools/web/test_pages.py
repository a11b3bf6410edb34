"""Pages that a separate process parses."""

from __future__ import annotations

import pytest

from tests.support.web_site import answer, serving_site
from trioserve.errors import MemoryFullError
from trioserve.tools.web.pages import Page, PageReader
from trioserve.tools.web.scope import WebScope

pytestmark = pytest.mark.system

HTML = "<html><head><title>T</title></head><body><p>{}</p></body></html>"


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (HTML.format("Größe").encode(), "text/html; charset=utf-8", "Größe"),
        (HTML.format("Größe").encode("latin-1"), "text/html; charset=ISO-8859-1", "Größe"),
        (HTML.format("Привет").encode("cp1251"), 'text/html; charset="windows-1251"', "Привет"),
        (HTML.format("日本").encode("utf-16"), "text/html", "日本"),
        ('{"a": "ä\u202e"}'.encode(), "application/json", '{"a": "ä"}'),
        (b"# Title\r\n\r\n- x", "text/markdown", "# Title\n\n- x"),
    ],
)
async def test_texts_of_any_encoding(body: bytes, kind: str, expected: str) -> None:
    assert (await read(body, kind)).text == expected


async def read(body: bytes, kind: str) -> Page:
    async with serving_site() as site:
        site.answers["/a"] = answer(body, Content_Type=kind)
        reader = PageReader([f".test:{site.port}=127.0.0.0/8"])
        try:
            return await reader.read(site.url(), WebScope(), lambda _n: None)
        finally:
            await reader.aclose()


async def test_bytes_are_counted_while_they_are_held() -> None:
    counted = list[int]()

    def full(n_bytes: int) -> None:
        if n_bytes > 0:
            raise MemoryFullError("full")

    async with serving_site() as site:
        site.answers["/a"] = answer(b"words", Content_Type="text/plain")
        reader = PageReader([f".test:{site.port}=127.0.0.0/8"])
        await reader.read(site.url(), WebScope(), counted.append)
        with pytest.raises(MemoryFullError):
            await reader.read(site.url(), WebScope(), full)
        await reader.aclose()
    assert counted == [5, -5]
