"""An MCP server at an address that wants a login, and the authorization server beside it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import attrs

from tests.support.threaded_server import QuietHandler, serving_handler

TOOL = {"name": "hello", "description": "Says hello", "inputSchema": {"type": "object"}}


@attrs.define
class OAuth:
    """The clients that have registered, and the tokens issued."""

    url: str = ""
    tokens: set[str] = attrs.Factory(set)  # that are valid
    refresh_tokens: set[str] = attrs.Factory(set)
    codes: dict[str, dict[str, str]] = attrs.Factory(dict)
    clients: list[dict[str, Any]] = attrs.Factory(list)
    n_refreshed: int = 0
    huge: bool = False  # whether metadata never end
    denies: bool = False

    def handed_out(self) -> dict[str, Any]:
        token, refresh = secrets.token_hex(8), secrets.token_hex(8)
        self.tokens, self.refresh_tokens = {token}, {refresh}
        return {"access_token": token, "token_type": "Bearer", "refresh_token": refresh,
                "expires_in": 3600}  # fmt: skip


@contextlib.contextmanager
def serving_oauth() -> Iterator[OAuth]:
    """Serve both, at one port."""
    oauth = OAuth()

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            base, url = oauth.url.removesuffix("/mcp"), urlsplit(self.path)
            if url.path.startswith("/.well-known/oauth-protected-resource"):
                if oauth.huge:
                    self._send(200, {"resource": "x" * 2**22})
                self._send(200, {"resource": oauth.url, "authorization_servers": [base]})
            elif url.path.startswith("/.well-known/oauth-authorization-server"):
                self._send(200, {
                    "issuer": base, "authorization_endpoint": f"{base}/authorize",
                    "token_endpoint": f"{base}/token", "registration_endpoint": f"{base}/register",
                    "response_types_supported": ["code"],
                    "code_challenge_methods_supported": ["S256"],
                    "token_endpoint_auth_methods_supported": ["none"],
                })  # fmt: skip
            elif url.path == "/authorize":
                asked = {name: values[0] for name, values in parse_qs(url.query).items()}
                code = secrets.token_hex(8)
                oauth.codes[code] = asked
                back = {"error": "access_denied"} if oauth.denies else {"code": code}
                to = f"{asked['redirect_uri']}?{urlencode(back | {'state': asked['state']})}"
                self._send(302, {}, Location=to)
            else:
                self._send(405, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/register":
                oauth.clients.append(json.loads(body))
                self._send(201, {**oauth.clients[-1], "client_id": "client-1"})
            elif self.path == "/token":
                self._token({name: values[0] for name, values in parse_qs(body.decode()).items()})
            elif self.headers.get("Authorization", "").removeprefix("Bearer ") in oauth.tokens:
                self._answer(json.loads(body))
            else:
                where = oauth.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")
                self._send(401, {}, **{"WWW-Authenticate": f'Bearer resource_metadata="{where}"'})

        def do_DELETE(self) -> None:
            self._send(200, {})

        def _token(self, asked: dict[str, str]) -> None:
            if asked["grant_type"] == "refresh_token":
                oauth.n_refreshed += 1
                is_good = asked["refresh_token"] in oauth.refresh_tokens
            else:
                given = oauth.codes.pop(asked["code"])
                digest = hashlib.sha256(asked["code_verifier"].encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                is_good = challenge == given["code_challenge"]
            self._send(200, oauth.handed_out()) if is_good else self._send(400, {"error": "no"})

        def _answer(self, message: dict[str, Any]) -> None:
            results = {
                "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                               "serverInfo": {"name": "s", "version": "1"}},
                "tools/list": {"tools": [TOOL]},
                "tools/call": {"content": [{"type": "text", "text": "hello"}]},
            }  # fmt: skip
            if "id" not in message:
                self._send(202, {})
                return
            result = results.get(message["method"], {})
            self._send(200, {"jsonrpc": "2.0", "id": message["id"], "result": result})

        def _send(self, status: int, value: Any, **headers: str) -> None:
            headers |= {"Content-Type": "application/json"}
            self.send(status, json.dumps(value).encode(), headers)

    with serving_handler(Handler) as address:
        oauth.url = f"{address}/mcp"
        yield oauth
