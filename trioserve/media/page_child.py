"""The process that reads pages: ``python -m trioserve.media.page_child LIMITS``, one after another.

It turns HTML into Markdown with trafilatura, and other texts into what can be seen of them. It is
confined by `trioserve.media.serving`. An answer has three pages: the title, the text, and the
addresses of the links, one a line.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urldefrag, urljoin

import trafilatura

from trioserve.media import serving
from trioserve.media.orders import MAX_TEXT, Answer, MediaLimits, Order, text_pieces
from trioserve.media.plain_text import plain

#: The declaration of a page's encoding, in its first bytes.
_CHARSET = re.compile(
    rb"""<(?:meta\b[^>]{0,200}?charset|\?xml[^>]{0,99}?encoding)\s*=\s*["']?([\w-]+)""", re.I
)
_HEAD = 2048

#: The marks of byte orders, the longer ones first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

#: Python imports an encoding for the first text that has it: too late.
_ENCODINGS = frozenset(
    codecs.lookup(name).name
    for name in (
        "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "ascii", "latin-1", "cp1252",
        "iso8859-2", "iso8859-5", "iso8859-7", "iso8859-9", "iso8859-15", "cp1250", "cp1251",
        "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "koi8-r", "koi8-u", "gbk",
        "gb18030", "gb2312", "big5", "shift_jis", "cp932", "euc_jp", "iso2022_jp", "euc_kr",
        "tis_620",
    )
)  # fmt: skip

_LINK = re.compile(r"https?://[!-~]{1,2000}")

_MAX_TITLE = 500
_MAX_LINKS = 200


def decode(order: Order, data: bytes, limits: MediaLimits) -> Iterator[Answer]:
    """Read a page. Raises any exception of the parsers."""
    text = _decoded(data, order.charset)
    title, links = "", ""
    if order.format == "html":
        title, text, links = _read(text, order.url)
    for page, each in enumerate((title, text, links)):
        yield from text_pieces(page, plain(each)[: MAX_TEXT // 4])


def _decoded(data: bytes, charset: str) -> str:
    named = _CHARSET.search(data[:_HEAD])
    said = named[1].decode("ascii", "replace") if named else ""
    marked = [name for mark, name in _MARKS if data.startswith(mark)]
    for name in (*marked, charset, said, "utf-8"):
        with suppress(LookupError, ValueError):
            if codecs.lookup(name).name in _ENCODINGS:
                return data.decode(name)
    return data.decode("cp1252", "replace")


def _read(html: str, url: str) -> tuple[str, str, str]:
    """The title of a page, its text in Markdown, and the addresses of its links."""
    tree = trafilatura.load_html(html)
    if tree is None:  # it takes what has no such tags for something else
        tree = trafilatura.load_html(f"<html><body>{html}</body></html>")
    if tree is None:
        return "", "", ""
    title = " ".join((tree.findtext(".//title") or "").split())[:_MAX_TITLE]
    links: dict[str, None] = {}
    for link in tree.iterfind(".//a[@href]"):
        with suppress(ValueError):
            links[urldefrag(urljoin(url, link.get("href").strip())).url] = None
        if len(links) >= _MAX_LINKS:
            break
    text = trafilatura.extract(
        tree, url=url, output_format="markdown", include_links=True, include_comments=False,
        favor_recall=True, fast=True,
    )  # fmt: skip
    return title, text or trafilatura.html2txt(tree), "\n".join(filter(_LINK.fullmatch, links))


logging.disable()  # what these libraries log is about the pages of strangers

# The first page makes them read files, which is too late afterwards.
_FIRST = "<html><head><title>t</title></head><body><article><p>{}<a href='/a'>b</a></p></article>"
_read(_FIRST.format("A sentence of a page. " * 20), "https://example.org/")

if __name__ == "__main__":
    serving.main(decode)
