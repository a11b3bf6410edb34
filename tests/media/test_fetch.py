"""Fetching files: over real connections, with names that stand for what a test wants."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest
import trio
import trustme
from trio import serve_tcp
from trio.testing import wait_all_tasks_blocked

from tests.support.web_site import Site, answer, serving_site
from trioserve.errors import InvalidMediaError, MemoryFullError
from trioserve.media.fetch import Fetcher


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving_site() as site:
        yield site


async def get(fetcher: Fetcher, url: str) -> bytes:
    return (await fetcher.fetch(url, lambda _n: None)).body


async def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidMediaError) as caught:
        await get(fetcher, url)
    return caught.value.message


async def test_a_file_is_fetched_from_the_address_that_was_checked(site: Site) -> None:
    site.answers["/a?b=c"] = answer(b"content")
    counted: list[int] = []
    body = (await site.fetcher().fetch(site.url(path="/a?b=c#d"), counted.append)).body
    assert body == b"content" and counted == [7]
    assert site.looked_up == ["files.test"]
    (request,) = site.requests
    assert f"Host: files.test:{site.port}\r\n" in request
    assert "Accept-Encoding: identity\r\n" in request and "Cookie" not in request


async def test_chunks_are_joined(site: Site) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    site.answers["/a"] = head + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    assert await get(site.fetcher(), site.url()) == b"abcdefg"


async def test_proxies_of_the_environment_are_not_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    site.answers["/a"] = answer(b"x")
    assert await get(site.fetcher(), site.url()) == b"x"


async def test_the_next_address_is_tried(site: Site) -> None:
    site.names["files.test"] = [["127.0.0.2", "127.0.0.1"]]
    site.answers["/a"] = answer(b"x")
    assert await get(site.fetcher(), site.url()) == b"x"


async def test_redirects_are_followed_three_times(site: Site) -> None:
    for path, then in (("/a", "/b"), ("/b", "c"), ("/c", f"//other.test:{site.port}/d")):
        site.answers[path] = answer(status="302 Found", Location=then)
    site.answers["/d"] = answer(b"x")
    assert await get(site.fetcher(), site.url()) == b"x"
    site.answers["/d"] = answer(status="307 Again", Location="/a")
    assert "redirects more than 3 times" in await refusal(site.fetcher(), site.url())


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://localhost:{port}/secret", "--media-urls does not allow"),
        ("http://127.0.0.1:{port}/secret", "--media-urls does not allow"),
        ("http://inside.test:{port}/secret", "no public address"),
        ("http://2130706433:{port}/secret", "host cannot be"),
        ("http://u:p@files.test:{port}/secret", "a name or a password"),
        ("https://files.test/secret", "--media-urls does not allow"),
        ("file:///etc/passwd", "does not begin with http"),
        ("ftp://files.test/secret", "does not begin with http"),
        ("http://[::1/secret", "redirects to none"),
    ],
)
async def test_each_redirect_is_checked_again(site: Site, location: str, reason: str) -> None:
    site.names |= {"localhost": [["127.0.0.1"]], "inside.test": [["10.0.0.1"]]}
    where = location.format(port=site.port)
    site.answers |= {"/a": answer(status="302 Found", Location=where), "/secret": answer(b"x")}
    assert reason in await refusal(site.fetcher(), site.url())
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "loopback.test",
        "both.test",
        "unknown.test",
        "2130706433",
        "0177.0.0.1",
        "127.1",
    ],
)
async def test_what_is_inside_is_not_reached_where_all_are_allowed(site: Site, host: str) -> None:
    site.names |= {
        "localhost": [["127.0.0.1"]],
        "loopback.test": [["127.0.0.1"]],
        "both.test": [["9.9.9.9", "127.0.0.1"]],
    }
    site.answers["/a"] = answer(b"secret")
    assert await refusal(site.fetcher(f"all:{site.port}"), site.url(host))
    assert site.requests == []


async def test_a_name_that_changes_is_looked_up_once(site: Site) -> None:
    site.names["files.test"] = [["127.0.0.1"], ["10.0.0.1"]]
    site.answers["/a"] = answer(b"x")
    assert await get(site.fetcher(), site.url()) == b"x"
    assert site.looked_up == ["files.test"]
    site.names["files.test"] = [["127.0.0.1"], ["10.0.0.1"]]
    site.answers["/a"] = answer(status="302 Found", Location="/b")
    assert "no public address" in await refusal(site.fetcher(), site.url())


@pytest.mark.parametrize(
    "headers",
    [{"Content_Length": "20000"}, {"Content_Length": "9" * 30}, {"Content_Encoding": "gzip"}],
)
async def test_headers_that_say_too_much_are_enough(site: Site, headers: Mapping[str, str]) -> None:
    site.answers["/a"] = answer(b"x", **headers)
    assert await refusal(site.fetcher(), site.url())


async def test_what_is_longer_than_said_ends_early(site: Site) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    site.answers["/a"] = head + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 1000
    site.is_open_ended = True
    assert "too many bytes" in await refusal(site.fetcher(), site.url())
    while site.n_open:
        await trio.sleep(0.01)


@pytest.mark.parametrize("status", ["404 Not Found", "500 No", "204 Nothing", "206 Part"])
async def test_only_status_200_is_a_file(site: Site, status: str) -> None:
    site.answers["/a"] = answer(status=status)
    assert f"status {status[:3]}" in await refusal(site.fetcher(), site.url())


@pytest.mark.parametrize("broken", [b"", b"SSH-2.0-x\r\n", answer(b"cut", Content_Length="9")])
async def test_a_server_that_breaks_off_is_a_refusal(site: Site, broken: bytes) -> None:
    site.answers["/a"] = broken
    assert "could not be fetched from files.test" in await refusal(site.fetcher(), site.url())
    assert "could not be fetched" in await refusal(
        site.fetcher("files.test:1=127.0.0.1"), "http://files.test:1/"
    )


@pytest.mark.system
async def test_there_is_one_deadline_for_all(site: Site) -> None:
    site.answers["/a"] = b"HTTP/1.1 200 OK\r\n"
    site.is_open_ended = True
    message = await refusal(site.fetcher(timeout=0.2), site.url())
    assert "within 0.2 seconds" in message


async def test_cancelling_closes_the_connection(site: Site) -> None:
    site.answers["/a"] = answer(b"cut", Content_Length="9")
    site.is_open_ended = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get, site.fetcher(), site.url())
        while not site.requests:
            await trio.sleep(0.01)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    while site.n_open:
        await trio.sleep(0.01)


async def test_whoever_counts_can_end_it(site: Site) -> None:
    def count(_n: int) -> None:
        raise MemoryFullError("full", retry_after=1)

    site.answers["/a"] = answer(b"x")
    with pytest.raises(MemoryFullError):
        await site.fetcher().fetch(site.url(), count)


async def test_https_asks_for_the_name_and_not_for_the_address(site: Site) -> None:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("files.test").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    site.answers["/a"] = answer(b"x")

    async def handle(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, server, server_side=True, https_compatible=True)
        await site.handle(secure)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(serve_tcp, handle, 0, host="127.0.0.1"))
        site.port = listener.socket.getsockname()[1]
        fetcher = site.fetcher(certificates=client)
        assert await get(fetcher, f"https://files.test:{site.port}/a") == b"x"
        message = await refusal(fetcher, f"https://other.test:{site.port}/a")
        assert "could not be fetched" in message
        nursery.cancel_scope.cancel()
