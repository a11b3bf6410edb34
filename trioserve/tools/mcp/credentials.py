"""`Bearer`: the token of an MCP server at an address, kept in a file and refreshed.

``trioserve mcp login`` writes the file, which only its user may read. `Bearer` reads it, refreshes
the token when it expires or the server refuses it, and writes it again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from urllib.parse import urlsplit

import httpcore2
import httpx2
import msgspec
import trio

from trioserve.config.files import replace_file, user_state
from trioserve.errors import ConfigError, ToolServerError, TrioServeError
from trioserve.log import get_logger
from trioserve.media.fetch import FAILURES, read_bounded

_log = get_logger("trioserve.tools")

#: Bytes of an answer about tokens, and seconds for it.
_MAX_ANSWER = 2**20
_SECONDS = 30.0

#: Seconds before its end at which a token is refreshed.
_EARLY = 30.0


class Credentials(msgspec.Struct, kw_only=True):
    """The result of a login: the token, and the data to renew it."""

    url: str
    token_endpoint: str
    client_id: str
    client_secret: str = ""
    auth_method: str = "none"
    access_token: str
    refresh_token: str = ""
    expires_at: float = 0.0  # seconds since 1970; 0: unknown
    resource: str = ""

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r})"


class _Answer(msgspec.Struct):
    access_token: str
    refresh_token: str | None = None
    expires_in: float | None = None


def path_of(url: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file with the credentials for an address. Raises ConfigError: the user has no home."""
    name = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return user_state(environ) / "mcp" / f"{name}.json"


def load(url: str) -> Credentials | None:
    """Read the credentials for an address; None if they are missing or unreadable. Blocks."""
    try:
        return msgspec.json.decode(path_of(url).read_bytes(), type=Credentials)
    except (FileNotFoundError, ConfigError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("the token of an MCP server cannot be read", url=url, problem=str(error))
        return None


def save(credentials: Credentials) -> Path:
    """Write credentials to their file, which only this user may read. Blocks.

    Raises:
        ConfigError: it cannot be written.
        OSError: its folder cannot be made.
    """
    path = path_of(credentials.url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(str(path), msgspec.json.encode(credentials).decode())
    return path


class _Bounded(httpx2.AsyncBaseTransport):
    """Reads answers up to a length."""

    def __init__(self) -> None:
        self._pool = httpcore2.AsyncConnectionPool()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        opened = self._pool.stream(
            request.method,
            str(request.url),
            headers=request.headers.raw,
            content=await request.aread(),
            extensions=request.extensions,
        )
        try:
            async with opened as response, aclosing(response.aiter_stream()) as parts:
                body = await read_bounded(parts, _MAX_ANSWER, _too_long)
        except FAILURES as error:
            raise httpx2.ConnectError(str(error) or type(error).__name__) from error
        headers = httpx2.Headers(response.headers)
        if headers.get("content-encoding", "identity") != "identity":
            raise httpx2.ReadError("an answer is compressed, and need not be")
        return httpx2.Response(response.status, headers=headers, content=body)

    async def aclose(self) -> None:
        await self._pool.aclose()


def _too_long() -> httpx2.ReadError:
    return httpx2.ReadError(f"an answer has more than {_MAX_ANSWER} bytes")


def bounded_client(auth: httpx2.Auth | None = None) -> httpx2.AsyncClient:
    """Make a client whose answers have a bound."""
    headers = {"Accept-Encoding": "identity"}
    return httpx2.AsyncClient(auth=auth, transport=_Bounded(), timeout=_SECONDS, headers=headers)


def check_endpoint(url: str, endpoint: str) -> None:
    """Check that tokens for an address are not asked for, or sent, in clear where it is not.

    Raises:
        ToolServerError: they would be.
    """
    if urlsplit(url).scheme == "https" and urlsplit(endpoint).scheme != "https":
        raise ToolServerError(f"its tokens are at {endpoint:.200}, which is not https")


class Bearer:
    """The token for an address, as requests carry it. Tasks may share it.

    Args:
        url: the address.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: Credentials | None = None
        self._is_loaded = False
        self._turn = trio.Lock()

    async def token(self) -> str | None:
        """Return the token, renewed if it expires soon; None without a login."""
        if not self._is_loaded:
            await self._load()
        known = self._known
        if known is not None and 0 < known.expires_at < time.time() + _EARLY:
            await self.renew(known.access_token)
        return None if self._known is None else self._known.access_token

    async def renew(self, refused: str | None) -> bool:
        """Get another token than one that is refused. Returns whether there is one."""
        async with self._turn:
            await self._load()  # another process may have logged in or refreshed it
            known = self._known
            if known is None:
                return False
            if known.access_token != refused:
                return True
            if not known.refresh_token:
                return False
            try:
                self._known = await _refreshed(known)
            except (httpx2.HTTPError, msgspec.MsgspecError, TrioServeError, OSError) as error:
                _log.warning("the token of an MCP server cannot be refreshed", url=self._url,
                             problem=str(error) or type(error).__name__)  # fmt: skip
                return False
            return True

    async def _load(self) -> None:
        self._known = await trio.to_thread.run_sync(load, self._url)
        self._is_loaded = True


async def _refreshed(known: Credentials) -> Credentials:
    check_endpoint(known.url, known.token_endpoint)
    fields = {
        "grant_type": "refresh_token",
        "refresh_token": known.refresh_token,
        "client_id": known.client_id,
    }
    if known.resource:
        fields["resource"] = known.resource
    auth = None
    if known.auth_method == "client_secret_basic":
        auth = httpx2.BasicAuth(known.client_id, known.client_secret)
    elif known.client_secret:
        fields["client_secret"] = known.client_secret
    async with bounded_client(auth) as client:
        response = await client.post(known.token_endpoint, data=fields)
    if response.status_code != 200:
        raise ToolServerError(f"its token endpoint answers with status {response.status_code}")
    answer = msgspec.json.decode(response.content, type=_Answer)
    renewed = msgspec.structs.replace(
        known,
        access_token=answer.access_token,
        refresh_token=answer.refresh_token or known.refresh_token,
        expires_at=time.time() + answer.expires_in if answer.expires_in else 0.0,
    )
    await trio.to_thread.run_sync(save, renewed)
    return renewed
