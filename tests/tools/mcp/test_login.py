"""Logging in to MCP servers at addresses, and the tokens that are kept."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import msgspec
import pytest
import trio

from tests.support.mcp_servers import call, opened
from tests.support.oauth_mcp import OAuth, serving_oauth
from trioserve.errors import ToolServerError
from trioserve.tools.mcp.credentials import Credentials, check_endpoint, load, path_of, save
from trioserve.tools.mcp.entries import HttpEntry
from trioserve.tools.mcp.login import login


@pytest.fixture
def oauth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OAuth]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with serving_oauth() as oauth:
        yield oauth


async def browse(url: str) -> None:
    """Log in as a browser does, after requests of others."""
    async with httpx2.AsyncClient() as client:
        back = (await client.get(url)).headers["location"]
        async with await trio.open_tcp_stream("127.0.0.1", urlsplit(back).port or 0) as stream:
            await stream.send_all(b"GET //[ HTTP/1.1\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 404")
        wrong = await client.get(back.replace("state=", "state=x"))
        assert wrong.status_code == 404
        assert (await client.get(back)).status_code == 200


async def test_a_login_is_kept_and_used(oauth: OAuth, capsys: pytest.CaptureFixture[str]) -> None:
    path = await login(HttpEntry(name="a", url=oauth.url), browse)
    assert path == path_of(oauth.url)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (client,) = oauth.clients
    assert client["redirect_uris"][0].startswith("http://127.0.0.1:")
    async with opened(a={"url": oauth.url}) as servers:
        assert (await call(servers, "a_hello")).text == "hello"
        oauth.tokens.clear()  # the server has ended the token
        assert (await call(servers, "a_hello")).text == "hello"
        assert oauth.n_refreshed == 1
        oauth.tokens.clear()
        oauth.refresh_tokens.clear()
        answer = await call(servers, "a_hello")
        assert "run trioserve mcp login a" in answer.text
    known = load(oauth.url)
    assert known is not None
    output = capsys.readouterr()
    for secret in (known.access_token, known.refresh_token):
        assert secret not in f"{known!r} {output.out} {output.err}"


async def test_a_token_is_refreshed_before_it_ends(oauth: OAuth) -> None:
    await login(HttpEntry(name="a", url=oauth.url), browse)
    known = load(oauth.url)
    assert known is not None
    save(msgspec.structs.replace(known, expires_at=time.time() + 5))
    async with opened(a={"url": oauth.url}) as servers:
        assert (await call(servers, "a_hello")).text == "hello"
    assert oauth.n_refreshed == 1
    renewed = load(oauth.url)
    assert renewed is not None and renewed.access_token in oauth.tokens
    assert renewed.expires_at > time.time() + 3000


async def test_without_a_login_the_log_says_what_to_do(
    oauth: OAuth, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(a={"url": oauth.url}) as servers:
        assert not servers.tools
    assert "run trioserve mcp login a" in capsys.readouterr().out


async def test_a_login_that_is_refused(oauth: OAuth) -> None:
    oauth.denies = True
    with pytest.raises(ToolServerError, match="access_denied"):
        await login(HttpEntry(name="a", url=oauth.url), browse)
    assert load(oauth.url) is None


async def test_metadata_that_are_too_long(oauth: OAuth) -> None:
    oauth.huge = True
    with pytest.raises(ToolServerError, match="more than 1048576 bytes"):
        await login(HttpEntry(name="a", url=oauth.url), browse)


async def test_a_server_that_wants_no_login(oauth: OAuth) -> None:
    oauth.tokens.add("")
    assert await login(HttpEntry(name="a", url=oauth.url), browse) is None


def test_tokens_are_not_sent_in_clear() -> None:
    check_endpoint("https://a.test/mcp", "https://b.test/token")
    with pytest.raises(ToolServerError, match="is not https"):
        check_endpoint("https://a.test/mcp", "http://b.test/token")


def test_a_damaged_file_is_no_login(oauth: OAuth, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(Credentials(url=oauth.url, token_endpoint="", client_id="", access_token="t"))
    path.write_text("{")
    assert load(oauth.url) is None
    assert "cannot be read" in capsys.readouterr().out
