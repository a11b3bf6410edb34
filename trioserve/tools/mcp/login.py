"""`login`: authorization for an MCP server at an address, by OAuth's code with PKCE.

The SDK discovers the servers (RFC 9728 and 8414), registers this program (RFC 7591) and checks what
comes back. Here are the page's way back, to a port of this machine, and what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import trio
from mcp.client.auth import OAuthClientProvider, OAuthFlowError, OAuthTokenError
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)
from mcp_types import LATEST_PROTOCOL_VERSION
from pydantic import AnyUrl, ValidationError

from trioserve._version import __version__
from trioserve.concurrency import Feed, alongside
from trioserve.errors import ToolServerError
from trioserve.tools.mcp.credentials import Credentials, bounded_client, check_endpoint, save
from trioserve.tools.mcp.entries import HttpEntry

#: Seconds for a person to log in.
_PATIENCE = 600.0

#: Bytes of a browser's request, and seconds for it.
_MAX_REQUEST = 2**14
_SECONDS = 10.0

_PATH = "/callback"

_PAGE = (
    b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
    b"Connection: close\r\nCache-Control: no-store\r\n\r\n%b"
)
_DONE = b"trioserve has what it needs. You can close this page."

_INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": LATEST_PROTOCOL_VERSION,
        "capabilities": {},
        "clientInfo": {"name": "trioserve", "version": __version__},
    },
}


class _Memory:
    """Keeps what a login brings, while it lasts."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


async def login(entry: HttpEntry, show: Callable[[str], Awaitable[None]]) -> Path | None:
    """Have a person log in, and write the token to its file.

    Args:
        entry: the server.
        show: shows the person the address of the page.

    Returns:
        The file; None: the server wants no login.

    Raises:
        ToolServerError: it failed, or took too long.
    """
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        provider, status = await _authorized(entry, _WayBack(listener, show))
    credentials = _credentials(entry, provider)
    if credentials is None:
        if status >= 400:
            raise ToolServerError(f"it answers with status {status}, and names no way to log in")
        return None
    check_endpoint(entry.url, credentials.token_endpoint)
    return await trio.to_thread.run_sync(save, credentials)


async def _authorized(entry: HttpEntry, back: _WayBack) -> tuple[OAuthClientProvider, int]:
    """Go through the SDK's flow; returns what has its result, and the status of the server."""
    provider = OAuthClientProvider(
        entry.url,
        OAuthClientMetadata(
            redirect_uris=[AnyUrl(back.url)],
            client_name="trioserve",
            token_endpoint_auth_method="none",
        ),
        _Memory(),
        redirect_handler=back.show,
        callback_handler=back.result,
    )
    status = 0
    try:
        with trio.fail_after(_PATIENCE):
            async with alongside(back.serve), bounded_client(provider) as client:
                status = await _tried(client, entry)
    except trio.TooSlowError:
        raise ToolServerError(f"no login has come back within {_PATIENCE:g} seconds") from None
    except (OAuthFlowError, OAuthTokenError, ValidationError, httpx2.HTTPError) as error:
        if provider.context.current_tokens is None:  # or it has a token, and no answer yet
            raise ToolServerError(f"the login failed: {error}") from None
    return provider, status


async def _tried(client: httpx2.AsyncClient, entry: HttpEntry) -> int:
    """Send a request, with all that authorizes it; returns the status."""
    headers = {**entry.headers, "Accept": "application/json, text/event-stream"}
    asked = client.stream("POST", entry.url, json=_INITIALIZE, headers=headers)
    async with asked as response:
        return response.status_code


def _credentials(entry: HttpEntry, provider: OAuthClientProvider) -> Credentials | None:
    context = provider.context
    tokens, client = context.current_tokens, context.client_info
    if tokens is None or client is None or client.client_id is None:
        return None
    takes_resource = context.should_include_resource_param(context.protocol_version)
    return Credentials(
        url=entry.url,
        token_endpoint=provider._get_token_endpoint(),
        client_id=client.client_id,
        client_secret=client.client_secret or "",
        auth_method=client.token_endpoint_auth_method or "none",
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token or "",
        expires_at=time.time() + tokens.expires_in if tokens.expires_in else 0.0,
        resource=context.get_resource_url() if takes_resource else "",
    )


class _WayBack:
    """Listens at the address that the browser returns to with the code."""

    def __init__(
        self, listener: trio.SocketListener, show: Callable[[str], Awaitable[None]]
    ) -> None:
        self._listener, self._show = listener, show
        self._state = ""
        self._found = Feed[dict[str, str]](1)
        #: The address that the browser returns to.
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}{_PATH}"

    async def serve(self) -> None:
        """Answer the browser. Ends when cancelled."""
        await trio.serve_listeners(self._answer, [self._listener])

    async def show(self, url: str) -> None:
        self._state = parse_qs(urlsplit(url).query).get("state", [""])[0]
        await self._show(url)

    async def result(self) -> AuthorizationCodeResult:
        """Wait for the code; the right state is required. Raises OAuthFlowError: it was refused."""
        found = await anext(self._found)
        if "code" not in found:
            raise OAuthFlowError(f"it was refused ({found.get('error', 'no code came back'):.200})")
        return AuthorizationCodeResult(
            code=found["code"], state=found.get("state"), iss=found.get("iss")
        )

    async def _answer(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(_SECONDS), suppress(trio.BrokenResourceError):
            async with stream:
                found = self._read(await _head(stream))
                is_right = found is not None
                status, said = (b"200 OK", _DONE) if is_right else (b"404 Not Found", b"")
                await stream.send_all(_PAGE % (status, len(said), said))
            if found is not None:
                self._found.put(found)
                self._found.end()

    def _read(self, head: bytes) -> dict[str, str] | None:
        """Read the parameters that the page sent back; None: this is another request."""
        words = head.split(b"\r\n")[0].decode("ascii", "replace").split(" ")
        try:
            url = urlsplit(words[1] if len(words) == 3 else "")
        except ValueError:
            return None
        found = {name: values[0] for name, values in parse_qs(url.query).items()}
        return found if url.path == _PATH and found.get("state") == self._state else None


async def _head(stream: trio.SocketStream) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _MAX_REQUEST:
        if not (piece := await stream.receive_some(_MAX_REQUEST)):
            break
        head += piece
    return head
