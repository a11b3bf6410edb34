"""`Fetcher`: files from other servers, for requests that name them by their URLs.

Whoever may have a server fetch what they like reaches what the server reaches: the services of its
machine and of its network. So a name is looked up once, its addresses are checked, and one of these
is dialed. The same goes for each redirect.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urljoin

import attrs
import httpcore
import trio

from trioserve._version import __version__
from trioserve.errors import InvalidMediaError
from trioserve.server.dialing import FAILURES, Dialer, url_of
from trioserve.server.fetch_rules import FetchRules, Target, parse_url

_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)

#: Bytes of an answer that are not its body: its head, and the lengths of chunks.
_HEAD = 2**18

#: Files that are fetched at the same time.
_N_FETCHES = 16

_HEADERS = {
    "User-Agent": f"trioserve/{__version__}",
    "Accept": "image/*, audio/*, video/*, */*;q=0.5",
    "Accept-Encoding": "identity",  # what it is compressed to says nothing of its size
}


class Fetcher:
    """Fetches files.

    Args:
        rules: from where.
        max_bytes: of a file.
        timeout: seconds for a file, from the look-up of its name to its last byte.
        certificates: what servers are known by; None: by the usual authorities.
    """

    def __init__(
        self,
        rules: FetchRules,
        *,
        max_bytes: int,
        timeout: float,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._dialer = Dialer(rules, certificates)
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._places = trio.CapacityLimiter(_N_FETCHES)

    async def fetch(self, url: str, count: Callable[[int], None]) -> bytes:
        """Fetch a file.

        Args:
            url: where it is.
            count: told of bytes as they come; what it raises ends the transfer.

        Raises:
            InvalidMediaError: the file cannot be had, or must not. The message is a part of a
                sentence.
        """
        async with self._places:
            with trio.move_on_after(self._timeout):
                return await self._follow(url, count)
        raise InvalidMediaError(f"could not be fetched within {self._timeout:g} seconds")

    async def _follow(self, url: str, count: Callable[[int], None]) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            body, location = await self._get(parse_url(url), count)
            if location is None:
                return body
            url = urljoin(url, location)
        raise InvalidMediaError(f"is at an address that redirects more than {_MAX_REDIRECTS} times")

    async def _get(self, target: Target, count: Callable[[int], None]) -> tuple[bytes, str | None]:
        """Send one GET. Returns the body, or where a redirect leads to."""
        meter = _Meter(self._max_bytes + _HEAD, count)
        connection = await self._dialer.connection(target, wrap=partial(_Metered, meter))
        try:
            async with connection:
                return await self._exchange(connection, target)
        except FAILURES as error:
            raise InvalidMediaError(f"could not be fetched from {target.netloc}") from error

    async def _exchange(
        self, connection: httpcore.AsyncHTTPConnection, target: Target
    ) -> tuple[bytes, str | None]:
        headers = {"Host": target.netloc, **_HEADERS}
        async with connection.stream(
            "GET", url_of(target), headers=list(headers.items())
        ) as response:
            said = {
                name.decode("ascii").lower(): value.decode("latin-1")
                for name, value in response.headers
            }
            if response.status in _REDIRECTS and "location" in said:
                return b"", said["location"]
            self._check(response.status, said, target)
            # What is too long ends the transfer in the meter. An exception here would leave the
            # generators unfinished that the body comes through.
            return b"".join([chunk async for chunk in response.aiter_stream()]), None

    def _check(self, status: int, said: Mapping[str, str], target: Target) -> None:
        if status != 200:
            raise InvalidMediaError(f"is at {target.netloc}, which answers with status {status}")
        if said.get("content-encoding", "identity").lower() != "identity":
            raise InvalidMediaError(f"is at {target.netloc}, which sends it compressed")
        length = said.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise InvalidMediaError(f"has more than {self._max_bytes} bytes")


@attrs.define
class _Meter:
    """Counts the bytes of an answer, and ends what is too long."""

    n_left: int
    count: Callable[[int], None]

    def add(self, n_bytes: int) -> None:
        self.count(n_bytes)
        self.n_left -= n_bytes
        if self.n_left < 0:
            raise InvalidMediaError("has too many bytes")


class _Metered(httpcore.AsyncNetworkStream):
    """A connection whose incoming bytes are counted."""

    def __init__(self, meter: _Meter, stream: httpcore.AsyncNetworkStream) -> None:
        self._meter = meter
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._meter.add(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Metered(self._meter, stream)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
