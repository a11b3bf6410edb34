"""`PageReader`: fetches pages, and reads their text in processes that may die."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trioserve.config.extras import has_extra
from trioserve.errors import InvalidMediaError, WebToolError
from trioserve.media.decoders import Decoders
from trioserve.media.fetch import Dialer, Fetched, Fetcher, FetchRules
from trioserve.media.orders import MediaLimits, Order
from trioserve.tools.web.scope import WebScope
from trioserve.types import DecodedDocument

#: Characters of an address: as many as Anthropic's tool takes, and some.
_MAX_URL = 2000

_ACCEPT = "text/html, application/xhtml+xml, text/*;q=0.9, application/pdf;q=0.8, */*;q=0.1"

#: Limits of a page and of a PDF. The three pages of an answer are title, text and links.
_OF_PAGES = MediaLimits(max_bytes=4 * 2**20, max_frames=3, timeout=5.0, memory=512 * 2**20)
_OF_PDFS = MediaLimits(max_bytes=16 * 2**20, timeout=20.0)
_FETCH_SECONDS = 30.0

_HTML = ("text/html", "application/xhtml+xml", "")
_PDF = "application/pdf"

#: Types of texts beside ``text/…``, and how others end.
_TEXTS = frozenset({"application/json", "application/xml", "application/javascript"})
_LIKE_TEXTS = ("+json", "+xml")


@attrs.frozen
class Page:
    """The text of a page, with its title and links."""

    url: str  # after all redirects
    title: str
    text: str
    links: Sequence[str] = ()


class PageReader:
    """Reads pages at the hosts that a configuration allows. Call `aclose` after use.

    Args:
        hosts: entries of `FetchRules`.

    Raises:
        ConfigError: an entry is invalid.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        dialer = Dialer(FetchRules(hosts, "--web-fetch"))
        self._fetcher = Fetcher(dialer, _OF_PDFS.max_bytes, _FETCH_SECONDS, _ACCEPT)
        self._pages = Decoders(_OF_PAGES, "trioserve.media.page_child")
        self._pdfs = Decoders(_OF_PDFS) if has_extra("pdf") else None

    async def read(self, url: str, scope: WebScope, count: Callable[[int], object]) -> Page:
        """Fetch a page and read it.

        Args:
            url: of the page.
            scope: what the request allows.
            count: counts the bytes that are held, more or fewer; an exception ends the call.

        Raises:
            WebToolError: it may not be fetched, or cannot be read.
            QueueFullError: too many pages of the client wait.
        """
        if len(url) > _MAX_URL:
            raise WebToolError(
                f"The address has more than {_MAX_URL} characters.", reason="url_too_long"
            )
        n_bytes = 0

        def add(n_more: int) -> None:
            nonlocal n_bytes
            count(n_more)
            n_bytes += n_more

        try:
            fetched = await self._fetcher.fetch(url.partition("#")[0], add, scope.check)
            page = await self._read(fetched)
        except InvalidMediaError as error:
            reason = getattr(error, "reason", "url_not_accessible")
            raise WebToolError(f"The page {error.message}.", reason=reason) from error
        finally:
            count(-n_bytes)
        return page

    async def aclose(self) -> None:
        await self._pages.aclose()
        if self._pdfs is not None:
            await self._pdfs.aclose()

    async def _read(self, fetched: Fetched) -> Page:
        kind, _, options = fetched.content_type.lower().partition(";")
        kind = kind.strip()
        if kind == _PDF or fetched.body.startswith(b"%PDF-"):
            if self._pdfs is None:
                raise _unsupported("is a PDF, which this server reads with trioserve[pdf] only")
            document = await self._pdfs.decode(fetched.body, Order(format="pdf", kind="document"))
            assert isinstance(document, DecodedDocument)
            return Page(fetched.url, "", "\n\n".join(each.text for each in document.pages))
        is_text = kind.startswith("text/") or kind in _TEXTS or kind.endswith(_LIKE_TEXTS)
        if kind not in _HTML and not is_text:
            raise _unsupported(f"is a file of the type {kind:.60}, which is no text")
        if len(fetched.body) > _OF_PAGES.max_bytes:
            raise WebToolError(
                f"The page has more than {_OF_PAGES.max_bytes} bytes.", reason="content_too_large"
            )
        order = Order(
            format="html" if kind in _HTML else "text",
            kind="document",
            charset=_charset(options),
            url=fetched.url,
        )
        document = await self._pages.decode(fetched.body, order)
        assert isinstance(document, DecodedDocument)
        title, text, links = (each.text for each in document.pages)
        return Page(fetched.url, title, text, links.split())


def _charset(options: str) -> str:
    _, found, rest = options.partition("charset=")
    return rest.partition(";")[0].strip(" \"'")[:40] if found else ""


def _unsupported(problem: str) -> WebToolError:
    return WebToolError(f"The page {problem}.", reason="unsupported_content_type")
