"""Requests of pages that go to MCP servers of other origins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.http_server import chunks_of, serving_script
from tests.support.waiting import patiently
from trioserve.api.tools import proxy

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n"
OK = HEAD + b"\r\nok"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@attrs.define(eq=False, slots=False)
class Target:
    """A server that answers each request with the same bytes, and remembers what came."""

    answer: bytes = OK
    url: str = ""
    requests: list[str] = attrs.Factory(list)
    heads: list[bytes] = attrs.Factory(list)
    stays: bool = False  # the connection stays open
    gone: trio.Event = attrs.Factory(trio.Event)  # until the other side has closed it

    def __attrs_post_init__(self) -> None:
        self.later, self.parts = trio.open_memory_channel[bytes](9)

    async def handle(self, stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some()
        head, _, body = data.partition(b"\r\n\r\n")
        said = dict(line.lower().split(": ") for line in head.decode("latin-1").split("\r\n")[1:])
        while len(body) < int(said.get("content-length", 0)):
            body += await stream.receive_some()
        self.heads.append(head)
        self.requests.append((head + b"\r\n\r\n" + body).decode("latin-1"))
        await stream.send_all(self.answer)
        if not self.stays:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.send_later, stream)
            while await stream.receive_some():
                pass
            nursery.cancel_scope.cancel()
        self.gone.set()

    async def send_later(self, stream: trio.SocketStream) -> None:
        async for part in self.parts:
            await stream.send_all(part)


@asynccontextmanager
async def target(answer: bytes = OK, *, stays: bool = False) -> AsyncIterator[Target]:
    made = Target(answer, stays=stays)
    async with trio.open_nursery() as nursery:
        serve: Callable[..., Any] = partial(
            trio.serve_tcp, made.handle, 0, host="127.0.0.1", handler_nursery=nursery
        )
        (listener,) = await nursery.start(serve)
        made.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield made
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def proxying(**config: object) -> AsyncIterator[httpx.AsyncClient]:
    config = {"ui_mcp_proxy": True, "ui_mcp_proxy_hosts": ("127.0.0.1:*",)} | config
    async with (
        serving_script(**config) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


def at(url: str) -> dict[str, str]:
    return {"url": url}


def get(url: str) -> bytes:
    return f"GET /cors-proxy?url={url} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def test_it_is_off_until_it_is_switched_on() -> None:
    async with serving_script() as (url, _), httpx.AsyncClient(base_url=url) as client:
        for method in ("GET", "POST", "DELETE"):
            answer = await client.request(method, "/cors-proxy", params=at("http://9.9.9.9"))
            assert answer.status_code == 403
            assert "--ui-mcp-proxy" in answer.json()["error"]["message"]
        assert (await client.get("/props")).json()["cors_proxy_enabled"] is False
    async with proxying() as client:
        assert (await client.get("/props")).json()["cors_proxy_enabled"] is True


async def test_only_what_is_named_is_sent_on() -> None:
    key = "sk-secret"
    async with target() as server, proxying(api_keys=(key,)) as client:
        answer = await client.post(
            "/cors-proxy",
            params=at(f"{server.url}/mcp?a=b"),
            content=b'{"x":1}',
            headers={
                "Authorization": f"Bearer {key}",
                "Proxy-Authorization": "Basic secret",
                "Cookie": "session=secret",
                "Content-Type": "application/json",
                "x-llama-server-proxy-header-accept": "text/event-stream",
                "X-Llama-Server-Proxy-Header-Authorization": "Bearer explicit",
                "x-trioserve-proxy-header-mcp-session-id": "abc",
                "x-llama-server-proxy-header-content-type": "application/json",
            },
        )
        assert (answer.status_code, answer.text) == (200, "ok")
        (sent,) = server.requests
        head, _, body = sent.partition("\r\n\r\n")
        assert body == '{"x":1}'
        first, *lines = head.lower().split("\r\n")
        assert first == "post /mcp?a=b http/1.1"
        assert sorted(lines) == sorted(
            [
                f"host: {server.url.removeprefix('http://')}",
                "accept: text/event-stream",
                "authorization: bearer explicit",
                "mcp-session-id: abc",
                "content-type: application/json",
                "content-length: 7",
            ]
        )


async def test_a_header_of_the_connection_is_not_sent_on() -> None:
    async with target() as server, proxying() as client:
        for name in ("host", "content-length", "transfer-encoding", ""):
            headers = {f"x-trioserve-proxy-header-{name}": "1"}
            answer = await client.get("/cors-proxy", params=at(server.url), headers=headers)
            assert (answer.status_code, server.requests) == (400, []), name


async def test_values_of_headers_are_passed_on_as_they_are() -> None:
    async with target() as server, proxying() as client:
        for value in ("é".encode("latin-1"), "é€".encode()):
            headers = {"x-trioserve-proxy-header-x-name": value}
            answer = await client.get("/cors-proxy", params=at(server.url), headers=headers)
            assert answer.status_code == 200
            assert b"x-name: " + value in server.heads[-1]


async def test_a_head_has_no_body() -> None:
    async with target(HEAD + b"\r\n") as server, proxying() as client:
        answer = await client.head("/cors-proxy", params=at(server.url))
        assert (answer.status_code, answer.headers["content-length"]) == (200, "2")
        assert server.requests[0].startswith("HEAD / ")


async def test_what_the_page_sees_of_an_answer() -> None:
    head = [
        "HTTP/1.1 200 OK",
        "Content-Type: text/html",
        "Mcp-Session-Id: 42",
        "Set-Cookie: a=b",
        "Access-Control-Allow-Origin: *",
        "Clear-Site-Data: *",
        "Content-Security-Policy: default-src *",
        "WWW-Authenticate: Basic realm=x",
        "WWW-Authenticate: Bearer resource_metadata=y",
        "Content-Length: 2",
    ]
    async with target("\r\n".join([*head, "", "ok"]).encode()) as server, proxying() as client:
        answer = await client.get(
            "/cors-proxy", params=at(server.url), headers={"Origin": "http://localhost:3000"}
        )
    assert answer.headers["mcp-session-id"] == "42"
    assert "Mcp-Session-Id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["www-authenticate"] == "Bearer resource_metadata=y"
    assert "sandbox" in answer.headers["content-security-policy"]  # it is no page of this origin
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    for name in ("set-cookie", "clear-site-data"):
        assert name not in answer.headers


@pytest.mark.parametrize(
    ("challenge", "passes"),
    [
        ('Bearer realm="a, b", scope=x', True),
        ("bearer", True),
        ('Bearer realm="a", Basic realm="b"', False),
        ("Bearer, Basic", False),
        ("Bearer a=b, Negotiate", False),
        ("Digest a=b", False),
    ],
)
async def test_only_a_challenge_for_a_token_reaches_the_page(challenge: str, passes: bool) -> None:
    head = f"HTTP/1.1 401 No\r\nWWW-Authenticate: {challenge}\r\nContent-Length: 0\r\n\r\n"
    async with target(head.encode()) as server, proxying() as client:
        answer = await client.get("/cors-proxy", params=at(server.url))
    assert ("www-authenticate" in answer.headers) is passes


async def test_a_length_beside_chunks_is_not_passed_on() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 99\r\n\r\n"
    async with target(head + b"2\r\nok\r\n0\r\n\r\n") as server, proxying() as client:
        answer = await client.get("/cors-proxy", params=at(server.url))
    assert answer.content == b"ok" and "content-length" not in answer.headers


async def test_the_status_is_that_of_the_other_server() -> None:
    async with target() as server, proxying() as client:
        for line, status in (
            ("204 No Content\r\n", 204),
            ("404 Not Found\r\nContent-Length: 0\r\n", 404),
            ("307 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n", 307),
        ):
            server.answer = f"HTTP/1.1 {line}\r\n".encode()
            for method in ("POST", "DELETE"):
                answer = await client.request(method, "/cors-proxy", params=at(server.url))
                assert (answer.status_code, answer.content) == (status, b"")
            assert (answer.headers.get("location") is not None) == (status == 307)
        assert len(server.requests) == 6  # no redirect is followed


async def test_events_come_as_they_are_sent_and_a_client_that_leaves_is_known_of() -> None:
    async with target(SSE + chunk(b"data: 1\n\n"), stays=True) as server, proxying() as client:
        async with chunks_of(str(client.base_url), get(server.url)) as next_chunk:
            assert await next_chunk() == "data: 1\n\n"
            server.later.send_nowait(chunk(b"data: 2\n\n"))
            assert await next_chunk() == "data: 2\n\n"
            assert not server.gone.is_set()
        with patiently():
            await server.gone.wait()


async def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async with target(HEAD.replace(b": 2", b": 9") + b"\r\nok") as server, proxying() as client:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await client.get("/cors-proxy", params=at(server.url))


async def test_where_requests_may_not_go() -> None:
    async with proxying() as client:
        for url, status in (
            ("", 400),
            ("ftp://127.0.0.1/", 400),
            ("http://user:pw@127.0.0.1/", 400),
            ("//127.0.0.1/", 400),
            ("http://127.1/", 400),
            ("http://127.0.0.2/", 403),
            ("http://localhost/", 403),
            ("http://169.254.169.254/latest/meta-data", 403),
            ("http://[::1]/", 403),
            ("http://127.0.0.1:1/", 502),
        ):
            answer = await client.get("/cors-proxy", params=at(url))
            assert answer.status_code == status, (url, answer.text)


async def test_by_default_private_addresses_are_out_of_reach() -> None:
    async with target() as server, proxying(ui_mcp_proxy_hosts=()) as client:
        for url in (server.url, "http://127.0.0.1/", "http://10.0.0.1/", "http://localhost/"):
            answer = await client.get("/cors-proxy", params=at(url))
            assert answer.status_code == 403, url
        assert server.requests == []


async def test_a_page_of_another_site_cannot_send_requests() -> None:
    async with target() as server, proxying() as client:
        for headers, status in (
            ({"Sec-Fetch-Site": "cross-site"}, 403),  # an image
            ({"Sec-Fetch-Site": "same-site"}, 403),
            ({"Origin": "http://evil.com"}, 403),
            ({"Host": "evil.com"}, 403),
            ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "script"}, 403),
            ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 200),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
            ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:3000"}, 200),
        ):
            answer = await client.get("/cors-proxy", params=at(server.url), headers=headers)
            assert answer.status_code == status, headers
        assert len(server.requests) == 3


async def test_the_requests_that_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_MAX_REQUESTS_EACH", 1)
    async with target(SSE, stays=True) as server, proxying() as client:
        async with chunks_of(str(client.base_url), get(server.url)):
            assert (await client.get("/cors-proxy", params=at(server.url))).status_code == 429
        with patiently():
            await server.gone.wait()
        server.answer, server.stays = OK, False
        assert (await client.get("/cors-proxy", params=at(server.url))).status_code == 200


async def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_ANSWER_SECONDS", 2.0)  # it has to connect first
    async with target(b"HTTP/1.1 ", stays=True) as server, proxying() as client:
        answer = await client.get("/cors-proxy", params=at(server.url))
        assert answer.status_code == 504, answer.text
        with patiently():
            await server.gone.wait()
