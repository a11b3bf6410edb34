"""``/tools``: what the server can do for a client, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from tests.support.clients import events_in
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, connected, post, serving_script
from tests.support.scripts import answering
from tests.support.waiting import patiently
from trioserve.api.service import Service
from trioserve.api.tools import calls
from trioserve.errors import ToolError, ToolRuntimeError
from trioserve.fair_limiter import tool_calls
from trioserve.tools.registry import ToolRegistry
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolKind, ToolResult, ToolSource

JSON = "Content-Type: application/json"


@attrs.define(eq=False)
class Played(Tool):
    """A tool that does what a test says. It tells which contexts it was called with."""

    play: Callable[[Mapping[str, Any], ToolCallContext], Any] = lambda arguments, context: "ok"
    name: str = "played"
    streams: bool = True
    kind: ToolKind = "server"
    contexts: list[ToolCallContext] = attrs.Factory(list)
    arguments: list[Mapping[str, Any]] = attrs.Factory(list)
    n_running: int = 0
    started: trio.Event = attrs.Factory(trio.Event)
    go_on: trio.Event | None = None
    ended: trio.Event = attrs.Factory(trio.Event)

    @property
    def info(self) -> ToolInfo:
        return ToolInfo(
            kind=self.kind,
            name=self.name,
            display_name="Played",
            description="d",
            streams=self.streams,
            writes=True,
        )

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        self.contexts.append(context)
        self.arguments.append(arguments)
        self.n_running += 1
        self.started.set()
        try:
            result = self.play(arguments, context)
            if self.go_on is not None:
                await self.go_on.wait()
        finally:
            self.n_running -= 1
            self.ended.set()
        return result if isinstance(result, ToolResult) else ToolResult.of_text(result)


@attrs.frozen
class Source(ToolSource):
    tools: Mapping[str, Tool]


@asynccontextmanager
async def with_tools(
    *tools: Tool, **config: object
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Serve these tools."""
    box = ToolRegistry([Source({tool.info.name: tool for tool in tools})])
    async with (
        serving_script(tools=("get_info",), **config) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        service.server.tools = box
        yield client, service


def asking(**fields: Any) -> bytes:
    return post("/tools", json.dumps({"tool": "played", **fields}).encode(), JSON)


async def test_without_tools_there_is_no_such_feature() -> None:
    async with serving_script() as (url, _), httpx.AsyncClient(base_url=url) as client:
        for method in ("GET", "POST"):
            answer = await client.request(method, "/tools", json={})
            assert answer.status_code == 403
            assert "--tools or --mcp-servers-config" in answer.json()["error"]["message"]


async def test_the_list_and_a_call_of_a_built_in_tool(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    async with (
        serving_script(tools=("read_file",), tools_dir=(str(tmp_path),)) as (url, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        (listed,) = (await client.get("/tools")).json()
        assert listed["tool"] == "read_file" and listed["display_name"] == "Read file"
        assert listed["type"] == "server" and listed["permissions"] == {"write": False}
        assert listed["uses_cwd"] is True
        assert listed["definition"]["function"]["parameters"]["required"] == ["path"]
        body = {"tool": "read_file", "params": {"path": "a.txt"}}
        answer = await client.post("/tools", json=body)
        assert answer.json() == {"plain_text_response": "first\nsecond\n"}


async def test_what_is_up_to_the_client_is_in_headers() -> None:
    tool, of_mcp = Played(), Played(kind="mcp", name="of_mcp")  # whose arguments have any name
    async with with_tools(tool, of_mcp) as (client, _):
        params = {"a": 1, "cwd": "/model", "runtime": "ssh:model", "resp_type": "base64"}
        for headers in (
            {},
            {"X-Tool-Cwd": "/é".encode(), "X-Tool-Runtime": "ssh:h"},
            {"X-Tool-Cwd": "/é".encode("latin-1")},  # as a page sends it
        ):
            answer = await client.post(
                "/tools", json={"tool": "played", "params": params}, headers=headers
            )
            assert answer.json() == {"plain_text_response": "ok"}
        await client.post("/tools", json={"tool": "played"}, headers={"X-Resp-Type": "base64"})
        await client.post("/tools", json={"tool": "of_mcp", "params": params})
    assert of_mcp.arguments == [params]
    assert tool.arguments == [{"a": 1}, {"a": 1}, {"a": 1}, {}]
    first, second, of_page, third = tool.contexts
    assert of_page.cwd == "/é"
    assert (first.cwd, first.runtime, first.response_type) == (None, None, "")
    assert (second.cwd, second.runtime) == ("/é", "ssh:h")
    assert third.response_type == "base64"


async def test_a_request_that_is_wrong() -> None:
    requests: list[tuple[Any, int, str | None]] = [
        ({}, 400, "tool"),
        ({"tool": "unknown"}, 404, "tool"),
        ({"tool": "mute", "stream": True}, 404, "stream"),
        ([], 400, None),
    ]
    async with with_tools(Played(), Played(name="mute", streams=False)) as (client, _):
        for body, status, param in requests:
            answer = await client.post("/tools", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body


async def test_a_page_cannot_call_tools_without_asking_first() -> None:
    tool = Played()
    async with with_tools(tool) as (client, _):
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            answer = await client.post(
                "/tools",
                content=b'{"tool": "played"}',
                headers={"Content-Type": kind} if kind else {},
            )
            assert answer.status_code == 400
        for headers in ({"Origin": "http://evil.com"}, {"Host": "evil.com"}):
            answer = await client.post("/tools", json={"tool": "played"}, headers=headers)
            assert answer.status_code == 403
            assert (await client.get("/tools", headers=headers)).status_code == 403
    assert tool.contexts == []


async def test_pages_of_other_sites_are_refused_with_keys_too() -> None:
    tool = Played()
    key = {"Authorization": "Bearer k"}
    async with with_tools(tool, api_keys=("k",)) as (client, _):
        assert (await client.post("/tools", json={"tool": "played"})).status_code == 401
        for origin in ("http://evil.com", "null"):
            headers = key | {"Origin": origin}
            answer = await client.post("/tools", json={"tool": "played"}, headers=headers)
            assert answer.status_code == 403
        assert tool.contexts == []
        assert (await client.get("/tools", headers=key)).status_code == 200


async def test_output_comes_as_it_is_made() -> None:
    tool = Played(lambda arguments, context: context.on_output("a") or "all", go_on=trio.Event())
    async with (
        with_tools(tool) as (client, _),
        chunks_of(str(client.base_url), asking(stream=True)) as next_chunk,
    ):
        assert await next_chunk() == 'data: {"chunk":"a"}\n\n'
        tool.contexts[0].on_output("b")
        tool.contexts[0].on_output("\ud800")  # no Unicode text
        assert await next_chunk() == 'data: {"chunk":"b?"}\n\n'
        assert tool.go_on is not None
        tool.go_on.set()
        end = '{"done":true,"result":{"plain_text_response":"all"}}'
        assert await next_chunk() == f"data: {end}\n\n"


async def test_a_tool_that_says_much_to_a_client_that_does_not_read() -> None:
    tool = Played(go_on=trio.Event())
    async with with_tools(tool) as (client, _):
        async with connected(str(client.base_url)) as connection:
            await connection.send_all(asking(stream=True))
            await tool.started.wait()
            for _ in range(300):
                tool.contexts[0].on_output("x" * 2**16)  # 20 MB
            assert tool.go_on is not None
            tool.go_on.set()
            answer = b""
            while b'{"done":true' not in answer:
                answer += await connection.receive_some()
        assert 2**20 < len(answer) < 2 * 2**20


async def test_calls_are_counted() -> None:
    fails = Played(lambda *_: ToolResult.of_error("no"), name="fails")
    async with with_tools(Played(), fails, metrics_endpoint=True) as (client, _):
        for name in ("played", "played", "fails"):
            await client.post("/tools", json={"tool": name})
        text = (await client.get("/metrics")).text
    for name, outcome, n in (("played", "finished", 2), ("fails", "failed", 1)):
        labels = f'outcome="{outcome}",tool="{name}"'
        assert re.search(rf"trioserve:tool_calls_total{{.*{labels}}} {n}.0", text)


async def test_a_tool_that_raises() -> None:
    def fail(failure: Exception, *_: object) -> None:
        raise failure

    tool = Played()
    async with with_tools(tool) as (client, _):
        for failure, error, more in (
            (ToolRuntimeError("unknown tool runtime"), "unknown tool runtime", ""),
            (ToolError("It has failed."), "It has failed.", ""),
            (ZeroDivisionError(), "Internal error.", " The log has more"),
        ):
            tool.play = partial(fail, failure)
            with capture_logs():  # tracebacks take long to write
                answer = await client.post("/tools", json={"tool": "played"})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith(error + more)
            with capture_logs():
                answer = await client.post("/tools", json={"tool": "played", "stream": True})
            assert answer.status_code == 200
            assert events_in(answer.text, done=False) == [{"done": True, "error": error}]


async def test_an_error_for_the_model_is_a_result() -> None:
    result = ToolResult.of_error("no such file \udcff")
    async with with_tools(Played(lambda *_: result)) as (client, _):
        answer = await client.post("/tools", json={"tool": "played"})
        assert (answer.status_code, answer.json()) == (200, {"error": "no such file ?"})
        answer = await client.post("/tools", json={"tool": "played", "stream": True})
        (event,) = events_in(answer.text, done=False)
        assert event["error"] == "no such file ?"


async def test_a_long_result_comes_whole() -> None:
    text = "é" * 2**20
    async with with_tools(Played(lambda *_: text)) as (client, _):
        answer = await client.post("/tools", json={"tool": "played"})
        assert answer.json() == {"plain_text_response": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_call(stream: bool) -> None:
    tool = Played(lambda *_: "never", go_on=trio.Event())
    async with with_tools(tool) as (client, _):
        async with connected(str(client.base_url)) as connection:
            await connection.send_all(asking(stream=stream))
            await tool.started.wait()
        with patiently():
            await tool.ended.wait()
    assert tool.n_running == 0


async def test_a_deadline_ends_the_call() -> None:
    tool = Played(lambda *_: "never", go_on=trio.Event())
    async with with_tools(tool) as (client, _):
        headers = {"X-Request-Timeout": "0.05"}
        answer = await client.post("/tools", json={"tool": "played"}, headers=headers)
        assert answer.status_code == 504
        assert "played" in answer.json()["error"]["message"]
    assert tool.n_running == 0


async def test_a_model_that_sleeps_is_not_woken_for_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would look at all objects of the tests.
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    async with with_tools(Played()) as (client, service):
        await service.server.sleep()
        assert len((await client.get("/tools")).json()) == 1
        answer = await client.post("/tools", json={"tool": "played"})
        assert answer.status_code == 200
        assert service.server.lifecycle.sleeping


async def test_calls_beyond_a_number_wait() -> None:
    tool_calls().n_places = 2
    tool = Played(go_on=trio.Event())
    statuses = []
    async with with_tools(tool) as (client, _), trio.open_nursery() as nursery:

        async def call() -> None:
            statuses.append((await client.post("/tools", json={"tool": "played"})).status_code)

        for _ in range(5):
            nursery.start_soon(call)
        with patiently():
            while tool.n_running < 2:
                await trio.sleep(0.01)
            await wait_all_tasks_blocked()
        assert len(tool.contexts) == 2 and tool.go_on is not None
        tool.go_on.set()
    assert statuses == [200] * 5


async def test_a_server_that_ends_takes_no_calls() -> None:
    tool = Played()
    async with with_tools(tool) as (client, service), trio.open_nursery() as nursery:
        nursery.start_soon(service.drain, 0.1)
        answer = await client.post("/tools", json={"tool": "played"})
        assert answer.status_code == 503
    assert tool.contexts == []


@pytest.mark.system
async def test_the_end_of_the_server_waits_for_calls_but_not_for_ever() -> None:
    slow, quick = Played(go_on=trio.Event()), Played(name="quick", go_on=trio.Event())
    statuses = {}
    async with with_tools(slow, quick) as (client, service), trio.open_nursery() as nursery:

        async def call(name: str) -> None:
            statuses[name] = (await client.post("/tools", json={"tool": name})).status_code

        for tool in (slow, quick):
            nursery.start_soon(call, tool.name)
            await tool.started.wait()
        nursery.start_soon(service.drain, 0.2)
        await wait_all_tasks_blocked()
        assert quick.go_on is not None
        quick.go_on.set()
    assert statuses == {"played": 503, "quick": 200}


async def test_a_server_that_ends_soon_ends_calls_of_mcp_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "_MCP_SECONDS", 0.0)
    of_mcp, own = (
        Played(kind="mcp", name="of_mcp", go_on=trio.Event()),
        Played(name="own", go_on=trio.Event()),
    )
    statuses = {}
    async with with_tools(of_mcp, own) as (client, service), trio.open_nursery() as nursery:

        async def call(name: str) -> None:
            statuses[name] = (await client.post("/tools", json={"tool": name})).status_code
            assert own.go_on is not None
            own.go_on.set()  # which is still waited for

        for tool in (of_mcp, own):
            nursery.start_soon(call, tool.name)
            await tool.started.wait()
        nursery.start_soon(service.drain, 60)
    assert statuses == {"of_mcp": 503, "own": 200}


async def test_a_router_runs_tools_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    config = {
        "tools": ("read_file",), "tools_dir": (str(tmp_path),), "metrics_endpoint": True
    }  # fmt: skip
    async with routed({"one": answering("x"), "two": None}, **config) as router:
        (listed,) = (await router.client.get("/tools")).json()
        assert listed["tool"] == "read_file"
        body = {"tool": "read_file", "params": {"path": "a.txt"}}
        answer = await router.client.post("/tools", json=body)
        assert answer.json() == {"plain_text_response": "x\n"}
        assert router.fleet.users == [] and router.fleet.calls == []
        text = (await router.client.get("/metrics")).text
        counted = 'trioserve:router_tool_calls_total{outcome="finished",tool="read_file"} 1.0'
        assert counted in text


async def test_the_log_says_what_the_server_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    def lines() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]

    async with serving_script(cors_origins="*"):
        assert lines() == []
    config = {"tools": ("read_file",), "tools_dir": ("/usr",)}
    async with serving_script(**config):
        (line,) = lines()
        assert "read files in /usr" in line
    async with serving_script(**config, cors_origins="*", ui_mcp_proxy=True):
        first, second, third = lines()
        assert "read files" in first and "at any public address" in second
        assert "every web page" in third
    async with routed({"one": None}, agent=True, ui_mcp_proxy_hosts=("127.0.0.1:3000",)):
        assert any("at 127.0.0.1:3000" in line for line in lines())
