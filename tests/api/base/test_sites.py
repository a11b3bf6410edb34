"""Requests that browsers send for pages of other sites."""

from __future__ import annotations

import httpx
import pytest

from tests.support.http_server import serving_script
from trioserve.api.base import sites
from trioserve.config import Config

CHAT = '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
EFFECTS = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/slots/0?action=erase", "{}"),
    ("POST", "/lora-adapters", "[]"),
    ("GET", "/props", None),
]


async def status(url: str, method: str, path: str, body: str | None, **headers: str) -> int:
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
        answer = await client.request(method, path, content=body)
    if answer.status_code == 403:
        assert answer.json()["error"]["type"] == "permission_error"
    return answer.status_code


@pytest.mark.parametrize(("method", "path", "body"), EFFECTS)
async def test_a_page_of_another_site_has_no_effect(method: str, path: str, body: str) -> None:
    plain = {"Content-Type": "text/plain"}
    async with serving_script() as (url, _):
        for origin in ("http://evil.com", "null", "http://[", "http://localhost.evil.com"):
            assert await status(url, method, path, body, Origin=origin, **plain) == 403
        for origin in (url, "http://localhost:5173", "http://127.0.0.1"):
            assert await status(url, method, path, body, Origin=origin, **plain) != 403
        assert await status(url, "GET", "/health", None, Origin="http://evil.com") == 200
    async with serving_script(cors_origins="http://good.com") as (url, _):
        assert await status(url, method, path, body, Origin="http://good.com") != 403
        assert await status(url, method, path, body, Origin="http://evil.com") == 403


@pytest.mark.parametrize(("method", "path", "body"), EFFECTS)
async def test_a_name_that_is_made_to_point_here(method: str, path: str, body: str) -> None:
    async with serving_script() as (url, _):
        for host in ("evil.com", "evil.com:80", "127.0.0.1.evil.com", "1.2.3.4", "["):
            assert await status(url, method, path, body, Host=host) == 403
        for host in ("localhost", "app.localhost:99", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"):
            assert await status(url, method, path, body, Host=host) != 403
        assert await status(url, "GET", "/health", None, Host="evil.com") == 200
    async with serving_script(allowed_hosts=("llm.example.org", ".lan")) as (url, _):
        for host, let_in in (("llm.example.org", True), ("a.b.lan", True), ("example.org", False)):
            assert (await status(url, method, path, body, Host=host) != 403) == let_in
    async with serving_script(api_keys=("k",)) as (url, _):
        assert await status(url, method, path, body, Host="evil.com") == 401


def test_names() -> None:
    assert sites.host_in("[::1]:80") == "::1"
    assert sites.host_in("A.b:1") == "a.b"
    assert sites.answers_to("anything", Config(allowed_hosts=("*",)))
    assert not sites.is_own("http://", "")
