"""Asks the hub: GET over HTTP, and which files a repository has."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import attrs
import httpcore2
import trio

from trioserve._version import __version__
from trioserve.errors import (
    GatedModelError,
    HubError,
    HubNotFoundError,
    HubUnavailableError,
    first_error,
)
from trioserve.whole_numbers import whole_number

_MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

#: Statuses that another try may not meet again, besides 5xx.
_PASSING = (408, 425, 429)

#: Headers of the hub's redirects, about the file that they lead to.
_LINKED = ("x-linked-etag",)

#: Seconds to connect, and between two pieces of an answer.
_TIMEOUTS = {"connect": 10.0, "read": 30.0, "write": 30.0, "pool": None}

#: Bytes that are handed over at once, and how long they are waited for.
_BATCH = 2**20
_BATCH_SECONDS = 0.2
_MAX_JSON = 64 * 2**20

#: Files of a repository, and bytes of one that a disk could have.
_MAX_FILES, _MAX_SIZE = 10_000, 2**60

#: Attempts to ask a question, and seconds before the second one.
_ATTEMPTS = 3
FIRST_WAIT = 0.5

_FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.TimeoutException,
)


class HubResponse:
    """The answer to a GET, whose body is still to be read."""

    def __init__(
        self,
        url: str,
        response: httpcore2.Response,
        body: AsyncIterator[bytes],
        linked: Mapping[str, str],
    ) -> None:
        self.url = url  # after redirects
        self.status = response.status
        #: Names are in lower case. Those in `_LINKED` may be from a redirect that led here.
        self.headers: Mapping[str, str] = dict(linked) | {
            name.decode("ascii").lower(): value.decode("latin-1")
            for name, value in response.headers
        }
        self._body = body
        self._failure: HubUnavailableError | None = None

    async def batch(self) -> list[bytes]:
        """Read about a megabyte, or what comes within a moment; nothing at the end.

        Raises:
            HubUnavailableError: the connection is lost. What came before it was returned.
        """
        if self._failure is not None:
            raise self._failure
        chunks: list[bytes] = []
        try:
            await self._fill(chunks)
        except HubUnavailableError as error:
            if not chunks:
                raise
            self._failure = error
        return chunks

    async def _fill(self, chunks: list[bytes]) -> None:
        n_bytes = 0
        until = trio.current_time() + _BATCH_SECONDS
        with _one_error(self.url):
            async for chunk in self._body:
                chunks.append(chunk)
                n_bytes += len(chunk)
                if n_bytes >= _BATCH or trio.current_time() >= until:
                    break


class HttpClient:
    """Asks the hub, and the hosts that it redirects to. Use `open_client`."""

    def __init__(
        self, pool: httpcore2.AsyncConnectionPool, endpoint: str, token: str | None
    ) -> None:
        if token is not None and not (token.isascii() and token.isprintable()):
            raise HubError("The token for the hub has characters that no token has.")
        self.endpoint = endpoint
        self._pool = pool
        self._origin = _origin(endpoint)
        self._token = token

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HubResponse]:
        """Send a GET and follow redirects; the answer may have any other status.

        Raises:
            HubUnavailableError: the server cannot be reached, or the connection is lost.
            HubError: the address cannot be used, or redirects lead nowhere.
        """
        linked: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            for _ in range(_MAX_REDIRECTS):
                response = await stack.enter_async_context(self._send(url, headers or {}))
                body = await stack.enter_async_context(aclosing(response.aiter_stream()))
                answer = HubResponse(url, response, body, linked)
                location = answer.headers.get("location")
                if answer.status not in _REDIRECTS or location is None:
                    break
                linked |= {name: value for name, value in answer.headers.items() if name in _LINKED}
                await stack.aclose()
                url = urljoin(url, location)
            else:
                raise HubError(f"{_host(url)} redirects again and again.")
            yield answer

    @asynccontextmanager
    async def _send(
        self, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[httpcore2.Response]:
        origin = _origin(url)
        sent = {
            "User-Agent": f"trioserve/{__version__}",
            "Accept-Encoding": "identity",  # sizes, ranges and hashes are those of the file
            **headers,
        }
        if self._token is not None and origin == self._origin:
            sent["Authorization"] = f"Bearer {self._token}"
        # Escape forbidden characters; keep escapes.
        request = self._pool.stream(
            "GET",
            quote(url, safe="%/:?#[]@!$&'()*+,;=~"),
            headers=list(sent.items()),
            extensions={"timeout": _TIMEOUTS},
        )
        with _one_error(url):
            async with request as response:
                yield response

    async def json(self, url: str, repo: str) -> tuple[Any, HubResponse]:
        """Ask the hub's API about a repository, again if it fails.

        Raises:
            HubError: a subclass; its message names the problem.
        """
        for attempt in range(1, _ATTEMPTS):
            try:
                return await self._json(url, repo)
            except HubUnavailableError as error:
                if error.retry_after is not None:
                    raise  # it asks for more patience than this
            await trio.sleep(FIRST_WAIT * attempt)
        return await self._json(url, repo)

    async def _json(self, url: str, repo: str) -> tuple[Any, HubResponse]:
        async with self.get(url, {"Accept": "application/json"}) as answer:
            self.check(answer, repo)
            body = bytearray()
            while batch := await answer.batch():
                body += b"".join(batch)
                if len(body) > _MAX_JSON:
                    raise HubError(f"{_host(url)} sends more than a list of files.")
        try:
            return await trio.to_thread.run_sync(json.loads, body), answer
        except (ValueError, RecursionError):
            raise HubError(
                f"{_host(url)} does not answer as the hub does; look at HF_ENDPOINT."
            ) from None

    def check(self, answer: HubResponse, what: str) -> None:
        """Raise the error that the status stands for, if it is not 2xx.

        Args:
            answer: the answer.
            what: the requested name: ``user/repo``, or a path below it.
        """
        status, host = answer.status, _host(answer.url)
        if 200 <= status < 300:
            return
        if _origin(answer.url) == self._origin:
            self._check_access(answer, what)
        expired = status == 403  # a signed address that is too old; the hub signs another one
        if status in _PASSING or status >= 500 or expired:
            after = whole_number(answer.headers.get("retry-after", ""))
            why = "gets too many requests" if status == 429 else f"answers with status {status}"
            raise HubUnavailableError(
                f"{host} {why}.",
                retry_after=after,
            )
        raise HubError(f"{host} answers with status {status}.")

    def _check_access(self, answer: HubResponse, what: str) -> None:
        """Check the statuses about permissions."""
        status, host = answer.status, _host(answer.url)
        if status == 404:
            raise HubNotFoundError(f"{host} has no {what}.")
        if status == 403 or answer.headers.get("x-error-code") == "GatedRepo":
            page = f"{self.endpoint}/{'/'.join(what.split('/')[:2])}"
            how = (
                "your token has no access"
                if self._token
                else "then give a token of yours with --hf-token or HF_TOKEN"
            )
            raise GatedModelError(f"{what} is gated: accept its terms at {page}; {how}.")
        if status == 401:
            but = (
                "it does not accept your token"
                if self._token
                else "it is private and needs a token (--hf-token or HF_TOKEN)"
            )
            raise HubNotFoundError(f"{host} has no {what}, or {but}.")


@asynccontextmanager
async def open_client(endpoint: str, token: str | None) -> AsyncIterator[HttpClient]:
    """Make a client for a hub; leaving the block closes its connections."""
    certificates = None  # made when they are needed
    if endpoint.startswith("https:"):  # which takes a while
        certificates = await trio.to_thread.run_sync(httpcore2.default_ssl_context)
    proxy = proxy_of(endpoint)
    async with httpcore2.AsyncConnectionPool(ssl_context=certificates, proxy=proxy) as pool:
        yield HttpClient(pool, endpoint, token)


def proxy_of(endpoint: str) -> httpcore2.Proxy | None:
    """The proxy that the environment names (``HTTPS_PROXY``, ``NO_PROXY``, ...).

    Raises:
        HubError: it is not a proxy for HTTP.
    """
    scheme = _origin(endpoint)[0]
    url = getproxies().get(scheme)
    if not url or proxy_bypass(_host(endpoint)):
        return None
    proxy = urlsplit(url)
    address = f"{proxy.scheme}://{_host(url)}"
    if proxy.scheme not in ("http", "https"):
        raise HubError(f"The proxy {address} is not one for HTTP.")
    if proxy.username is None:
        return httpcore2.Proxy(address)
    return httpcore2.Proxy(address, auth=(unquote(proxy.username), unquote(proxy.password or "")))


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL.

    Raises:
        HubError: it is no address of a web server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # a name that no system looks for
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HubError(f"{url[:200]!r} is not an address that begins with http:// or https://.")
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme]


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


@contextmanager
def _one_error(url: str) -> Iterator[None]:
    """Turn the ways in which a connection can fail into one."""
    try:
        yield
    except httpcore2.ConnectError as error:
        raise HubUnavailableError(f"{_host(url)} cannot be reached: {_reason(error)}.") from error
    except httpcore2.TimeoutException as error:
        raise HubUnavailableError(f"{_host(url)} does not answer in time.") from error
    except _FAILURES as error:
        raise HubUnavailableError(f"The connection to {_host(url)} is lost.") from error


def _reason(error: BaseException | None) -> str:
    """The system's error for a failed connection."""
    while error is not None:
        error = first_error(error)
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return "it does not answer"


_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NEXT = re.compile(r"<([^<>]+)>;\s*rel=\"?next\"?")


@attrs.frozen(kw_only=True)
class RemoteFile:
    """A file on a server. `digest` is a SHA-256, or for small files the SHA-1 of Git."""

    name: str  # for messages: the repository and the path
    url: str
    size: int | None
    digest: str | None


@attrs.frozen
class Listing:
    """The files of a repository, as its newest commit on a branch has them."""

    branch: str
    commit: str
    files: Mapping[str, RemoteFile]


async def list_files(client: HttpClient, repo: str) -> Listing:
    """Ask the hub for the files of a repository.

    Raises:
        HubError: a subclass; its message names the problem.
    """
    branch, commit = await _newest(client, repo)
    base = f"{client.endpoint}/{repo}/resolve/{commit}/"
    url: str | None = f"{client.endpoint}/api/models/{repo}/tree/{commit}?recursive=true"
    files: dict[str, RemoteFile] = {}
    n_listed = 0  # an empty page counts as a file
    while url is not None:
        entries, answer = await client.json(url, repo)
        n_listed += max(1, len(_dicts(entries)))
        if n_listed > _MAX_FILES:
            raise HubError(f"{repo} has more than {_MAX_FILES:,} files.")
        files |= dict(_files(entries, repo, base))
        url = _next_page(answer)
    return Listing(branch, commit, files)


async def _newest(client: HttpClient, repo: str) -> tuple[str, str]:
    """The branch main and its commit; without such a branch, the first."""
    refs, _ = await client.json(f"{client.endpoint}/api/models/{repo}/refs", repo)
    entries = refs.get("branches") if isinstance(refs, dict) else None
    branches = {
        one["name"]: one["targetCommit"]
        for one in _dicts(entries)
        if _is_path(one.get("name")) and _is(_COMMIT, one.get("targetCommit"))
    }
    if not branches:
        raise HubError(f"{client.endpoint} names no branch of {repo}; look at HF_ENDPOINT.")
    name = "main" if "main" in branches else next(iter(branches))
    return name, branches[name]


def _files(entries: Any, repo: str, base: str) -> Iterator[tuple[str, RemoteFile]]:
    for one in _dicts(entries):
        path, lfs = one.get("path"), one.get("lfs")
        if one.get("type") == "file" and isinstance(path, str) and _is_path(path):
            contents = lfs if isinstance(lfs, dict) else one  # the others are in Git itself
            size, digest = contents.get("size"), contents.get("oid")
            is_sound = type(size) is int and 0 <= size <= _MAX_SIZE and _is(_DIGEST, digest)
            yield (
                path,
                RemoteFile(
                    name=f"{repo}/{path}",
                    url=base + quote(path),
                    size=size if is_sound else None,
                    digest=digest if is_sound else None,
                ),
            )


def _next_page(answer: HubResponse) -> str | None:
    match = _NEXT.search(answer.headers.get("link", ""))
    return match and urljoin(answer.url, match[1])


def _dicts(entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        raise HubError("The hub's answer is no list of files; look at HF_ENDPOINT.")
    return [one for one in entries if isinstance(one, dict)]


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_path(value: Any) -> bool:
    """Return True for a path that stays within its folder."""
    if not isinstance(value, str) or not value or "\\" in value or not value.isprintable():
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]
