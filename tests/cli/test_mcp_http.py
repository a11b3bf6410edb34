"""`trioserve mcp --http`: the official client over HTTP, and requests that are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import httpx2
import pytest
import trio
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from trio.testing import wait_all_tasks_blocked

from tests.support.http_server import (
    connected,
    post,
    read_response,
    serving,
    serving_script,
    slots_in_use,
)
from tests.support.scripts import answering, endless
from tests.support.waiting import patiently
from trioserve.api.service import Service
from trioserve.cli.address import place_of
from trioserve.cli.mcp_http import mcp_app
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.mcp_server.models import models_of_server
from trioserve.testing import ScriptedBackend

#: The SDK's transport leaves these to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Async generator 'httpcore2:ResourceWarning",
    "ignore:Async generator 'httpx2:ResourceWarning",
)

ACCEPT = {"Accept": "application/json, text/event-stream"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


@asynccontextmanager
async def served(
    backend: ScriptedBackend | None = None, max_sessions: int = 10, **config: Any
) -> AsyncIterator[tuple[str, Service]]:
    """Serve MCP over HTTP with the models of a scripted server; gives its base URL."""
    async with (
        serving_script(backend) as (url, service),
        models_of_server(url) as models,
        mcp_app(models, Config(**config), max_sessions=max_sessions) as app,
        serving(app) as base,
    ):
        yield base, service


@asynccontextmanager
async def web(url: str, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, headers=ACCEPT | headers, timeout=60) as client:
        yield client


async def until_in_use(service: Service, n: int) -> None:
    with patiently():
        while await slots_in_use(service) != n:
            await trio.sleep(0.005)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_chat(mode: str) -> None:
    async with served(answering("Hello!")) as (url, _), Client(f"{url}/mcp", mode=mode) as client:
        result = await client.call_tool("chat", {"prompt": "Hi"})
    assert result.structured_content is not None
    assert result.structured_content["text"] == "Hello!"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_call_that_is_cancelled_frees_its_slot(mode: str) -> None:
    async with served(endless()) as (url, service), Client(f"{url}/mcp", mode=mode) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "chat", {"prompt": "Hi"})
            await until_in_use(service, 1)
            nursery.cancel_scope.cancel()
        await until_in_use(service, 0)
        assert not (await client.call_tool("list_models", {})).is_error


async def test_a_client_that_leaves_frees_its_slot_and_its_session_goes_on() -> None:
    async with served(endless()) as (url, service), web(url) as client:
        session = (await client.post("/mcp", json=INITIALIZE)).headers["mcp-session-id"]
        call = (
            b'{"jsonrpc":"2.0","id":3,"method":"tools/call",'
            b'"params":{"name":"chat","arguments":{"prompt":"Hi"}}}'
        )
        headers = [f"{name}: {value}" for name, value in ACCEPT.items()]
        headers += ["Content-Type: application/json", f"Mcp-Session-Id: {session}"]
        async with connected(url) as stream:
            await stream.send_all(post("/mcp", call, *headers))
            await until_in_use(service, 1)
        await until_in_use(service, 0)
        answer = await client.post("/mcp", json=LIST, headers={"Mcp-Session-Id": session})
    assert answer.status_code == 200
    assert '"chat"' in answer.text


async def test_the_end_of_the_app_frees_the_slot() -> None:
    async with serving_script(endless()) as (models_url, service):
        stop = trio.Event()
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[str]) -> None:
                async with (
                    models_of_server(models_url) as models,
                    mcp_app(models, Config()) as app,
                    serving(app) as url,
                ):
                    task_status.started(url)
                    await stop.wait()

            url: str = await nursery.start(serve)
            async with web(url) as client:
                session = (await client.post("/mcp", json=INITIALIZE)).headers["mcp-session-id"]
                params = {"name": "chat", "arguments": {"prompt": "Hi"}}
                call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}
                sending = partial(client.post, json=call, headers={"Mcp-Session-Id": session})

                async def send() -> None:
                    with pytest.raises(httpx.HTTPError):
                        await sending("/mcp")

                nursery.start_soon(send)
                await until_in_use(service, 1)
                stop.set()
                await until_in_use(service, 0)


async def test_api_keys_and_the_sessions_of_others() -> None:
    async with served(api_keys=("one", "two")) as (url, _), web(url) as client:
        for headers in ({}, {"Authorization": "Bearer three"}):
            answer = await client.post("/mcp", json=INITIALIZE, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, 401)
        mine = {"Authorization": "Bearer one"}
        answer = await client.post("/mcp", json=INITIALIZE, headers=mine)
        session = {"Mcp-Session-Id": answer.headers["mcp-session-id"]}
        answers = [
            await client.post("/mcp", json=LIST, headers=session | key)
            for key in (mine, {"X-Api-Key": "one"}, {"Authorization": "Bearer two"})
        ]
        assert [one.status_code for one in answers] == [200, 200, 404]
        async with (
            httpx2.AsyncClient(headers=mine) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as official,
        ):
            assert (await official.list_tools()).tools


async def test_a_refusal_leaves_the_connection_open_for_the_next_request() -> None:
    async with served(api_keys=("one",)) as (url, _), connected(url) as stream:
        for _ in range(2):
            request = post("/mcp", b"{}")
            await stream.send_all(request[:-2])
            await wait_all_tasks_blocked()
            await stream.send_all(request[-2:])
            assert (await read_response(stream)).status_code == 401


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"Host": "evil.example.org"}, "does not answer to the name 'evil.example.org'"),
        ({"Origin": "https://evil.example.org"}, "Pages of https://evil.example.org"),
        ({"Sec-Fetch-Site": "cross-site"}, "Pages of other sites"),
    ],
)
async def test_other_sites_are_refused(headers: dict[str, str], told: str) -> None:
    async with served() as (url, _), web(url) as client:
        answer = await client.post("/mcp", json=INITIALIZE, headers=headers)
        assert answer.status_code == 403
        assert told in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_of_this_machine_may_use_it() -> None:
    origin = {"Origin": "http://localhost:6274"}
    async with served(api_keys=("one",)) as (url, _), web(url) as client:
        preflight = await client.options("/mcp", headers=origin)
        refused = await client.post("/mcp", json=INITIALIZE, headers=origin)
        answer = await client.post("/mcp", json=INITIALIZE, headers=origin | {"X-Api-Key": "one"})
    assert [one.status_code for one in (preflight, refused, answer)] == [200, 401, 200]
    for one in (preflight, refused, answer):
        assert one.headers["access-control-allow-origin"] == "http://localhost:6274"
    assert "Mcp-Session-Id" in answer.headers["access-control-expose-headers"]
    assert preflight.headers["access-control-allow-methods"]


async def test_a_session_that_waits_makes_room_for_another() -> None:
    async with served(max_sessions=1) as (url, _), web(url) as client:
        first = await client.post("/mcp", json=INITIALIZE)
        second = await client.post("/mcp", json=INITIALIZE)
        session = {"Mcp-Session-Id": second.headers["mcp-session-id"]}
        gone = {"Mcp-Session-Id": first.headers["mcp-session-id"]}
        answers = [
            await client.post("/mcp", json=LIST, headers=gone),
            await client.post("/mcp", json=LIST, headers=session),
        ]
        async with client.stream("GET", "/mcp", headers=session):  # it is not waiting
            answers.append(await client.post("/mcp", json=INITIALIZE))
        answers.append(await client.delete("/mcp", headers=session))
        answers.append(await client.post("/mcp", json=INITIALIZE))
    assert (first.status_code, second.status_code) == (200, 200)
    assert [one.status_code for one in answers] == [404, 200, 503, 200, 200]


async def test_the_sessions_of_one_key_do_not_lock_out_another() -> None:
    async with (
        served(max_sessions=4, api_keys=("one", "two")) as (url, _),
        web(url, **{"X-Api-Key": "one"}) as one,
        web(url, **{"X-Api-Key": "two"}) as two,
    ):

        async def begin(client: httpx.AsyncClient) -> dict[str, str]:
            answer = await client.post("/mcp", json=INITIALIZE)
            return {"Mcp-Session-Id": answer.headers["mcp-session-id"]}

        of_two = await begin(two)
        of_one = [await begin(one) for _ in range(6)]
        of_two = [of_two, await begin(two)]
        used = [
            *[await one.post("/mcp", json=LIST, headers=session) for session in of_one],
            *[await two.post("/mcp", json=LIST, headers=session) for session in of_two],
        ]
    assert [answer.status_code for answer in used] == [*[404] * 4, 200, 200, 200, 200]


async def test_paths_and_bodies() -> None:
    config = {"api_prefix": "/ai", "api_keys": ("one",), "max_body_size": 1000}
    async with served(**config) as (url, _), web(url, **{"X-Api-Key": "one"}) as client:
        answers = [
            await client.get("/ai/health", headers={"X-Api-Key": ""}),
            await client.get("/ai/.well-known/oauth-protected-resource"),
            await client.post("/ai/mcp", json=INITIALIZE),
            await client.post("/ai/mcp", json=INITIALIZE | {"more": "x" * 1000}),
            await client.post("/ai/mcp", content="{", headers={"Content-Type": "application/json"}),
        ]
    assert [one.status_code for one in answers] == [200, 404, 200, 413, 400]
    assert answers[1].json()["error"]["message"] == "The MCP server is at /ai/mcp."


@pytest.mark.system
async def test_what_the_sdk_reads_on_the_event_loop_and_what_a_session_keeps_is_bounded() -> None:
    client_info = {"name": "x" * 70_000, "version": "1"}
    introduction = {**INITIALIZE, "params": {**INITIALIZE["params"], "clientInfo": client_info}}
    values = LIST | {"params": {"cursor": [0] * 100_001}}
    long_call = {"name": "tokenize", "arguments": {"text": "a" * 200_000}}
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": long_call}
    async with served() as (url, _), web(url) as client:
        session = (await client.post("/mcp", json=INITIALIZE)).headers["mcp-session-id"]
        headers = {"Mcp-Session-Id": session}
        answers = [
            await client.post("/mcp", json=introduction),
            await client.post("/mcp", json=introduction, headers=headers),
            await client.post("/mcp", json=values, headers=headers),
            await client.post("/mcp", json=call, headers=headers),
        ]
    assert [one.status_code for one in answers] == [413, 413, 413, 200]
    assert "initialize" in answers[0].json()["error"]["message"]
    assert "values" in answers[2].json()["error"]["message"]


@pytest.mark.system
async def test_bodies_share_the_memory_of_requests() -> None:
    config = {"max_request_memory": 4 * 2**20, "max_body_size": 2**22}
    many_values = b'{"a": [' + b"[]," * 40_000 + b"[]]}"
    head = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n"
    async with served(**config) as (url, _), web(url) as client, connected(url) as stream:
        assert (await client.post("/mcp", json=INITIALIZE)).status_code == 200
        too_large = await client.post("/mcp", content=many_values)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, 413)
        await stream.send_all(head + b"x" * 2_900_000)
        with patiently():
            while (full := await client.post("/mcp", content=b" " * 1_000_000)).status_code == 400:
                await trio.sleep(0.005)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        await stream.send_all(b"x" * 100_000)
        assert (await read_response(stream)).status_code == 413  # with its values it is too large
        assert (await client.post("/mcp", json=INITIALIZE)).status_code == 200


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("8081", ("127.0.0.1", 8081)),
        (":8081", ("127.0.0.1", 8081)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_an_address(value: str, place: tuple[str, int]) -> None:
    assert place_of(value) == place


@pytest.mark.parametrize(
    "value", ["", "localhost", "localhost:", "localhost:65536", "\N{ARABIC-INDIC DIGIT ONE}", "-1"]
)
def test_no_address(value: str) -> None:
    with pytest.raises(ConfigError, match="--http must be PORT or HOST:PORT"):
        place_of(value)
