"""Requests that browsers send for pages of other sites."""

from __future__ import annotations

import httpx
import pytest
from werkzeug.datastructures import Headers

from tests.support.clients import client_of
from trioserve.api.edge import access
from trioserve.config import Config
from trioserve.errors import PermissionDeniedError

CHAT = '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
EFFECTS = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/slots/0?action=erase", "{}"),
    ("POST", "/lora-adapters", "[]"),
    ("GET", "/props", None),
]


async def status(
    client: httpx.AsyncClient, method: str, path: str, body: str | None, **headers: str
) -> int:
    answer = await client.request(method, path, content=body, headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["type"] == "permission_error"
    return answer.status_code


async def test_a_page_of_another_site_has_no_effect() -> None:
    plain = {"Content-Type": "text/plain"}
    async with client_of() as client:
        for effect in EFFECTS:
            assert await status(client, *effect, Origin="http://evil.com", **plain) == 403
            assert await status(client, *effect, Origin=str(client.base_url), **plain) != 403
        for origin in ("null", "http://[", "http://localhost.evil.com"):
            assert await status(client, *EFFECTS[0], Origin=origin, **plain) == 403
        for origin in ("http://localhost:5173", "http://127.0.0.1"):
            assert await status(client, *EFFECTS[0], Origin=origin, **plain) != 403
        assert await status(client, "GET", "/health", None, Origin="http://evil.com") == 200
    async with client_of(cors_origins="http://good.com") as client:
        for effect in EFFECTS:
            assert await status(client, *effect, Origin="http://good.com") != 403
            assert await status(client, *effect, Origin="http://evil.com") == 403


async def test_embeds_of_another_site() -> None:
    """An image of it, for example: browsers send no origin."""
    site, mode = "Sec-Fetch-Site", "Sec-Fetch-Mode"
    props = EFFECTS[-1]
    async with client_of() as client:
        assert await status(client, *props, **{site: "cross-site", mode: "no-cors"}) == 403
        assert await status(client, *props, **{site: "same-origin", mode: "no-cors"}) == 200
        assert await status(client, *props, **{site: "cross-site", mode: "navigate"}) == 200
        let_in = {"Origin": "http://localhost:5173", site: "cross-site", mode: "cors"}
        assert await status(client, *props, **let_in) == 200
    async with client_of(cors_origins="*") as client:
        assert await status(client, *props, **{site: "cross-site", mode: "no-cors"}) == 200


async def test_a_name_that_is_made_to_point_here() -> None:
    async with client_of() as client:
        for effect in EFFECTS:
            assert await status(client, *effect, Host="evil.com") == 403
            assert await status(client, *effect, Host="localhost") != 403
        for host in ("evil.com:80", "127.0.0.1.evil.com", "1.2.3.4", "["):
            assert await status(client, *EFFECTS[0], Host=host) == 403
        for host in ("app.localhost:99", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"):
            assert await status(client, *EFFECTS[0], Host=host) != 403
        assert await status(client, "GET", "/health", None, Host="evil.com") == 200
    async with client_of(allowed_hosts=("llm.example.org", ".lan")) as client:
        for host, let_in in (("llm.example.org", True), ("a.b.lan", True), ("example.org", False)):
            assert (await status(client, *EFFECTS[0], Host=host) != 403) == let_in
    async with client_of(api_keys=("k",)) as client:
        assert await status(client, *EFFECTS[0], Host="evil.com") == 401


def test_names() -> None:
    assert access.answers_to("anything", Config(allowed_hosts=("*",)))
    assert not access.is_own("http://", "")
    assert access.is_own("https://a.b", "A.B:443") and not access.is_own("https://a.b", "a.b:80")


def test_an_address_of_ipv4_on_a_socket_of_ipv6_is_loopback_too() -> None:
    headers, sites = Headers({"Host": "evil.example"}), access.Sites(Config())
    for server in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        with pytest.raises(PermissionDeniedError, match=r"evil\.example"):
            sites.check("/v1/models", headers, server)
    sites.check("/v1/models", headers, "::ffff:10.0.0.1")
