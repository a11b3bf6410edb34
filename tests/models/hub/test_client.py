"""The client: addresses, tokens and proxies."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trio
import trustme

from tests.hub.server import Hub, running_hub
from tests.support.waiting import patiently
from trioserve.errors import HubError, HubUnavailableError
from trioserve.models.hub import HubReference, client, pull
from trioserve.models.hub.client import open_client


async def get(hub: Hub, url: str, token: str | None = None) -> int:
    with patiently():
        async with open_client(hub.url, token) as client, client.get(url) as answer:
            return answer.status


async def test_redirects_end_somewhere(hub: Hub) -> None:
    hub.failures = [(302, {"Location": "/again"})] * 20
    with pytest.raises(HubError, match="redirects again and again"):
        await get(hub, f"{hub.url}/x")


async def test_a_redirect_may_lead_back_to_the_hub_or_nowhere(hub: Hub) -> None:
    hub.failures = [(307, {"Location": "api/models/user/x"}), (204, {})]
    assert await get(hub, f"{hub.url}/x?y=z", "hf_x") == 204
    assert [one.headers.get("Authorization") for one in hub.asked] == ["Bearer hf_x"] * 2
    for place in ("file:///etc/passwd", f"http://{'a' * 64}.test/"):
        hub.failures = [(302, {"Location": place})]
        with pytest.raises(HubError, match=f"'{place}' is not an address"):
            await get(hub, f"{hub.url}/x")


@pytest.mark.parametrize(
    ("size", "known"), [(5, 5), (0, 0), (-1, None), (True, None), (10**30, None), ("5", None)]
)
def test_a_size_that_no_file_has_is_not_known(size: object, known: int | None) -> None:
    entry = {"type": "file", "path": "a.gguf", "size": size, "oid": "b" * 40}
    ((_, file),) = client._files([entry], "user/repo", "http://x/")
    assert file.size == known


@pytest.mark.parametrize(("page_size", "n_pages"), [(0, 21), (9, 3)])
async def test_a_list_without_end_is_refused(
    page_size: int, n_pages: int, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MAX_FILES", 20)
    hub.page_size = page_size
    hub.add("user/repo", {f"{i}.gguf": b"x" for i in range(99)})
    with pytest.raises(HubError, match="more than 20 files"), patiently():
        async with open_client(hub.url, None) as made:
            await client.list_files(made, "user/repo")
    assert len(hub.asked) == 1 + n_pages


async def test_what_is_not_ascii_is_escaped(hub: Hub) -> None:
    hub.failures = [(200, {})]
    assert await get(hub, f"{hub.url}/a b/é%20?q=ü") == 200
    assert hub.asked[0].path == "/a b/é "


async def test_a_token_that_is_none(hub: Hub) -> None:
    for token in ("hf_\n", "hf_é"):
        with pytest.raises(HubError, match="has characters that no token has"):
            await get(hub, hub.url, token)


async def test_a_body_may_be_left_unread(hub: Hub) -> None:
    hub.add("user/repo", {"m.gguf": b"x" * 3_000_000})
    url = f"{hub.cdn_url}/user/repo/m.gguf"
    async with open_client(hub.url, None) as client:
        async with client.get(url) as answer:
            assert answer.headers["content-length"] == "3000000"
        with pytest.raises(ZeroDivisionError):
            async with client.get(url) as answer:
                assert len(await answer.batch()) > 0
                raise ZeroDivisionError
        with trio.CancelScope() as scope:
            async with client.get(url) as answer:
                await answer.batch()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_proxy_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.cdn_url.replace("//", "//me:p%40ss@"))
    hub.cdn_failures = [(200, {})]
    assert await get(hub, "http://elsewhere.test/x") == 200
    assert hub.asked[0].host == "cdn"
    assert hub.asked[0].headers["Proxy-Authorization"] == "Basic bWU6cEBzcw=="
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub.failures = [(200, {})]
    assert await get(hub, f"{hub.url}/x") == 200
    assert hub.asked[1].host == "hub"


async def test_a_proxy_that_is_none(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "socks5://me:secret@x:1")
    with pytest.raises(HubError, match=r"The proxy socks5://x:1 is not one for HTTP\."):
        await get(hub, hub.url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(HubUnavailableError, match=r"cannot be reached: .*Connection refused\."):
        await get(hub, hub.url)


async def test_a_hub_with_a_certificate(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = trustme.CA()
    security = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(security)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with running_hub(security) as secure:
        secure.add("user/repo", {"m-Q8_0.gguf": b"x" * 5000})
        monkeypatch.setenv("HF_ENDPOINT", secure.url)
        reference = HubReference("user/repo")
        with pytest.raises(HubUnavailableError, match=r"cannot be reached: .*certificate"):
            await pull(reference)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        model = await pull(reference)
    assert model.files[0].read_bytes() == b"x" * 5000
